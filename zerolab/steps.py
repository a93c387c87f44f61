"""How long steps and their phases took: marks on the device's time line now, seconds when they cost nothing."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from zerolab.probes import Clock
from zerolab.record import Phase, Speed, Step


def num_warmup_steps(num_steps: int) -> int:
    """How many steps at the start are left out of the medians: five, or a quarter of a short run."""
    return min(5, num_steps // 4)


class StepTimer:
    """Times optimizer steps from the end of one to the end of the next, and the phases inside those that are marked.

    Args:
        clock: what measures the time.
    """

    def __init__(self, clock: Clock):
        self.clock = clock
        self.steps: list[Step] = []
        self._counts: list[tuple[int, int]] = []
        self._start: Any = None
        self._marks: list[tuple[Phase, Any]] = []
        self._pending: deque[tuple[Step, Any, list[tuple[Phase, Any]], Any]] = deque()
        self._phase_seconds: dict[Phase, list[float]] = {}

    def begin(self) -> None:
        """A step begins; where the one before ended just now, it began there, so that loading data is part of it."""
        if self._start is None:
            self._start = self.clock.mark()

    def mark(self, phase: Phase) -> None:
        """A phase begins inside the running step."""
        if self._start is not None:
            self._marks.append((phase, self.clock.mark()))

    def end(self, step: Step, num_samples: int, num_tokens: int) -> None:
        """The step is over; its `seconds` are filled in once the device has passed this mark."""
        self.steps.append(step)
        self._counts.append((num_samples, num_tokens))
        end = self.clock.mark()
        if self._start is not None:
            self._pending.append((step, self._start, self._marks, end))
        self._start, self._marks = end, []
        self.resolve(wait=False)

    def forget(self) -> None:
        """Something that is no step came between: the running step is not timed."""
        self._start, self._marks = None, []

    def resolve(self, *, wait: bool) -> None:
        """Turns marks that the device has passed into seconds; with `wait`, all of them."""
        while self._pending and (wait or self.clock.ready(self._pending[0][3])):
            step, start, marks, end = self._pending.popleft()
            step.seconds = self.clock.seconds(start, end)
            spent: dict[Phase, float] = {}
            ends = [*(mark for _, mark in marks[1:]), end] if marks else []
            for (phase, mark), following in zip(marks, ends, strict=True):
                spent[phase] = spent.get(phase, 0.0) + self.clock.seconds(mark, following)
            for phase, seconds in spent.items():
                self._phase_seconds.setdefault(phase, []).append(seconds)
            # `end` is the start of the step that follows; it is released with that one, as its start.
            self.clock.release(start)
            for _, mark in marks:
                self.clock.release(mark)

    def phase_seconds(self, phase: Phase) -> float | None:
        """The median time of a phase in a step, after the warm-up; None where it was never timed."""
        seconds = self._phase_seconds.get(phase)
        return statistics.median(seconds[num_warmup_steps(len(seconds)) :]) if seconds else None

    def speed(self, own_seconds_per_step: float | None) -> Speed:
        """The medians over the steps after the warm-up.

        Args:
            own_seconds_per_step: host time that the measuring itself takes.
        """
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
            callback_seconds_per_step=own_seconds_per_step,
        )
        if timed:
            seconds = sorted(second for second, _ in timed)
            speed.step_seconds = statistics.median(seconds)
            speed.step_seconds_p10 = seconds[len(seconds) // 10]
            speed.step_seconds_p90 = seconds[(len(seconds) * 9) // 10]
            speed.samples_per_second = statistics.median(counts[0] / second for second, counts in timed)
            speed.tokens_per_second = statistics.median(counts[1] / second for second, counts in timed) or None
        return speed
