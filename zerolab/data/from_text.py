"""The data of a run on text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerolab.data import text
from zerolab.data.arguments import DataArguments, DataError, Source
from zerolab.data.collate import MaskingCollator, TextCollator
from zerolab.data.result import Data, first, hold_out, random_data
from zerolab.data.rows import Rows, cache_key, prepare
from zerolab.data.sources import LABEL_NAMES, TEXT_NAMES, Raw, find_column, label_classes, load_raw
from zerolab.data.tokenizer import existing_tokenizer, tokenizer_digest, trained_tokenizer


def load_text(
    args: DataArguments,
    source: Source,
    task: str,
    config: Any,
    seed: int,
    tokenizer_source: str | None,
    cache_dir: Path,
) -> Data:
    """See `load_data`."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest < args.max_length:
        raise DataError("--max_length", args.max_length, f"the model takes {longest} tokens at most. Lower it.")
    if source == ("built-in", "random", ()):
        return _random(args, task, config, seed)
    if source.kind == "built-in":
        passages, digest = text.pydoc_passages()
        raw = Raw(passages, None, digest)
    else:
        raw = load_raw(source, args, cache_dir)
    column = find_column(raw.train, args.text_column, TEXT_NAMES, "--text_column", "string")
    classify = task == "sequence-classification"
    # Neighboring rows of running text belong together, rows with labels do not.
    raw = hold_out(raw, args, seed, run_length=1 if classify else max(1, len(raw.train) // 200), limit=classify)
    parts = [raw.train, raw.eval]
    tokenizer, origin = _tokenizer(args, raw, column, config, tokenizer_source, longest, cache_dir)
    if task == "masked-lm" and tokenizer.mask_token_id is None:
        raise DataError("--tokenizer", origin, "it has no mask token, which masked-lm needs. Choose another.")
    digest = tokenizer_digest(tokenizer)
    settings: list[Any] = [raw.identity, column, digest, args.max_length, task]
    classes, names = None, None
    if classify:
        label = find_column(raw.train, args.label_column, LABEL_NAMES, "--label_column")
        classes, names = label_classes(parts, label)
        settings += [label, list(classes.items())]
        function, features = text.labelled_rows(tokenizer, column, label, classes, args.max_length)
    else:
        function, features = text.block_rows(tokenizer, column, args.max_length)
    train, held = (
        prepare(rows, function, features, cache_key("text", name, *settings), cache_dir)
        for name, rows in zip(("train", "eval"), parts, strict=True)
    )
    if classify and all(min(rows.unique("length")) == args.max_length for rows in (train, held)):
        # Nothing is padded, so no mask is needed.
        train, held = train.remove_columns("length"), held.remove_columns("length")
    collate: Any = TextCollator(task)
    if task == "masked-lm":
        special = tuple(sorted(set(tokenizer.all_special_ids)))
        collate = MaskingCollator(args.mlm_probability, tokenizer.mask_token_id, len(tokenizer), special, seed)
    return Data(
        train=Rows(first(train, args.max_train_samples)),
        eval=Rows(first(held, args.max_eval_samples)),
        collate=collate,
        tokenizer=tokenizer,
        num_labels=len(classes) if classes is not None else None,
        labels=names,
        num_tokens_per_sample=args.max_length,
        description={
            "fingerprint": cache_key(*settings),
            "tokenizer": {"source": origin, "vocab_size": len(tokenizer), "sha256": digest},
            "source_columns": raw.train.column_names,
            "notes": [],
        },
    )


def _tokenizer(
    args: DataArguments,
    raw: Raw,
    column: str,
    config: Any,
    tokenizer_source: str | None,
    longest: int | None,
    cache_dir: Path,
) -> tuple[Any, str]:
    name = args.tokenizer or tokenizer_source
    tokenizer = existing_tokenizer(name, required=args.tokenizer is not None) if name else None
    if tokenizer is None:
        origin = "trained on the training text"
        limit = longest or args.max_length
        tokenizer = trained_tokenizer(raw.train, column, raw.identity, config.vocab_size, limit, cache_dir)
    else:
        origin = str(name)
    if len(tokenizer) > config.vocab_size:
        remedy = f"the model has {config.vocab_size} words. Choose the model's own tokenizer, or a larger model."
        raise DataError("--tokenizer", f"{origin}: {len(tokenizer)} words", remedy)
    return tokenizer, origin


def _random(args: DataArguments, task: str, config: Any, seed: int) -> Data:
    num_labels = config.num_labels if task == "sequence-classification" else None
    made = text.random_rows(args.num_random_samples, args.max_length, config.vocab_size, num_labels, seed)
    collate: Any = TextCollator(task)
    if task == "masked-lm":
        special = tuple(range(text.NUM_RESERVED_IDS))
        collate = MaskingCollator(args.mlm_probability, text.RANDOM_MASK_ID, config.vocab_size, special, seed)
    settings = [args.num_random_samples, args.max_length, config.vocab_size, num_labels, seed]
    return random_data(
        args,
        made,
        collate,
        fingerprint=cache_key("random text", *settings),
        num_labels=num_labels,
        num_tokens_per_sample=args.max_length,
    )
