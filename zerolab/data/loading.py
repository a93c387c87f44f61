"""`load_data`: from the arguments to what one run trains and evaluates on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zerolab.data.arguments import TASKS, DataArguments, DataError, resolve_source
from zerolab.data.from_images import load_images
from zerolab.data.from_text import load_text
from zerolab.data.result import Data

__all__ = ["Data", "default_cache_dir", "load_data"]


def default_cache_dir() -> Path:
    """`ZEROLAB_CACHE`, else zerolab in the user's cache folder."""
    chosen = os.environ.get("ZEROLAB_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return (Path(chosen) if chosen else base / "zerolab").expanduser()


def load_data(
    args: DataArguments,
    *,
    task: str,
    config: Any,
    seed: int,
    tokenizer_source: str | None,
    cache_dir: Path | None = None,
) -> Data:
    """Load, tokenize or resize, split and cache the data.

    Args:
        task: one of `TASKS`.
        config: the model's configuration: `vocab_size`, `max_position_embeddings`, `image_size`, `num_channels`,
            `num_labels`, as far as the task needs them.
        seed: decides the held-out part, masks, augmentation and all of `random`.
        tokenizer_source: folder or Hub id of a pretrained model, whose tokenizer is used if it has one.
        cache_dir: where prepared data and tokenizers are kept; `default_cache_dir()` by default.

    Raises:
        DataError (a ValueError): with field, value and remedy.
    """
    if task not in TASKS:
        raise DataError("task", task, f"Tasks: {', '.join(TASKS)}.")
    source = resolve_source(args, task)
    cache_dir = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        load = load_images if task == "image-classification" else load_text
        data = load(args, source, task, config, seed, tokenizer_source, cache_dir)
    except PermissionError as error:
        raise DataError("ZEROLAB_CACHE", cache_dir, f"cannot write: {error}. Set it to another folder.") from error
    for name, rows in (("train", data.train), ("eval", data.eval)):
        if not len(rows):
            remedy = f"the {name} part fills not one sample. Give more data"
            if task in ("masked-lm", "causal-lm"):
                remedy += f", or a --max_length below {args.max_length}"
            raise DataError("--dataset", source.name, remedy + ".")
    data.description = {
        "name": source.name,
        "kind": source.kind,
        "task": task,
        "num_train_samples": len(data.train),
        "num_eval_samples": len(data.eval),
        "num_tokens_per_sample": data.num_tokens_per_sample,
        "num_labels": data.num_labels,
        "columns": data.train.dataset.column_names,
        **data.description,
    }
    return data
