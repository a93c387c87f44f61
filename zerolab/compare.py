"""Runs side by side: whether they may be compared, their figures as rows, and what theory expects of each.

Pure: records in, plain values out; no torch, no files. The first arm is the reference. An arm is one record, or
several of the same command (`--repeat N`). What the figures mean is said in verdicts.
"""

# Over 300 lines: the last section, what theory expects, stands here until the ledger's predictions have a module.

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from zerolab import ds_config
from zerolab.problems import Problem
from zerolab.record import PHASES, Engine, Phase, Record, Status

Arm = Record | Sequence[Record]
Unit = Literal["bytes", "seconds", "per second", "loss", "metric"]

# What describe_arguments leaves out because it is TrainingArguments' default.
_DEFAULTS = {"seed": 42, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}

# What Trainer.evaluate adds to every result: times and counts, no metrics.
_NOISE = ("_runtime", "_per_second", "_preparation_time", "_compilation_time")


def records_of(arm: Arm) -> list[Record]:
    """The records of an arm, at least one.

    Raises:
        ValueError: the arm has no record.
    """
    records = [arm] if isinstance(arm, Record) else list(arm)
    if not records:
        raise ValueError("an arm needs at least one record")
    return records


def status_of(arm: Arm) -> Status:
    """The status of an arm: that of its first repeat that did not train, where one did not."""
    statuses = [record.status for record in records_of(arm)]
    return next((status for status in statuses if status != "trained"), "trained")


# ---- may they be compared? ------------------------------------------------------------------------------------------


class _Fact(NamedTuple):
    field: str
    read: Callable[[Record], Any]
    remedy: str
    follows: tuple[str, ...] = ()  # where one of these differs already, this one differs for the same reason


def _argument(record: Record, name: str) -> Any:
    # A record that has no arguments yet knows nothing; one that has some left out the defaults.
    return record.arguments.get(name, _DEFAULTS[name]) if record.arguments else None


def _data_seed(record: Record) -> int | None:
    own = record.arguments.get("data_seed")
    return _argument(record, "seed") if own is None else own


def _samples_per_step(record: Record) -> int | None:
    if record.engine is None or not record.arguments:
        return None
    micro = _argument(record, "per_device_train_batch_size")
    return micro * _argument(record, "gradient_accumulation_steps") * record.engine.world_size


_MODEL = ("model", "model class", "number of parameters")
_BATCH = "the same product of batch size, --gradient_accumulation_steps and processes"
_FACTS = (
    _Fact("model", lambda r: r.model.get("name"), "the same --model"),
    _Fact("model class", lambda r: r.model.get("class"), "the same --task", _MODEL[:1]),
    _Fact("number of parameters", lambda r: r.model.get("num_parameters"), "the same config.json", _MODEL[:2]),
    _Fact(
        "number of trained parameters",
        lambda r: r.model.get("num_trainable_parameters"),
        "the same frozen layers",
        _MODEL,
    ),
    _Fact("data", lambda r: r.data.get("name"), "the same --dataset"),
    _Fact(
        "max_length", lambda r: r.data.get("num_tokens_per_sample"), "the same --max_length", ("model class", "data")
    ),
    _Fact(
        "training samples",
        lambda r: r.data.get("num_train_samples"),
        "the same part of the data",
        ("data", "max_length"),
    ),
    _Fact("seed", lambda r: _argument(r, "seed"), "the same --seed"),
    _Fact("order of batches", _data_seed, "the same --data_seed", ("seed",)),
    _Fact(
        "data fingerprint",
        lambda r: r.data.get("fingerprint"),
        "the same version of the data",
        ("model class", "data", "max_length", "training samples", "seed"),
    ),
    _Fact("samples per step", _samples_per_step, _BATCH),
    _Fact(
        "initial weights",
        lambda r: r.model.get("initial_weights"),
        "one folder of weights as --model",
        (*_MODEL, "seed"),
    ),
)


def check_comparable(arms: Mapping[str, Arm]) -> list[Problem]:
    """What makes two arms different experiments, each fact once for each arm.

    A fact that one of the two records does not know, as after an early death, is no difference; neither is one that
    follows from another difference: other data have another fingerprint.

    Args:
        arms: name to records; the first is the reference.

    Returns:
        Problems whose field names the fact and the arm; empty where the arms may be compared.
    """
    if not arms:
        return []
    (reference, first), *_ = arms.items()
    expected = records_of(first)[0]
    problems = []
    for name, arm in arms.items():
        different: set[str] = set()
        for record in records_of(arm):
            for fact in _FACTS:
                there, here = fact.read(expected), fact.read(record)
                if there is None or here is None or there == here or fact.field in different:
                    continue
                if not different.intersection(fact.follows):
                    problems.append(
                        Problem(f"{fact.field} of {name}", f"{here}; {reference} has {there}", fact.remedy)
                    )
                different.add(fact.field)
    return problems


# ---- rows -----------------------------------------------------------------------------------------------------------


