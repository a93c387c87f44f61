"""What a person may ask of the data, and all that can be wrong with it before a library is imported (no torch)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from zerolab.problems import Problem, did_you_mean

TEXT_TASKS = ("masked-lm", "causal-lm", "sequence-classification")
TASKS = (*TEXT_TASKS, "image-classification")

# Which tasks each built-in set can serve.
BUILT_IN: dict[str, tuple[str, ...]] = {
    "pydoc": ("masked-lm", "causal-lm"),
    "digits": ("image-classification",),
    "random": TASKS,
}
# Suffix to the name that datasets gives its reader.
READERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}

_IDX_FILE = re.compile(r".*(images|labels)[.-]idx([13])-ubyte(\.gz)?")
_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")
_FORMATS = f"{', '.join(READERS)}, or a folder of these or of MNIST's IDX files"


def _option(default: object, help: str):
    return field(default=default, metadata={"help": help})


@dataclass
class DataArguments:
    """The data of a run, for HfArgumentParser. `check_data` says what is wrong with it."""

    dataset: str | None = _option(
        None,
        "pydoc (CPython's manual), digits (scikit-learn), random, a local file or folder, or a Hub id. Default: pydoc "
        "for language models, digits for images, random for sequence classification.",
    )
    dataset_config: str | None = _option(None, "Configuration of a Hub dataset.")
    dataset_split: str | None = _option(
        None, "Split to train on; evaluation then holds out a part of it. Default: train, and validation or test."
    )
    text_column: str | None = _option(None, "Column of text. Default: found by name, or the only column of strings.")
    label_column: str | None = _option(None, "Column of labels. Default: label or labels.")
    max_length: int = _option(128, "Tokens of every sample: text is cut, or padded, to this fixed length.")
    tokenizer: str | None = _option(
        None, "Folder or Hub id of a tokenizer. Default: the model's own, else a WordPiece trained on the text."
    )
    mlm_probability: float = _option(0.15, "Share of tokens that a masked language model has to predict.")
    eval_fraction: float = _option(0.1, "Share held out for evaluation where the data has no split for it.")
    max_train_samples: int | None = _option(None, "Train on at most this many samples.")
    max_eval_samples: int | None = _option(None, "Evaluate on at most this many samples.")
    num_random_samples: int = _option(64, "Size of the dataset random.")
    augment: bool = _option(False, "Shift and rotate training images at random.")


class DataError(ValueError):
    """Data that cannot be used.

    Attributes:
        field: the option at fault, as typed (`--dataset`).
        value: what it was.
        remedy: what is wrong and what to do about it.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} {value}: {remedy}")
        self.field, self.value, self.remedy = field, str(value), remedy

    @property
    def problem(self) -> Problem:
        """The same three parts, for a report of all problems at once."""
        return Problem(self.field, self.value, self.remedy)


class Source(NamedTuple):
    """Where the samples come from.

    Attributes:
        kind: `files` are read by datasets, `idx` are MNIST's binary files, the rest says itself.
        name: the built-in name, the path, or the Hub id.
        files: the files of the kinds `files` and `idx`, sorted.
    """

    kind: Literal["built-in", "files", "idx", "hub"]
    name: str
    files: tuple[Path, ...] = ()


def default_dataset(task: str) -> str:
    """The dataset for `task` where none is named; none of them needs a download."""
    if task == "image-classification":
        return "digits"
    # pydoc has no labels, so a text classifier gets what the course gave it, only learnable.
    return "random" if task == "sequence-classification" else "pydoc"


