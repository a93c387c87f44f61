"""Records as text and as pictures, for runs of every kind. No torch: the records are built by hand."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from zerolab.record import DeviceMemory, Engine, Failure, HostPhase, PhaseMemory, Record, Reset, Speed, Step
from zerolab.report.plots import plot_loss, plot_memory, save_plots
from zerolab.report.text import render_plan, render_run
from zerolab.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
STATUSES = {
    "running": "still running",
    "trained": "trained",
    "diverged": "diverged",
    "oom": "out of memory",
    "refused": "refused",
    "interrupted": "interrupted",
    "killed": "killed",
    "failed": "failed",
}
OOM_MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.74 GiB. GPU 0 has a total capacity of 139.81 GiB of which 402.00 MiB is "
    "free. Process 4242 has 139.41 GiB memory in use. Of the allocated memory 11.20 GiB is allocated by PyTorch, and "
    "128.50 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "[red]PYTORCH_ALLOC_CONF=expandable_segments:True[/red] to avoid fragmentation. The end of the message."
)


def of(gibibytes: float) -> int:
    return round(gibibytes * GIB)


def phase(peak: float, reserved: float, driver: float, end: float, host: float, seconds: float | None = None):
    return PhaseMemory(
        peak_bytes=of(peak),
        reserved_bytes=of(reserved),
        driver_bytes=of(driver),
        end_bytes=of(end),
        seconds=seconds,
        host=HostPhase(peak_bytes=of(host)),
    )


def steps(count: int, peak: float | None) -> list[Step]:
    return [
        Step(step=n, loss=8.8 + 1.6 / n, seconds=0.1, peak_bytes=None if peak is None else of(peak) + n % 7 * MIB)
        for n in range(1, count + 1)
    ]


def gpu_record(num_steps: int = 40, **changes) -> Record:
    """Stage 2 with offload on an H200, as in measured_h200.md."""
    record = Record(
        status="trained",
        phase=None,
        created="2026-12-01T10:00:00+0000",
        duration_seconds=34.26,
        configuration="offload",
        model={
            "name": "bert-120m",
            "kind": "preset",
            "task": "masked-lm",
            "class": "ZeroBertForMaskedLM",
            "num_parameters": 121_834_544,
            "num_trainable_parameters": 121_834_544,
        },
        data={"name": "digits", "num_train_samples": 1347, "max_length": 128},
        arguments={"per_device_train_batch_size": 8, "bf16": True},
        deepspeed={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        engine=Engine(
            name="deepspeed",
            zero_stage=2,
            offload_optimizer="cpu",
            optimizer_class="DeepSpeedCPUAdam",
            wrapper_class="DeepSpeedZeroOptimizer",
            precision="bfloat16",
            attention="sdpa",
        ),
        machine={"cpu": "Xeon", "num_cores": 16, "num_gpus": 1, "gpu": "NVIDIA H200", "gpu_total_bytes": of(139.8)},
        versions={"torch": "2.11.0", "deepspeed": "0.19.8"},
        phases={
            "init": phase(0.423, 0.5, 1.17, 0.332, 3.9),
            "forward": phase(0.6514, 1.012, 2.68, 0.55, 4.0, 0.0053),
            "backward": phase(0.7694, 1.012, 2.682, 0.34, 4.03, 0.0432),
            "step": phase(0.4, 1.012, 2.682, 0.332, 4.031, 0.0407),
            "eval": phase(0.5, 1.012, 2.682, 0.332, 4.03),
            "save": phase(0.34, 1.012, 2.682, 0.332, 4.03),
        },
        device=DeviceMemory(
            peak_bytes=of(0.7694),
            peak_phase="backward",
            steady_peak_bytes=of(0.7691),
            resident_bytes=of(0.332),
            reserved_bytes=of(1.012),
            fragmentation_bytes=of(1.012) - of(0.7694),
            driver_bytes=of(2.682),
            driver_source="NVML, this process",
            context_bytes=of(2.682) - of(1.012),
        ),
        resets=[Reset(caller="deepspeed.runtime.engine.initialize", phase="init", count=1)],
        steps=steps(num_steps, 0.769),
        speed=Speed(
            clock="CUDA events",
            num_warmup_steps=5,
            num_timed_steps=35,
            step_seconds=0.102,
            step_seconds_p10=0.0961,
            step_seconds_p90=0.1312,
            samples_per_second=78.43,
            tokens_per_second=10039.2,
        ),
        metrics={
            "eval_loss": 8.7654,
            "eval_accuracy": 0.12345,
            "eval_perplexity": 6407.9,
            "eval_runtime": 1.23,
            "eval_samples_per_second": 99.0,
            "eval_steps_per_second": 12.0,
            "epoch": 1.0,
            "train_runtime": 30.0,
        },
    )
    record.host.peak_bytes, record.host.peak_phase, record.host.pinned_bytes = of(4.056), "step", of(2.0)
    record.choose("precision", "bf16", "zerolab", "the card has bfloat16 arithmetic")
    record.choose("zero_optimization.reduce_bucket_size", 5_000_000, "zerolab", "fits the largest parameter " * 6)
    return record.model_copy(update=changes)


def cpu_record() -> Record:
    host = {"init": (0.61, None), "forward": (0.72, 0.0312), "backward": (0.8154, 0.0611), "step": (0.80, 0.0123)}
    record = Record(
        status="trained",
        phase=None,
        duration_seconds=4.2,
        configuration="none",
        model={"name": "bert-mini", "class": "ZeroBertForMaskedLM", "num_parameters": 5_467_904},
        engine=Engine(name="none", optimizer_class="AdamW", wrapper_class="AdamW", precision="float32"),
        machine={"cpu": "Xeon", "num_cores": 2, "num_gpus": 0, "gpu": None},
        phases={
            name: PhaseMemory(seconds=seconds, host=HostPhase(peak_bytes=of(peak)))
            for name, (peak, seconds) in host.items()
        },
        steps=steps(12, None),
        metrics={"eval_loss": 8.9},
    )
    record.host.peak_bytes = of(0.8312)
    return record


def oom_record(message: str = OOM_MESSAGE) -> Record:
    phases = {"init": phase(3.481, 3.6, 5.2, 3.4, 19.1), "forward": phase(11.2, 11.325, 13.0, 11.2, 19.1)}
    failure = Failure(
        type="OutOfMemoryError",
        message=message,
        phase="forward",
        requested_bytes=of(1.74),
        free_bytes=402 * MIB,
        total_bytes=of(139.81),
    )
    changed = {"status": "oom", "phase": "forward", "phases": phases, "steps": [], "speed": Speed(), "metrics": {}}
    record = gpu_record(failure=failure, device=DeviceMemory(num_ooms=1, num_alloc_retries=2, cap_bytes=12 * GIB))
    return record.model_copy(update=changed)


def diverged_record() -> Record:
    lost = [Step(step=n, loss=10.4 - 0.1 * n if n < 7 else math.nan, peak_bytes=of(0.769)) for n in range(1, 13)]
    written = gpu_record(status="diverged", steps=lost, metrics={"eval_loss": math.nan, "eval_perplexity": math.inf})
    # NaN goes through JSON as null: both what the run itself prints and what is read later have to render.
    return Record.model_validate_json(written.model_dump_json())


def oom_in_init() -> Record:
    failure = Failure(type="OutOfMemoryError", message="CUDA out of memory.", phase="init")
    return Record(status="oom", failure=failure, machine={"gpu": "NVIDIA H200"})


RECORDS = {
    "gpu": gpu_record,
    "cpu": cpu_record,
    "oom": oom_record,
    "oom_in_init": oom_in_init,
    "diverged": diverged_record,
    "one_step": lambda: gpu_record(1),
    "many_steps": lambda: gpu_record(300),
    "empty": Record,
}


def line_with(text: str, *words: str) -> str:
    """The one line that holds all words."""
    (found,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return found


def cells(text: str, first: str) -> list[str]:
    """The cells of the table's row that begins with `first`."""
    (found,) = [
        line for line in text.splitlines() if re.match(rf"\s*{first}\b", line) and re.search(r"\d\.\d{3}", line)
    ]
    return re.split(r"\s{2,}", found.strip())


