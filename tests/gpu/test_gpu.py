"""What only a GPU can show. `make test-gpu` runs these; each starts a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerolab.record import load_record

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.gpu

FLAGS = [
    "--model",
    "bert-mini",
    "--dataset",
    "random",
    "--max_steps",
    "12",
    "--do_eval",
    "false",
    "--disable_tqdm",
    "true",
]


def run(tmp_path, *flags, code=0):
    command = [sys.executable, "run_zero.py", *FLAGS, "--output_dir", str(tmp_path / "run"), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return load_record(tmp_path / "run"), done


def test_the_peak_is_the_allocators_own(tmp_path):
    """The same training with and without the callback: the peak of the whole run is the same to the byte."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, json\n"
        "from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from zerolab import MemoryCallback\n"
        "measured = sys.argv[1] == 'measured'\n"
        "callbacks = [MemoryCallback()] if measured else []\n"
        "set_seed(0)\n"
        "config = BertConfig(vocab_size=1000, hidden_size=256, num_hidden_layers=2, num_attention_heads=4)\n"
        "data = [{'input_ids': torch.randint(0, 1000, (64,)), 'labels': i % 2} for i in range(64)]\n"
        "args = TrainingArguments(sys.argv[2], max_steps=40, report_to='none', bf16=True, save_strategy='no')\n"
        "model = BertForSequenceClassification(config)\n"
        "trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)\n"
        "trainer.train()\n"
        "peak = callbacks[0].record.device.peak_bytes if measured else torch.cuda.max_memory_allocated()\n"
        "print('PEAK', json.dumps(peak))\n"
    )
    peaks = {}
    for how in ("measured", "plain"):
        done = subprocess.run(
            [sys.executable, str(script), how, str(tmp_path / how)], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        peaks[how] = json.loads(done.stdout.rsplit("PEAK", 1)[1])
    assert peaks["measured"] == peaks["plain"]


def test_offload_keeps_the_optimizer_off_the_gpu(tmp_path):
    plain, _ = run(tmp_path / "a", "--ds", "zero2")
    offload, _ = run(tmp_path / "b", "--ds", "offload")
    parameters = offload.model["num_parameters"]
    # Between two steps: 14 bytes a parameter at stage 2, 2 bytes and the largest gradient once more with offload. 2%:
    # stage 2 kept one MiB more than that on an H200, which is not explained yet (docs/log.md).
    saved = plain.device.resident_bytes - offload.device.resident_bytes
    assert saved == pytest.approx(12 * parameters - 2 * offload.model["largest_parameter"], rel=0.02)
    assert offload.host.pinned_bytes > 8 * parameters
    assert offload.engine.optimizer_class == "DeepSpeedCPUAdam"


def test_phases_reconcile_up_to_the_driver(tmp_path):
    record, done = run(tmp_path, "--ds", "offload")
    device = record.device
    assert record.engine.precision == "bfloat16"
    assert {"init", "forward", "backward", "step", "save"} <= set(record.phases)
    assert device.peak_bytes == max(memory.peak_bytes for memory in record.phases.values())
    assert device.peak_bytes + device.fragmentation_bytes == device.reserved_bytes
    assert device.reserved_bytes + device.context_bytes == device.driver_bytes
    assert record.speed.clock == "CUDA events"
    assert (
        sum(record.phases[phase].seconds for phase in ("forward", "backward", "step")) < 2 * record.speed.step_seconds
    )
    assert "GiB" in done.stdout


def test_a_reset_by_deepspeed_is_named(tmp_path):
    record, _ = run(tmp_path, "--ds", "zero2")
    assert any(reset.caller.startswith("deepspeed") for reset in record.resets)


def test_an_out_of_memory_is_a_record_with_phase_and_sizes(tmp_path):
    """A script of the user's own on a card that has two GiB."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments\n"
        "from zerolab import MemoryCallback\n"
        "total = torch.cuda.get_device_properties(0).total_memory\n"
        "torch.cuda.set_per_process_memory_fraction(2 * 2**30 / total)\n"
        "data = [{'input_ids': torch.randint(0, 1000, (512,)), 'labels': 0} for _ in range(512)]\n"
        "config = BertConfig(vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4)\n"
        "args = TrainingArguments(sys.argv[1], per_device_train_batch_size=512, report_to='none')\n"
        "model = BertForSequenceClassification(config)\n"
        "Trainer(model=model, args=args, train_dataset=data, callbacks=[MemoryCallback()]).train()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "OutOfMemoryError" in done.stderr
    record = load_record(tmp_path / "run")
    assert record.status == "oom"
    assert record.failure.phase in ("forward", "backward")
    assert record.failure.requested_bytes > 2**20
    assert record.device.peak_bytes <= 2 * 2**30
    assert record.device.num_ooms >= 1


def test_fp16_at_stage_0_warns(tmp_path):
    record, _ = run(tmp_path, "--ds", "baseline", "--fp16")
    assert any("fp16 at stage 0" in warning for warning in record.warnings)
