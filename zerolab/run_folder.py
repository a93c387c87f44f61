"""The folder of a run: its name, and that no run takes another's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from zerolab.launch import world_size
from zerolab.record import FILE_NAME


def default_run_folder(model: str, configuration: str) -> Path:
    """`runs/bert-120m-offload-20261201-094500`: model, configuration, date."""
    return Path("runs") / f"{_short(model)}-{configuration}-{_start_of_run()}"


def _short(model: str) -> str:
    path = Path(model)
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem or "model"


def _start_of_run() -> str:
    """The date for a folder's name; several ranks take their launcher's start, so that they agree."""
    moment = time.time()
    if world_size() > 1:
        moment = psutil.Process(os.getppid()).create_time()
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(moment))


def make_run_folder(folder: Path, *, resume: bool = False) -> Path:
    """Creates the folder of a run. One that exists gets a suffix, so that a second run never overwrites a first.

    Args:
        folder: the folder asked for.
        resume: take it as it is, since the run goes on in it.

    Raises:
        OSError: it cannot be created.
    """
    candidate, number = folder, 1
    while True:
        try:
            candidate.mkdir(parents=True, exist_ok=resume)
            if resume:
                _keep_earlier_record(candidate)
            return candidate
        except FileExistsError:
            if candidate.is_dir() and not any(candidate.iterdir()):
                return candidate
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")


def _keep_earlier_record(folder: Path) -> None:
    """A run that goes on writes a record of its own; the one before is kept as record-1.json, record-2.json, ..."""
    record = folder / FILE_NAME
    if record.exists():
        number = 1
        while (folder / f"record-{number}.json").exists():
            number += 1
        record.rename(folder / f"record-{number}.json")
