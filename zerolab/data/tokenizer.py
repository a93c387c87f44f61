"""The tokenizer of a run: one that exists, or a WordPiece trained on the training text and cached."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import tokenizers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from zerolab.data.arguments import DataError
from zerolab.data.rows import cache_key
from zerolab.data.sources import hub_answers

# [PAD] is first: a BERT-style config pads with 0.
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_LARGEST_VOCAB = 30_000
# More text changes the vocabulary little and takes minutes.
_TRAINING_ROWS = 100_000


def existing_tokenizer(name: str, required: bool) -> Any | None:
    """The tokenizer in a folder or of a Hub id; None where there is none and it is not required.

    Raises:
        DataError: it is required and cannot be loaded.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() and not required and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return None
    source = str(folder) if folder.is_dir() else name
    try:
        cached_only = not folder.is_dir() and not hub_answers(name, "model")
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=cached_only)
    except Exception as error:  # each tokenizer class fails in its own way on an incomplete folder
        if not required:
            return None
        lines = str(error).strip().splitlines()
        remedy = f"cannot be loaded: {lines[0] if lines else type(error).__name__} Name a folder with tokenizer.json, "
        raise DataError("--tokenizer", name, remedy + "or leave it out: one is trained on the text.") from error
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def trained_tokenizer(
    texts: datasets.Dataset, column: str, identity: str, vocab_size: int, max_length: int, cache_dir: Path
) -> PreTrainedTokenizerFast:
    """A lower-casing WordPiece trained on a column of text, or its copy from the cache.

    Args:
        identity: the same only for the same text.
        vocab_size: the vocabulary gets at most so many entries (and at most 30,000), fewer if the text has fewer.
        max_length: what the tokenizer will say is the longest input.

    Raises:
        DataError: `vocab_size` leaves no room for an alphabet.
    """
    cap = min(vocab_size, _LARGEST_VOCAB)
    if cap < len(SPECIAL) + 32:
        raise DataError("--model", f"vocab_size {vocab_size}", "too few words to train a tokenizer. Give 512 or more.")
    key = cache_key("wordpiece", identity, column, cap, tokenizers.__version__)
    path = cache_dir / "tokenizers" / f"{key}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        _train(texts, column, cap).save(str(temporary))
        os.replace(temporary, path)  # another process may have been first: its file is the same, byte for byte
    return PreTrainedTokenizerFast(tokenizer_file=str(path), model_max_length=max_length, **SPECIAL)


def tokenizer_digest(tokenizer: Any) -> str:
    """A SHA-256 of the vocabulary and rules, not of the padding or truncation that was used last."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))
    else:
        plain = Tokenizer.from_str(backend.to_str())
        plain.no_padding()
        plain.no_truncation()
        text = plain.to_str()
    return hashlib.sha256(text.encode()).hexdigest()


def _batches(texts: datasets.Dataset, column: str) -> Iterator[list[str]]:
    few = texts.select_columns([column]).select(range(min(len(texts), _TRAINING_ROWS)))
    for batch in few.iter(batch_size=1000):
        yield [text for text in batch[column] if text]


def _train(texts: datasets.Dataset, column: str, cap: int) -> Tokenizer:
    pieces = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk_token"]))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    counts: Counter[str] = Counter()
    for batch in _batches(texts, column):
        for text in batch:
            counts.update(pieces.normalizer.normalize_str(text))
    common = [char for char, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if not char.isspace()]
    alphabet = sorted(common[: min(1000, (cap - len(SPECIAL)) // 4)])
    # The trainer numbers the letters in the order of a hash table that is seeded anew in each process, and ties
    # between pairs are broken by number: two runs would learn different words. Letters given beforehand keep theirs.
    fixed = [*SPECIAL.values(), *alphabet, *(f"##{char}" for char in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=cap, min_frequency=2, special_tokens=fixed, limit_alphabet=len(alphabet), show_progress=False
    )
    pieces.train_from_iterator(_batches(texts, column), trainer)
    # A second tokenizer, since in the first one the letters are special tokens.
    result = Tokenizer(models.WordPiece(pieces.get_vocab(), unk_token=SPECIAL["unk_token"]))
    result.normalizer, result.pre_tokenizer = pieces.normalizer, pieces.pre_tokenizer
    result.decoder = decoders.WordPiece()
    result.add_special_tokens(list(SPECIAL.values()))
    start, end = SPECIAL["cls_token"], SPECIAL["sep_token"]
    result.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[(token, result.token_to_id(token)) for token in (start, end)],
    )
    return result
