"""Fixed-size rows in Arrow, served a batch at a time without touching a sample on its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch

# Part of every cache key: raise it when the meaning of a prepared file changes.
_FORMAT = 1


class Rows(torch.utils.data.Dataset):
    """A map-style dataset over Arrow columns of numbers: scalars, or lists of one fixed length.

    The DataLoader asks `__getitems__` for a whole batch. Large sets stay memory-mapped: columns are views of the
    file, and indexing copies the batch's rows alone.

    Args:
        dataset: its columns are numbers or fixed-size lists of numbers, without nulls.
        extra: constants that join each sample (`augment`), so that a collator can tell train from eval.
    """

    def __init__(self, dataset: datasets.Dataset, extra: dict[str, bool] | None = None) -> None:
        if len(dataset) and dataset._indices is not None:
            dataset = dataset.flatten_indices()  # the views below know nothing of a selection
        self.dataset, self.extra = dataset, extra or {}
        self._views: dict[str, list[np.ndarray]] | None = None
        self._starts = np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The rows of one batch: each column as a tensor [B] or [B, length], of the column's own dtype."""
        if self._views is None:
            self._open()
        wanted = np.asarray(indices, dtype=np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        chunk = np.searchsorted(self._starts, wanted, side="right") - 1
        batch = {
            name: torch.from_numpy(_gather(views, wanted - self._starts[chunk], chunk))
            for name, views in (self._views or {}).items()
        }
        return batch | {name: torch.full((len(wanted),), value) for name, value in self.extra.items()}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sample: tensors [] or [length]. For people; training never calls it.

        Raises:
            IndexError: beyond the last row.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return {name: column[0] for name, column in self.__getitems__([index]).items()}

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker maps the file again: pickled views would be copies of the whole set.
        return self.__dict__ | {"_views": None}

    def column(self, name: str, limit: int | None = None) -> np.ndarray:
        """The first `limit` rows (all by default) of one column: [n] or [n, length]."""
        if self._views is None:
            self._open()
        rows, taken = [], 0
        for view in (self._views or {})[name]:
            rows.append(view if limit is None else view[: limit - taken])
            taken += len(rows[-1])
            if limit is not None and taken >= limit:
                break
        return np.concatenate(rows)

    def _open(self) -> None:
        # A small set comes as one chunk; a table whose columns are chunked differently is made equal.
        table = self.dataset.data.table
        if len({tuple(len(chunk) for chunk in column.chunks) for column in table.columns}) > 1:
            table = table.combine_chunks()
        self._views = {
            name: [_view(chunk) for chunk in table.column(name).chunks if len(chunk)] for name in table.column_names
        }
        lengths = [len(view) for view in next(iter(self._views.values()))]
        self._starts = np.cumsum([0, *lengths[:-1]])


def _view(chunk: pa.Array) -> np.ndarray:
    if pa.types.is_fixed_size_list(chunk.type):
        return chunk.flatten().to_numpy(zero_copy_only=True).reshape(len(chunk), chunk.type.list_size)
    return chunk.to_numpy(zero_copy_only=True)


def _gather(views: list[np.ndarray], rows: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    if len(views) == 1:
        return views[0][rows]
    out = np.empty((len(rows), *views[0].shape[1:]), dtype=views[0].dtype)
    for number in np.unique(chunk):
        here = chunk == number
        out[here] = views[number][rows[here]]
    return out


def to_table(columns: dict[str, np.ndarray]) -> pa.Table:
    """Arrays [n] or [n, length] as Arrow columns, the latter as fixed-size lists."""
    return pa.table(
        {
            name: pa.array(array)
            if array.ndim == 1
            else pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(array).reshape(-1)), array.shape[1])
            for name, array in columns.items()
        }
    )


def in_memory(columns: dict[str, np.ndarray]) -> datasets.Dataset:
    """A small dataset of arrays [n] or [n, length]."""
    return datasets.Dataset(datasets.table.InMemoryTable(to_table(columns)))


def cache_key(*parts: object) -> str:
    """A name for what these parts (JSON values) produce, the same in every process."""
    text = json.dumps([_FORMAT, datasets.__version__, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def prepare(
    source: datasets.Dataset, function: Callable[..., pa.Table], features: datasets.Features, key: str, cache_dir: Path
) -> datasets.Dataset:
    """`source.map(function)` in batches of 1,000 rows, kept in `cache_dir` under `key` and memory-mapped from there.

    The fingerprint is given instead of computed: datasets would pickle the tokenizer, whose state changes with use.
    Two processes at once do the work twice and rename the same file into place.
    """
    folder = cache_dir / "prepared"
    folder.mkdir(parents=True, exist_ok=True)
    quiet = len(source) < 10_000 and not datasets.are_progress_bars_disabled()
    if quiet:  # the work takes less than a second
        datasets.disable_progress_bars()
    try:
        return source.map(
            function,
            batched=True,
            remove_columns=source.column_names,
            features=features,
            cache_file_name=str(folder / f"{key}.arrow"),
            load_from_cache_file=True,
            new_fingerprint=key,
        )
    finally:
        if quiet:
            datasets.enable_progress_bars()


def list_of(dtype: str, length: int) -> Any:
    """The feature of a column [n, length]."""
    return datasets.Sequence(datasets.Value(dtype), length=length)