def flat(text: str) -> str:
    return " ".join(text.split())


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("kind", RECORDS)
def test_no_line_is_wider_than_asked_for(kind, width, verbose, tmp_path):
    record = RECORDS[kind]()
    record.warnings.append("a path without a blank: /" + "x" * 150 + " and 中文字符" * 30)
    lines = (render_run(record, width, verbose, tmp_path) + render_plan(record, width)).splitlines()
    assert max(cell_len(line) for line in lines) <= width
    assert not any(line != line.rstrip() or "\x1b" in line for line in lines)


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_is_said_in_the_headline(status):
    assert render_run(gpu_record(status=status)).splitlines()[0].startswith(f"Run: {STATUSES[status]}, 40 steps")


def test_gpu_table_has_every_figure_to_three_digits():
    text = render_run(gpu_record())
    assert cells(text, "init") == ["init", "0.423", "0.500", "1.170", "0.332", "3.900", "-"]
    assert cells(text, "forward") == ["forward", "0.651", "1.012", "2.680", "0.550", "4.000", "5.3 ms"]
    assert cells(text, "backward")[1:] == ["0.769", "1.012", "2.682", "0.340", "4.030", "43.2 ms"]
    assert cells(text, "run maximum") == ["run maximum", "0.769", "1.012", "2.682", "4.056"]
    order = [line.split()[0] for line in text.splitlines() if re.match(r" ?\w+ +\d\.\d{3} ", line)]
    assert order == ["init", "forward", "backward", "step", "eval", "save"]
    assert "GPU and host memory" in text
    assert "no GPU" not in text


