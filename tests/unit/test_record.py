import json
import os
import subprocess
import sys

import pytest

from zerolab import record as records


def test_a_record_survives_the_way_to_disk_and_back(tmp_path):
    written = records.start_record(["run_zero.py", "--ds", "offload"])
    written.phases["forward"] = records.PhaseMemory(peak_bytes=7, host=records.HostPhase(peak_bytes=9))
    written.steps.append(records.Step(step=1, loss=10.3, seconds=0.1))
    written.choose("precision", "bf16", "zerolab", "capability 9.0")
    records.save_record(written, tmp_path)
    assert records.load_record(tmp_path) == written


def test_a_loss_that_is_not_a_number_leaves_a_file_that_json_can_read(tmp_path):
    written = records.start_record([])
    written.steps.append(records.Step(step=1, loss=float("nan")))
    path = records.save_record(written, tmp_path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["steps"][0]["loss"] is None


def test_running_with_a_live_process_stays_running(tmp_path):
    records.save_record(records.start_record([]), tmp_path)
    assert records.load_record(tmp_path).status == "running"


def test_running_with_a_dead_process_reads_as_killed(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path; from zerolab.record import *;"
        f"save_record(start_record([]), Path({str(tmp_path)!r})); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=os.getcwd())
    assert done.returncode == -9
    assert records.load_record(tmp_path).status == "killed"


def test_a_choice_made_again_replaces_the_first():
    record = records.start_record([])
    record.choose("--model", "bert-120m", "zerolab", "default")
    record.choose("--model", "bert-mini", "zerolab", "no GPU")
    assert [(choice.field, choice.value) for choice in record.choices] == [("--model", "bert-mini")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as a record"),
        ("[]", "schema version None"),
        ('{"schema_version": 99}', "schema version 99; this release reads version 1"),
        ('{"schema_version": 1, "status": "happy"}', "not a valid record: status"),
        ('{"schema_version": 1, "surprise": 1}', "not a valid record: surprise"),
    ],
)
def test_each_damaged_record_is_named_with_what_is_wrong(tmp_path, content, said):
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(records.RecordError, match=said):
        records.load_record(path)


def test_no_record_is_said_so(tmp_path):
    with pytest.raises(records.RecordError, match="there is no record"):
        records.load_record(tmp_path)


def test_a_failed_write_leaves_the_earlier_record_and_no_litter(tmp_path, monkeypatch):
    first = records.start_record(["first"])
    records.save_record(first, tmp_path)
    monkeypatch.setattr(
        records.Path, "write_text", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(OSError, match="No space left"):
        records.save_record(records.start_record(["second"]), tmp_path)
    monkeypatch.undo()
    assert records.load_record(tmp_path).command == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_the_rows_of_the_ledger_have_their_place_in_each_phase():
    names = set(records.PhaseMemory.model_fields)
    assert {f"{row}_bytes" for row in records.DEVICE_ROWS} <= names
    assert {f"{row}_bytes" for row in records.DEVICE_ROWS} <= set(records.HostPhase.model_fields)
