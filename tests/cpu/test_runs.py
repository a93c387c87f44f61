"""The user's own command, run for real: every shipped configuration through the real Trainer and DeepSpeed."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.conftest import ROOT, environment
from zerolab import ds_config
from zerolab.data import DataArguments, load_data
from zerolab.record import load_record

ACCELERATE = ("accelerate", "launch")
TRAINABLE = ["none", "baseline", "zero1", "zero2", "offload", "zero3", "zero3_offload", "zero3_ratio"]
# What the engine has to say of itself, read from the live objects.
ENGINES = {
    "none": ("none", None, None, None),
    "baseline": ("deepspeed", 0, None, None),
    "zero1": ("deepspeed", 1, None, None),
    "zero2": ("deepspeed", 2, None, None),
    "offload": ("deepspeed", 2, "cpu", None),
    "zero3": ("deepspeed", 3, None, None),
    "zero3_offload": ("deepspeed", 3, "cpu", "cpu"),
    "zero3_ratio": ("deepspeed", 3, "cpu", None),
}


def flags(tiny_model, *more):
    return (
        *("--model", str(tiny_model), "--task", "sequence-classification"),
        *("--dataset", "random", "--num_random_samples", "16", "--max_length", "16"),
        *(
            "--per_device_train_batch_size",
            "4",
            "--max_steps",
            "12",
            "--learning_rate",
            "1e-2",
            "--disable_tqdm",
            "true",
        ),
        *more,
    )


@pytest.fixture(params=TRAINABLE)
def trained(request, launch, tiny_model):
    """One run for each configuration; `offload` by the command of the README, the others bare."""
    name = request.param
    spec, launcher = ("ds_configs/offload.json", ACCELERATE) if name == "offload" else (name, ())
    return name, launch("--ds", spec, *flags(tiny_model), launcher=launcher)


def test_every_configuration_trains_and_is_what_it_says(trained):
    name, run = trained
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    record = run.record
    assert record.status == "trained"
    engine = record.engine
    assert (engine.name, engine.zero_stage, engine.offload_optimizer, engine.offload_param) == ENGINES[name]
    losses = [step.loss for step in record.steps]
    assert len(losses) == 12
    # Four batches are all the samples: the trained model knows them better than the first pass did.
    assert record.metrics["eval_loss"] < sum(losses[:4]) / 4 - 0.05
    assert record.configuration == name


def test_every_phase_has_host_memory_and_no_device_where_there_is_none(trained):
    _, run = trained
    phases = run.record.phases
    assert list(phases) == ["init", "forward", "backward", "step", "eval", "save"]
    if not torch.cuda.is_available():
        assert all(memory.peak_bytes is None for memory in phases.values())
        assert "because this machine has no GPU" in run.stdout
    # torch alone is above 100 MiB.
    assert all(memory.host.peak_bytes > 100 * 2**20 for memory in phases.values())
    assert run.record.host.peak_bytes >= max(memory.host.peak_bytes for memory in phases.values())


def test_the_steps_are_timed_and_counted(trained):
    _, run = trained
    speed = run.record.speed
    assert speed.step_seconds > 0
    assert speed.samples_per_second == pytest.approx(4 / speed.step_seconds, rel=0.5)
    assert speed.tokens_per_second == pytest.approx(16 * speed.samples_per_second)
    assert run.record.phases["backward"].seconds < speed.step_seconds * 3


def test_the_terminal_fits_100_columns(trained):
    _, run = trained
    table = run.stdout[run.stdout.rindex("Memory by phase") :]
    assert max(len(line) for line in table.splitlines()) <= 100


def test_the_folder_holds_record_plots_config_and_model(trained):
    name, run = trained
    names = {path.name for path in run.folder.iterdir()}
    assert {"record.json", "loss.png", "memory.png", "model"} <= names
    assert (name != "none") == ("ds_config.json" in names)
    # Model and tokenizer once, without the optimizer's state.
    assert not [path for path in run.folder.rglob("*") if "optim" in path.name or "global_step" in path.name]


def test_the_resolved_configuration_has_no_auto_left_that_matters(trained):
    name, run = trained
    if name == "none":
        return
    resolved = json.loads((run.folder / "ds_config.json").read_text())
    assert [key for key, value in ds_config.leaves(resolved) if value == "auto"] == []
    raw = ds_config.read_config(ds_config.CONFIG_DIR / f"{name}.json")
    explained = {choice.field for choice in run.record.choices}
    assert {key for key, value in ds_config.leaves(raw) if value == "auto"} <= explained


def test_the_saved_model_gives_the_same_loss_as_the_trained_one(trained, tmp_path):
    _, run = trained
    model = AutoModelForSequenceClassification.from_pretrained(
        shutil.copytree(run.folder / "model", tmp_path / "model"), trust_remote_code=True, dtype=torch.float32
    ).eval()
    arguments = DataArguments(dataset="random", num_random_samples=16, max_length=16)
    data = load_data(arguments, task="sequence-classification", config=model.config, seed=42, tokenizer_source=None)
    with torch.no_grad():
        loss = model(**data.collate(data.eval.__getitems__(list(range(16))))).loss
    # One batch against two of eight: fp32 sums in another order.
    assert float(loss) == pytest.approx(run.record.metrics["eval_loss"], rel=1e-5)


def test_stages_0_to_2_and_offload_learn_the_same(launch, tiny_model):
    first = {}
    for name in ("none", "baseline", "zero1", "zero2"):
        first[name] = [step.loss for step in launch("--ds", name, *flags(tiny_model)).record.steps]
    for name in ("baseline", "zero1", "zero2"):
        assert first[name] == pytest.approx(first["none"], abs=1e-3)


def test_world_size_one_is_said_before_the_run(launch, tiny_model):
    run = launch("--ds", "zero2", *flags(tiny_model))
    plan = run.stdout[: run.stdout.index("Memory by phase")]
    assert "nothing to partition" in plan
    assert "nothing to partition" not in launch("--ds", "none", *flags(tiny_model)).stdout


def test_low_precision_is_refused_where_there_is_no_16_bit(launch, tiny_model):
    if torch.cuda.is_available():
        pytest.skip("with a GPU it trains; benchmarks/results has it")
    run = launch("--ds", "offload_low_precision", *flags(tiny_model))
    assert run.returncode == 2
    assert "bf16_master_weights_and_grads" in run.stderr
    assert not run.folder.exists()


def test_nvme_needs_a_path_and_then_trains_or_names_libaio(launch, tiny_model, tmp_path):
    without = launch("--ds", "zero3_nvme", *flags(tiny_model))
    assert without.returncode == 2
    assert "nvme_path" in without.stderr
    run = launch("--ds", "zero3_nvme", *flags(tiny_model), "--nvme_path", str(tmp_path))  # async_io is compiled
    if run.returncode == 2:
        assert "libaio" in run.stderr
    else:
        assert run.record.engine.offload_optimizer == "nvme"
        assert run.record.status == "trained"


def test_a_users_deepspeed_yaml_does_not_turn_none_into_zero_nor_a_run_overwrite_another(launch, tiny_model, tmp_path):
    yaml = tmp_path / "default_config.yaml"
    yaml.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 1\nnum_machines: 1\n"
        "machine_rank: 0\nmixed_precision: 'no'\nuse_cpu: false\n"
        "deepspeed_config:\n  zero_stage: 2\n  gradient_accumulation_steps: 1\n"
    )
    # The folder holds somebody's record already, which this run must not touch.
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "record.json").write_text("mine")
    more = ("--output_dir", str(folder), "--save_model", "false")
    run = launch("--ds", "none", *flags(tiny_model, *more), launcher=(*ACCELERATE, "--config_file", str(yaml)))
    assert run.returncode == 0, run.stderr[-3000:]
    record = load_record(tmp_path / "run-2")
    assert record.engine.name == "none"
    assert any(choice.field == "accelerate configuration" for choice in record.choices)
    assert (folder / "record.json").read_text() == "mine"


def test_cpu_threads_are_ours_under_accelerate_and_said(launch, tiny_model):
    from zerolab.launch import available_cores

    run = launch("--ds", "ds_configs/offload.json", *flags(tiny_model), launcher=ACCELERATE)
    assert run.record.machine["num_threads"] == available_cores()
    assert "OMP_NUM_THREADS" in run.stdout


def test_the_script_of_the_readme_gives_a_record_without_anything_else_of_ours(tmp_path):
    script = ROOT / "examples" / "own_script.py"
    assert script.read_text() in (ROOT / "README.md").read_text()
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = load_record(tmp_path / "own_run")
    assert record.status == "trained"
    assert record.model["class"] == "ViTForImageClassification"
    assert {"init", "forward", "backward", "step", "eval"} <= set(record.phases)
    assert len(record.steps) == 20
    assert record.metrics["eval_loss"] > 0


def test_an_interrupt_leaves_a_complete_record(tiny_model, tmp_path):
    command = [
        sys.executable,
        "run_zero.py",
        "--ds",
        "none",
        *flags(tiny_model),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    command[command.index("--max_steps") + 1] = "100000"
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    record = tmp_path / "run" / "record.json"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (record.exists() and load_record(record).engine is not None):
        time.sleep(0.2)
    time.sleep(1)  # some steps
    process.send_signal(signal.SIGINT)
    try:
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stderr[-2000:]
    done = load_record(record)
    assert done.status == "interrupted"
    assert done.steps
    assert "interrupted" in stdout
    assert "Traceback" not in stderr
