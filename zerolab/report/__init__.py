"""A record as text for the terminal (`text`) and as pictures (`plots`). Needs no torch.

Here is what both of them say about a record, as single phrases; a dash stands for what the record does not know.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from zerolab import ds_config
from zerolab.record import Record
from zerolab.units import format_bytes, format_count, format_seconds, gib

_STATUS = {
    "running": "still running",
    "trained": "trained",
    "diverged": "diverged",
    "oom": "out of memory",
    "refused": "refused",
    "interrupted": "interrupted",
    "killed": "killed",
    "failed": "failed",
}


def headline(record: Record, folder: Path | None = None) -> str:
    """The status in words, after the name of the run's folder: `bert-offload: trained, 40 steps in 9.1 s`."""
    text = f"{folder.resolve().name if folder is not None else 'Run'}: {_STATUS[record.status]}"
    num_steps = record.steps[-1].step if record.steps else 0
    text += f", {num_steps:,} step{'' if num_steps == 1 else 's'}"
    return text if record.duration_seconds is None else f"{text} in {format_seconds(record.duration_seconds)}"


def has_gpu_memory(record: Record) -> bool:
    """Whether the record holds figures of a GPU's allocator."""
    return record.device.peak_bytes is not None or any(m.peak_bytes is not None for m in record.phases.values())


def why_host_memory(record: Record) -> str:
    """Why there are host figures only, in words for a title."""
    if record.machine.get("gpu"):
        return "host memory, because this run allocated nothing on the GPU"
    if record.machine:
        return "host memory, because this machine has no GPU"
    return "host memory, because no GPU was measured"


def reconciliation(record: Record) -> str:
    """From the allocator's peak to what nvidia-smi shows, in GiB, as far as it is known."""
    device = record.device
    phase = f" in {device.peak_phase}" if device.peak_phase else ""
    text = f"{gib(device.peak_bytes)} GiB allocated at the peak{phase}"
    if device.fragmentation_bytes is not None and device.reserved_bytes is not None:
        text += f" + {gib(device.fragmentation_bytes)} GiB fragmentation -> {gib(device.reserved_bytes)} GiB reserved"
    if device.driver_bytes is None:
        return text + "; the driver's figure is not known"
    source = f" ({device.driver_source})" if device.driver_source else ""
    driver = f"{gib(device.driver_bytes)} GiB"
    if device.context_bytes is None or device.context_bytes < 0:
        # The driver is sampled, the allocator is not: a short peak can lie between two samples.
        return f"{text}; the driver's samples missed that moment, the largest is {driver}{source}"
    return f"{text} + {gib(device.context_bytes)} GiB context -> {driver} in nvidia-smi{source}"


def finite_losses(record: Record) -> list[tuple[int, float]]:
    """(step, loss) of the steps with a loss that is a finite number; others were not logged, or diverged."""
    return [(s.step, s.loss) for s in record.steps if s.loss is not None and math.isfinite(s.loss)]


def model_words(record: Record) -> str:
    """Name, class and number of parameters: `bert-120m (ZeroBertForMaskedLM), 121.8 M parameters`."""
    model = record.model
    name, kind = model.get("name"), model.get("class")
    text = f"{name} ({kind})" if name and kind else str(name or kind or "-")
    if model.get("num_parameters"):
        text += f", {format_count(model['num_parameters'])} parameters"
        trainable = model.get("num_trainable_parameters")
        if trainable is not None and trainable != model["num_parameters"]:
            text += f", {format_count(trainable)} of them trained"
    return text


def engine_words(record: Record) -> str:
    """The engine that really ran, its optimizer and its number of processes."""
    engine = record.engine
    if engine is None:
        return f"{asked_engine_words(record)} asked for; none ran yet" if record.configuration else "none ran yet"
    if engine.name == "none":
        words = ["HF Trainer without DeepSpeed"]
    else:
        words = [f"DeepSpeed ZeRO stage {'?' if engine.zero_stage is None else engine.zero_stage}"]
        words += [f"optimizer on {engine.offload_optimizer}"] if engine.offload_optimizer else []
        words += [f"parameters on {engine.offload_param}"] if engine.offload_param else []
    if engine.optimizer_class:
        inside = engine.wrapper_class if engine.wrapper_class != engine.optimizer_class else None
        words.append(engine.optimizer_class + (f" inside {inside}" if inside else ""))
    words.append("1 process" if engine.world_size == 1 else f"{engine.world_size} processes")
    return ", ".join(words)


def asked_engine_words(record: Record) -> str:
    """The engine that the configuration asks for."""
    if record.deepspeed is None:
        return "HF Trainer without DeepSpeed"
    try:
        return f"DeepSpeed ZeRO {ds_config.zero_plan(record.deepspeed).text()}"
    except (TypeError, ValueError):
        # A refused run keeps the configuration that was refused, such as one whose stage is no number.
        return "DeepSpeed"


def precision_words(record: Record) -> str:
    """The precision and the attention kernel that really ran."""
    if record.engine is None or record.engine.precision is None:
        return "-"
    attention = f", attention {record.engine.attention}" if record.engine.attention else ""
    return record.engine.precision + attention


def gpu_words(record: Record) -> str:
    """The card and its memory, or `no GPU`."""
    machine = record.machine
    if not machine:
        return "-"
    if not machine.get("gpu"):
        return "no GPU"
    total = machine.get("gpu_total_bytes")
    return str(machine["gpu"]) + (f", {format_bytes(total)}" if total else "")


# What tells two data sets apart, for a machine; a person reads past it.
_FOR_MACHINES = ("fingerprint", "columns", "source_columns", "tokenizer")


def data_words(data: dict[str, Any]) -> str:
    """`pydoc, kind built-in, ...`: the data of a run without what only a machine compares."""
    return facts({key: value for key, value in data.items() if key not in _FOR_MACHINES}) or "-"


def facts(values: dict[str, Any]) -> str:
    """`digits, num_samples 1,347`: plain values by key; the name comes without its key, empty values are left out."""
    texts = []
    for key, value in values.items():
        if value is None or value == "" or value == {} or value == []:
            continue
        is_size = key.endswith("_bytes") and isinstance(value, int)
        text = format_bytes(value) if is_size else _value(value)
        texts.append(text if key == "name" else f"{key.removesuffix('_bytes') if is_size else key} {text}")
    return ", ".join(texts)


def _value(value: Any) -> str:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_count else plain(value)


def plain(value: Any) -> str:
    """A value as one would write it in JSON, a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
