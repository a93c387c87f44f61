"""Makes the environment .venv for `make run` and `make test`; standard library only, because nothing is installed yet.

Where the Python that runs this can import torch, .venv is laid on top of it: torch, transformers and whatever else
satisfies requirements.txt are used as they are. Otherwise (and with --fresh) .venv is isolated and takes the versions
in constraints.txt. A stamp inside .venv is written last: without it .venv is not trusted and is built again.

More than 300 lines because it is one program, a third of it the two scripts it hands to .venv's Python and the lines
that say what went wrong; nothing of it is imported by the project.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What each `make` target needs; "dev" includes "run", as one pip call has to see both to choose versions.
FILES = {"run": ["requirements.txt"], "dev": ["requirements.txt", "requirements-dev.txt"]}
CONSTRAINTS = "constraints.txt"
# An existing one is used or refused, never replaced: whoever installed it chose the CUDA build that fits the driver.
PROTECTED = ("torch", "transformers")
NEEDED_BYTES = {"isolated": 3 * 2**30, "on top": 2**30}

# Runs in .venv, where pip brings the `packaging` library that knows version ranges.
SURVEY = """
import importlib.metadata as metadata, json, re, sys
from pip._vendor.packaging.requirements import Requirement
name = lambda text: re.sub("[-_.]+", "-", text).lower()
found = {}
for dist in metadata.distributions():
    if dist.metadata["Name"]:
        found.setdefault(name(dist.metadata["Name"]), dist.version)
wanted = []
for line in json.load(sys.stdin):
    need = Requirement(line)
    if need.marker is None or need.marker.evaluate():
        have = found.get(name(need.name))
        fits = have is not None and need.specifier.contains(have, prereleases=True)
        wanted.append({"name": name(need.name), "range": str(need.specifier), "found": have, "fits": fits})
print(json.dumps({"found": found, "wanted": wanted}))
"""

# Runs in .venv after installing on top of another environment, whose commands (accelerate, pytest, ninja) start that
# environment's Python and would not see what was added here: each gets a counterpart in .venv/bin.
COMMANDS = """
import importlib.metadata as metadata, json, os, pathlib, sys
venv = pathlib.Path(sys.prefix)
# Through sh, since a shebang takes neither spaces nor long paths.
header = f"#!/bin/sh\\n'''exec' '{venv}/bin/python' \\"$0\\" \\"$@\\"\\n' '''\\n"
for name in json.load(sys.stdin):
    dist = metadata.distribution(name)
    if venv in pathlib.Path(dist.locate_file("")).resolve().parents:
        continue
    scripts = {e.name: e.value for e in dist.entry_points if e.group == "console_scripts"}
    for script, value in scripts.items():
        module, _, attribute = value.partition("[")[0].strip().partition(":")
        path = venv / "bin" / script
        if not path.exists():
            imported = attribute.split(".")[0]
            path.write_text(f"{header}import sys\\nfrom {module} import {imported}\\nsys.exit({attribute}())\\n")
            path.chmod(0o755)
    for file in dist.files or ():
        source = pathlib.Path(dist.locate_file(file)).resolve()
        target = venv / "bin" / file.name
        outside = file.parts[0] == ".." and file.parent.name == "bin"
        if not outside or file.name in scripts or target.exists() or not source.exists():
            continue
        first, _, rest = source.read_bytes().partition(b"\\n")
        if first.startswith(b"#!") and b"python" in first:
            target.write_bytes(header.encode() + rest)
            target.chmod(0o755)
        else:
            target.symlink_to(source)
