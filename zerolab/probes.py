"""The meters: the CUDA allocator's peaks, pinned host memory, and clocks. Only this module resets the peak counter.

The allocator keeps its peaks on the host, so reading one needs no synchronization. Others reset them too
(`deepspeed.initialize`, DeepSpeed's memory_breakdown, the TrainerMemoryTracker): `ResetGuard` takes the reading just
before such a reset and notes who did it, so that no peak is lost.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch


class Reading(NamedTuple):
    """The allocator at one moment, in bytes: allocated now, and the peaks since the last reset."""

    allocated: int
    peak: int
    reserved_peak: int


class DeviceProbe(Protocol):
    """What the meter asks of a device."""

    def read(self) -> Reading | None:
        """The allocator's state, or None where there is none yet."""

    def reset(self) -> None:
        """Starts a new peak."""


class NoDevice:
    """A machine without a GPU: there is no device memory to read."""

    def read(self) -> None:
        return None

    def reset(self) -> None:
        return None


class CudaProbe:
    """Peaks of the CUDA caching allocator on the current device."""

    def __init__(self) -> None:
        self._reset = torch.cuda.reset_peak_memory_stats

    def read(self) -> Reading | None:
        # Before the first CUDA call there is nothing to read, and asking must not create the context.
        if not torch.cuda.is_initialized():
            return None
        # The nested form is the raw answer of the allocator; memory_stats() flattens it, which costs ten times more.
        stats = torch.cuda.memory_stats_as_nested_dict()
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Reading(allocated["current"], allocated["peak"], reserved["peak"])

    def reset(self) -> None:
        if torch.cuda.is_initialized():
            self._reset()


def device_probe() -> DeviceProbe:
    """The probe for this machine."""
    return CudaProbe() if torch.cuda.is_available() else NoDevice()


class ResetGuard:
    """Calls `before_reset(caller)` ahead of every reset of the peak counter that is not ours.

    The functions are looked up at each call (`torch.cuda.reset_peak_memory_stats()`), so replacing the module's
    attribute reaches DeepSpeed's and transformers' calls alike.
    """

    _PLACES = (("torch.cuda", "reset_peak_memory_stats"), ("torch.cuda.memory", "reset_peak_memory_stats"))

    def __init__(self, before_reset: Callable[[str], None]):
        self._before_reset = before_reset
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Starts watching."""
        for module_name, name in self._PLACES:
            module = sys.modules[module_name]
            original = getattr(module, name)
            self._originals.append((module, name, original))
            setattr(module, name, self._guarded(original))

    def remove(self) -> None:
        """Puts the original functions back."""
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals.clear()

    def _guarded(self, original):
        def reset_peak_memory_stats(*args, **kwargs):
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_name == "reset_peak_memory_stats":
                frame = frame.f_back
            self._before_reset(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_name}")
            return original(*args, **kwargs)

        return reset_peak_memory_stats


def pinned_peak() -> int | None:
    """Peak bytes of torch's pinned-memory allocator, as it rounds them (each block to a power of two).

    None where torch has no such statistics or CUDA is not in use.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    stats = getattr(torch.cuda, "host_memory_stats_as_nested_dict", None)
    if stats is None:
        stats = getattr(torch.cuda.memory, "host_memory_stats_as_nested_dict", None)
    return None if stats is None else stats().get("allocated_bytes", {}).get("peak")


def allocator_events() -> tuple[int, int]:
    """(allocation retries, out-of-memory errors) of the allocator since the process started."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0, 0
    stats = torch.cuda.memory_stats_as_nested_dict()
    return stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)


def device_uuid() -> str | None:
    """The UUID of the current GPU as NVML spells it, or None before CUDA is in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


class Clock(Protocol):
    """Marks moments; the time between two marks is read later, when it costs nothing."""

    name: str

    def mark(self) -> Any:
        """A moment on the device's time line."""

    def ready(self, mark: Any) -> bool:
        """Whether the device has passed the mark."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks that are both ready."""

    def release(self, mark: Any) -> None:
        """The mark will not be asked for again."""


class HostClock:
    """Wall-clock time, for a machine without a GPU."""

    name = "host clock"

    def mark(self) -> float:
        return time.perf_counter()

    def ready(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def release(self, mark: float) -> None:
        return None


class CudaClock:
    """CUDA events on the current stream: no synchronization, and the device's own view of the time."""

    name = "CUDA events"

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None

    def mark(self) -> torch.cuda.Event:
        if self._stream is None:
            # Asking for the current stream at each mark costs as much as the mark itself; a Trainer never leaves it.
            self._stream = torch.cuda.current_stream()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def ready(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def release(self, mark: torch.cuda.Event) -> None:
        self._free.append(mark)


def clock() -> Clock:
    """The clock for this machine."""
    return CudaClock() if torch.cuda.is_available() else HostClock()