class Quantity(NamedTuple):
    """Something that is compared. `phase` is set for the figures of one phase."""

    name: str
    unit: Unit
    read: Callable[[Record], float | None]
    phase: Phase | None = None


class Cell(NamedTuple):
    """One quantity of one arm, in the quantity's unit; bytes are integers.

    `value` is the median of the repeats, `low` and `high` their smallest and largest; `difference` is value - the
    reference's value, `percent` that in percent of the reference's. None for what a record does not know.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None
    num_values: int = 0
    difference: float | None = None
    percent: float | None = None


class Row(NamedTuple):
    """One quantity of every arm, by the arm's name."""

    quantity: Quantity
    cells: dict[str, Cell]


class Comparison(NamedTuple):
    """Arms side by side. `statuses` has the status of every repeat; rows that no arm knows are left out."""

    reference: str
    statuses: dict[str, list[Status]]
    rows: list[Row]

    def row(self, name: str) -> Row | None:
        """The row of that name, such as `device peak` or `backward peak`; None where no arm knows it."""
        return next((row for row in self.rows if row.quantity.name == name), None)


def compare(arms: Mapping[str, Arm]) -> Comparison:
    """Puts arms side by side, whatever their status.

    Args:
        arms: name to records; the first is the reference.

    Raises:
        ValueError: no arm, or an arm without a record.
    """
    if not arms:
        raise ValueError("a comparison needs at least one arm")
    reference = next(iter(arms))
    used = {name: measured_records(arm) for name, arm in arms.items()}
    rows = []
    for quantity in _quantities(used):
        cells = {name: _cell(quantity, records) for name, records in used.items()}
        if any(cell.num_values for cell in cells.values()):
            base = cells[reference].value
            rows.append(Row(quantity, {name: _against(cell, base) for name, cell in cells.items()}))
    statuses = {name: [record.status for record in records_of(arm)] for name, arm in arms.items()}
    return Comparison(reference, statuses, rows)


def measured_records(arm: Arm) -> list[Record]:
    """The repeats that count: those that trained, or all where none did. A run cut short has lower peaks."""
    records = records_of(arm)
    return [record for record in records if record.status == "trained"] or records


def logged_losses(record: Record) -> dict[int, float | None]:
    """The loss of each step that logged one; None where it was NaN or infinite."""
    return {s.step: s.loss for s in record.steps if s.loss is not None or s.finite is False}


def clipping(record: Record) -> float:
    """The norm at which gradients are clipped, 0 for not at all. DeepSpeed looks at its JSON only, not at the flag."""
    flag = record.arguments.get("max_grad_norm", 1.0)
    value = flag if record.deepspeed is None else record.deepspeed.get("gradient_clipping", 0.0)
    return float(flag if value == "auto" else value)


def _end_loss(record: Record, last: bool) -> float | None:
    losses = list(logged_losses(record).values())
    return losses[-1 if last else 0] if losses else None


def _phase_peak(phase: Phase) -> Callable[[Record], float | None]:
    return lambda record: record.phases[phase].peak_bytes if phase in record.phases else None


