"""How a run ended badly: from an exception to the words of a record."""

from __future__ import annotations

import re

import torch

from zerolab.record import Failure, Phase, Status
from zerolab.units import parse_bytes

_ASKED = re.compile(r"Tried to allocate ([0-9.]+) (B|KiB|MiB|GiB|TiB)")
_FREE = re.compile(r"of which ([0-9.]+) (B|KiB|MiB|GiB|TiB) is free")
_TOTAL = re.compile(r"total capacity of ([0-9.]+) (B|KiB|MiB|GiB|TiB)")


def status_of(error: BaseException) -> Status:
    """The status of a run that this error ended: `oom`, `interrupted` or `failed`."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return "oom"
    # DeepSpeed and cuBLAS raise a plain RuntimeError where the driver itself has no memory left.
    if isinstance(error, RuntimeError) and "out of memory" in str(error).lower():
        return "oom"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"


def failure_of(error: BaseException, phase: Phase | None) -> Failure:
    """What a record says of an error: for CUDA's OOM also what was asked, what was free and what there was."""
    text = str(error)
    found = {}
    for name, pattern in (("requested_bytes", _ASKED), ("free_bytes", _FREE), ("total_bytes", _TOTAL)):
        match = pattern.search(text)
        if match:
            found[name] = parse_bytes(f"{match[1]}{match[2]}")
    return Failure(type=type(error).__name__, message=text[:2000], phase=phase, **found)
