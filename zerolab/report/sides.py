"""Runs side by side as text: a table that fits the terminal, and the verdicts under it."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zerolab.compare import Cell, Comparison, Quantity
from zerolab.units import format_bytes, format_seconds
from zerolab.verdicts import Verdict


def render_comparison(comparison: Comparison, verdicts: Sequence[Verdict], width: int = 100) -> str:
    """The comparison as plain text of at most `width` columns; differences are to the first arm, which is named."""
    names = list(comparison.statuses)
    table = Table(box=SIMPLE_HEAD, title=f"Side by side; differences to {comparison.reference}", title_justify="left")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    table.add_row("status", *(", ".join(comparison.statuses[name]) for name in names))
    for row in comparison.rows:
        cells = (_cell_text(row.quantity, row.cells[name], name == comparison.reference) for name in names)
        table.add_row(row.quantity.name, *cells)
    console = Console(width=width, file=io.StringIO(), color_system=None, highlight=False)
    console.print(table)
    for verdict in verdicts:
        console.print(f"{verdict.arm}: {verdict.question}: {verdict.outcome}. {verdict.line}", soft_wrap=False)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def _cell_text(quantity: Quantity, cell: Cell, is_reference: bool) -> str:
    if cell.value is None:
        return "-"
    text = _value_text(quantity, cell.value)
    if is_reference or cell.percent is None or quantity.unit in ("loss", "metric"):
        return text
    return f"{text} ({cell.percent:+.0f}%)"


def _value_text(quantity: Quantity, value: float) -> str:
    if quantity.unit == "bytes":
        return format_bytes(int(value))
    return format_seconds(value) if quantity.unit == "seconds" else f"{value:,.4g}"
