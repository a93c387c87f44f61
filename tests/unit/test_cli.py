"""`python -m zerolab report`, from the outside."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zerolab import __version__
from zerolab.cli import app
from zerolab.record import DeviceMemory, PhaseMemory, Record, Step, save_record, start_record
from zerolab.units import GIB

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def make_run(tmp_path):
    def make(name: str, **changes) -> Path:
        record = Record(
            status="trained",
            configuration=name,
            phases={"forward": PhaseMemory(peak_bytes=GIB), "step": PhaseMemory(peak_bytes=2 * GIB)},
            device=DeviceMemory(peak_bytes=2 * GIB, peak_phase="step"),
            steps=[Step(step=1, loss=2.5), Step(step=2, loss=1.25)],
        ).model_copy(update=changes)
        record.choose("precision", "bf16", "zerolab", "because of the card")
        folder = tmp_path / name
        folder.mkdir()
        save_record(record, folder)
        return folder

    return make


def test_report_shows_runs_in_order(call, make_run):
    result = call("report", make_run("zero2"), make_run("offload") / "record.json")
    assert result.exit_code == 0
    assert result.stdout.index("zero2: trained, 2 steps") < result.stdout.index("offload: trained, 2 steps")
    assert result.stdout.count("2.000 GiB allocated at the peak in step") == 2
    assert "because of the card" not in result.stdout
    assert result.stderr == ""


def test_verbose_adds_choices(call, make_run):
    assert "because of the card" in call("report", make_run("a"), "--verbose").stdout


@pytest.mark.parametrize("columns, widest", [("80", 80), ("300", 100), ("20", 60)])
def test_width_follows_the_terminal_between_60_and_100(call, make_run, monkeypatch, columns, widest):
    run = make_run("a", warnings=["words " * 60])
    monkeypatch.setenv("COLUMNS", columns)
    longest = max(len(line) for line in call("report", run).stdout.splitlines())
    assert widest - 10 < longest <= widest


def test_json_is_one_record_a_line(call, make_run):
    result = call("report", make_run("a"), make_run("b"), "--json")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["configuration"] for record in records] == ["a", "b"]
    assert records[0]["device"]["peak_bytes"] == 2 * GIB


def test_damaged_and_foreign_records_do_not_stop_the_others(call, make_run, tmp_path):
    damaged, foreign, wrong = make_run("damaged"), make_run("foreign"), make_run("wrong")
    (damaged / "record.json").write_text('{"schema_version": 1, "status"')
    (foreign / "record.json").write_text('{"schema_version": 99}')
    (wrong / "record.json").write_text('{"schema_version": 1, "status": "happy"}')
    missing = tmp_path / "missing"
    result = call("report", damaged, make_run("a"), foreign, missing, wrong, make_run("b"))
    assert result.exit_code == 2
    assert "a: trained" in result.stdout and "b: trained" in result.stdout
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error"] * 4
    for line, name, words in zip(
        lines,
        ("damaged", "foreign", "missing", "wrong"),
        ("cannot be read as a record", "schema version 99", "there is no record", "status"),
        strict=True,
    ):
        assert name in line and words in line


def test_running_record_of_a_dead_process_is_killed(call, tmp_path):
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    record = Record(status="running", phase="backward", process={"pid": int(child.stdout), "started": 1.0})
    save_record(record, tmp_path)
    result = call("report", tmp_path)
    assert f"{tmp_path.name}: killed" in result.stdout
    assert "the process ended in backward" in result.stdout
    assert json.loads(call("report", tmp_path, "--json").stdout)["status"] == "killed"


def test_running_record_of_a_live_process_is_running(call, tmp_path):
    save_record(start_record(["here"]), tmp_path)
    assert "still running, 0 steps" in call("report", tmp_path).stdout


def test_plots_only_when_asked_for(call, make_run):
    run = make_run("a")
    call("report", run)
    assert [path.name for path in run.iterdir()] == ["record.json"]
    result = call("report", run, "--plots")
    assert result.exit_code == 0
    assert sorted(path.name for path in run.iterdir()) == ["loss.png", "memory.png", "record.json"]
    assert "record.json, loss.png, memory.png" in " ".join(result.stdout.split())


def test_plots_that_cannot_be_written_are_an_error_of_that_run(call, make_run):
    run, other = make_run("a"), make_run("b")
    (run / "loss.png").mkdir()
    result = call("report", run, other, "--plots")
    assert result.exit_code == 2
    assert "loss.png" in result.stderr and "Traceback" not in result.stderr
    assert "b: trained" in result.stdout


def test_version(call):
    result = call("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, f"zerolab {__version__}")


def test_the_command_has_to_be_named(call, make_run):
    run = make_run("a")
    assert call(run).exit_code == 2
    assert call("report").exit_code == 2
    assert "report" in call("--help").stdout


def test_python_m_zerolab_where_the_encoding_lacks_a_character(make_run):
    run = make_run("a", configuration="größe-数")
    result = subprocess.run(
        [sys.executable, "-m", "zerolab", "report", str(run)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        encoding="latin-1",
    )
    assert result.returncode == 0, result.stderr
    assert "a: trained" in result.stdout and "größe-?" in result.stdout


CONFIGURATIONS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "configurations"


def test_compare_puts_runs_side_by_side_in_100_columns():
    result = CliRunner().invoke(
        app, ["compare", *(str(CONFIGURATIONS / f"{name}.json") for name in ("none", "zero2", "offload"))]
    )
    assert result.exit_code == 0, result.output
    assert max(len(line) for line in result.output.splitlines()) <= 100
    for word in ("differences to none", "zero2", "offload", "device peak", "learns the same", "(-60%)"):
        assert word in result.output


def test_compare_ends_with_1_where_an_arm_learns_otherwise():
    arms = [str(CONFIGURATIONS / f"{name}.json") for name in ("zero1-fp16", "baseline-fp16")]
    result = CliRunner().invoke(app, ["compare", *arms])
    assert result.exit_code == 1
    assert "learns the same: no" in " ".join(result.output.split())


def test_compare_needs_two_readable_runs(tmp_path):
    result = CliRunner().invoke(app, ["compare", str(CONFIGURATIONS / "none.json"), str(tmp_path)])
    assert result.exit_code == 2
    assert "there is no record" in result.output
    alone = CliRunner().invoke(app, ["compare", str(CONFIGURATIONS / "none.json")])
    assert alone.exit_code == 2
    assert "at least two" in alone.output
