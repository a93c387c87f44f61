"""tools/setup_env.py: what it decides and what it says, without installing anything."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    # By path: another distribution may have a module named `tools`.
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOW = {"venv": "/x/.venv", "parent": "/usr", "version": "3.11", "digests": {"run": "r", "dev": "d"}}
STAMP = {**NOW, "python": "/usr/bin/python3", "reuse": True, "torch": ""}


@pytest.mark.parametrize(
    ("stamp", "which", "fresh", "torch", "action"),
    [
        (STAMP, "run", False, "", "ready"),
        (STAMP, "dev", False, "", "ready"),
        (None, "run", False, "", "rebuild"),
        ({**STAMP, "digests": {"run": "r"}}, "dev", False, "", "install"),
        ({**STAMP, "digests": {"run": "old", "dev": "d"}}, "run", False, "", "install"),
        ({**STAMP, "venv": "/moved/.venv"}, "run", False, "", "rebuild"),
        ({**STAMP, "parent": "/opt/conda"}, "run", False, "", "rebuild"),
        ({**STAMP, "version": "3.12"}, "run", False, "", "rebuild"),
        (STAMP, "run", True, "", "rebuild"),
        ({**STAMP, "reuse": False}, "run", True, "", "ready"),
        # Isolated once, isolated until `make clean`: FRESH=1 need not be repeated.
        ({**STAMP, "reuse": False}, "run", False, "", "ready"),
        (STAMP, "run", False, "torch==2.11.0", "rebuild"),
        ({**STAMP, "torch": "torch==2.11.0", "reuse": False}, "run", False, "torch==2.11.0", "ready"),
    ],
)
def test_decide(tool, stamp, which, fresh, torch, action):
    assert tool.decide(stamp, NOW, which, fresh, torch)[0] == action


TESTED = [
    "torch==2.13.0",
    "transformers==5.24.0",
    "rich==15.0.0",
    "PyYAML==6.0.4",
    'scipy==1.17; python_version > "3.10"',
]


def test_isolated_takes_the_tested_versions(tool):
    assert tool.merge_constraints(TESTED, None, "") == TESTED
    assert tool.merge_constraints(TESTED, None, "torch==2.11.0") == TESTED[1:]


def test_on_top_keeps_what_fits(tool):
    survey = {
        "found": {"torch": "2.11.0+cu130", "transformers": "5.17.0", "rich": "1.0", "pyyaml": "6.0.1"},
        "wanted": [
            {"name": "torch", "range": ">=2.8", "found": "2.11.0+cu130", "fits": True},
            {"name": "transformers", "range": ">=5.17", "found": "5.17.0", "fits": True},
            {"name": "rich", "range": ">=13", "found": "1.0", "fits": False},
        ],
    }
    # torch and transformers stay; rich, too old, takes the tested version; pyyaml is pip's to keep; scipy is new.
    assert tool.merge_constraints(TESTED, survey, "") == [
        "torch==2.11.0+cu130",
        "transformers==5.17.0",
        "rich==15.0.0",
        'scipy==1.17; python_version > "3.10"',
    ]


def test_an_existing_transformers_out_of_range_is_refused(tool):
    want = {"name": "transformers", "range": "<6,>=5.17", "found": "4.57.0", "fits": False}
    with pytest.raises(tool.Refused, match=r"transformers 4\.57\.0.*<6,>=5\.17.*FRESH=1"):
        tool.check_survey({"wanted": [want]}, "/usr/bin/python3")
    # Absent, or not one of the protected: installed without a question.
    tool.check_survey({"wanted": [{**want, "found": None}, {**want, "name": "rich"}]}, "/usr/bin/python3")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "NewConnectionError: Temporary failure in name resolution\nNo matching distribution found for torch",
            "index cannot be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "no torch==2.13.0 for Python"),
        ("ERROR: ResolutionImpossible: for help visit", "fit together"),
        ("error: subprocess-exited-with-error", "pip failed"),
    ],
)
def test_failures_become_one_line(tool, log, expected):
    text = tool.explain_failure(log, "/x")
    assert expected in text and "\n" not in text


def test_a_missing_compiler_is_named(tool, tmp_path):
    with pytest.raises(tool.Refused, match=r"no C\+\+ compiler.*apt install"):
        tool.check_compiler({"PATH": str(tmp_path)})
    with pytest.raises(tool.Refused, match="CXX=nosuch"):
        tool.check_compiler({"PATH": str(tmp_path), "CXX": "nosuch -O2"})


def test_an_interrupted_installation_leaves_no_stamp(tool, tmp_path, monkeypatch):
    """An installation that dies leaves no stamp, also where a good one lay before."""
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    stamp = venv / "zerolab-stamp.json"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    prefix = str(Path(sys.prefix).resolve())
    made = {"venv": str(venv), "parent": prefix, "version": version, "digests": {}}
    stamp.write_text(json.dumps({**made, "python": "p", "reuse": False, "torch": ""}))

    def dies(*arguments):
        assert not stamp.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "check_compiler", lambda environ: None)
    monkeypatch.setattr(tool, "install", dies)
    with pytest.raises(KeyboardInterrupt):
        tool.set_up(venv, "run", False, "", [])
    assert not stamp.exists()


def test_every_requirement_has_a_tested_version(tool):
    tested = {tool.line_name(line) for line in tool.requirement_lines(ROOT / "constraints.txt")}
    wanted = tool.requirement_lines(ROOT / "requirements.txt", ROOT / "requirements-dev.txt")
    assert {tool.line_name(line) for line in wanted} <= tested


def test_pyproject_repeats_the_ranges_of_requirements(tool):
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packaged = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    assert sorted(packaged) == sorted(tool.requirement_lines(ROOT / "requirements.txt"))


def test_the_makefile_names_a_python_that_is_too_old(tmp_path):
    old = tmp_path / "python3.6"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.6.15\nexit 1\n')
    old.chmod(0o755)
    made = subprocess.run(["make", "run", f"PYTHON={old}"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode != 0
    assert re.search(r"Python 3\.10 or newer is needed.*Python 3\.6\.15", made.stderr)
    assert "Traceback" not in made.stderr
