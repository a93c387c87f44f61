"""Host memory of a process tree, and the driver's figure for its GPU, sampled from a process of its own.

A busy thread inside the training process would take cores from the CPU optimizer and hold the GIL. Here the training
process only writes the number of its phase into a small shared file; this module, run as a script, does the rest:

    python host_sampler.py PID FILE INTERVAL_SECONDS

It ends when it is told to, or when the process that it watches is gone.
"""

from __future__ import annotations

import mmap
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import NamedTuple

import psutil

# An offloaded step runs on every core at once, and waits for the slowest: each look from here delays it a little.
INTERVAL_SECONDS = 0.05
_DRIVER_INTERVAL_SECONDS = 1.0
_CHILDREN_INTERVAL_SECONDS = 1.0
MAX_PHASES = 8

# The shared file: phase (-1 pauses), stop flag, number of samples, then per phase the peak RSS of the tree and the
# driver's peak for the process, then the driver's two ways to count, then the UUID of the GPU.
_HEAD = struct.Struct("<iiq")
_PEAKS = struct.Struct("<qq")
_DRIVER = struct.Struct("<i")
_PEAKS_AT = _HEAD.size
_DRIVER_AT = _PEAKS_AT + MAX_PHASES * _PEAKS.size
_UUID_AT = _DRIVER_AT + _DRIVER.size
_SIZE = _UUID_AT + 64
_SOURCES = {0: None, 1: "NVML, this process", 2: "NVML, the whole card less what it held before"}


class Samples(NamedTuple):
    """What the sampler has seen: peaks in bytes for each phase by number, and how often it looked."""

    host_peaks: list[int]
    driver_peaks: list[int]
    num_samples: int
    driver_source: str | None


class HostSampler:
    """The client's side: starts the sampling process for this process, tells it the phase, reads its peaks.

    Args:
        interval: seconds between two looks at the resident set.
    """

    def __init__(self, interval: float = INTERVAL_SECONDS):
        self.interval = interval
        self._folder = tempfile.TemporaryDirectory(prefix="zerolab-")
        path = Path(self._folder.name) / "samples"
        path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _SIZE)
        self._phase = memoryview(self._shared)[:4].cast("i")
        command = [sys.executable, str(Path(__file__).resolve()), str(os.getpid()), str(path), str(interval)]
        # A session of its own: Ctrl-C in the terminal must not end the sampler before the run has read its peaks.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )

        # Also for a script that never says that it is done: the process ends with this object, or with Python.
        self._end = weakref.finalize(self, _end_process, self._shared, self._process, self._folder)

    def set_phase(self, number: int) -> None:
        """Says which phase the samples belong to from now on; -1 pauses the sampling."""
        self._phase[0] = number

    def set_device(self, uuid: str) -> None:
        """Names the GPU, once CUDA is in use, whose driver figure is to be followed."""
        encoded = uuid.encode()[:64]
        self._shared[_UUID_AT : _UUID_AT + len(encoded)] = encoded

    def read(self) -> Samples:
        """The peaks so far."""
        _, _, count = _HEAD.unpack_from(self._shared, 0)
        pairs = [_PEAKS.unpack_from(self._shared, _PEAKS_AT + i * _PEAKS.size) for i in range(MAX_PHASES)]
        source = _SOURCES[_DRIVER.unpack_from(self._shared, _DRIVER_AT)[0]]
        return Samples([pair[0] for pair in pairs], [pair[1] for pair in pairs], count, source)

    def alive(self) -> bool:
        """Whether the sampling process runs."""
        return self._process.poll() is None

    def stop(self) -> Samples:
        """Ends the sampling process and returns the last peaks. Safe to call again."""
        samples = self.read()
        self._end()
        return samples


def _end_process(shared: mmap.mmap, process: subprocess.Popen, folder: tempfile.TemporaryDirectory) -> None:
    struct.pack_into("<i", shared, 4, 1)
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    folder.cleanup()


def own_peak_rss() -> int:
    """The kernel's own peak of this process's resident set, which no sampling can miss."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class _Driver:
    """NVML's figure for one process on one GPU; without NVML or a GPU it stays silent."""

    def __init__(self, pid: int):
        self._pid = pid
        self._handle = None
        self._nvml = None
        self._before = 0
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            # What the cards hold before the run: where NVML cannot name our process, the growth of the card stands in.
            self._held = {}
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                self._held[_text(pynvml.nvmlDeviceGetUUID(handle))] = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        except Exception:  # no library, no driver, no permission: each raises its own class
            self._nvml = None

    def look(self, uuid: str) -> tuple[int, int]:
        """(bytes, number of the source); zeros where nothing is known."""
        if self._nvml is None:
            return 0, 0
        try:
            if self._handle is None:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                self._before = self._held.get(uuid, 0)
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
                if process.pid == self._pid and process.usedGpuMemory:
                    return process.usedGpuMemory, 1
            return max(0, self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used - self._before), 2
        except Exception:
            return 0, 0


def _text(value) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _tree(process: psutil.Process) -> list[psutil.Process]:
    own = os.getpid()
    return [process, *(child for child in process.children(recursive=True) if child.pid != own)]


def _resident(processes: list[psutil.Process]) -> int:
    """The RSS of the process in bytes, and the unique memory (USS) of its children.

    A fork shares its pages with its parent until it writes to them; with the RSS of both they would count twice.
    """
    total = processes[0].memory_info().rss
    for child in processes[1:]:
        try:
            total += child.memory_full_info().uss
        except psutil.Error:
            continue  # a child that ended since the list was made
    return total


def main(pid: int, path: str, interval: float) -> None:
    """Samples until told to stop or until the process `pid` is gone."""
    process = psutil.Process(pid)
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), _SIZE)
    os.nice(5)  # the training goes first
    driver = _Driver(pid)
    processes, next_tree, next_driver = [process], 0.0, 0.0
    while True:
        phase, stop, count = _HEAD.unpack_from(shared, 0)
        if stop or os.getppid() != pid:
            return
        if 0 <= phase < MAX_PHASES:
            now = time.monotonic()
            if now >= next_tree:
                try:
                    processes, next_tree = _tree(process), now + _CHILDREN_INTERVAL_SECONDS
                except psutil.Error:
                    return
            at = _PEAKS_AT + phase * _PEAKS.size
            host, device = _PEAKS.unpack_from(shared, at)
            try:
                host = max(host, _resident(processes))
            except psutil.Error:
                return
            uuid = shared[_UUID_AT:_SIZE].rstrip(b"\0").decode()
            if uuid and now >= next_driver:
                seen, source = driver.look(uuid)
                device, next_driver = max(device, seen), now + _DRIVER_INTERVAL_SECONDS
                if seen:
                    _DRIVER.pack_into(shared, _DRIVER_AT, source)
            _PEAKS.pack_into(shared, at, host, device)
            struct.pack_into("<q", shared, 8, count + 1)
        time.sleep(interval)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