"""


class Refused(Exception):
    """Set-up cannot go on; the text is one line that says why and what to do."""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_lines(*files: Path) -> list[str]:
    lines = (line.split("#")[0].strip() for file in files for line in file.read_text().splitlines())
    return [line for line in lines if line]


def line_name(line: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", line)
    return canonical(match.group()) if match else ""


def digest(root: Path, which: str) -> str:
    hashed = hashlib.sha256()
    for file in [*FILES[which], CONSTRAINTS]:
        hashed.update((root / file).read_bytes())
    return hashed.hexdigest()


def decide(stamp: dict | None, now: dict, which: str, fresh: bool, torch: str) -> tuple[str, str]:
    """What to do, of "ready", "install" and "rebuild", and why. `now` holds venv, parent, version and digests."""
    if not stamp:
        return "rebuild", "it is not there, or an installation was interrupted"
    if stamp["venv"] != now["venv"]:
        return "rebuild", f"it was made for {stamp['venv']}"
    if (stamp["parent"], stamp["version"]) != (now["parent"], now["version"]):
        return "rebuild", f"it was made with Python {stamp['version']} of {stamp['parent']}"
    if fresh and stamp["reuse"]:
        return "rebuild", "FRESH=1 asks for an isolated one"
    if torch and torch != stamp["torch"]:
        return "rebuild", f"TORCH={torch} was asked for"
    if stamp["digests"].get(which) != now["digests"][which]:
        return "install", "requirements are new or have changed"
    return "ready", ""


def merge_constraints(tested: list[str], survey: dict | None, torch: str) -> list[str]:
    """The tested versions, less those that would replace what is to be kept; the kept ones pinned as they are."""
    dropped = {"torch"} if torch else set()
    kept = []
    if survey:
        fitting = {want["name"]: want["found"] for want in survey["wanted"] if want["fits"]}
        kept = [f"{name}=={version}" for name, version in sorted(fitting.items())]
        # One that does not fit takes the tested version; what came along with others stays free to be kept by pip.
        dropped |= set(survey["found"]) - {want["name"] for want in survey["wanted"] if not want["fits"]}
    return kept + [line for line in tested if line_name(line) not in dropped]


def check_survey(survey: dict, python: str) -> None:
    for want in survey["wanted"]:
        if want["name"] in PROTECTED and want["found"] and not want["fits"]:
            raise Refused(
                f"{python} has {want['name']} {want['found']}, but {want['range']} is needed and an existing one is "
                "never replaced: upgrade it yourself, or use `make run FRESH=1`, which makes an isolated environment."
            )


def check_compiler(environ: dict[str, str]) -> None:
    """DeepSpeed compiles its CPU optimizer on first use; better to hear of a missing compiler now."""
    chosen = environ.get("CXX")
    if chosen:
        if not shutil.which(shlex.split(chosen)[0], path=environ.get("PATH")):
            raise Refused(f"CXX={chosen} is not a command: unset CXX, or set it to a C++ compiler.")
    elif not any(shutil.which(name, path=environ.get("PATH")) for name in ("c++", "g++", "clang++")):
        raise Refused("no C++ compiler (c++, g++, clang++): `sudo apt install g++`, or point CXX at one.")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise Refused(f"{header} is missing, C++ extensions cannot be built: `sudo apt install python3-dev`.")


def explain_failure(log: str, where: str) -> str:
    """One line for what pip said at length."""
    if re.search(r"No space left on device|Errno 28", log):
        return (
            f"the disk is full ({where}, pip's cache or the temporary folder): free about 3 GiB (a CUDA build of "
            "torch: 10 GiB), or point TMPDIR and PIP_CACHE_DIR at a larger disk; then run the same command again."
        )
    if re.search(r"ConnectionError|ConnectTimeout|ReadTimeout|ConnectionReset|name resolution|Network is unreachable"
                 r"|ProxyError|SSLError|Connection (refused|broken|aborted)", log):  # fmt: skip
        return (
            "the package index cannot be reached: check the network or proxy, name another index or a folder of "
            'wheels with PIP_ARGS="--index-url URL" or PIP_ARGS="--no-index --find-links FOLDER"; then run it again.'
        )
    if re.search(r"ResolutionImpossible|conflicting dependencies", log):
        return (
            "pip found no set of versions that fit together (its reasons are above): try again without TORCH and "
            "PIP_ARGS, or with FRESH=1."
        )
    missing = re.search(r"No matching distribution found for (\S+)", log)
    if missing:
        return (
            f"the package index has no {missing.group(1)} for Python {sys.version_info[0]}.{sys.version_info[1]} on "
            "this machine: use another Python with `make run PYTHON=python3.11`, or see PIP_ARGS in the Makefile."
        )
    return "pip failed, its message is above: mend that and run the same command again."


def run_pip(venv: Path, arguments: list[str]) -> str | None:
    """None when pip succeeded, else its output, which has been shown already."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    log = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout
        for line in pip.stdout:
            log.append(line)
            # The lines about what is there already would be most of the output and say nothing.
            if not line.startswith(("Requirement already satisfied", "  Using cached")):
                print(line, end="", flush=True)
    return "".join(log) if pip.returncode else None