def _metric(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.metrics.get(name)


def _quantities(arms: Mapping[str, Sequence[Record]]) -> list[Quantity]:
    names = dict.fromkeys(name for records in arms.values() for record in records for name in record.metrics)
    return [
        Quantity("device peak", "bytes", lambda r: r.device.peak_bytes),
        *(Quantity(f"{phase} peak", "bytes", _phase_peak(phase), phase) for phase in PHASES),
        Quantity("between steps", "bytes", lambda r: r.device.resident_bytes),
        Quantity("reserved", "bytes", lambda r: r.device.reserved_bytes),
        Quantity("driver", "bytes", lambda r: r.device.driver_bytes),
        Quantity("host peak", "bytes", lambda r: r.host.peak_bytes),
        Quantity("pinned", "bytes", lambda r: r.host.pinned_bytes),
        Quantity("step time", "seconds", lambda r: r.speed.step_seconds),
        Quantity("samples/s", "per second", lambda r: r.speed.samples_per_second),
        Quantity("first loss", "loss", lambda r: _end_loss(r, last=False)),
        Quantity("last loss", "loss", lambda r: _end_loss(r, last=True)),
        *(
            Quantity(name, "metric", _metric(name))
            for name in names
            if name.startswith("eval_") and not name.endswith(_NOISE)
        ),
    ]


def _cell(quantity: Quantity, records: Sequence[Record]) -> Cell:
    values = [value for value in map(quantity.read, records) if value is not None]
    if not values:
        return Cell()
    middle = statistics.median(values)
    # The median of an even number of repeats lies between two of them; a size stays an integer of bytes.
    return Cell(round(middle) if quantity.unit == "bytes" else middle, min(values), max(values), len(values))


def _against(cell: Cell, base: float | None) -> Cell:
    if cell.value is None or base is None:
        return cell
    difference = cell.value - base
    return cell._replace(difference=difference, percent=100 * difference / abs(base) if base else None)


# ---- what theory expects --------------------------------------------------------------------------------------------


class States(NamedTuple):
    """Bytes of a process's model states: at the end of init, between steps, at the step's peak, and on the host."""

    init_bytes: int
    resident_bytes: int
    peak_bytes: int
    host_bytes: int
    formula: str  # that of resident_bytes


def expected_states(record: Record) -> States | None:
    """Parameters, master weights, gradients and Adam's states, without activations and without what backward holds.

    P parameters of b bytes (4 in fp32, else 2), the largest E, W processes (deepspeed_memory.md, sections 2 and 3):

    - Trainer: 12P, 16P at the step; for W > 1 DDP's buckets, 4P (from its source, not measured).
    - stage 0: 14P, 20P (FusedAdam 24P); 12P and 16P in fp32.
    - stages 1, 2: bP + 12P/W; at the step bP/W and the larger of the norm's fp64 copy, 8E, and (b + 4)G/W (bG in fp32)
      for the largest group G. With fp32 accumulation 4P/W and 8E. BF16_Optimizer: 4P more, all the time.
    - the same offloaded: bP + bE; host (16 + b)P/W + bE.
    - stage 3: (12 + 2b)P/W + bN, bucket N; at the step (b + 4) x the largest sub-group, or gathered weights, up to bP.
    - the same offloaded: bP/W + bN, with parameters bN; host (16 + b)P/W, with parameters (16 + 2b)P/W.

    Returns:
        None where the record says too little, or no formula is known: another optimizer than Adam, an offload ratio.
    """
    engine = record.engine
    count, largest = record.model.get("num_parameters"), record.model.get("largest_parameter")
    if engine is None or not count or not largest or engine.precision is None:
        return None
    if engine.optimizer_class not in ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam"):
        return None
    if engine.name == "none":
        ddp = 4 * count if engine.world_size > 1 else 0
        return States(4 * count, 12 * count + ddp, 16 * count + ddp, 0, "12P" + (" + 4P of DDP" if ddp else ""))
    half, shard = engine.precision != "float32", count // engine.world_size
    if engine.zero_stage == 0:
        init, steady, peak = (14, 14, 24 if engine.wrapper_class == "FP16_Optimizer" else 20) if half else (4, 12, 16)
        return States(init * count, steady * count, peak * count, 0, f"{steady}P")
    stage = _stage_3 if engine.zero_stage == 3 else _stage_1_or_2
    return stage(record, engine, 2 if half else 4, count, shard, largest)


def _stage_1_or_2(record: Record, engine: Engine, bits: int, count: int, shard: int, largest: int) -> States:
    low = bool(_setting(record, "bf16.bf16_master_weights_and_grads", False))
    master, adam = 2 if low else 4, 4 if _setting(record, "bf16.bf16_optimizer_states", False) else 8
    if engine.offload_optimizer:
        device, host = bits * (count + largest), (2 * master + adam + bits) * shard + bits * largest
        return States(device, device, device, host, f"{bits}P + {bits}E")
    whole = 4 * count if engine.wrapper_class == "BF16_Optimizer" else 0
    init = bits * count + master * shard + whole
    limit = next((int(choice.value) for choice in record.choices if choice.field == "--max_group_elements"), count)
    copies = (bits + (0 if low or bits == 4 else 4)) * min(limit, count) // engine.world_size
    gradients = bits * (count if whole else shard)
    if whole or _setting(record, "data_types.grad_accum_dtype") == "fp32":
        gradients, copies = gradients if whole else 4 * shard, 0
    peak = init + adam * shard + gradients + max(8 * largest, copies)
    return States(init, init + adam * shard, peak, 0, f"{bits}P + {master + adam}P/W" + (" + 4P" if whole else ""))


def _stage_3(record: Record, engine: Engine, bits: int, count: int, shard: int, largest: int) -> States | None:
    bucket = bits * int(_setting(record, "zero_optimization.reduce_bucket_size", 500_000_000))
    gathered = bits * min(count, 10**9) if engine.offload_param or engine.world_size > 1 else 0
    if engine.offload_optimizer:
        if _setting(record, "zero_optimization.offload_optimizer.ratio", 1.0) != 1.0:
            return None  # the split follows the sub-groups, which the record does not list
        device = bucket + (0 if engine.offload_param else bits * shard)
        host = (16 + bits + (bits if engine.offload_param else 0)) * shard
        name = f"{bits}N" if engine.offload_param else f"{bits}P/W + {bits}N"
        return States(device, device, device + gathered, host, name)
    init = (2 * bits + 4) * shard + bucket
    # A sub-group ends with the parameter that fills it.
    group = min(int(_setting(record, "zero_optimization.sub_group_size", 10**9)) + largest, shard)
    peak = init + 8 * shard + max((bits + (0 if bits == 4 else 4)) * group, gathered)
    return States(init, init + 8 * shard, peak, 0, f"{2 * bits + 12}P/W + {bits}N")


def _setting(record: Record, key: str, default: Any = None) -> Any:
    value = ds_config.get(record.deepspeed or {}, key, default)
    return default if value == "auto" else value
