"""From readings to phases and steps: which phase a peak belongs to, how long it took, and what a step was.

Knows nothing of the Trainer: `callback` says when a phase begins. All sizes in bytes, all times in seconds.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections import deque
from typing import Any

import psutil

from zerolab import probes
from zerolab.host_sampler import HostSampler
from zerolab.record import PHASES, HostMemory, Phase, PhaseMemory, Record, Reset, Speed, Step

_PHASE_NUMBER: dict[Phase, int] = {phase: number for number, phase in enumerate(PHASES)}


def num_warmup_steps(num_steps: int) -> int:
    """How many steps at the start are left out of the medians: five, or a quarter of a short run."""
    return min(5, num_steps // 4)


class Meter:
    """Peaks by phase and times by step of one process.

    Phases nest: `enter("eval")` inside a step and `leave()` afterwards return to where it was. The allocator's peak is
    read and reset at each change, so that a phase's peak is its own.

    Args:
        device: the allocator to read.
        clock: what measures the time.
        sampler: the process that follows host memory.
    """

    def __init__(self, device: probes.DeviceProbe, clock: probes.Clock, sampler: HostSampler):
        self.device = device
        self.clock = clock
        self.sampler = sampler
        self.phases: dict[Phase, PhaseMemory] = {}
        self.resets: dict[tuple[str, Phase | None], int] = {}
        self.steps: list[Step] = []
        self.resident_bytes: int | None = None
        self.own_seconds = 0.0
        self.num_samples = 0
        self.num_tokens = 0
        self._stack: list[Phase] = []
        self._process = psutil.Process()
        self._has_device = not isinstance(device, probes.NoDevice)
        self._marks: list[tuple[Phase, Any]] = []
        self._step_start: Any = None
        self._step_peak = 0
        self._pending: deque[tuple[Step, Any, list[tuple[Phase, Any]], Any]] = deque()
        self._phase_seconds: dict[Phase, list[float]] = {}
        self._counts: list[tuple[int, int]] = []
        self._guard = probes.ResetGuard(self._before_foreign_reset)
        self._watching_driver = False

    @property
    def phase(self) -> Phase | None:
        """The current phase."""
        return self._stack[-1] if self._stack else None

    def start(self, phase: Phase = "init") -> None:
        """Begins to measure: resets the peak and watches for resets by others."""
        if self._has_device:
            self._guard.install()
        self.device.reset()
        self._stack = [phase]
        self.sampler.set_phase(_PHASE_NUMBER[phase])

    def switch(self, phase: Phase) -> None:
        """Ends the current phase and begins another in its place."""
        began = time.perf_counter()
        self._close()
        self._stack[-1:] = [phase]
        self._open(phase)
        self.own_seconds += time.perf_counter() - began

    def enter(self, phase: Phase) -> None:
        """Begins a phase inside the current one."""
        self._close()
        self._stack.append(phase)
        self._forget_step()
        self._open(phase)

    def leave(self) -> None:
        """Ends the phase begun by the last `enter`."""
        self._close()
        self._stack.pop()
        self._forget_step()
        self._open(self._stack[-1])

    def _open(self, phase: Phase) -> None:
        self.sampler.set_phase(_PHASE_NUMBER[phase])
        if self._step_start is not None:
            self._marks.append((phase, self.clock.mark()))

    def _close(self) -> None:
        phase = self.phase
        if phase is None:
            return
        memory = self.phases.setdefault(phase, PhaseMemory())
        reading = self._take(memory)
        if reading is not None:
            memory.end_bytes = reading.allocated
            self.device.reset()
            if not self._watching_driver:
                self._watch_driver()
        elif not self._has_device:
            # Phases shorter than the sampler's interval would be missed; a read at each end costs 10 microseconds.
            rss = self._process.memory_info().rss
            memory.host.peak_bytes = max(memory.host.peak_bytes or 0, rss)

    def _take(self, memory: PhaseMemory) -> probes.Reading | None:
        reading = self.device.read()
        if reading is not None:
            memory.peak_bytes = max(memory.peak_bytes or 0, reading.peak)
            memory.reserved_bytes = max(memory.reserved_bytes or 0, reading.reserved_peak)
            self._step_peak = max(self._step_peak, reading.peak)
        return reading

    def _watch_driver(self) -> None:
        uuid = probes.device_uuid()
        if uuid is not None:
            self.sampler.set_device(uuid)
            self._watching_driver = True

    def _before_foreign_reset(self, caller: str) -> None:
        phase = self.phase
        if phase is not None:
            self._take(self.phases.setdefault(phase, PhaseMemory()))
        self.resets[caller, phase] = self.resets.get((caller, phase), 0) + 1

    def begin_step(self) -> None:
        """The first micro-batch of an optimizer step is about to run."""
        if self._step_start is None:
            self._step_start = self.clock.mark()
        self._step_peak = 0

    def count(self, num_samples: int, num_tokens: int) -> None:
        """A micro-batch of this size was given to the model."""
        self.num_samples += num_samples
        self.num_tokens += num_tokens

    def end_step(self, number: int, *, skipped: bool) -> Step:
        """An optimizer step is over.

        Returns:
            The step; its `seconds` are filled in later, once the device has passed the marks.
        """
        began = time.perf_counter()
        self._close()
        self.resident_bytes = self.phases[self.phase].end_bytes if self.phase else None
        step = Step(step=number, peak_bytes=self._step_peak or None, skipped=skipped)
        self.steps.append(step)
        end = self.clock.mark()
        if self._step_start is not None:
            self._pending.append((step, self._step_start, self._marks, end))
        self._counts.append((self.num_samples, self.num_tokens))
        self.num_samples = self.num_tokens = 0
        # The next step's time runs from here, so that loading data and logging are part of it.
        self._step_start, self._marks = end, []
        self._resolve(wait=False)
        self.own_seconds += time.perf_counter() - began
        return step

    def _forget_step(self) -> None:
        """Something that is no step came between: the running step is not timed."""
        self._step_start, self._marks = None, []

    def _resolve(self, *, wait: bool) -> None:
        while self._pending and (wait or self.clock.ready(self._pending[0][3])):
            step, start, marks, end = self._pending.popleft()
            step.seconds = self.clock.seconds(start, end)
            spent: dict[Phase, float] = {}
            ends = [*(mark for _, mark in marks[1:]), end]
            for (phase, mark), following in zip(marks, ends, strict=bool(marks)):
                spent[phase] = spent.get(phase, 0.0) + self.clock.seconds(mark, following)
            for phase, seconds in spent.items():
                self._phase_seconds.setdefault(phase, []).append(seconds)
            # `end` is the start of the step that follows; it is released with that one, as its start.
            for mark in [start, *(mark for _, mark in marks)]:
                self.clock.release(mark)

    def pause(self) -> None:
        """Stops measuring without losing what was measured."""
        self._close()
        self._forget_step()
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
        self._resolve(wait=True)
        samples = self.sampler.read()
        for phase, number in _PHASE_NUMBER.items():
            if phase not in self.phases and not samples.host_peaks[number]:
                continue
            memory = self.phases.setdefault(phase, PhaseMemory())
            memory.host.peak_bytes = max(memory.host.peak_bytes or 0, samples.host_peaks[number]) or None
            memory.driver_bytes = samples.driver_peaks[number] or None
            seconds = self._phase_seconds.get(phase)
            memory.seconds = statistics.median(seconds[num_warmup_steps(len(seconds)) :]) if seconds else None
        record.phases = {phase: self.phases[phase] for phase in PHASES if phase in self.phases}
        record.resets = [
            Reset(caller=caller, phase=phase, count=count) for (caller, phase), count in self.resets.items()
        ]
        record.steps = self.steps
        record.speed = self._speed()
        self._write_device(record, samples.driver_source)
        self._write_host(record, samples.num_samples)

    def _speed(self) -> Speed:
        warmup = num_warmup_steps(len(self.steps))
        timed = [
            (step.seconds, counts)
            for step, counts in zip(self.steps[warmup:], self._counts[warmup:], strict=True)
            if step.seconds is not None
        ]
        speed = Speed(
            clock=self.clock.name,
            num_warmup_steps=warmup,
            num_timed_steps=len(timed),
            num_skipped_steps=sum(step.skipped for step in self.steps),
            callback_seconds_per_step=self.own_seconds / len(self.steps) if self.steps else None,
        )
        if timed:
            seconds = sorted(second for second, _ in timed)
            speed.step_seconds = statistics.median(seconds)
            speed.step_seconds_p10 = seconds[len(seconds) // 10]
            speed.step_seconds_p90 = seconds[(len(seconds) * 9) // 10]
            speed.samples_per_second = statistics.median(counts[0] / second for second, counts in timed)
            tokens = statistics.median(counts[1] / second for second, counts in timed)
            speed.tokens_per_second = tokens or None
        return speed

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


def own_peak_rss() -> int:
    """The kernel's own peak of this process's resident set, which no sampling can miss."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def this_rank() -> int:
    """The rank of this process, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))