def resolve_source(args: DataArguments, task: str) -> Source:
    """Decide what `args.dataset` names. Reads local directories, never the network.

    A built-in name wins over a path, a path over a Hub id.

    Raises:
        DataError: unknown name, missing or empty path, unknown format, or a kind that does not fit `task`.
    """
    name = args.dataset or default_dataset(task)
    if name in BUILT_IN:
        if task not in BUILT_IN[name]:
            others = ", ".join(other for other, tasks in BUILT_IN.items() if task in tasks)
            raise DataError("--dataset", name, f"it does not fit the task {task}. Use {others}, a file, or a Hub id.")
        return Source("built-in", name)
    path = Path(name).expanduser()
    if path.exists():
        return _local(name, path, task)
    looks_local = name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1
    if looks_local or path.suffix in READERS:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError("--dataset", name, f"no such file or folder{where}. Correct the path, or use {_names(task)}.")
    hint = did_you_mean(name, BUILT_IN)
    if not _HUB_ID.fullmatch(name) or (hint and "/" not in name):
        # A bare name can be a Hub id (imdb), but one letter off a built-in name it is far more likely a slip.
        remedy = f"no such dataset: {hint}Built in for {task}: {_names(task)}. A Hub id reads owner/name."
        raise DataError("--dataset", name, remedy)
    return Source("hub", name)


def check_data(args: DataArguments, task: str) -> list[Problem]:
    """All that is wrong with the arguments, as far as it shows without a library or the network (milliseconds)."""
    if task not in TASKS:
        return [Problem("task", str(task), f"{did_you_mean(str(task), TASKS)}Tasks: {', '.join(TASKS)}.")]
    problems = list(_wrong_numbers(args))
    try:
        resolve_source(args, task)
    except DataError as error:
        problems.append(error.problem)
    image_task = task == "image-classification"
    if args.augment and not image_task:
        problems.append(Problem("--augment", "True", f"only images can be augmented, not {task}. Leave it out."))
    if args.tokenizer is not None:
        path = Path(args.tokenizer).expanduser()
        if image_task:
            problems.append(Problem("--tokenizer", args.tokenizer, "images have no tokenizer. Leave it out."))
        elif not path.exists() and not _HUB_ID.fullmatch(args.tokenizer):
            problems.append(Problem("--tokenizer", args.tokenizer, "no such folder. Correct it, or leave it out."))
    return problems


def _wrong_numbers(args: DataArguments) -> Iterator[Problem]:
    for name in ("mlm_probability", "eval_fraction"):
        value = getattr(args, name)
        if not 0 < value < 1:
            yield Problem(f"--{name}", str(value), "give a share between 0 and 1, for example 0.1.")
    least = {"max_length": 8, "num_random_samples": 1, "max_train_samples": 1, "max_eval_samples": 1}
    for name, minimum in least.items():
        value = getattr(args, name)
        if value is not None and value < minimum:
            yield Problem(f"--{name}", str(value), f"give at least {minimum}.")


def _names(task: str) -> str:
    return ", ".join(name for name, tasks in BUILT_IN.items() if task in tasks)


def _local(name: str, path: Path, task: str) -> Source:
    files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
    idx = tuple(file for file in files if _IDX_FILE.fullmatch(file.name))
    known = tuple(file for file in files if file.suffix in READERS)
    if idx and path.is_dir():
        if task != "image-classification":
            raise DataError("--dataset", name, f"IDX files hold images, the task is {task}. Use {_names(task)}.")
        return Source("idx", name, idx)
    if idx:
        raise DataError("--dataset", name, f"give the folder of the images and labels: {path.parent}.")
    if not known:
        what = "the folder holds no file of a known format" if path.is_dir() else "unknown format"
        raise DataError("--dataset", name, f"{what}. Known: {_FORMATS}.")
    if len({READERS[file.suffix] for file in known}) > 1:
        kinds = ", ".join(sorted({file.suffix for file in known}))
        raise DataError("--dataset", name, f"the folder mixes formats ({kinds}). Leave one, or name one file.")
    if task == "image-classification" and known[0].suffix != ".parquet":
        raise DataError("--dataset", name, f"images come as parquet or IDX files, not {known[0].suffix}.")
    for file in known:
        if file.stat().st_size == 0:
            raise DataError("--dataset", str(file), "the file is empty. Fill it, or name another.")
    return Source("files", name, known)
