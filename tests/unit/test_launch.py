import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerolab import launch

ROOT = Path(__file__).resolve().parents[2]


def test_cores_follow_the_affinity_of_the_process():
    one = sorted(os.sched_getaffinity(0))[:1]
    code = f"import os; os.sched_setaffinity(0, {one}); from zerolab import launch; print(launch.available_cores())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_cores_follow_the_quota_of_the_control_group(tmp_path, files, expected):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert launch.available_cores(tmp_path) == (expected or len(os.sched_getaffinity(0)))


def test_threads_take_the_cores_and_a_value_of_the_user_wins():
    environ = {}
    choice = launch.set_cpu_threads(environ)
    assert environ["OMP_NUM_THREADS"] == str(launch.available_cores()) == choice.value
    environ = {"OMP_NUM_THREADS": "3"}
    assert launch.set_cpu_threads(environ).value == "3" == environ["OMP_NUM_THREADS"]


def test_several_ranks_share_the_cores():
    environ = {"LOCAL_WORLD_SIZE": "1000"}
    launch.set_cpu_threads(environ)
    assert environ["OMP_NUM_THREADS"] == "1"


def run_under(launcher: list[str], environment: dict[str, str], tmp_path) -> str:
    """What set_cpu_threads leaves in a child of a launcher that exports OMP_NUM_THREADS=1, as accelerate does."""
    script = tmp_path / "child.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from zerolab import launch; launch.set_cpu_threads(); import os; print(os.environ['OMP_NUM_THREADS'])"
    )
    fake = tmp_path / "accelerate"
    fake.write_text(
        "import os, subprocess, sys\n"
        f"env = {{**os.environ, 'OMP_NUM_THREADS': os.environ.get('OMP_NUM_THREADS', '1')}}\n"
        f"subprocess.run([sys.executable, {str(script)!r}], env=env, check=True)"
    )
    base = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, str(fake), *launcher], env={**base, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_one_thread_of_a_launcher_is_replaced(tmp_path):
    assert run_under(["launch"], {}, tmp_path) == str(launch.available_cores())


def test_one_thread_that_the_user_exported_stays(tmp_path):
    assert run_under(["launch"], {"OMP_NUM_THREADS": "1"}, tmp_path) == "1"


def test_one_thread_that_the_user_gave_to_the_launcher_stays(tmp_path):
    assert run_under(["launch", "--num_cpu_threads_per_process=1"], {}, tmp_path) == "1"


def test_the_workspace_of_cublas_is_set_unless_the_user_did():
    environ = {}
    assert launch.set_cublas_workspace(environ).value == environ["CUBLAS_WORKSPACE_CONFIG"]
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert launch.set_cublas_workspace(environ) is None
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_the_five_variables_are_filled_for_one_process_only():
    environ = {"MASTER_PORT": "29500"}
    assert launch.set_distributed_variables(environ) is not None
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("0", "1", "0")
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    assert launch.set_distributed_variables(launched) is None
    assert launched == {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}


def test_two_runs_get_two_ports():
    first, second = {}, {}
    launch.set_distributed_variables(first)
    launch.set_distributed_variables(second)
    assert first["MASTER_PORT"] != second["MASTER_PORT"]


def test_deepspeed_settings_of_a_users_accelerate_configuration_are_dropped():
    environ = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    assert launch.drop_accelerate_deepspeed(environ) is not None
    assert environ == {"ACCELERATE_MIXED_PRECISION": "no"}
    assert launch.drop_accelerate_deepspeed(environ) is None


@pytest.mark.parametrize(("value", "expected"), [("True", True), ("true", True), ("False", False), ("", False)])
def test_the_launchers_cpu_wish_is_understood(value, expected):
    assert launch.uses_cpu_only({"ACCELERATE_USE_CPU": value}) is expected
