"""MemoryCallback: where the memory of a HuggingFace Trainer goes, phase by phase, in a record.

    from zerolab import MemoryCallback
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[MemoryCallback()])
    trainer.train()

It needs nothing else from the script: it works with and without DeepSpeed, with and without a GPU, and writes
`record.json` into the run's folder.

The Trainer's events alone do not show where forward, backward and step end, nor when an evaluation or a save begins
(under DeepSpeed the optimizer steps inside `accelerator.backward`, before `on_pre_optimizer_step`). Events are not
handed the trainer either, so the callback takes it from the frame that fires the first event, and wraps its methods on
that one instance. Each wrapper marks a moment and calls the original; none changes a value.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from zerolab import environment, meter, probes
from zerolab.failure import failure_of, status_of
from zerolab.host_sampler import INTERVAL_SECONDS, HostSampler, own_peak_rss
from zerolab.launch import this_rank
from zerolab.record import Phase, Record, save_record, start_record
from zerolab.run_folder import make_run_folder
from zerolab.units import format_bytes


class MemoryCallback(TrainerCallback):
    """Measures a Trainer run and keeps its record.

    Args:
        folder: where the record goes; by default the Trainer's `output_dir`. A folder that holds a record already is
            left alone and gets a neighbour with a suffix.
        record: a record begun earlier, for a script that has more to say about its run.
        interval: seconds between two samples of host memory, taken by a process of its own.
        every_step: look at every step phase by phase, not only at the first ten and one in 50. Slows
            short steps; the peak of the whole run is exact either way.

    Memory is counted from the moment that the callback is created: create it before the model to see the model's
    construction in `init`.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        record: Record | None = None,
        interval: float = INTERVAL_SECONDS,
        every_step: bool = False,
    ):
        self.record = record if record is not None else start_record(sys.argv[:])
        self.folder = Path(folder) if folder is not None else None
        self.enabled = True
        self.meter = meter.Meter(probes.device_probe(), probes.clock(), HostSampler(interval), every_step=every_step)
        self.meter.start("init")
        self._began = time.monotonic()
        self._trainer: Trainer | None = None
        self._log_values: dict[str, float] = {}

    def on_init_end(self, args, state, control, **kwargs):
        self._adopt(_trainer_of_caller(), args)

    def on_train_begin(self, args, state, control, **kwargs):
        self._adopt(_trainer_of_caller(), args)  # for a callback that was added after the Trainer was built
        self._wrap_engine()
        self.record.engine = environment.describe_engine(self.trainer)
        self._save()

    def on_train_end(self, args, state, control, **kwargs):
        logged = [step.finite for step in self.meter.steps if step.finite is not None]
        self.record.status = "diverged" if logged and not logged[-1] else "trained"
        self.record.phase = None
        self._save()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.enabled:
            self.meter.begin_step()

    def on_step_end(self, args, state, control, **kwargs):
        if not self.enabled:
            return
        skipped = bool(getattr(self.trainer.accelerator, "optimizer_step_was_skipped", False))
        self.meter.end_step(state.global_step, skipped=skipped)
        if self.meter.detailed:
            began = time.perf_counter()
            self._log_values = self._current_values()
            self._show_in_progress_bar()
            self.meter.own_seconds += time.perf_counter() - began

    @property
    def trainer(self) -> Trainer:
        """The trainer that this callback belongs to."""
        assert self._trainer is not None, "no event of a Trainer has reached this callback yet"
        return self._trainer

    def _adopt(self, trainer: Trainer, args) -> None:
        if self._trainer is trainer:
            return
        self._trainer = trainer
        if self.folder is None:
            self.folder = make_run_folder(Path(args.output_dir), resume=not _has_record(Path(args.output_dir)))
        self._describe(args)
        self._wrap_trainer(trainer)
        self._save()

    def _describe(self, args) -> None:
        record = self.record
        record.machine = record.machine or environment.describe_machine()
        record.versions = record.versions or environment.describe_versions()
        record.model = record.model or environment.describe_model(self.trainer.model)
        record.arguments = record.arguments or environment.describe_arguments(args)

    def _wrap_trainer(self, trainer: Trainer) -> None:
        _wrap(trainer, "train", self._guarded)
        _wrap(trainer, "compute_loss", self._around_compute_loss)
        _wrap(trainer, "log", self._around_log)
        _wrap(trainer.accelerator, "backward", self._around_backward)
        _wrap(trainer.accelerator, "prepare", self._around_prepare)
        for name in ("evaluate", "predict"):
            _wrap(trainer, name, functools.partial(self._inside, "eval"))
        for name in ("save_model", "_save_checkpoint"):
            _wrap(trainer, name, functools.partial(self._inside, "save"))
        if hasattr(trainer, "_load_from_checkpoint"):
            _wrap(trainer, "_load_from_checkpoint", functools.partial(self._inside, "resume"))

    def _around_prepare(self, prepare, *args, **kwargs):
        prepared = prepare(*args, **kwargs)
        self._wrap_engine()
        return prepared

    def _wrap_engine(self) -> None:
        wrapper = getattr(self.trainer.accelerator, "deepspeed_engine_wrapped", None)
        engine = getattr(wrapper, "engine", None)
        if engine is not None and not hasattr(engine, "_zerolab_wrapped"):
            engine._zerolab_wrapped = True
            # accelerate calls engine.step() from inside accelerator.backward().
            _wrap(engine, "step", self._around_engine_step)
            _wrap(engine, "load_checkpoint", functools.partial(self._inside, "resume"))

    def _around_compute_loss(self, compute_loss, model, inputs, *args, **kwargs):
        if self.enabled and model.training and self.meter.phase not in ("eval", "save"):
            self.meter.switch("forward")
            self.meter.count(*_batch_size(inputs))
        return compute_loss(model, inputs, *args, **kwargs)

    def _around_backward(self, backward, *args, **kwargs):
        if not self.enabled:
            return backward(*args, **kwargs)
        self.meter.switch("backward")
        result = backward(*args, **kwargs)
        if not self._has_engine() and self.trainer.accelerator.sync_gradients:
            # Without DeepSpeed clipping and the optimizer follow, until on_step_end.
            self.meter.switch("step")
        return result

    def _around_engine_step(self, step, *args, **kwargs):
        if self.enabled:
            self.meter.switch("step")
        return step(*args, **kwargs)

    def _has_engine(self) -> bool:
        return getattr(self.trainer.accelerator, "deepspeed_engine_wrapped", None) is not None

    def _inside(self, phase: Phase, original, *args, **kwargs):
        """Runs `original` as a phase of its own; a save inside a save is one save."""
        if not self.enabled or self.meter.phase == phase:
            return original(*args, **kwargs)
        self.meter.enter(phase)
        result = self._guarded(original, *args, **kwargs)
        self.meter.leave()
        if not self.trainer.is_in_train:
            self._save()
        return result

    def _around_log(self, log, logs, *args, **kwargs):
        """Adds the memory figures before the Trainer hands its logs on, so that every integration sees them."""
        if self.enabled and self.meter.steps:
            began = time.perf_counter()
            if "loss" in logs:
                self._note_loss(logs)
                logs.update(self._log_values)
                # The last step's time is still on its way from the device; the one before is known.
                for step in self.meter.steps[-2:]:
                    if step.seconds is not None:
                        logs["step_seconds"] = step.seconds
            self.record.metrics.update(
                {name: value for name, value in logs.items() if name.startswith(("eval_", "test_", "train_"))}
            )
            self.meter.own_seconds += time.perf_counter() - began
        return log(logs, *args, **kwargs)

    def _note_loss(self, logs: dict[str, float]) -> None:
        step = self.meter.steps[-1]
        loss = float(logs["loss"])
        step.finite = math.isfinite(loss)
        step.loss = loss if step.finite else None
        step.grad_norm = logs.get("grad_norm")
        step.learning_rate = logs.get("learning_rate")

    def _current_values(self) -> dict[str, float]:
        """What the next logs say about memory; brought up to date at each detailed step."""
        values: dict[str, float] = {"host_peak_bytes": max(self.meter.sampler.read().host_peaks)}
        peaks = [memory.peak_bytes for memory in self.meter.phases.values() if memory.peak_bytes is not None]
        if peaks:
            values["device_peak_bytes"] = max(peaks)
            values["device_reserved_bytes"] = max(m.reserved_bytes or 0 for m in self.meter.phases.values())
        return values

    def _show_in_progress_bar(self) -> None:
        peak = self._log_values.get("device_peak_bytes")
        text = f"peak {format_bytes(int(peak))}" if peak else f"host {format_bytes(own_peak_rss())}"
        for callback in self.trainer.callback_handler.callbacks:
            bar = getattr(callback, "training_bar", None)
            if bar is not None and hasattr(bar, "set_postfix_str"):
                bar.set_postfix_str(text, refresh=False)

    def pause(self) -> None:
        """Stops measuring from the next event on; what was measured stays."""
        if self.enabled:
            self.meter.pause()
            self.enabled = False

    def resume(self) -> None:
        """Goes on after `pause`."""
        if not self.enabled:
            self.meter.resume()
            self.enabled = True

    def _guarded(self, call, *args, **kwargs):
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Completes the record of a run that ended in `error`: an OOM or an interruption is a result, too."""
        if self.record.failure is not None:
            return  # an inner phase has said it already
        self.record.status = status_of(error)
        self.record.failure = failure_of(error, self.meter.phase)
        self.record.phase = self.meter.phase
        self._save()

    def _save(self) -> None:
        if self.folder is None or this_rank() != 0:
            return
        self.meter.write_to(self.record)
        self.record.duration_seconds = time.monotonic() - self._began
        save_record(self.record, self.folder)

    def finish(self) -> Record:
        """Writes the record for the last time and ends the sampling process."""
        self._save()
        self.meter.stop()
        return self.record


def _wrap(owner: Any, name: str, around) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def _trainer_of_caller() -> Trainer:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer):
            return candidate
        frame = frame.f_back
    raise RuntimeError("MemoryCallback works inside a transformers.Trainer (or a subclass of it)")


def _has_record(folder: Path) -> bool:
    return (folder / "record.json").exists()


def _batch_size(inputs: Any) -> tuple[int, int]:
    """(samples, tokens) of a batch: tokens only where there are input_ids."""
    tensors = inputs.values() if hasattr(inputs, "values") else []
    first = next((value for value in tensors if isinstance(value, torch.Tensor) and value.dim() > 0), None)
    tokens = inputs.get("input_ids") if hasattr(inputs, "get") else None
    return (0 if first is None else first.shape[0]), (tokens.numel() if isinstance(tokens, torch.Tensor) else 0)
