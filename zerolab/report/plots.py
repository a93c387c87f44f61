"""A record as pictures: the loss and the memory, as PNG. matplotlib is imported when a picture is drawn.

Every size is drawn in GiB = 2**30 bytes. The colors are those of Okabe and Ito, which stay apart for color-blind eyes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from zerolab.record import PHASES, Record
from zerolab.report import finite_losses, has_gpu_memory, why_host_memory
from zerolab.units import format_bytes, gib, in_gib

BLUE, ORANGE, VERMILLION, GRAY = "#0072B2", "#E69F00", "#D55E00", "#595959"
LOSS_FILE, MEMORY_FILE = "loss.png", "memory.png"
_MOST_MARKERS = 50  # more dots than this run into one another


def save_plots(record: Record, folder: Path) -> list[Path]:
    """Writes `loss.png` and `memory.png` into `folder`, each only where the record has something to draw.

    Returns:
        The files written; none for a run that ended before its first phase did.

    Raises:
        OSError: the folder cannot be written.
    """
    targets = [(plot_loss, folder / LOSS_FILE), (plot_memory, folder / MEMORY_FILE)]
    return [path for plot, path in targets if plot(record, path)]


def plot_loss(record: Record, path: Path) -> bool:
    """Draws the loss of each logged step, and the evaluation loss at the last step where it is known.

    Returns:
        Whether there was a finite loss; without one nothing is written.
    """
    losses = finite_losses(record)
    if not losses:
        return False
    figure = _figure(height=4.0)
    axes = figure.subplots()
    steps, values = zip(*losses, strict=True)
    axes.plot(steps, values, color=BLUE, marker="o" if len(losses) <= _MOST_MARKERS else "", ms=4, label="training")
    last = record.steps[-1].step
    evaluated = record.metrics.get("eval_loss")
    if evaluated is not None and math.isfinite(evaluated):
        axes.plot(
            [last], [evaluated], color=ORANGE, marker="D", ms=8, ls="", mec="black", label="evaluation, at the end"
        )
    if record.status == "diverged":
        axes.axvspan(steps[-1], last, color=VERMILLION, alpha=0.2, label=f"not finite after step {steps[-1]}")
    _whole_steps(axes)
    axes.set(xlabel="optimizer step", ylabel="loss", title=_title("Loss", record))
    axes.legend(frameon=False)
    figure.savefig(path)
    return True


def plot_memory(record: Record, path: Path) -> bool:
    """Draws a bar for each phase, in GiB: the device's allocated peak within its reserved, or the host's peak.

    Where steps have peaks of their own, a panel below shows them.

    Returns:
        Whether there was a phase with a known peak; without one nothing is written.
    """
    on_gpu = has_gpu_memory(record)
    bars = _bars(record, on_gpu)
    if not bars:
        return False
    peaks = [(step.step, step.peak_bytes) for step in record.steps if step.peak_bytes is not None]
    height = 1.5 + 0.45 * len(bars)
    figure = _figure(height=height + (2.2 if peaks else 0))
    panels = figure.subplots(2, 1, height_ratios=[height, 2.2]) if peaks else [figure.subplots()]
    _draw_bars(panels[0], record, bars, on_gpu)
    if peaks:
        _draw_steps(panels[1], peaks)
    figure.savefig(path)
    return True


def _bars(record: Record, on_gpu: bool) -> list[tuple[str, int, int | None]]:
    """(phase, peak, reserved or None) in bytes, in the order of the phases."""
    bars: list[tuple[str, int, int | None]] = []
    for phase in PHASES:
        if phase not in record.phases:
            continue
        memory = record.phases[phase]
        peak = memory.peak_bytes if on_gpu else memory.host.peak_bytes
        if peak is not None:
            bars.append((phase, peak, memory.reserved_bytes if on_gpu else None))
    return bars


def _draw_bars(axes: Any, record: Record, bars: list[tuple[str, int, int | None]], on_gpu: bool) -> None:
    places = range(len(bars))
    ends = [max(peak, reserved or 0) for _, peak, reserved in bars]
    axes.barh(places, [in_gib(peak) for _, peak, _ in bars], 0.62, color=BLUE)
    unit = "GiB"
    if on_gpu:
        axes.barh(places, [in_gib(reserved or 0) for *_, reserved in bars], 0.62, fill=False, ec=GRAY, lw=1.2)
        # Said beside the unit, since a legend would cover a bar or its label in one run or another.
        unit += "  (filled: allocated peak; outlined: reserved peak"
        cap = record.device.cap_bytes
        if cap is not None:
            axes.axvline(in_gib(cap), color=VERMILLION, ls="--")
            unit += f"; dashed: cap of {gib(cap)}"
        unit += ")"
    for place, (_, peak, reserved), end in zip(places, bars, ends, strict=True):
        text = gib(peak) + (f"  (reserved {gib(reserved)})" if reserved is not None else "")
        box = {
            "facecolor": "white",
            "edgecolor": "none",
            "pad": 1,
        }  # so that the cap's line does not cross the figures
        axes.annotate(
            text, (in_gib(end), place), (5, 0), textcoords="offset points", va="center", fontsize=9, bbox=box
        )
    # The text beside the longest bar needs room, however long the bar is.
    room = in_gib(max(ends)) * (1.45 if on_gpu else 1.15)
    axes.set_xlim(0, max(room, in_gib(record.device.cap_bytes or 0) * 1.02) or 1)
    axes.set_yticks(places, [phase for phase, *_ in bars])
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=_title("GPU memory by phase" if on_gpu else why_host_memory(record), record))


def _draw_steps(axes: Any, peaks: list[tuple[int, int]]) -> None:
    steps = [step for step, _ in peaks]
    marker = "o" if len(peaks) <= _MOST_MARKERS else ""
    axes.plot(steps, [in_gib(peak) for _, peak in peaks], color=BLUE, marker=marker, ms=4)
    _whole_steps(axes)
    axes.set_ylim(0, in_gib(max(peak for _, peak in peaks)) * 1.2)
    axes.set(xlabel="optimizer step", ylabel="GiB", title="allocated peak of each step")


def _whole_steps(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _title(what: str, record: Record) -> str:
    """Up to three lines: what is drawn, of which run, and how it ended where it did not train."""
    names = [
        str(name) for name in (record.model.get("name") or record.model.get("class"), record.configuration) if name
    ]
    lines = [what[:1].upper() + what[1:]]
    if names:
        of = ", ".join(names)
        lines.append(of if len(of) <= 70 else of[:67] + "...")
    failure = record.failure
    if record.status == "oom" and failure is not None:
        asked = f": {format_bytes(failure.requested_bytes)} asked for" if failure.requested_bytes is not None else ""
        free = f", {format_bytes(failure.free_bytes)} free" if asked and failure.free_bytes is not None else ""
        lines.append(f"out of memory{f' in {failure.phase}' if failure.phase else ''}{asked}{free}")
    elif record.status != "trained":
        lines.append(record.status)
    # A dollar sign would begin a formula.
    return "\n".join(lines).replace("$", r"\$")


def _figure(height: float) -> Any:
    """A figure without pyplot: no window system, and no state shared with the script that is being measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
