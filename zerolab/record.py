"""What a run was: the record that every command reads. This module alone defines its schema, and needs no torch.

A record is written with the status `running` before the model is built, updated while the run goes on, and completed
at its end. Every size is an integer of bytes, every duration a float of seconds. Readers go through `load_record`,
which says `killed` for a record whose process is gone.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

SCHEMA_VERSION = 1
FILE_NAME = "record.json"

DEVICE_ROWS = (
    "parameters",
    "master_weights",
    "gradients",
    "optimizer_states",
    "communication_buckets",
    "activations",
    "temporary",
    "unattributed",
)
Phase = Literal["init", "forward", "backward", "step", "eval", "save", "resume"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Status = Literal["running", "trained", "diverged", "oom", "refused", "interrupted", "killed", "failed"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=False)


class Rows(_Part):
    """The ledger's rows in bytes; None where this version of the project did not attribute them."""

    parameters_bytes: int | None = None
    master_weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_states_bytes: int | None = None
    communication_buckets_bytes: int | None = None
    activations_bytes: int | None = None
    temporary_bytes: int | None = None
    unattributed_bytes: int | None = None


class HostPhase(Rows):
    """Host memory in one phase. `peak_bytes` is the RSS of the process tree, sampled from another process."""

    peak_bytes: int | None = None
    pinned_bytes: int | None = None
    pageable_bytes: int | None = None


class PhaseMemory(Rows):
    """Memory in one phase: device figures here, host figures under `host`.

    `peak_bytes` and `reserved_bytes` are the allocator's own peaks, `driver_bytes` the largest figure of the driver
    seen by the sampler, `end_bytes` what was allocated when the phase last ended. All None on a machine without a GPU.
    """

    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    driver_bytes: int | None = None
    end_bytes: int | None = None
    seconds: float | None = None
    host: HostPhase = Field(default_factory=HostPhase)


class DeviceMemory(_Part):
    """The device over the whole run: `peak_bytes` is the maximum over all phases, init included.

    `fragmentation_bytes` = reserved - allocated and `context_bytes` = driver - reserved lead to what nvidia-smi shows.
    """

    peak_bytes: int | None = None
    peak_phase: Phase | None = None
    steady_peak_bytes: int | None = Field(default=None, description="largest peak of a step after the first")
    resident_bytes: int | None = Field(default=None, description="allocated between two steps")
    reserved_bytes: int | None = None
    fragmentation_bytes: int | None = None
    driver_bytes: int | None = None
    driver_source: str | None = None
    context_bytes: int | None = None
    cap_bytes: int | None = None
    num_alloc_retries: int | None = None
    num_ooms: int | None = None


class HostMemory(_Part):
    """Host memory over the whole run. `pinned_bytes` is what the pinned allocator took, rounded up as it rounds."""

    peak_bytes: int | None = None
    peak_phase: Phase | None = None
    pinned_bytes: int | None = None
    pinned_requested_bytes: int | None = None
    sample_interval_seconds: float | None = None
    num_samples: int | None = None
    source: str | None = None


@dataclass(slots=True)
class Step:
    """One optimizer step. `seconds` runs from the end of the step before; None where something came between.

    `finite` is False for a loss that was NaN or infinite, which JSON cannot hold: `loss` is None then. `peak_bytes` is
    None for a step that was not looked at by itself. A plain dataclass: one is made in every step of the training.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: int
    loss: float | None = None
    finite: bool | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    skipped: bool = False


class Speed(_Part):
    """Medians after the warm-up steps; `clock` says whether CUDA events or the host clock measured them."""

    clock: str | None = None
    num_warmup_steps: int = 0
    num_timed_steps: int = 0
    step_seconds: float | None = None
    step_seconds_p10: float | None = None
    step_seconds_p90: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    num_skipped_steps: int = 0
    callback_seconds_per_step: float | None = Field(default=None, description="host time spent in the callback itself")


class Choice(_Part):
    """A value that was chosen for the user, by whom and why."""

    field: str
    value: Any
    chosen_by: str
    reason: str


class Reset(_Part):
    """Somebody else reset the allocator's peak; the reading before it was taken, so no peak was lost."""

    caller: str
    phase: Phase | None
    count: int


