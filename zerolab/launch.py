"""The process environment of one run, set before torch is imported: ranks, CPU threads, what a launcher left behind.

Each function changes `os.environ` and returns what it chose with its reason, for the terminal and the record.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from zerolab.problems import Problem

_CGROUP = Path("/sys/fs/cgroup")
_CUBLAS_WORKSPACE = ":4096:2:16:8"  # two buffers of 4 MiB and eight of 16 KiB


class EnvironmentChoice(NamedTuple):
    """A setting of the process environment and why it has its value."""

    field: str
    value: str
    chosen_by: str
    reason: str


def available_cores(cgroup: Path = _CGROUP) -> int:
    """The cores that this process may use: its CPU affinity, limited by the quota of its control group (v2 or v1)."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    quota = _cgroup_quota(cgroup)
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def _cgroup_quota(cgroup: Path) -> float | None:
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError):
        return None


def set_cpu_threads(environ: MutableMapping[str, str] | None = None) -> EnvironmentChoice:
    """Sets OMP_NUM_THREADS to the cores of this process, unless the user set it.

    `accelerate launch` and torchrun export OMP_NUM_THREADS=1 to their children when the user did not set it. That
    leaves an offloaded optimizer step, which runs on the CPU, on one core. A value counts as the user's where a
    process above the launcher has it in its environment, or the launcher got `--num_cpu_threads_per_process`.
    """
    environ = os.environ if environ is None else environ
    current = environ.get("OMP_NUM_THREADS")
    if current is not None and current != "1":
        return EnvironmentChoice("OMP_NUM_THREADS", current, "environment", "set before the run and left alone")
    if current == "1" and _set_by_user():
        return EnvironmentChoice("OMP_NUM_THREADS", "1", "user", "set explicitly to 1 and left alone")
    ranks_here = _count(environ, "LOCAL_WORLD_SIZE")
    cores = available_cores()
    threads = max(1, cores // ranks_here)
    environ["OMP_NUM_THREADS"] = str(threads)
    was = "the launcher's default of 1 would run the CPU part on one core" if current == "1" else "it was not set"
    shared = f" / {ranks_here} ranks" if ranks_here > 1 else ""
    return EnvironmentChoice("OMP_NUM_THREADS", str(threads), "zerolab", f"{cores} cores usable{shared}; {was}")


def _count(environ: Mapping[str, str], name: str) -> int:
    """A number of processes that a launcher exported; 1 where there is none, or where it is no number."""
    value = environ.get(name, "1")
    return max(1, int(value)) if value.isdigit() else 1


def world_size(environ: Mapping[str, str] | None = None) -> int:
    """The number of processes of this run."""
    return _count(os.environ if environ is None else environ, "WORLD_SIZE")


def _set_by_user() -> bool:
    """Whether a 1 that we see came from the user: looks at the launcher, our nearest ancestor that is one."""
    try:
        for ancestor in psutil.Process().parents():
            command = ancestor.cmdline()
            if any(word.startswith("--num_cpu_threads_per_process") for word in command):
                return True
            if not _is_launcher(command):
                # The first ancestor above the launchers: a shell, make, a notebook. Did it export the variable?
                return "OMP_NUM_THREADS" in ancestor.environ() or _exported_to_child(command)
            if "OMP_NUM_THREADS" in ancestor.environ():
                return True
    except (psutil.Error, OSError):
        pass
    return False


def _is_launcher(command: list[str]) -> bool:
    names = {Path(word).name for word in command[:4]}
    return bool(names & {"accelerate", "accelerate-launch", "torchrun", "accelerate.commands.launch"}) or any(
        word in ("accelerate.commands.launch", "torch.distributed.run", "accelerate.commands.accelerate_cli")
        for word in command[:6]
    )


def _exported_to_child(command: list[str]) -> bool:
    # `OMP_NUM_THREADS=1 python run_zero.py` from `sh -c` shows in the command of the shell, not in its environment.
    return any("OMP_NUM_THREADS=" in word for word in command)


def set_cublas_workspace(environ: MutableMapping[str, str] | None = None) -> EnvironmentChoice | None:
    """Gives cuBLAS the workspace on Hopper that it has on every other card: 8 MiB for each thread instead of 32.

    The forward and the backward thread have one each, and they stay allocated from the first step on. What the smaller
    one costs in time has not been measured by itself yet (suite `workspace` of benchmarks/run.py).

    Returns:
        None where the user set CUBLAS_WORKSPACE_CONFIG.
    """
    environ = os.environ if environ is None else environ
    if "CUBLAS_WORKSPACE_CONFIG" in environ:
        return None
    environ["CUBLAS_WORKSPACE_CONFIG"] = _CUBLAS_WORKSPACE
    reason = "cuBLAS takes 8 MiB a thread, as on cards before Hopper, instead of 32"
    return EnvironmentChoice("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE, "zerolab", reason)


def keep_compiled_ops_apart(environ: MutableMapping[str, str] | None = None) -> None:
    """Lets each virtual environment keep its own compiled DeepSpeed ops.

    torch keeps them in one folder for all environments of a Python, and their build files name the environment: two
    environments would compile everything anew by turns, and wait for each other's lock.
    """
    environ = os.environ if environ is None else environ
    if "TORCH_EXTENSIONS_DIR" not in environ and sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")
    folder = Path(environ.get("TORCH_EXTENSIONS_DIR", ""))
    for lock in folder.glob("*/lock") if "TORCH_EXTENSIONS_DIR" in environ else ():
        # torch waits for it without a word, also for one that a killed compiler left behind.
        sys.stderr.write(f"waiting for another run that compiles; if there is none, delete {lock}\n")


def find_rank_problems(environ: Mapping[str, str] | None = None) -> list[Problem]:
    """RANK and WORLD_SIZE that a launcher cannot have set: one without the other, or no numbers."""
    environ = os.environ if environ is None else environ
    problems = []
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        value = environ.get(name)
        if value is None:
            continue
        if not value.isdigit():
            problems.append(Problem(name, value, "a number, set by the launcher; unset it for one process"))
        elif other not in environ:
            problems.append(Problem(name, value, f"set {other} as well, or neither: one process needs none"))
    return problems


def set_distributed_variables(environ: MutableMapping[str, str] | None = None) -> EnvironmentChoice | None:
    """Fills the five variables of torch.distributed for a single process, where no launcher did.

    Without them DeepSpeed looks for an MPI launcher and stops with "No module named 'mpi4py'".

    Returns:
        None where a launcher set RANK and WORLD_SIZE.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return None
    port = _free_port()
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        environ.setdefault(name, value)
    # A port that accelerate's simple launcher exports without using it is taken as soon as a second run starts.
    environ["MASTER_PORT"] = str(port)
    return EnvironmentChoice("RANK ... MASTER_PORT", f"one process, port {port}", "zerolab", "no launcher set them")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def drop_accelerate_deepspeed(environ: MutableMapping[str, str] | None = None) -> EnvironmentChoice | None:
    """Removes the DeepSpeed settings that a user's own accelerate configuration exports.

    With `distributed_type: DEEPSPEED` in default_config.yaml, `accelerate launch` sets ACCELERATE_USE_DEEPSPEED and
    its companions. They would turn `--ds none` into ZeRO, and they clash with a configuration given by `--ds`: here
    `--ds` alone decides.
    """
    environ = os.environ if environ is None else environ
    names = [name for name in environ if name.startswith("ACCELERATE_DEEPSPEED_")]
    names += [name for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_CONFIG_DS_FIELDS") if name in environ]
    if not names:
        return None
    for name in names:
        del environ[name]
    return EnvironmentChoice(
        "accelerate configuration", "its DeepSpeed section is ignored", "zerolab", "--ds alone decides about DeepSpeed"
    )


def this_rank() -> int:
    """The rank of this process, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def uses_cpu_only(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher asked for the CPU (`--cpu`, `use_cpu: true`), which makes accelerate drop DeepSpeed."""
    environ = os.environ if environ is None else environ
    return environ.get("ACCELERATE_USE_CPU", "").strip().lower() in ("1", "true", "yes", "y", "on", "t")


def wait_for_turn(environ: Mapping[str, str] | None = None) -> IO[str] | None:
    """Where ZEROLAB_QUEUE names a file, waits until no other run holds its lock, and holds it until this process ends.

    Runs that share a GPU can so be started together: they import and prepare at the same time and train one by one.
    `<file>.<pid>.ready` tells whoever started them that this one has come so far.

    Returns:
        The open file, to be kept; the lock goes with it. None without a queue.
    """
    path = (os.environ if environ is None else environ).get("ZEROLAB_QUEUE")
    if not path:
        return None
    import fcntl  # not on Windows, where there is no queue either

    Path(f"{path}.{os.getpid()}.ready").touch()
    queue = open(path, "a")  # noqa: SIM115 - open for as long as the process lives
    fcntl.flock(queue, fcntl.LOCK_EX)
    return queue


def prepare_process() -> list[EnvironmentChoice]:
    """What has to be set before torch is imported. `set_distributed_variables` follows once `--ds` is known.

    Without DeepSpeed the five variables stay unset: with them the plain Trainer on one GPU would wrap the model in
    DistributedDataParallel, whose buckets cost another four bytes a parameter.
    """
    keep_compiled_ops_apart()
    choices = (set_cpu_threads(), set_cublas_workspace(), drop_accelerate_deepspeed())
    return [choice for choice in choices if choice is not None]