def test_device_line_leads_from_allocated_to_nvidia_smi():
    text = flat(render_run(gpu_record()))
    assert (
        "0.769 GiB allocated at the peak in backward + 0.243 GiB fragmentation -> 1.012 GiB reserved"
        " + 1.670 GiB context -> 2.682 GiB in nvidia-smi (NVML, this process)"
    ) in text
    assert "0.332 GiB stay allocated between two steps" in text
    assert "2.000 GiB" in line_with(render_run(gpu_record()), "pinned host")


def test_device_line_says_only_what_is_known():
    record = gpu_record()
    record.device.driver_bytes = record.device.context_bytes = None
    assert "1.012 GiB reserved; the driver's figure is not known" in flat(render_run(record))
    # The driver is sampled: it may have been smaller than what the allocator held for a moment.
    record.device.driver_bytes, record.device.context_bytes = of(0.9), of(0.9) - of(1.012)
    text = flat(render_run(record))
    assert "samples missed that moment, the largest is 0.900 GiB" in text
    assert "context" not in text


def test_machine_without_gpu_shows_host_memory_and_says_why():
    text = render_run(cpu_record())
    assert "Memory by phase: host memory, because this machine has no GPU" in text
    assert cells(text, "backward") == ["backward", "0.815", "61.1 ms"]
    assert cells(text, "run maximum") == ["run maximum", "0.831"]
    assert "reserved" not in text and "nvidia-smi" not in text
    assert line_with(text, "  GPU").split() == ["GPU", "no", "GPU"]


def test_gpu_that_was_not_used_is_not_called_missing():
    record = cpu_record().model_copy(update={"machine": {"gpu": "NVIDIA H200", "num_gpus": 1}})
    text = render_run(record)
    assert "host memory, because this run allocated nothing on the GPU" in text
    assert "no GPU" not in text


def test_oom_says_phase_asked_and_free():
    text = render_run(oom_record())
    assert "out of GPU memory in forward: 1.74 GiB asked for, 402.0 MiB free, 139.81 GiB on the whole card" in flat(
        text
    )
    assert "The end of the message." not in text
    assert "emptied its cache to try again 2x, out of memory 1x" in text
    assert "capped at 12.000 GiB" in text
    # device.peak_bytes was never written: the last row is the largest phase.
    assert cells(text, "run maximum")[:4] == ["run maximum", "11.200", "11.325", "13.000"]


def test_verbose_shows_the_whole_message_with_its_brackets():
    text = flat(render_run(oom_record(), verbose=True))
    assert "[red]PYTORCH_ALLOC_CONF=expandable_segments:True[/red]" in text
    assert "The end of the message." in text


def test_host_oom_is_not_blamed_on_the_gpu():
    failure = Failure(type="MemoryError", message="", phase="save")
    text = render_run(gpu_record(status="oom", failure=failure))
    assert "out of host memory in save" in text
    assert "GPU memory in" not in text


