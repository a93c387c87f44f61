"""From readings to phases: which phase a peak belongs to, of device and host memory.

Knows nothing of the Trainer: `callback` says when a phase begins. All sizes in bytes, all times in seconds.
"""

from __future__ import annotations

import time

import psutil

from zerolab import probes
from zerolab.host_sampler import HostSampler, own_peak_rss
from zerolab.record import PHASES, HostMemory, Phase, PhaseMemory, Record, Reset, Step
from zerolab.steps import StepTimer, num_warmup_steps

_PHASE_NUMBER: dict[Phase, int] = {phase: number for number, phase in enumerate(PHASES)}

# A reading at each phase means four a step, which short steps feel (docs/log.md).
# The first steps are where memory still changes (the optimizer's states are born); then the peaks
# of steps of one shape repeat to the byte, and one step in 50 is looked at phase by phase.
FIRST_DETAILED_STEPS = 10
DETAIL_INTERVAL = 50
_FOLLOW_UP_STEPS = 3
# Batches differ by a little: in a masked language model the number of masked tokens does.
_EXPECTED_RISE = 0.01


class Meter:
    """Peaks by phase of one process.

    Phases nest: `enter("eval")` inside a step and `leave()` afterwards return to where it was. In a detailed step the
    allocator's peak is read and reset at each change, so that a phase's peak is its own. Steps in between run into one
    peak, read when the next detailed step begins: no peak is missed. Where it is above all that is known, it goes to
    the phase that peaked highest so far; above by more than 1%, the record says so and the steps that follow are
    detailed.

    Args:
        device: the allocator to read.
        clock: what measures the time.
        sampler: the process that follows host memory.
        every_step: look at every step phase by phase.
    """

    def __init__(
        self, device: probes.DeviceProbe, clock: probes.Clock, sampler: HostSampler, *, every_step: bool = False
    ):
        self.device = device
        self.sampler = sampler
        self.timer = StepTimer(clock)
        self.phases: dict[Phase, PhaseMemory] = {}
        self.resets: dict[tuple[str, Phase | None], int] = {}
        self.notes: list[str] = []
        self.resident_bytes: int | None = None
        self.own_seconds = 0.0
        self._own_by_step = [0.0]
        self.detailed = True
        self._every_step = every_step
        self._follow_up = 0
        self._between = False  # whether steps that were not detailed have passed since the last reading
        self._num_samples = 0
        self._num_tokens = 0
        self._stack: list[Phase] = []
        self._process = psutil.Process()
        self._has_device = not isinstance(device, probes.NoDevice)
        self._step_peak = 0
        self._guard = probes.ResetGuard(self._before_foreign_reset)
        self._watching_driver = False

    @property
    def phase(self) -> Phase | None:
        """The current phase."""
        return self._stack[-1] if self._stack else None

    @property
    def steps(self) -> list[Step]:
        """The steps so far."""
        return self.timer.steps

    def start(self, phase: Phase = "init") -> None:
        """Begins to measure: resets the peak and watches for resets by others."""
        if self._has_device:
            self._guard.install()
        self.device.reset()
        self._stack = [phase]
        self.sampler.set_phase(_PHASE_NUMBER[phase])

    def switch(self, phase: Phase) -> None:
        """Ends the current phase and begins another in its place."""
        if not self.detailed:
            self._stack[-1] = phase
            self.sampler.set_phase(_PHASE_NUMBER[phase])
            return
        began = time.perf_counter()
        self._close()
        self._stack[-1] = phase
        self._open(phase)
        self.own_seconds += time.perf_counter() - began

    def enter(self, phase: Phase) -> None:
        """Begins a phase inside the current one."""
        self._close()
        self._stack.append(phase)
        self.timer.forget()
        self._open(phase)

    def leave(self) -> None:
        """Ends the phase begun by the last `enter`."""
        self._close()
        self._stack.pop()
        self.timer.forget()
        self._open(self._stack[-1])

    def begin_step(self) -> None:
        """The first micro-batch of an optimizer step is about to run."""
        began = time.perf_counter()
        number = len(self.steps)
        detailed = self._every_step or number < FIRST_DETAILED_STEPS or number % DETAIL_INTERVAL == 0
        detailed = detailed or self._follow_up > 0
        if detailed and self._between:
            self._close()
        self.detailed = detailed
        self.timer.begin()
        self._step_peak = 0
        self.own_seconds += time.perf_counter() - began

    def count(self, num_samples: int, num_tokens: int) -> None:
        """A micro-batch of this size was given to the model."""
        self._num_samples += num_samples
        self._num_tokens += num_tokens

    def end_step(self, number: int, *, skipped: bool) -> Step:
        """An optimizer step is over.

        Returns:
            The step, with its peak where it was detailed; its `seconds` are filled in later.
        """
        began = time.perf_counter()
        step = Step(step=number, skipped=skipped)
        if self.detailed:
            self._close()
            step.peak_bytes = self._step_peak or None
            if self.phase is not None:
                self.resident_bytes = self.phases[self.phase].end_bytes
            self._follow_up = max(0, self._follow_up - 1)
        else:
            self._between = True
        self.timer.end(step, self._num_samples, self._num_tokens)
        self._num_samples = self._num_tokens = 0
        self.own_seconds += time.perf_counter() - began
        self._own_by_step.append(self.own_seconds)
        return step

    def _open(self, phase: Phase) -> None:
        self.sampler.set_phase(_PHASE_NUMBER[phase])
        self.timer.mark(phase)

    def _close(self) -> None:
        """Reads the peak since the last reset for the phase, or for the steps between, that it belongs to."""
        phase = self.phase
        if phase is None:
            return
        reading = self.device.read()
        if reading is None:
            if not self._has_device:
                # Phases shorter than the sampler's interval would be missed; a look at each end costs 10 microseconds.
                memory = self.phases.setdefault(phase, PhaseMemory())
                memory.host.peak_bytes = max(memory.host.peak_bytes or 0, self._process.memory_info().rss)
            return
        if self._between:
            self._attribute_between(reading)
        else:
            memory = self._take(reading, phase)
            memory.end_bytes = reading.allocated
        self._between = False
        self.device.reset()
        if not self._watching_driver:
            self._watch_driver()

    def _take(self, reading: probes.Reading, phase: Phase) -> PhaseMemory:
        memory = self.phases.setdefault(phase, PhaseMemory())
        memory.peak_bytes = max(memory.peak_bytes or 0, reading.peak)
        memory.reserved_bytes = max(memory.reserved_bytes or 0, reading.reserved_peak)
        self._step_peak = max(self._step_peak, reading.peak)
        return memory

    def _attribute_between(self, reading: probes.Reading) -> None:
        known: list[tuple[int, Phase]] = []
        for phase in ("forward", "backward", "step"):
            memory = self.phases.get(phase)
            if memory is not None and memory.peak_bytes is not None:
                known.append((memory.peak_bytes, phase))
        if not known or reading.peak <= max(known)[0]:
            return
        before, highest = max(known)
        self._take(reading, highest)
        if reading.peak < before * (1 + _EXPECTED_RISE):
            return
        self._follow_up = _FOLLOW_UP_STEPS
        self.notes.append(
            f"between two detailed steps, before step {len(self.steps) + 1}, the peak rose to {reading.peak:,} bytes; "
            f"it is counted under {highest}"
        )

    def _watch_driver(self) -> None:
        uuid = probes.device_uuid()
        if uuid is not None:
            self.sampler.set_device(uuid)
            self._watching_driver = True

    def _before_foreign_reset(self, caller: str) -> None:
        phase = self.phase
        reading = self.device.read()
        if phase is not None and reading is not None:
            if self._between:
                self._attribute_between(reading)
            else:
                self._take(reading, phase)
        self.resets[caller, phase] = self.resets.get((caller, phase), 0) + 1

    def pause(self) -> None:
        """Stops measuring without losing what was measured."""
        self._close()
        self.timer.forget()
        self.sampler.set_phase(-1)

    def resume(self) -> None:
        """Goes on after `pause`: what others allocated in between is not counted."""
        self.device.reset()
        if self.phase is not None:
            self.sampler.set_phase(_PHASE_NUMBER[self.phase])

    def stop(self) -> None:
        """Ends the measuring: closes the phase, ends the sampler, stops watching for resets."""
        self._close()
        self._stack = []
        self._guard.remove()
        self.sampler.stop()

    def write_to(self, record: Record) -> None:
        """Brings a record up to date with everything measured so far."""
        self._close()
        self.timer.resolve(wait=True)
        samples = self.sampler.read()
        for phase, number in _PHASE_NUMBER.items():
            if phase not in self.phases and not samples.host_peaks[number]:
                continue
            memory = self.phases.setdefault(phase, PhaseMemory())
            memory.host.peak_bytes = max(memory.host.peak_bytes or 0, samples.host_peaks[number]) or None
            memory.driver_bytes = samples.driver_peaks[number] or None
            memory.seconds = self.timer.phase_seconds(phase)
        record.phases = {phase: self.phases[phase] for phase in PHASES if phase in self.phases}
        record.resets = [
            Reset(caller=caller, phase=phase, count=count) for (caller, phase), count in self.resets.items()
        ]
        record.warnings += [note for note in self.notes if note not in record.warnings]
        record.steps = self.steps
        record.speed = self.timer.speed(self._own_seconds_per_step())
        self._write_device(record, samples.driver_source)
        self._write_host(record, samples.num_samples)

    def _own_seconds_per_step(self) -> float | None:
        """The mean after the warm-up, detailed steps included: the first steps also create events and find the GPU."""
        first = num_warmup_steps(len(self.steps))
        count = len(self.steps) - first
        return (self._own_by_step[-1] - self._own_by_step[first]) / count if count else None

    def _write_device(self, record: Record, driver_source: str | None) -> None:
        peaks = [(memory.peak_bytes, phase) for phase, memory in record.phases.items() if memory.peak_bytes]
        if not peaks:
            return
        device = record.device
        device.peak_bytes, device.peak_phase = max(peaks, key=lambda pair: pair[0])
        device.reserved_bytes = max(memory.reserved_bytes or 0 for memory in record.phases.values())
        device.fragmentation_bytes = device.reserved_bytes - device.peak_bytes
        device.steady_peak_bytes = max((step.peak_bytes or 0 for step in self.steps[1:]), default=0) or None
        device.resident_bytes = self.resident_bytes
        device.num_alloc_retries, device.num_ooms = probes.allocator_events()
        driver = max(memory.driver_bytes or 0 for memory in record.phases.values())
        if driver:
            device.driver_bytes, device.driver_source = driver, driver_source
            # Negative only where the sampler missed the moment of the largest reservation.
            device.context_bytes = driver - device.reserved_bytes if driver >= device.reserved_bytes else None
        record.host.pinned_bytes = probes.pinned_peak()

    def _write_host(self, record: Record, num_samples: int) -> None:
        peaks = [(memory.host.peak_bytes or 0, phase) for phase, memory in record.phases.items()]
        host: HostMemory = record.host
        if peaks:
            largest, host.peak_phase = max(peaks, key=lambda pair: pair[0])
            host.peak_bytes = max(largest, own_peak_rss())
        host.sample_interval_seconds = self.sampler.interval
        host.num_samples = num_samples
        host.source = (
            "sampled: RSS of the process, unique memory of its children; at least the process's peak by the kernel"
        )
