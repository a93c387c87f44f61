"""The commands of `python -m zerolab`. What a command needs is imported inside it, so that --help is instant."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from zerolab import __version__

        typer.echo(f"zerolab {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Where the memory of a HuggingFace Trainer run goes, with and without DeepSpeed."""
    # A terminal that cannot show a line or a name shows a question mark in its place, instead of an error.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folder of a run, or its record.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record a line, for other programs.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also every choice and its reason.")] = False,
    plots: Annotated[bool, typer.Option("--plots", help="Write loss.png and memory.png again.")] = False,
) -> None:
    """Shows the records of earlier runs again. Exit status 2 where one of them cannot be read or drawn."""
    from zerolab.record import RecordError, load_record
    from zerolab.report.plots import save_plots
    from zerolab.report.text import render_run

    failed = False
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    for run in runs:
        folder = run if run.is_dir() else run.parent
        try:
            record = load_record(run)
            if plots:
                save_plots(record, folder)
        except (RecordError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            failed = True
            continue
        typer.echo(record.model_dump_json() if as_json else render_run(record, width, verbose, folder))
    if failed:
        raise typer.Exit(2)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs; the first is the reference.")
    ],
) -> None:
    """Puts runs side by side with a verdict on each. Exit status 1 where one does not train or learns differently."""
    from zerolab.compare import check_comparable, compare
    from zerolab.problems import BadInput, Problem
    from zerolab.record import RecordError, load_record
    from zerolab.report.sides import render_comparison
    from zerolab.verdicts import exit_status, judge

    records, problems = {}, []
    for run in runs:
        try:
            name = run.stem if run.suffix == ".json" and run.name != "record.json" else run.resolve().name
            records[name] = load_record(run)
        except RecordError as error:
            problems.append(Problem("RUN", str(run), str(error)))
    if not problems and len(records) < 2:
        problems.append(Problem("RUN", ", ".join(map(str, runs)), "name at least two different runs"))
    problems = problems or check_comparable(records)
    if problems:
        typer.echo(BadInput(problems).text(), err=True)
        raise typer.Exit(2)
    verdicts = judge(records)
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    typer.echo(render_comparison(compare(records), verdicts, width), nl=False)
    raise typer.Exit(exit_status(None, verdicts))
