"""Every shipped JSON and YAML through the parsers of those who read them, and every command of the README."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.conftest import ROOT, environment
from zerolab import ds_check, ds_config
from zerolab.request import parse

JSONS = sorted((ROOT / "ds_configs").glob("*.json"))
YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
COMMANDS = re.findall(r"^(?:accelerate launch|python) run_zero\.py .*$", (ROOT / "README.md").read_text(), re.M)


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_deepspeed_itself_has_nothing_against_the_json(path):
    assert ds_check.find_problems(ds_config.read_config(path)) == []


def test_the_known_keys_come_from_deepspeed():
    known = ds_check.known_keys()
    # Read in three ways by DeepSpeedConfig: by get, by `in`, and by `in ....keys()`.
    assert {"zero_optimization", "gradient_clipping", "aio", "flops_profiler", "data_types", "bf16"} <= known
    assert "gradient_cliping" not in known


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_accelerate_reads_the_yaml_and_finds_no_zero_or_precision_in_it(path):
    config = load_config_from_file(str(path))
    assert not config.deepspeed_config
    assert config.mixed_precision is None
    assert config.use_cpu is False  # with True, accelerate drops DeepSpeed


def test_the_readme_lists_every_configuration_that_is_shipped():
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "ds_configs" / "README.md").read_text(), re.M)
    assert {path.stem for path in JSONS} <= set(listed)


@pytest.fixture
def readers_files(tmp_path, monkeypatch):
    """What the commands of the README name: a folder with our files, and the reader's own."""
    from models import resolve_model
    from models.loading import build_model, load_config

    shutil.copytree(ROOT / "ds_configs", tmp_path / "ds_configs")
    shutil.copy(ROOT / "ds_configs" / "offload.json", tmp_path / "my_config.json")
    (tmp_path / "corpus.txt").write_text("some text\n" * 500)
    source = resolve_model("bert-mini")
    build_model(source, load_config(source), "masked-lm").save_pretrained(tmp_path / "my_model")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme_are_good_input(command, readers_files):
    words = shlex.split(command, comments=True)
    flags = words[words.index("run_zero.py") + 1 :]
    if flags == ["--help"]:
        with pytest.raises(SystemExit) as ended:
            parse(flags)
        assert ended.value.code == 0
    else:
        assert parse(flags).source is not None


def test_there_are_commands_in_the_readme():
    assert len(COMMANDS) >= 5


def test_the_tables_say_what_the_records_say():
    done = subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    """What `pip install .` would copy: zerolab with its metric modules, and no top-level folder beside it."""
    copy = tmp_path / "source"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "results", "__pycache__", ".*cache", ".whl")
    )
    code = "from setuptools import setup; setup()"
    build = [sys.executable, "-c", code, "-q", "build", "--build-lib", str(tmp_path / "built")]
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    built = tmp_path / "built"
    assert [path.name for path in built.iterdir()] == ["zerolab"]
    for name in ("callback.py", "metrics/accuracy/accuracy.py", "metrics/perplexity/perplexity.py", "report/text.py"):
        assert (built / "zerolab" / name).is_file()
    assert Path(built / "zerolab" / "data" / "loading.py").is_file()