def test_other_failures_name_type_phase_and_message():
    failure = Failure(type="ValueError", message="shapes (3,)\n and (4,)", phase="backward")
    text = flat(render_run(gpu_record(status="failed", failure=failure)))
    assert "what happened ValueError in backward shapes (3,) and (4,)" in text


def test_killed_says_where_and_why_there_is_no_message():
    text = flat(render_run(gpu_record(status="killed", phase="step")))
    assert "the process ended in step and left no message" in text
    assert "host memory" in text


def test_diverged_shows_the_last_finite_loss():
    text = render_run(diverged_record())
    assert "10.3 at step 1 -> 9.8 at step 6; not finite after that" in text
    assert "eval_loss not finite, eval_perplexity not finite" in text
    record = gpu_record(status="diverged", steps=[Step(step=1, loss=math.nan)])
    assert "not finite at any step" in render_run(record)


def test_loss_of_a_run_that_logs_seldom_is_not_called_diverged():
    logged = [Step(step=n, loss=10.0 - n if n == 2 else None) for n in (1, 2, 3)]
    text = render_run(gpu_record(steps=logged))
    assert "8 at step 2" in line_with(text, "  loss")
    assert "not finite" not in text


def test_metrics_leave_the_noise_out():
    text = render_run(gpu_record())
    assert "eval_loss 8.765, eval_accuracy 0.1235, eval_perplexity 6408" in text
    assert not any(noise in text for noise in ("eval_runtime", "per_second", "epoch", "train_runtime"))


def test_speed_says_its_basis():
    assert (
        "102.0 ms a step, median of 35 (p10 to p90: 96.1 ms to 131.2 ms), 78.4 samples/s, 10,039.2 tokens/s;"
        " warm-up steps left out: 5; CUDA events"
    ) in flat(render_run(gpu_record()))
    assert "skipped" not in render_run(gpu_record())
    record = gpu_record()
    record.speed.num_skipped_steps = 3
    assert "skipped 3 of 40 optimizer steps" in render_run(record)


def test_identity_says_what_really_ran():
    text = flat(render_run(gpu_record()))
    assert "bert-120m (ZeroBertForMaskedLM), 121.8 M parameters" in text
    assert (
        "DeepSpeed ZeRO stage 2, optimizer on cpu, DeepSpeedCPUAdam inside DeepSpeedZeroOptimizer, 1 process" in text
    )
    assert "bfloat16, attention sdpa" in text
    assert "NVIDIA H200, 139.80 GiB" in text
    assert "HF Trainer without DeepSpeed, AdamW, 1 process" in render_run(cpu_record())


def test_engine_that_never_ran_is_not_claimed():
    text = render_run(gpu_record(engine=None))
    assert "DeepSpeed ZeRO stage 2, optimizer on cpu asked for; none ran yet" in text
    refused = gpu_record(engine=None, status="refused", deepspeed={"zero_optimization": {"stage": "two"}})
    assert "DeepSpeed asked for; none ran yet" in render_run(refused)


def test_several_processes_are_told_apart():
    record = gpu_record()
    assert "(process 0 of" not in render_run(record)
    record.engine.world_size = 4
    assert "(process 0 of 4)" in render_run(record)


def test_choices_only_when_verbose_warnings_and_resets_always():
    record = gpu_record(warnings=["world size 1 partitions nothing [1]"])
    short, long = render_run(record), flat(render_run(record, verbose=True))
    assert "bfloat16 arithmetic" not in short
    assert "precision = bf16 (zerolab: the card has bfloat16 arithmetic)" in long
    assert "torch 2.11.0, deepspeed 0.19.8" in long
    assert "world size 1 partitions nothing [1]" in short
    assert "deepspeed.runtime.engine.initialize in init, 1x; no peak was lost" in short


def test_files_are_those_that_are_there(tmp_path):
    (tmp_path / "record.json").touch()
    (tmp_path / "model").mkdir()
    text = flat(render_run(gpu_record(saved_model="model"), folder=tmp_path))
    assert text.startswith(f"{tmp_path.name}: trained")
    assert text.endswith("record.json, model")