def parent_has_torch(python: str) -> bool:
    """By importing it: a torch whose libraries are missing is no use. From /, where no folder can pose as torch."""
    probe = subprocess.run([python, "-c", "import torch; torch.zeros(1)"], cwd="/", capture_output=True)
    return probe.returncode == 0


def parent_paths(python: str) -> list[str]:
    """Where the parent finds its packages, the user's own folder and PYTHONPATH included."""
    script = "import json, sys; print(json.dumps(sys.path))"
    paths = json.loads(subprocess.run([python, "-c", script], cwd="/", capture_output=True, check=True).stdout)
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    standard |= {os.path.join(path, "lib-dynload") for path in standard}
    return [path for path in paths if os.path.isdir(path) and path not in standard]


def create(venv: Path, python: str, reuse: bool) -> None:
    made = subprocess.run([python, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
    if made.returncode:
        # Debian keeps ensurepip in a package of its own; the pip that is there can put itself into .venv instead.
        try:
            bare = [python, "-m", "venv", "--clear", "--without-pip", str(venv)]
            subprocess.run(bare, check=True, capture_output=True, text=True)
            where = "import pip, os; print(os.path.dirname(pip.__file__))"
            pip = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
            own = [str(venv / "bin" / "python"), pip, "install", "-q", "--ignore-installed", "pip"]
            subprocess.run(own, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            log = made.stdout + made.stderr + (error.stderr or "")
            if "No space left" in log:
                raise Refused(explain_failure(log, str(venv))) from None
            raise Refused(f"{python} cannot make an environment with pip: `sudo apt install python3-venv`.") from None
    if reuse:
        # Not --system-site-packages: in a venv that would mean the base interpreter's packages, not the venv's own.
        # A .pth works for both, and puts the parent's folders behind .venv's.
        purelib = next((venv / "lib").glob("python3*")) / "site-packages"
        (purelib / "zerolab_parent.pth").write_text("\n".join(parent_paths(python)) + "\n")
        # Up to Python 3.11 a new environment brings an old setuptools, which would hide the parent's and, being too
        # old for torch, make pip fetch another one.
        own_pip = [str(venv / "bin" / "python"), "-m", "pip", "uninstall", "-q", "-y", "setuptools"]
        if (purelib / "setuptools").exists():
            subprocess.run(own_pip, check=True, capture_output=True)


def in_venv(venv: Path, script: str, data: object) -> str:
    command = [str(venv / "bin" / "python"), "-c", script]
    return subprocess.run(
        command, input=json.dumps(data), check=True, stdout=subprocess.PIPE, text=True, cwd="/"
    ).stdout


def install(venv: Path, which: str, reuse: bool, torch: str, pip_args: list[str], python: str) -> dict:
    """Installs what is missing and returns the survey of the result."""
    files = [ROOT / name for name in FILES[which]]
    wanted = requirement_lines(*files)
    before = json.loads(in_venv(venv, SURVEY, wanted)) if reuse else None
    if before:
        check_survey(before, python)
        kept = [f"{want['name']} {want['found']}" for want in before["wanted"] if want["fits"]]
        say(f"kept as they are: {', '.join(kept)}")
    tested = requirement_lines(ROOT / CONSTRAINTS)
    constraints = venv / "zerolab-constraints.txt"
    arguments = [part for file in files for part in ("-r", str(file))]
    arguments += [*([torch] if torch else []), "-c", str(constraints), *pip_args]
    constraints.write_text("\n".join(merge_constraints(tested, before, torch)) + "\n")
    log = run_pip(venv, arguments)
    if log and before and re.search(r"ResolutionImpossible|conflicting dependencies", log):
        say("the tested versions do not go with what is installed here: once more, with only the latter held fast")
        constraints.write_text("\n".join(merge_constraints([], before, torch)) + "\n")
        log = run_pip(venv, arguments)
    if log:
        raise Refused(explain_failure(log, str(venv)))
    after = json.loads(in_venv(venv, SURVEY, wanted))
    if before:
        check_survey(after, python)
        in_venv(venv, COMMANDS, [want["name"] for want in after["wanted"]])
    probe = subprocess.run(
        [str(venv / "bin" / "python"), "-c", "import torch"], cwd="/", capture_output=True, text=True
    )
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Refused(
            f"torch was installed but does not import ({reason}): try another one with TORCH=torch==VERSION."
        )
    return after


def set_up(venv: Path, which: str, fresh: bool, torch: str, pip_args: list[str]) -> None:
    stamp_file = venv / "zerolab-stamp.json"
    stamp = None
    with contextlib.suppress(OSError, ValueError):
        if (venv / "bin" / "python").exists():
            stamp = json.loads(stamp_file.read_text())
    python, prefix = sys.executable, os.path.realpath(sys.prefix)
    if prefix == os.path.realpath(venv):
        # .venv is activated, so that `python3` is its own: go by the Python that it was made with.
        python = stamp["python"] if stamp else sys._base_executable  # type: ignore[attr-defined]
        prefix = stamp["parent"] if stamp else os.path.realpath(sys.base_prefix)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    digests = {name: digest(ROOT, name) for name in FILES}
    now = {"venv": str(venv), "parent": prefix, "version": version, "digests": digests}
    action, reason = decide(stamp, now, which, fresh, torch)
    if action == "ready":
        return
    check_compiler(dict(os.environ))
    started = time.monotonic()
    if action == "rebuild":
        reuse = not fresh and not torch and parent_has_torch(python)
        kind = "on top" if reuse else "isolated"
        free = shutil.disk_usage(venv.parent).free
        if free < NEEDED_BYTES[kind]:
            raise Refused(explain_failure("No space left on device", f"{venv.parent} has {free / 2**30:.1f} GiB left"))
        base = f"on top of the packages of {python}" if reuse else f"isolated, with {python}"
        say(f"making {venv} ({reason}), {base}")
        stamp = {**now, "python": python, "reuse": reuse, "torch": torch, "digests": {}}
        stamp_file.unlink(missing_ok=True)
        create(venv, python, reuse)
    else:
        say(f"installing into {venv}: {reason}")
        stamp_file.unlink()
    assert stamp
    survey = install(venv, which, stamp["reuse"], stamp["torch"], pip_args, stamp["python"])
    stamp["digests"] = {**stamp["digests"], which: digests[which]}
    if which == "dev":
        stamp["digests"]["run"] = digests["run"]
    partial = stamp_file.with_suffix(".tmp")
    partial.write_text(json.dumps(stamp, indent=2) + "\n")
    partial.replace(stamp_file)
    shown = ("torch", "deepspeed", "transformers", "accelerate")
    versions = ", ".join(f"{name} {survey['found'].get(name)}" for name in shown)
    say(f"{versions}: ready in {time.monotonic() - started:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", choices=sorted(FILES))
    parser.add_argument("--fresh", default="", help="anything but empty, 0 or no: isolated, whatever is installed")
    parser.add_argument(
        "--torch", default="", help="a requirement that replaces the tested torch, such as torch==2.11.0"
    )
    parser.add_argument("--pip-args", default="", help="further arguments for pip install")
    options = parser.parse_args()
    fresh = options.fresh.lower() not in ("", "0", "no", "false")
    try:
        # Two `make` at once would install over each other; the second waits here and then finds all ready.
        with open(__file__) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            set_up(ROOT / ".venv", options.which, fresh, options.torch, shlex.split(options.pip_args))
    except Refused as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup: {explain_failure(str(error), str(ROOT)) if error.errno == 28 else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; the next `make` starts it over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
