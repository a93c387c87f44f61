"""Text to rows of token ids, all of one length."""

from __future__ import annotations

import hashlib
import re
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from zerolab.data.rows import in_memory, list_of, to_table

# Random ids stay clear of the special tokens, wherever the convention of our own tokenizer puts them.
NUM_RESERVED_IDS = 5
RANDOM_MASK_ID = 4
_PASSAGE_CHARS = 2000


def pydoc_passages() -> tuple[datasets.Dataset, str]:
    """CPython's language manual (`pydoc_data.topics`) as rows of `text`, and the SHA-256 of them.

    Topics quote each other at length, so each paragraph is kept once: text held out for evaluation is then nowhere in
    the training text. A row is some paragraphs, about 2,000 characters. The manual differs between Python versions.
    """
    from pydoc_data.topics import topics

    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            # Quotes differ in indentation, line breaks and the lines under headings, not in words.
            paragraphs.setdefault(" ".join(re.findall(r"\w+", paragraph.lower())), paragraph)
    paragraphs.pop("", None)
    passages, part, size = [], [], 0
    for paragraph in paragraphs.values():
        part.append(paragraph)
        size += len(paragraph)
        if size >= _PASSAGE_CHARS:
            passages.append("\n\n".join(part))
            part, size = [], 0
    if part:
        passages.append("\n\n".join(part))
    digest = hashlib.sha256("\0".join(passages).encode()).hexdigest()
    return datasets.Dataset.from_dict({"text": passages}), digest


def block_rows(tokenizer: Any, column: str, max_length: int) -> tuple[Any, datasets.Features]:
    """A function for `prepare` and its features: `input_ids` int32 [n, max_length], full blocks without padding.

    Texts are joined and cut; each block is wrapped in [CLS] and [SEP] where the tokenizer has them, else texts end
    with the end-of-text token. The rest that fills no block is dropped, once in 1,000 texts.
    """
    ends: tuple[int, ...] = ()
    if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
        ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
    features = datasets.Features({"input_ids": list_of("int32", max_length)})
    return partial(_blocks, tokenizer=tokenizer, column=column, max_length=max_length, ends=ends), features


def _blocks(
    batch: dict[str, list[str]], tokenizer: Any, column: str, max_length: int, ends: tuple[int, ...]
) -> pa.Table:
    texts = [text for text in batch[column] if text]
    empty = np.empty(0, dtype=np.int32)
    if not texts:
        return to_table({"input_ids": np.empty((0, max_length), dtype=np.int32)})
    tokens = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    after = empty if ends or tokenizer.eos_token_id is None else np.array([tokenizer.eos_token_id], dtype=np.int32)
    stream = np.concatenate([part for ids in tokens for part in (np.array(ids, dtype=np.int32), after)])
    body = max_length - len(ends)
    blocks = stream[: len(stream) // body * body].reshape(-1, body)
    if ends:
        start, end = (np.full((len(blocks), 1), token, dtype=np.int32) for token in ends)
        blocks = np.concatenate([start, blocks, end], axis=1)
    return to_table({"input_ids": blocks})


def labelled_rows(
    tokenizer: Any, column: str, label_column: str, classes: dict[object, int], max_length: int
) -> tuple[Any, datasets.Features]:
    """A function for `prepare` and its features: `input_ids` int32 [n, max_length], cut or padded, `length` int32 [n]
    (tokens before the padding) and `labels` int32 [n]."""
    features = datasets.Features(
        {
            "input_ids": list_of("int32", max_length),
            "length": datasets.Value("int32"),
            "labels": datasets.Value("int32"),
        }
    )
    function = partial(
        _labelled,
        tokenizer=tokenizer,
        column=column,
        label_column=label_column,
        classes=classes,
        max_length=max_length,
    )
    return function, features


def _labelled(
    batch: dict[str, list], tokenizer: Any, column: str, label_column: str, classes: dict[object, int], max_length: int
) -> pa.Table:
    encoded = tokenizer(
        [text or "" for text in batch[column]], truncation=True, max_length=max_length, padding="max_length"
    )
    return to_table(
        {
            "input_ids": np.array(encoded["input_ids"], dtype=np.int32),
            "length": np.array(encoded["attention_mask"], dtype=np.int32).sum(axis=1, dtype=np.int32),
            "labels": np.array([classes[label] for label in batch[label_column]], dtype=np.int32),
        }
    )


def random_rows(
    num_rows: int, max_length: int, vocab_size: int, num_labels: int | None, seed: int
) -> datasets.Dataset:
    """`input_ids` int32 [n, max_length] and, below `num_labels` if given, `labels` int32 [n], fixed by the seed.

    Ids follow Zipf's law, as words do: a language model can then learn something before it knows the rows by heart.
    """
    generator = np.random.default_rng(seed)
    ordinary = np.arange(min(NUM_RESERVED_IDS, vocab_size - 1), vocab_size, dtype=np.int32)
    weights = 1 / np.arange(1, len(ordinary) + 1)
    ids = generator.choice(ordinary, size=(num_rows, max_length), p=weights / weights.sum())
    columns = {"input_ids": ids}
    if num_labels is not None:
        columns["labels"] = generator.integers(num_labels, size=num_rows, dtype=np.int32)
    return in_memory(columns)