class Failure(_Part):
    """How a run ended that did not train: for `oom`, what was asked for and what there was."""

    type: str
    message: str
    phase: Phase | None = None
    requested_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None


class Engine(_Part):
    """What really ran, read from the live objects and not from the configuration."""

    name: Literal["none", "deepspeed"]
    zero_stage: int | None = None
    offload_optimizer: str | None = None
    offload_param: str | None = None
    optimizer_class: str | None = None
    wrapper_class: str | None = None
    precision: str | None = None
    attention: str | None = None
    world_size: int = 1


class Record(_Part):
    """One run. `predicted` and `ranks` have their place from version 1 on, so that later writers need no new one."""

    schema_version: int = SCHEMA_VERSION
    status: Status = "running"
    phase: Phase | None = "init"
    created: str = ""
    duration_seconds: float | None = None
    command: list[str] = Field(default_factory=list)
    process: dict[str, float] = Field(default_factory=dict, description="pid and start time: killed or running?")
    configuration: str | None = None
    model: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    arguments: dict[str, Any] = Field(default_factory=dict)
    deepspeed: dict[str, Any] | None = None
    engine: Engine | None = None
    machine: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    choices: list[Choice] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    phases: dict[Phase, PhaseMemory] = Field(default_factory=dict)
    device: DeviceMemory = Field(default_factory=DeviceMemory)
    host: HostMemory = Field(default_factory=HostMemory)
    resets: list[Reset] = Field(default_factory=list)
    steps: list[Step] = Field(default_factory=list)
    speed: Speed = Field(default_factory=Speed)
    metrics: dict[str, float | None] = Field(default_factory=dict)
    failure: Failure | None = None
    saved_model: str | None = None
    predicted: dict[str, Any] | None = None
    ranks: list[dict[str, Any]] = Field(default_factory=list)

    def choose(self, field: str, value: Any, chosen_by: str, reason: str) -> None:
        """Adds a choice, replacing an earlier one for the same field."""
        self.choices = [choice for choice in self.choices if choice.field != field]
        self.choices.append(Choice(field=field, value=value, chosen_by=chosen_by, reason=reason))


class RecordError(ValueError):
    """A record that cannot be read: not there, damaged, or of another schema version."""


def start_record(command: list[str]) -> Record:
    """A record for this process, with the status `running`."""
    process = psutil.Process()
    return Record(
        command=command,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        process={"pid": process.pid, "started": process.create_time()},
    )


def save_record(record: Record, folder: Path) -> Path:
    """Writes `record.json` in `folder`, through a temporary file, so that a reader never sees half of one.

    Raises:
        OSError: the folder cannot be written or the disk is full; an earlier record is left as it was.
    """
    target = folder / FILE_NAME
    temporary = folder / f".{FILE_NAME}.{os.getpid()}.tmp"
    try:
        # pydantic writes NaN and infinity as null: a diverged loss must not make the file unreadable elsewhere.
        temporary.write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def load_record(path: Path | str) -> Record:
    """Reads a record from its file or from the folder of its run.

    Returns:
        The record; its status is `killed` where it says `running` and the process that wrote it is gone.

    Raises:
        RecordError: no such file, not JSON, another schema version, or not a record.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path}: there is no record; name the folder of a run or its {FILE_NAME}") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read as a record: {error}") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(f"{path}: schema version {version!r}; this release reads version {SCHEMA_VERSION}")
    try:
        record = Record.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecordError(f"{path}: not a valid record: {where}: {first['msg']}") from None
    if record.status == "running" and not _alive(record.process):
        record.status = "killed"
    return record


def _alive(process: dict[str, float]) -> bool:
    try:
        running = psutil.Process(int(process["pid"]))
        # A process id is reused; with its start time it is not.
        return abs(running.create_time() - process["started"]) < 1.0 and running.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, KeyError, ValueError):
        return False
