"""A record as plain text for a terminal: `render_plan` before a run, `render_run` after it.

The words of a record come from models, error messages and folders: nothing in them is taken for markup. Sizes are in
GiB = 2**30 bytes, durations in the unit that keeps them readable.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from zerolab.record import PHASES, PhaseMemory, Record
from zerolab.report import (
    asked_engine_words,
    data_words,
    engine_words,
    facts,
    finite_losses,
    gpu_words,
    has_gpu_memory,
    headline,
    model_words,
    plain,
    precision_words,
    reconciliation,
    why_host_memory,
)
from zerolab.units import format_bytes, format_seconds, gib

Lines = list[tuple[str, str]]  # (label, text); an empty label goes on under the one above

# What Trainer.evaluate and Trainer.train add to every result; the speed line says it better.
_NOISE = ("_runtime", "_per_second", "_preparation_time", "_compilation_time", "epoch", "total_flos")
_FILES = ("record.json", "ds_config.json", "loss.png", "memory.png")
_SHORT_MESSAGE = 300


def render_run(record: Record, width: int = 100, verbose: bool = False, folder: Path | None = None) -> str:
    """What a run was and where its memory went.

    Args:
        record: of any status; what it does not know is left out or shown as a dash.
        width: the number of columns that no line exceeds.
        verbose: adds the whole error message, versions, arguments, and every choice with its reason.
        folder: the run's folder, for its name in the headline and for the files it holds.

    Returns:
        Lines without trailing blanks or color, ending in a newline.
    """
    parts: list[RenderableType] = [Text(headline(record, folder)), _grid(_identity(record, verbose))]
    failure = _failure(record, verbose)
    if failure:
        parts += ["", _grid(failure)]
    if record.phases:
        parts += ["", Text(_table_title(record)), _phase_table(record), ""]
    parts.append(_grid([*_memory(record), *_speed(record), *_learning(record)]))
    notes = _notes(record, verbose)
    if folder is not None:
        notes += _files(record, folder)
    if notes:
        parts += ["", _grid(notes)]
    return _render(parts, width)


def render_plan(record: Record, width: int = 100) -> str:
    """What is about to run: model, data, configuration, and each automatic choice with its reason; same form."""
    lines = [
        ("model", model_words(record)),
        ("data", data_words(record.data)),
        ("configuration", record.configuration or "-"),
        ("engine", asked_engine_words(record)),
        ("GPU", gpu_words(record)),
    ]
    parts: list[RenderableType] = [Text("About to run"), _grid([line for line in lines if line[1] != "-"])]
    if record.choices:
        parts += ["", _grid(_choices(record))]
    if record.warnings:
        parts += ["", _grid([("warning", warning) for warning in record.warnings])]
    return _render(parts, width)


# ---- who and what ---------------------------------------------------------------------------------------------------


def _identity(record: Record, verbose: bool) -> Lines:
    lines = [
        ("model", model_words(record)),
        ("data", data_words(record.data)),
        ("configuration", record.configuration or "-"),
        ("engine", engine_words(record)),
        ("precision", precision_words(record)),
        ("GPU", gpu_words(record)),
    ]
    if verbose:
        machine = {key: value for key, value in record.machine.items() if not key.startswith("gpu")}
        lines += [
            ("arguments", facts(record.arguments) or "-"),
            ("machine", facts(machine) or "-"),
            ("versions", ", ".join(f"{name} {version}" for name, version in record.versions.items()) or "-"),
            ("begun", record.created or "-"),
        ]
    return [line for line in lines if line[1] != "-"]


# ---- what happened --------------------------------------------------------------------------------------------------


def _failure(record: Record, verbose: bool) -> Lines:
    failure = record.failure
    if failure is None:
        return _failure_without_message(record)
    where = f" in {failure.phase}" if failure.phase else ""
    if record.status == "oom":
        known = [
            (failure.requested_bytes, "asked for"),
            (failure.free_bytes, "free"),
            (failure.total_bytes, "on the whole card"),
        ]
        sizes = ", ".join(f"{format_bytes(size)} {words}" for size, words in known if size is not None)
        kind = (
            "host memory" if failure.type == "MemoryError" else "GPU memory" if failure.requested_bytes else "memory"
        )
        happened = f"out of {kind}{where}" + (f": {sizes}" if sizes else "")
    else:
        happened = f"{failure.type}{where}"
    message = " ".join(failure.message.split())
    if not verbose and len(message) > _SHORT_MESSAGE:
        message = f"{message[:_SHORT_MESSAGE].rstrip()} ... (--verbose shows all)"
    # The type's name is in the first line of every other failure already.
    message = f"{failure.type}: {message}" if record.status == "oom" else message
    return [("what happened", happened), *([("", message)] if message else [])]


def _failure_without_message(record: Record) -> Lines:
    if record.status == "diverged":
        return [("what happened", "the loss is no longer a finite number")]
    if record.status != "killed":
        return []
    where = f"the process ended in {record.phase} and" if record.phase else "the process ended and"
    return [
        ("what happened", f"{where} left no message, as one does that is killed from outside;"),
        ("", "Linux kills a process that takes more host memory than there is: see the host peak"),
    ]


# ---- where the memory went ------------------------------------------------------------------------------------------


def _table_title(record: Record) -> str:
    what = "GPU and host memory" if has_gpu_memory(record) else why_host_memory(record)
    size = record.engine.world_size if record.engine else 1
    return f"Memory by phase: {what}" + (f" (process 0 of {size})" if size > 1 else "")


def _phase_table(record: Record) -> Table:
    on_gpu = has_gpu_memory(record)
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("phase", overflow="fold")
    gpu_titles = ["allocated\npeak GiB", "reserved\npeak GiB", "driver\npeak GiB", "at end\nGiB"] if on_gpu else []
    for title in [*gpu_titles, "host\npeak GiB", "time\nper step"]:
        table.add_column(title, justify="right", overflow="fold")
    for phase in PHASES:
        if phase in record.phases:
            table.add_row(phase, *_cells(record.phases[phase], on_gpu))
    table.add_section()
    table.add_row("run maximum", *_whole_run(record, on_gpu))
    return table


def _cells(memory: PhaseMemory, on_gpu: bool) -> list[str]:
    device = [memory.peak_bytes, memory.reserved_bytes, memory.driver_bytes, memory.end_bytes] if on_gpu else []
    seconds = "-" if memory.seconds is None else format_seconds(memory.seconds)
    return [gib(size) for size in [*device, memory.host.peak_bytes]] + [seconds]


def _whole_run(record: Record, on_gpu: bool) -> list[str]:
    phases = record.phases.values()
    device, host = record.device, record.host
    largest = [
        _largest(device.peak_bytes, (m.peak_bytes for m in phases)),
        _largest(device.reserved_bytes, (m.reserved_bytes for m in phases)),
        _largest(device.driver_bytes, (m.driver_bytes for m in phases)),
    ]
    cells = [*(gib(size) for size in largest), ""] if on_gpu else []
    return [*cells, gib(_largest(host.peak_bytes, (m.host.peak_bytes for m in phases))), ""]


def _largest(whole: int | None, parts: Iterable[int | None]) -> int | None:
    """The figure of the whole run, or the largest of its phases where a run ended before it was written."""
    return whole if whole is not None else max((part for part in parts if part is not None), default=None)


def _memory(record: Record) -> Lines:
    device, host = record.device, record.host
    lines = []
    if device.peak_bytes is not None:
        lines.append(("device", reconciliation(record)))
    if device.resident_bytes is not None:
        lines.append(("", f"{gib(device.resident_bytes)} GiB stay allocated between two steps"))
    if device.steady_peak_bytes is not None and device.steady_peak_bytes != device.peak_bytes:
        lines.append(("", f"{gib(device.steady_peak_bytes)} GiB is the largest peak of a step after the first"))
    if device.cap_bytes is not None:
        lines.append(("", f"the allocator was capped at {gib(device.cap_bytes)} GiB"))
    if device.num_alloc_retries or device.num_ooms:
        retries, ooms = device.num_alloc_retries or 0, device.num_ooms or 0
        lines.append(("", f"allocator: emptied its cache to try again {retries}x, out of memory {ooms}x"))
    if host.pinned_bytes:
        asked = f" for {gib(host.pinned_requested_bytes)} GiB asked for" if host.pinned_requested_bytes else ""
        lines.append(("pinned host", f"{gib(host.pinned_bytes)} GiB of page-locked memory{asked}"))
    return lines


# ---- how fast, and what it learned ----------------------------------------------------------------------------------


def _speed(record: Record) -> Lines:
    speed = record.speed
    lines = []
    if speed.step_seconds is not None:
        text = f"{format_seconds(speed.step_seconds)} a step, median of {speed.num_timed_steps:,}"
        if speed.step_seconds_p10 is not None and speed.step_seconds_p90 is not None:
            spread = f"{format_seconds(speed.step_seconds_p10)} to {format_seconds(speed.step_seconds_p90)}"
            text += f" (p10 to p90: {spread})"
        rates = [(speed.samples_per_second, "samples/s"), (speed.tokens_per_second, "tokens/s")]
        text += "".join(f", {rate:,.1f} {unit}" for rate, unit in rates if rate is not None)
        clock = f"; {speed.clock}" if speed.clock else ""
        lines.append(("speed", f"{text}; warm-up steps left out: {speed.num_warmup_steps}{clock}"))
    elif record.steps:
        lines.append(("speed", f"no step was timed ({len(record.steps)} ran)"))
    if speed.num_skipped_steps:
        lines.append(("", f"skipped {speed.num_skipped_steps} of {len(record.steps)} optimizer steps (overflow)"))
    return lines


def _learning(record: Record) -> Lines:
    lines = []
    losses = finite_losses(record)
    if losses:
        (first, start), (last, end) = losses[0], losses[-1]
        text = f"{start:.4g} at step {first}" + (f" -> {end:.4g} at step {last}" if last != first else "")
        # A loss that is None was not logged, or was NaN: only the status tells which.
        diverged = "; not finite after that" if record.status == "diverged" else ""
        lines.append(("loss", text + diverged))
    elif record.status == "diverged":
        lines.append(("loss", "not finite at any step"))
    shown = {name: value for name, value in record.metrics.items() if not name.endswith(_NOISE)}
    if shown:
        values = ((n, "not finite" if v is None or not math.isfinite(v) else f"{v:.4g}") for n, v in shown.items())
        lines.append(("metrics", ", ".join(f"{name} {value}" for name, value in values)))
    return lines


# ---- what else there is to say --------------------------------------------------------------------------------------


def _notes(record: Record, verbose: bool) -> Lines:
    lines = _choices(record) if verbose else []
    lines += [("warning", warning) for warning in record.warnings]
    resets = [f"{r.caller}{f' in {r.phase}' if r.phase else ''}, {r.count}x; no peak was lost" for r in record.resets]
    return lines + [("peak reset by", reset) for reset in resets]


def _choices(record: Record) -> Lines:
    return [("chosen", f"{c.field} = {plain(c.value)}  ({c.chosen_by}: {c.reason})") for c in record.choices]


def _files(record: Record, folder: Path) -> Lines:
    names = [name for name in (*_FILES, record.saved_model) if name and (folder / name).exists()]
    return [("files", f"{folder}: {', '.join(names)}" if names else str(folder))]


# ---- rich -----------------------------------------------------------------------------------------------------------


def _grid(lines: Lines) -> Table:
    """Labels on the left; long texts go on under themselves."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold", min_width=15)
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(Text(f"  {label}"), Text(text))
    return grid


def _render(parts: list[RenderableType], width: int) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False,
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))