def test_plan_names_everything_before_the_run():
    record = gpu_record(warnings=["world size 1 partitions nothing"], engine=None)
    text = flat(render_plan(record))
    for words in (
        "bert-120m (ZeroBertForMaskedLM), 121.8 M parameters",
        "digits, num_train_samples 1,347, max_length 128",
        "configuration offload",
        "engine DeepSpeed ZeRO stage 2, optimizer on cpu",
        "precision = bf16 (zerolab: the card has bfloat16 arithmetic)",
        "zero_optimization.reduce_bucket_size = 5000000 (zerolab: fits the largest",
        "warning world size 1 partitions nothing",
    ):
        assert words in text
    assert "HF Trainer without DeepSpeed" in render_plan(cpu_record())


# ---- pictures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECORDS)
def test_plots_are_written_where_there_is_something_to_draw(kind, tmp_path):
    has_loss = kind not in ("oom", "oom_in_init", "empty")
    has_memory = kind not in ("oom_in_init", "empty")
    expected = ["loss.png"] * has_loss + ["memory.png"] * has_memory
    written = save_plots(RECORDS[kind](), tmp_path)
    assert [path.name for path in written] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def texts_of(monkeypatch, plot, record: Record, path: Path) -> tuple[list[str], list]:
    """Every text of the figure that `plot` saves, and its axes."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, target: seen.append(figure))
    assert plot(record, path)
    (figure,) = seen
    figure.draw_without_rendering()
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()], figure.axes


def test_memory_plot_is_labeled_in_gib(monkeypatch, tmp_path):
    texts, axes = texts_of(monkeypatch, plot_memory, gpu_record(), tmp_path / "x.png")
    unit = "GiB  (filled: allocated peak; outlined: reserved peak)"
    assert {unit, "GiB", "backward", "0.769  (reserved 1.012)"} <= set(texts)
    filled, outlined = ([round(patch.get_width(), 3) for patch in bars] for bars in axes[0].containers)
    assert filled == [0.423, 0.651, 0.769, 0.4, 0.5, 0.34]
    assert outlined == [0.5] + [1.012] * 5
    assert len(axes) == 2


def test_memory_plot_without_gpu_says_host_memory(monkeypatch, tmp_path):
    texts, axes = texts_of(monkeypatch, plot_memory, cpu_record(), tmp_path / "x.png")
    assert any("Host memory, because this machine has no GPU" in text for text in texts)
    assert "GiB" in texts
    assert "0.815" in texts
    assert len(axes) == 1


def test_oom_plot_says_what_was_asked_for(monkeypatch, tmp_path):
    texts, _ = texts_of(monkeypatch, plot_memory, oom_record(), tmp_path / "x.png")
    assert any("out of memory in forward: 1.74 GiB asked for, 402.0 MiB free" in text for text in texts)
    assert "GiB  (filled: allocated peak; outlined: reserved peak; dashed: cap of 12.000)" in texts


@pytest.mark.parametrize("kind", ["gpu", "cpu", "oom", "one_step", "many_steps"])
def test_bar_labels_stay_inside_the_axes_and_apart(kind, monkeypatch, tmp_path):
    _, axes = texts_of(monkeypatch, plot_memory, RECORDS[kind](), tmp_path / "x.png")
    frame = axes[0].get_window_extent()
    boxes = [label.get_window_extent() for label in axes[0].texts]
    assert len(boxes) >= 2
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])


def test_loss_plot_marks_evaluation_and_divergence(monkeypatch, tmp_path):
    texts, axes = texts_of(monkeypatch, plot_loss, gpu_record(), tmp_path / "x.png")
    assert {"optimizer step", "loss", "training", "evaluation, at the end"} <= set(texts)
    assert list(axes[0].lines[0].get_xdata()) == list(range(1, 41))
    monkeypatch.undo()
    texts, _ = texts_of(monkeypatch, plot_loss, diverged_record(), tmp_path / "x.png")
    assert "not finite after step 6" in texts
    assert "evaluation, at the end" not in texts


def test_names_are_no_formulas(tmp_path):
    record = gpu_record(configuration="a$b_$\\frac", model={"name": "x" * 200})
    assert len(save_plots(record, tmp_path)) == 2


def test_import_brings_in_neither_torch_nor_matplotlib():
    code = (
        "import sys, zerolab.report.text, zerolab.report.plots, zerolab.cli;"
        "print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
