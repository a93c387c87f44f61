"""What one run trains and evaluates on, and the two steps that texts and images share on the way there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np

from zerolab.data.arguments import DataArguments
from zerolab.data.rows import Rows, cache_key
from zerolab.data.sources import Raw, split_rows
from zerolab.problems import Problem


@dataclass
class Data:
    """What a run trains and evaluates on.

    Attributes:
        train, eval: map-style sets; `__getitems__` gives a batch in one step.
        collate: a batch of them (or a list of samples) to the model's tensors.
        tokenizer: the tokenizer, the image processor of a pretrained model, or None.
        num_labels: classes that the labels need, or None for language models.
        labels: the classes' names, where they have some.
        num_tokens_per_sample: sequence length of a text, None for images.
        description: JSON values for the record.
    """

    train: Rows
    eval: Rows
    collate: Callable[[Any], dict[str, Any]]
    tokenizer: Any = None
    num_labels: int | None = None
    labels: list[str] | None = None
    num_tokens_per_sample: int | None = None
    description: dict[str, Any] = field(default_factory=dict)

    def problems(self, batch_size: int, num_processes: int = 1, config: Any = None) -> list[Problem]:
        """What does not fit the run: less than one batch for every process, or more classes than `config` has."""
        found = []
        needed = batch_size * num_processes
        if len(self.train) < needed:
            remedy = f"one step takes {needed} samples. Give more data or a smaller --per_device_train_batch_size."
            found.append(Problem("--dataset", f"{len(self.train)} training samples", remedy))
        if config is not None and self.num_labels is not None and self.num_labels > config.num_labels:
            remedy = f"the model has {config.num_labels}. Set num_labels of its configuration to {self.num_labels}."
            found.append(Problem("--dataset", f"{self.num_labels} classes", remedy))
        return found


def hold_out(raw: Raw, args: DataArguments, seed: int, run_length: int = 1, limit: bool = True) -> Raw:
    """`raw` with an eval part, taken from its training rows where it had none.

    Args:
        run_length: see `split_rows`.
        limit: a row is a sample, so that the limits of `args` already apply: to a random choice, since many sets are
            sorted by label.

    Raises:
        DataError: too few rows.
    """
    train, held = raw.train, raw.eval
    if held is None:
        kept, taken = split_rows(len(train), args.eval_fraction, seed, run_length)
        train, held = train.select(kept), train.select(taken)
    limits = (args.max_train_samples, args.max_eval_samples) if limit else (None, None)
    train, held = (_some(rows, count, seed) for rows, count in zip((train, held), limits, strict=True))
    share = args.eval_fraction if raw.eval is None else None
    return Raw(train, held, cache_key(raw.identity, share, seed, run_length, *limits))


def first(rows: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    """At most `limit` rows from the start."""
    return rows if limit is None or limit >= len(rows) else rows.select(range(limit))


def random_data(
    args: DataArguments,
    made: datasets.Dataset,
    collate: Any,
    *,
    fingerprint: str,
    num_labels: int | None = None,
    num_tokens_per_sample: int | None = None,
    extra: dict[str, bool] | None = None,
) -> Data:
    """`random`: evaluated on the rows it was trained on."""
    note = "evaluated on the training samples: random data has nothing to learn but the samples themselves"
    return Data(
        train=Rows(first(made, args.max_train_samples), extra),
        eval=Rows(first(made, args.max_eval_samples)),
        collate=collate,
        num_labels=num_labels,
        num_tokens_per_sample=num_tokens_per_sample,
        description={"fingerprint": fingerprint, "notes": [note]},
    )


def _some(rows: datasets.Dataset, count: int | None, seed: int) -> datasets.Dataset:
    if count is None or count >= len(rows):
        return rows
    return rows.select(np.sort(np.random.default_rng(seed).permutation(len(rows))[:count]))
