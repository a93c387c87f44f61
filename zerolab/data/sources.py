"""Rows as their makers left them: from local files, or from the Hub, through the datasets library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np

from zerolab.data.arguments import READERS, DataArguments, DataError, Source

TEXT_NAMES = ("text", "sentence", "content", "document", "review", "article", "body")
LABEL_NAMES = ("label", "labels")
_EVAL_SPLITS = ("validation", "valid", "dev", "eval", "test")


class Raw(NamedTuple):
    """Unprepared rows.

    Attributes:
        train: rows to train on.
        eval: rows to evaluate on, or None where a part of `train` has to be held out.
        identity: a text that is the same only for the same rows.
    """

    train: datasets.Dataset
    eval: datasets.Dataset | None
    identity: str


def load_raw(source: Source, args: DataArguments, cache_dir: Path) -> Raw:
    """The rows of local files or of a Hub dataset, memory-mapped.

    Raises:
        DataError: the Hub cannot be reached, there is no such dataset, configuration or split, or nothing is in it.
    """
    try:
        if source.kind == "hub":
            with _offline_unless_hub_answers(source.name):
                splits = datasets.load_dataset(source.name, args.dataset_config)
        else:
            reader = READERS[source.files[0].suffix]
            files = _files_by_split(source.files)
            splits = datasets.load_dataset(reader, data_files=files, cache_dir=str(cache_dir / "datasets"))
    except Exception as error:
        raise _explained(source, args, error) from error
    train_name = args.dataset_split or ("train" if "train" in splits else next(iter(splits)))
    if train_name not in splits:
        raise DataError("--dataset_split", train_name, f"{source.name} has no such split, but {', '.join(splits)}.")
    held = None
    if args.dataset_split is None:
        held = next((splits[name] for name in _EVAL_SPLITS if name in splits and name != train_name), None)
    train = splits[train_name]
    for name, rows in (("train", train), ("eval", held)):
        if rows is not None and not len(rows):
            raise DataError("--dataset", source.name, f"the {name} split is empty. Name another dataset or split.")
    identity = "/".join(rows._fingerprint for rows in (train, held) if rows is not None)
    return Raw(train, held, identity)


def split_rows(num_rows: int, fraction: float, seed: int, run_length: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train on and to hold out, both int64, sorted, disjoint and not empty; the same for the same seed.

    Args:
        run_length: hold out runs of so many neighbors: neighboring lines of a text say much about each other.

    Raises:
        DataError: there are fewer than two runs.
    """
    runs = -(-num_rows // run_length)
    if runs < 2:
        raise DataError("--dataset", f"{num_rows} row(s)", "too few to hold some out for evaluation. Give more rows.")
    count = min(max(1, round(runs * fraction)), runs - 1)
    held_runs = np.random.default_rng(seed).permutation(runs)[:count]
    held = np.isin(np.arange(num_rows) // run_length, held_runs)
    return np.flatnonzero(~held), np.flatnonzero(held)


def find_column(rows: datasets.Dataset, chosen: str | None, names: tuple[str, ...], flag: str, dtype: str = "") -> str:
    """The column that a person chose, or the one that is named as such columns usually are.

    Args:
        dtype: if given, a column may also be found as the only one of this Arrow type (`string`).

    Raises:
        DataError: it is missing or ambiguous; names the columns and the flag.
    """
    columns = rows.column_names
    if chosen is not None:
        if chosen not in columns:
            raise DataError(flag, chosen, f"no such column. There are: {', '.join(columns)}.")
        return chosen
    for name in names:
        if name in columns:
            return name
    fitting = [name for name in columns if dtype and getattr(rows.features[name], "dtype", None) == dtype]
    if len(fitting) == 1:
        return fitting[0]
    raise DataError(flag, "not given", f"unclear which column it is. Name one of: {', '.join(columns)}.")


def label_classes(splits: list[datasets.Dataset], column: str) -> tuple[dict[object, int], list[str] | None]:
    """From a column of labels: the id of each value, and the names of the classes where they have some.

    Raises:
        DataError: labels are missing, negative, beyond the declared classes, or not classes at all.
    """
    values = {value for rows in splits for value in rows.unique(column)}
    feature = splits[0].features[column]
    if None in values:
        raise DataError("--label_column", column, "some rows have no label. Fill or remove them.")
    if all(isinstance(value, str) for value in values):
        words = sorted(str(value) for value in values)
        return {word: index for index, word in enumerate(words)}, words
    if not all(isinstance(value, (int, bool)) for value in values):
        raise DataError("--label_column", column, f"classes are integers or strings, not {feature}.")
    ids = sorted(int(value) for value in values)  # type: ignore[call-overload]
    names = list(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    if ids[-1] > 1000 + 100 * len(ids):
        remedy = f"label {ids[-1]} among {len(ids)} different ones would make a head of that size. Number them from 0."
        raise DataError("--label_column", column, remedy)
    if ids[0] < 0:
        remedy = f"label {ids[0]} marks rows without a label. Choose a labelled split with --dataset_split."
        raise DataError("--label_column", column, remedy)
    if names is not None and ids[-1] >= len(names):
        raise DataError("--label_column", column, f"label {ids[-1]}, but only {len(names)} classes are declared.")
    return {index: index for index in range(len(names) if names is not None else ids[-1] + 1)}, names


def _files_by_split(files: tuple[Path, ...]) -> dict[str, list[str]]:
    word = re.compile(rf"(?<![a-z])({'|'.join(_EVAL_SPLITS)})(?![a-z])")
    held = [str(file) for file in files if word.search(file.stem.lower())]
    rest = [str(file) for file in files if str(file) not in held]
    return {"train": rest, "test": held} if held and rest else {"train": rest or held}


@contextmanager
def _offline_unless_hub_answers(dataset_id: str) -> Iterator[None]:
    """One request of five seconds decides; without it every file is retried for 23 s before a person hears of it."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or not hub_answers(dataset_id, "dataset")
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def hub_answers(repo_id: str, repo_type: str) -> bool:
    """Whether the Hub can be reached; an answer like "not found" counts. Takes five seconds at most."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().repo_info(repo_id, repo_type=repo_type, timeout=5)
    except HfHubHTTPError:
        return True
    except Exception:  # no route, no name, a timeout, offline mode: the HTTP client has a class for each
        return False
    return True


def _explained(source: Source, args: DataArguments, error: Exception) -> DataError:
    lines = str(error).strip().splitlines()
    said = (lines[0] if lines else type(error).__name__).rstrip(".")
    if source.kind != "hub":
        return DataError("--dataset", source.name, f"cannot be read: {said}. Correct the file.")
    if isinstance(error, ConnectionError) or "Couldn't reach" in str(error):
        remedy = (
            "the Hugging Face Hub cannot be reached and the dataset is not in the cache. Check the network, give a "
            "local file or folder, or use a built-in dataset: pydoc, digits, random."
        )
        return DataError("--dataset", source.name, remedy)
    if "config" in said.lower() and isinstance(error, ValueError):
        # The names of the configurations stand in its other lines.
        return DataError("--dataset_config", args.dataset_config or "not given", " ".join(" ".join(lines).split()))
    return DataError("--dataset", source.name, f"{said}. Check the id (owner/name), or give a local file or folder.")
