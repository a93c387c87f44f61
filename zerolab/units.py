"""Bytes and their text. Every other module holds bytes as integers; only this one divides by 2**30."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)")


def parse_bytes(text: str) -> int:
    """Reads a size such as `12GiB`, `512 MiB`, `8GB` or a plain number of bytes.

    Args:
        text: a non-negative number and a unit. KiB, MiB, GiB and TiB are powers of 1024; kB, MB, GB and TB powers
            of 1000.

    Returns:
        The size in bytes, rounded to the nearest integer.

    Raises:
        ValueError: the text is not a number followed by a known unit.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 12GiB or 512MiB")
    return round(float(match[1]) * _UNITS[match[2].lower()])


def gib(num_bytes: int | None, digits: int = 3) -> str:
    """`num_bytes` in GiB without the unit, for table columns and axes; a dash for None."""
    return "-" if num_bytes is None else f"{num_bytes / GIB:.{digits}f}"


def in_gib(num_bytes: int) -> float:
    """`num_bytes` as a float number of GiB, for the axis of a plot."""
    return num_bytes / GIB


def format_bytes(num_bytes: int | None) -> str:
    """`num_bytes` in the unit that keeps it readable: `0.76 GiB`, `668.0 MiB`, `512 B`; a dash for None."""
    if num_bytes is None:
        return "-"
    size = abs(num_bytes)
    if size >= GIB / 2:
        return f"{num_bytes / GIB:.2f} GiB"
    if size >= MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    if size >= KIB:
        return f"{num_bytes / KIB:.1f} KiB"
    return f"{num_bytes} B"


def format_count(number: int) -> str:
    """A number of parameters or elements as people say it: `121.8 M`, `1.00 B`, `4,096`."""
    if number >= 10**9:
        return f"{number / 10**9:.2f} B"
    if number >= 10**6:
        return f"{number / 10**6:.1f} M"
    return f"{number:,}"


def format_seconds(seconds: float) -> str:
    """A duration: `97.1 ms` below one second, `12.3 s` below two minutes, minutes and seconds above."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"
