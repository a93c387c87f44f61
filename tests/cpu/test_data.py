"""Data: what is served, that it is served in batches, and what is said when it cannot be."""

import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import zerolab.data.tokenizer
from zerolab.data import DataArguments, DataError, check_data, load_data
from zerolab.data.collate import ImageCollator, MaskingCollator
from zerolab.data.images import read_idx, resize
from zerolab.data.rows import Rows, in_memory
from zerolab.data.sources import split_rows
from zerolab.data.text import pydoc_passages

BERT = SimpleNamespace(vocab_size=2000, max_position_embeddings=128, num_labels=7)
VIT = SimpleNamespace(image_size=28, num_channels=1, num_labels=10)
MNIST = Path(os.environ.get("ZEROLAB_MNIST", Path(__file__).parents[3] / "shared" / "data" / "mnist"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def load(cache_dir, task="masked-lm", config=None, seed=42, tokenizer_source=None, **arguments):
    config = config or (VIT if task == "image-classification" else BERT)
    return load_data(
        DataArguments(**arguments),
        task=task,
        config=config,
        seed=seed,
        tokenizer_source=tokenizer_source,
        cache_dir=cache_dir,
    )


def batches(rows, collate, batch_size=8, **options):
    return list(DataLoader(rows, batch_size=batch_size, collate_fn=collate, **options))


# Text


def test_pydoc_comes_in_full_blocks(cache):
    data = load(cache, max_length=64)
    cls, sep, pad = data.tokenizer.cls_token_id, data.tokenizer.sep_token_id, data.tokenizer.pad_token_id
    assert pad == 0
    for rows in (data.train, data.eval):
        ids = rows.column("input_ids")
        assert ids.shape == (len(rows), 64)
        assert (ids[:, 0] == cls).all()
        assert (ids[:, -1] == sep).all()
        assert not np.isin(ids[:, 1:-1], [cls, sep, pad]).any()
        assert ids.max() < len(data.tokenizer) <= BERT.vocab_size
    assert 0.07 < len(data.eval) / (len(data.train) + len(data.eval)) < 0.13
    assert (data.train.column("input_ids") == data.tokenizer.unk_token_id).mean() < 0.01
    assert "statement" in data.tokenizer.decode(data.train.column("input_ids")[:20].reshape(-1).tolist())
    assert data.num_tokens_per_sample == 64
    assert json.loads(json.dumps(data.description)) == data.description


def test_no_paragraph_is_in_train_and_eval():
    passages, _ = pydoc_passages()
    kept, held = split_rows(len(passages), 0.1, seed=3)

    def words(part):
        return "".join(char for char in part.casefold() if char.isalnum())

    paragraphs = [
        {words(part) for row in rows.tolist() for part in passages[row]["text"].split("\n\n")} for rows in (kept, held)
    ]
    assert min(map(len, paragraphs)) > 50
    assert not paragraphs[0] & paragraphs[1]


def test_held_out_rows_depend_on_the_seed_and_come_in_runs():
    kept, held = split_rows(100, 0.2, seed=1, run_length=10)
    assert sorted([*kept, *held]) == list(range(100))
    assert len(held) == 20
    assert len(set(held // 10)) == 2
    assert not np.array_equal(held, split_rows(100, 0.2, seed=2, run_length=10)[1])
    with pytest.raises(DataError, match="too few"):
        split_rows(1, 0.1, seed=0)


def test_the_tokenizer_is_the_same_in_another_process(cache, tmp_path):
    """The tokenizers library alone numbers letters by a hash table that is seeded anew in each process."""
    code = """if True:
        import sys
        from pathlib import Path
        import datasets
        from zerolab.data.text import pydoc_passages
        from zerolab.data.tokenizer import tokenizer_digest, trained_tokenizer
        rows, digest = pydoc_passages()
        print(tokenizer_digest(trained_tokenizer(rows, "text", digest, 1000, 64, Path(sys.argv[1]))))
    """
    found = [
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True, check=True)
        for name in ("one", "two")
    ]
    assert len(found[0].stdout.strip()) == 64
    assert found[0].stdout == found[1].stdout


def test_the_second_call_reads_the_cache(cache, tmp_path, monkeypatch):
    first = load(tmp_path, max_length=32)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert {file.parent.name for file in files} == {"prepared", "tokenizers"}

    def refuse(*args, **kwargs):
        raise AssertionError("prepared again")

    monkeypatch.setattr(zerolab.data.tokenizer, "_train", refuse)
    monkeypatch.setattr(zerolab.data.text, "_blocks", refuse)
    second = load(tmp_path, max_length=32)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()} == files
    assert np.array_equal(first.train.column("input_ids"), second.train.column("input_ids"))
    monkeypatch.undo()
    assert load(tmp_path, max_length=16).train.column("input_ids").shape[1] == 16


def test_causal_labels_are_the_inputs(cache):
    data = load(cache, task="causal-lm", max_length=64)
    batch = batches(data.train, data.collate)[0]
    assert set(batch) == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["labels"].dtype == torch.int64


def test_a_tokenizer_of_the_model_is_used(cache, tmp_path):
    own = load(cache, max_length=64).tokenizer
    own.save_pretrained(tmp_path / "model")
    data = load(cache, tokenizer_source=str(tmp_path / "model"), max_length=32)
    assert data.description["tokenizer"]["source"] == str(tmp_path / "model")
    assert data.tokenizer.get_vocab() == own.get_vocab()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    assert "trained" in load(cache, tokenizer_source=str(tmp_path / "bare")).description["tokenizer"]["source"]
    with pytest.raises(DataError, match="1000 words"):
        load(cache, tokenizer=str(tmp_path / "model"), config=SimpleNamespace(vocab_size=1000))
    with pytest.raises(DataError, match="--tokenizer .*bare: cannot be loaded"):
        load(cache, tokenizer=str(tmp_path / "bare"))


def test_a_tokenizer_with_nothing_but_an_end_of_text(cache, tmp_path):
    """As GPT-2's: no [CLS], no [SEP], no padding token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<end>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="?").save_pretrained(tmp_path / "t")
    datasets.Dataset.from_dict({"text": ["a b"] * 40, "label": [0, 1] * 20}).to_json(tmp_path / "a.jsonl")
    chosen = {"tokenizer": str(tmp_path / "t"), "dataset": str(tmp_path / "a.jsonl"), "max_length": 9}
    data = load(cache, task="causal-lm", **chosen)
    assert data.train[0]["input_ids"].tolist() == [1, 2, 0] * 3
    labelled = load(cache, task="sequence-classification", **chosen)
    batch = labelled.collate(labelled.train.__getitems__([0]))
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 0]]
    with pytest.raises(DataError, match="no mask token"):
        load(cache, task="masked-lm", **chosen)


# Masks


def masking(seed=5, special=(0, 1, 2, 3, 4)):
    return MaskingCollator(0.15, 4, 1000, special, seed)


def test_masks_do_not_depend_on_other_random_numbers(cache):
    data, again = (load(cache, max_length=64) for _ in range(2))
    torch.manual_seed(0)
    one = batches(data.train, data.collate)
    torch.rand(1000)
    again.collate(again.eval.__getitems__(range(4)))  # an evaluation in between, in this arm alone
    two = batches(again.train, again.collate)
    assert len(one) == len(two) > 10
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a)
    other = load(cache, seed=43, max_length=64)
    rows = data.train.__getitems__(range(8))
    assert not torch.equal(data.collate(rows)["labels"], other.collate(rows)["labels"])
    # Another batch of an epoch with the same rows first: other masks, or an epoch would repeat the last one.
    assert not torch.equal(data.collate(data.train.__getitems__(range(9)))["labels"][:8], data.collate(rows)["labels"])


def test_masks_are_80_10_10_of_ordinary_tokens():
    ids = torch.randint(5, 1000, (512, 128), generator=torch.Generator().manual_seed(0)).int()
    ids[:, 0], ids[:, -1], ids[:, -2] = 2, 3, 0
    out = masking()({"input_ids": ids})
    chosen = out["labels"] != -100
    assert not chosen[:, [0, -1, -2]].any()
    assert torch.equal(out["labels"][chosen], ids.long()[chosen])
    assert torch.equal(out["input_ids"][~chosen], ids.long()[~chosen])
    assert float(chosen[:, 1:-2].float().mean()) == pytest.approx(0.15, abs=0.01)
    masked = out["input_ids"][chosen] == 4
    kept = out["input_ids"][chosen] == out["labels"][chosen]
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(kept.float().mean()) == pytest.approx(0.1, abs=0.02)
    replaced = out["input_ids"][chosen][~masked & ~kept]
    assert len(replaced.unique()) > 300
    assert int(replaced.min()) >= 5


def test_a_batch_has_a_label_however_unlikely():
    collate = MaskingCollator(1e-9, 4, 1000, (0, 1, 2, 3, 4), 0)
    ids = torch.tensor([[2, 9, 3], [2, 3, 0]], dtype=torch.int32)
    assert collate({"input_ids": ids})["labels"].tolist() == [[-100, 9, -100], [-100] * 3]
    assert (collate({"input_ids": ids[1:]})["labels"] == -100).all()


def test_a_list_of_samples_collates_to_the_same(cache):
    for data in (
        load(cache, max_length=64),
        load(cache, task="sequence-classification"),
        load(cache, task="image-classification", dataset="random", augment=True),
    ):
        whole = data.collate(data.train.__getitems__([3, 0, 5]))
        listed = data.collate([data.train[3], data.train[0], data.train[5]])
        assert set(whole) == set(listed)
        assert all(torch.equal(whole[name], listed[name]) for name in whole)


# random


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("masked-lm", {"input_ids", "labels"}),
        ("causal-lm", {"input_ids", "labels"}),
        ("sequence-classification", {"input_ids", "labels"}),
        ("image-classification", {"pixel_values", "labels"}),
    ],
)
def test_random_is_finite_fixed_and_fits_the_model(cache, task, columns):
    data, again, other = (load(cache, task=task, dataset="random", seed=seed) for seed in (1, 1, 2))
    assert len(data.train) == len(data.eval) == 64
    rows = data.train.__getitems__(range(64))
    assert all(torch.equal(values, again.train.__getitems__(range(64))[name]) for name, values in rows.items())
    main = "pixel_values" if task.startswith("image") else "input_ids"
    assert not torch.equal(rows[main], other.train.__getitems__(range(64))[main])
    assert torch.equal(rows[main], data.eval.__getitems__(range(64))[main])
    assert "evaluated on the training samples" in data.description["notes"][0]
    batch = data.collate(rows)
    assert set(batch) == columns  # no attention_mask: nothing is padded
    if main == "input_ids":
        assert int(batch["input_ids"].min()) >= 4
        assert int(batch["input_ids"].max()) < BERT.vocab_size
    if "classification" in task:
        assert data.num_labels == (10 if task.startswith("image") else 7)
        assert 1 < len(batch["labels"].unique()) <= data.num_labels
        assert int(batch["labels"].max()) < data.num_labels


# Files

LINES = [f"the quick brown fox number {index} jumps over the lazy dog " * (1 + index % 3) for index in range(60)]


@pytest.fixture
def reviews(tmp_path):
    """60 rows with string labels, the same in each format."""
    rows = [{"review": line, "label": ("good", "bad", "fair")[index % 3]} for index, line in enumerate(LINES)]
    table = datasets.Dataset.from_list(rows)
    table.to_csv(tmp_path / "reviews.csv")
    table.to_parquet(tmp_path / "reviews.parquet")
    table.to_json(tmp_path / "reviews.jsonl")
    return tmp_path


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_labelled_files(cache, reviews, suffix):
    data = load(cache, task="sequence-classification", dataset=str(reviews / f"reviews.{suffix}"), max_length=24)
    assert (len(data.train), len(data.eval)) == (54, 6)
    assert (data.num_labels, data.labels) == (3, ["bad", "fair", "good"])
    batch = data.collate(data.train.__getitems__(range(54)))
    mask = batch["attention_mask"]
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(54, 24), (54,)}
    # The first sentence is short and padded, the third is cut at 24.
    assert set(mask.sum(1).tolist()) > {24}
    assert torch.equal(mask == 0, batch["input_ids"] == data.tokenizer.pad_token_id)
    text = data.tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True)
    assert text == LINES[0].strip()
    assert data.labels[batch["labels"][0]] == "good"


def test_labelled_text_that_needs_no_padding_has_no_mask(cache, reviews):
    data = load(cache, task="sequence-classification", dataset=str(reviews / "reviews.csv"), max_length=8)
    assert set(data.collate(data.train.__getitems__([0, 1]))) == {"input_ids", "labels"}


def test_a_text_file_and_a_folder_with_splits(cache, tmp_path):
    (tmp_path / "train.txt").write_text("\n".join(LINES))
    data = load(cache, dataset=str(tmp_path / "train.txt"), max_length=16)
    assert data.train.column("input_ids").shape == (len(data.train), 16)
    (tmp_path / "test.txt").write_text("\n".join(f"another sentence about cat {index}" for index in range(20)))
    (tmp_path / "latest.txt").write_text("\n".join(LINES))  # "test" inside a word is no split
    split = load(cache, dataset=str(tmp_path), max_length=16)
    words = split.tokenizer.decode(split.eval.column("input_ids").reshape(-1).tolist())
    assert "dog" not in words
    assert len(split.train) > 1.8 * len(data.train)


def test_a_changed_file_is_read_again(cache, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(LINES))
    before = load(cache, dataset=str(path), max_length=16)
    path.write_text("\n".join(LINES * 2))
    assert len(load(cache, dataset=str(path), max_length=16).train) > 1.5 * len(before.train)


def test_limits_choose_from_all_rows(cache, tmp_path):
    """A set sorted by label must not shrink to its first label."""
    rows = [{"text": line, "label": index // 30} for index, line in enumerate(LINES)]
    datasets.Dataset.from_list(rows).to_json(tmp_path / "sorted.jsonl")
    data = load(
        cache,
        task="sequence-classification",
        dataset=str(tmp_path / "sorted.jsonl"),
        max_train_samples=20,
        max_eval_samples=2,
    )
    assert (len(data.train), len(data.eval), data.num_labels) == (20, 2, 2)
    assert set(data.train.column("labels").tolist()) == {0, 1}
    assert len(load(cache, max_length=64, max_train_samples=5).train) == 5


# Images


def write_idx(path, array):
    content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_digits(folder, name, count, ending=""):
    images = np.arange(count * 64).reshape(count, 8, 8) % 251
    write_idx(folder / f"{name}-images-idx3-ubyte{ending}", images)
    write_idx(folder / f"{name}-labels-idx1-ubyte{ending}", np.arange(count) % 4)
    return images


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_with_one_set_is_split(cache, tmp_path, ending):
    images = write_digits(tmp_path, "t10k", 50, ending)
    config = SimpleNamespace(image_size=8, num_channels=1, num_labels=10)
    data = load(cache, task="image-classification", config=config, dataset=str(tmp_path))
    assert (len(data.train), len(data.eval), data.num_labels) == (45, 5, 4)
    served = np.concatenate([data.train.column("pixel_values"), data.eval.column("pixel_values")])
    # Same size in and out: the very pixels, each image once.
    assert {row.tobytes() for row in served} == {row.astype(np.uint8).tobytes() for row in images}
    kept, _ = split_rows(50, 0.1, seed=42)
    assert np.array_equal(data.train.column("labels"), kept % 4)
    assert np.array_equal(data.train.column("pixel_values"), images[kept].reshape(45, 64))


def test_idx_with_both_sets_uses_them(cache, tmp_path):
    write_digits(tmp_path, "train", 30)
    write_digits(tmp_path, "t10k", 12, ".gz")
    data = load(cache, task="image-classification", dataset=str(tmp_path))
    assert (len(data.train), len(data.eval)) == (30, 12)
    assert data.train.column("pixel_values").shape == (30, 784)


def test_broken_idx_files_are_named(cache, tmp_path):
    write_digits(tmp_path, "train", 6)
    labels = tmp_path / "train-labels-idx1-ubyte"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="train-labels.*do not match its header"):
        load(cache, task="image-classification", dataset=str(tmp_path))
    labels.write_bytes(b"\x89PNG" + whole)
    with pytest.raises(DataError, match="not an IDX file"):
        load(cache, task="image-classification", dataset=str(tmp_path))
    write_idx(labels, np.zeros(5))
    with pytest.raises(DataError, match="do not belong together"):
        load(cache, task="image-classification", dataset=str(tmp_path))
    labels.unlink()
    with pytest.raises(DataError, match="labels of the set train are missing"):
        load(cache, task="image-classification", dataset=str(tmp_path))
    (tmp_path / "cut-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"x" * 1000)[:-20])
    with pytest.raises(DataError, match="cut-images.*cannot be read"):
        read_idx(tmp_path / "cut-images-idx3-ubyte.gz")


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"no MNIST at {MNIST}; set ZEROLAB_MNIST to a folder of its IDX files")
def test_real_mnist(cache):
    data = load(cache, task="image-classification", dataset=str(MNIST))
    assert len(data.train) + len(data.eval) >= 10_000
    assert data.num_labels == 10
    # The well-known mean and deviation of the 60,000 training images.
    assert data.collate.mean[0] == pytest.approx(0.1307, abs=0.005)
    assert data.collate.std[0] == pytest.approx(0.3081, abs=0.005)


def test_digits_are_the_default_and_normalized(cache):
    data = load(cache, task="image-classification")
    assert (data.description["name"], len(data.train), len(data.eval)) == ("digits", 1617, 180)
    batch = data.collate(data.train.__getitems__(range(1617)))
    assert batch["pixel_values"].shape == (1617, 1, 28, 28)
    assert batch["pixel_values"].dtype == torch.float32
    assert float(batch["pixel_values"].mean()) == pytest.approx(0, abs=1e-3)
    assert float(batch["pixel_values"].std()) == pytest.approx(1, abs=1e-3)
    assert np.bincount(data.train.column("labels")).min() > 100


def test_parquet_of_images_of_several_sizes(cache, tmp_path):
    pictures = [Image.new("RGB", (10 + index % 3, 12), (index, 2 * index, 0)) for index in range(20)]
    rows = datasets.Dataset.from_dict(
        {"image": pictures, "label": [index % 2 for index in range(20)]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["even", "odd"])}),
    )
    rows.to_parquet(tmp_path / "train.parquet")
    config = SimpleNamespace(image_size=(6, 8), num_channels=3, num_labels=2)
    data = load(cache, task="image-classification", config=config, dataset=str(tmp_path), eval_fraction=0.2)
    assert (len(data.train), len(data.eval), data.labels) == (16, 4, ["even", "odd"])
    kept, _ = split_rows(20, 0.2, seed=42)
    pixels = data.train.column("pixel_values").reshape(16, 3, 6, 8)
    # One color each, so that resizing changes nothing and the order is visible.
    expected = np.stack([kept, 2 * kept, 0 * kept], axis=1)[:, :, None, None]
    assert np.array_equal(pixels, np.broadcast_to(expected, pixels.shape))
    assert np.array_equal(data.train.column("labels"), kept % 2)
    assert data.collate(data.train.__getitems__([0, 1]))["pixel_values"].shape == (2, 3, 6, 8)


def test_resize_all_equals_resize_each_and_converts_channels():
    images = np.random.default_rng(0).integers(256, size=(5, 3, 9, 7), dtype=np.uint8)
    together = resize(images, (3, 12, 14))
    assert (together.shape, together.dtype) == ((5, 3, 12, 14), np.uint8)
    for index in range(5):
        assert np.array_equal(resize(images[index : index + 1], (3, 12, 14))[0], together[index])
    gray = np.array(Image.fromarray(images[0].transpose(1, 2, 0)).convert("L"))
    assert np.abs(resize(images, (1, 9, 7))[0, 0].astype(int) - gray).max() <= 1
    assert np.array_equal(resize(images[:, :1], (3, 9, 7)), images[:, [0, 0, 0]])
    with pytest.raises(DataError, match="2 channels"):
        resize(images[:, :2], (3, 9, 7))


def test_augmentation_moves_training_images_alone(cache):
    plain, moved = (
        load(cache, task="image-classification", dataset="digits", augment=augment) for augment in (False, True)
    )
    for part, equal in (("train", False), ("eval", True)):
        one, two = (data.collate(getattr(data, part).__getitems__(range(32))) for data in (plain, moved))
        assert torch.equal(one["labels"], two["labels"])
        assert torch.equal(one["pixel_values"], two["pixel_values"]) is equal
    rows = moved.train.__getitems__(range(32))
    assert torch.equal(moved.collate(rows)["pixel_values"], moved.collate(rows)["pixel_values"])


def test_augmentation_keeps_the_image_nearly_in_place():
    square = torch.zeros(64, 1, 28, 28, dtype=torch.uint8)
    square[:, :, 9:19, 9:19] = 255
    collate = ImageCollator((1, 28, 28), (0.0,), (1.0,), 0)
    rows = {"pixel_values": square.flatten(1), "labels": torch.zeros(64), "augment": torch.ones(64, dtype=torch.bool)}
    pixels = collate(rows)["pixel_values"][:, 0]
    weight = pixels.sum((1, 2))
    assert float((weight - 100).abs().max()) < 3  # moved and turned, not scaled or cut
    center = (pixels.sum(1) * torch.arange(28)).sum(1) / weight
    assert float((center - 13.5).abs().max()) < 2.3
    assert float(center.std()) > 0.5


# Rows


def test_rows_gather_across_chunks_and_selections():
    parts = [
        in_memory({"x": np.arange(n * 3, dtype=np.int32).reshape(n, 3) + 100 * n, "y": np.arange(n)})
        for n in (4, 1, 7)
    ]
    whole = datasets.concatenate_datasets(parts)
    expected = np.concatenate([part.data.table["x"].combine_chunks().flatten().to_numpy() for part in parts])
    rows = Rows(whole)
    assert len(rows.dataset.data.table["x"].chunks) == 3
    order = [11, 0, 4, 5, 4, -1, 3]
    assert np.array_equal(rows.__getitems__(order)["x"], expected.reshape(12, 3)[order])
    assert np.array_equal(Rows(whole.select([8, 2, 5])).column("x"), expected.reshape(12, 3)[[8, 2, 5]])
    assert np.array_equal(Rows(whole.select(range(3, 9))).column("x"), expected.reshape(12, 3)[3:9])
    assert np.array_equal(rows.column("x", limit=5), expected.reshape(12, 3)[:5])
    with pytest.raises(IndexError):
        rows[12]
    assert rows[-1]["x"].tolist() == expected.reshape(12, 3)[-1].tolist()


def test_rows_stay_on_disk_and_pickle_without_their_views(cache):
    rows = load(cache, task="image-classification", dataset="digits").train
    rows.__getitems__([0])
    assert isinstance(rows.dataset.data, datasets.table.MemoryMappedTable)
    assert not any(view.flags.owndata or view.flags.writeable for view in rows._views["pixel_values"])
    small = pickle.dumps(rows)
    assert len(small) < 20_000
    assert torch.equal(pickle.loads(small)[7]["pixel_values"], rows[7]["pixel_values"])


# The Trainer


def test_trainer_trains_on_batches_only(cache, tmp_path, monkeypatch):
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

    from zerolab.metrics import build_metrics

    def refuse(self, index):
        raise AssertionError("a sample was taken on its own")

    batches_taken = []
    take = Rows.__getitems__
    monkeypatch.setattr(Rows, "__getitem__", refuse)
    monkeypatch.setattr(Rows, "__getitems__", lambda self, wanted: batches_taken.append(wanted) or take(self, wanted))
    data = load(cache, max_length=64, max_eval_samples=10)
    config = BertConfig(
        vocab_size=BERT.vocab_size, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    compute, preprocess = build_metrics("masked-lm")
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=12,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        use_cpu=True,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = Trainer(
        BertForMaskedLM(config),
        arguments,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collate,
        compute_metrics=compute,
        preprocess_logits_for_metrics=preprocess,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3
    # accelerate reads one batch ahead.
    assert {len(wanted) for wanted in batches_taken} == {8}
    assert 12 <= len(batches_taken) <= 13
    one, two = trainer.evaluate(), trainer.evaluate()
    assert 1 < one["eval_perplexity"] < BERT.vocab_size
    assert one["eval_perplexity"] == two["eval_perplexity"]  # the same masks each time


def test_worker_processes_serve_the_same_batches(cache):
    data = load(cache, max_length=64, max_train_samples=32)
    here, there = (batches(data.train, data.collate, num_workers=workers) for workers in (0, 2))
    assert len(here) == 4
    assert all(torch.equal(a[name], b[name]) for a, b in zip(here, there, strict=True) for name in a)


# What is wrong, and what to do


def test_checking_needs_no_library():
    code = (
        "import sys; from zerolab.data import DataArguments, check_data; check_data(DataArguments(), 'masked-lm');"
        "print([name for name in ('torch', 'datasets', 'transformers', 'numpy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("task", "arguments", "field", "remedy"),
    [
        ("masked-lm", {"dataset": "pydok"}, "--dataset", "did you mean 'pydoc'"),
        ("masked-lm", {"dataset": "./no/such.txt"}, "--dataset", "no such file"),
        ("masked-lm", {"dataset": "lines.txt"}, "--dataset", "no such file"),
        ("masked-lm", {"dataset": "what is this"}, "--dataset", "owner/name"),
        ("masked-lm", {"dataset": "digits"}, "--dataset", "does not fit the task masked-lm. Use pydoc, random"),
        ("image-classification", {"dataset": "pydoc"}, "--dataset", "Use digits, random"),
        ("sequence-classification", {"dataset": "pydoc"}, "--dataset", "Use random"),
        ("masked-lm", {"augment": True}, "--augment", "only images"),
        ("image-classification", {"tokenizer": "bert-base"}, "--tokenizer", "images"),
        ("masked-lm", {"tokenizer": "/no/tokenizer"}, "--tokenizer", "no such folder"),
        ("masked-lm", {"eval_fraction": 1.0}, "--eval_fraction", "between 0 and 1"),
        ("masked-lm", {"mlm_probability": 0.0}, "--mlm_probability", "between 0 and 1"),
        ("masked-lm", {"max_length": 3}, "--max_length", "at least 8"),
        ("masked-lm", {"max_train_samples": 0}, "--max_train_samples", "at least 1"),
        ("masked-ln", {}, "task", "did you mean 'masked-lm'"),
    ],
)
def test_check_finds_it_beforehand(task, arguments, field, remedy):
    ((found_field, value, found_remedy),) = check_data(DataArguments(**arguments), task)
    assert found_field == field
    assert value == str(next(iter(arguments.values()), task))
    assert remedy in found_remedy


def test_check_looks_into_files_and_folders(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "notes.docx").write_text("x")
    (tmp_path / "void").mkdir()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("x")
    (tmp_path / "mixed" / "b.csv").write_text("x")
    write_digits(tmp_path / "void", "train", 2)
    expected = {"empty.txt": "is empty", "notes.docx": "unknown format", "mixed": "mixes formats", "void": "IDX"}
    for name, remedy in expected.items():
        ((_, value, found),) = check_data(DataArguments(dataset=str(tmp_path / name)), "causal-lm")
        assert name in value
        assert remedy in found
    ((_, _, found),) = check_data(DataArguments(dataset=str(tmp_path / "mixed" / "b.csv")), "image-classification")
    assert "parquet or IDX" in found


def test_check_reports_everything_and_is_fast():
    arguments = DataArguments(dataset="pydok", eval_fraction=2, max_length=0, augment=True)
    start = time.perf_counter()
    fields = [problem.field for problem in check_data(arguments, "masked-lm")]
    assert time.perf_counter() - start < 0.2
    assert fields == ["--eval_fraction", "--max_length", "--dataset", "--augment"]
    assert check_data(DataArguments(dataset="owner/name"), "masked-lm") == []


def test_an_unreachable_hub_says_what_works_instead(cache, monkeypatch):
    monkeypatch.setattr(zerolab.data.sources, "hub_answers", lambda *args: False)
    start = time.perf_counter()
    with pytest.raises(DataError, match="cannot be reached.*local file.*pydoc, digits, random") as found:
        load(cache, task="image-classification", dataset="zerolab-tests/never-downloaded")
    assert time.perf_counter() - start < 5  # datasets alone retries for 23 s
    assert found.value.problem.field == "--dataset"
    assert isinstance(found.value, ValueError)
    assert datasets.config.HF_HUB_OFFLINE is bool(os.environ.get("HF_HUB_OFFLINE"))


def test_a_hub_dataset_with_splits(cache, monkeypatch):
    def split(count, label):
        pictures = [Image.new("L", (28, 28), label) for _ in range(count)]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
        return datasets.Dataset.from_dict({"image": pictures, "label": [label] * count}, features=features)

    asked = []
    splits = datasets.DatasetDict(train=split(12, 3), test=split(4, 9))
    monkeypatch.setattr(zerolab.data.sources, "hub_answers", lambda *args: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: asked.append(args) or splits)
    data = load(cache, task="image-classification", dataset="ylecun/mnist", dataset_config="mnist")
    assert asked == [("ylecun/mnist", "mnist")]
    assert (len(data.train), len(data.eval), data.num_labels) == (12, 4, 10)
    assert set(data.eval.column("labels").tolist()) == set(data.eval.column("pixel_values").ravel().tolist()) == {9}
    # With a split named, the other one is left alone.
    held = load(cache, task="image-classification", dataset="ylecun/mnist", dataset_split="train")
    assert (len(held.train), len(held.eval)) == (11, 1)
    assert set(held.eval.column("labels").tolist()) == {3}


def test_a_hub_dataset_without_its_configuration(cache, monkeypatch):
    def refuse(*args):
        raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['cola', 'sst2']")

    monkeypatch.setattr(zerolab.data.sources, "hub_answers", lambda *args: True)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataError, match="--dataset_config not given: .*'cola', 'sst2'"):
        load(cache, dataset="nyu-mll/glue")


def write_rows(folder, **columns):
    datasets.Dataset.from_dict(columns).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        ({"text": ["a"] * 9}, {}, "--label_column.*text"),
        ({"a": ["a"] * 9, "b": ["b"] * 9, "label": [0] * 9}, {}, "--text_column.*a, b, label"),
        ({"text": ["a"] * 9, "label": [0] * 9}, {"text_column": "body"}, "--text_column body.*text, label"),
        ({"text": ["a"] * 9, "label": [-1] * 9}, {}, "label -1"),
        ({"text": ["a"] * 9, "label": [None, 1, 0] * 3}, {}, "no label"),
        ({"text": ["a"] * 9, "label": [0.5] * 9}, {}, "integers or strings"),
        ({"text": ["a"] * 9, "label": [0] * 9}, {"dataset_split": "valid"}, "--dataset_split valid.*train"),
        ({"text": ["a"], "label": [0]}, {}, "too few"),
        ({"text": ["a"] * 9, "label": [0] * 9}, {"max_length": 999}, "--max_length 999.*128"),
    ],
)
def test_unusable_rows_are_explained(cache, tmp_path, columns, arguments, message):
    with pytest.raises(DataError, match=message):
        load(cache, task="sequence-classification", dataset=write_rows(tmp_path, **columns), **arguments)


def test_more_classes_than_declared(cache, tmp_path):
    # ClassLabel refuses 3 on its way in, so it comes as the integer of a file and is declared afterwards.
    rows = datasets.Dataset.from_dict({"label": [0, 3]})
    features = datasets.Features({"label": datasets.ClassLabel(names=["a", "b"])})
    declared = datasets.Dataset(rows.data, info=datasets.DatasetInfo(features=features))
    with pytest.raises(DataError, match="label 3, but only 2 classes"):
        zerolab.data.sources.label_classes([declared], "label")


def test_text_that_fills_no_block_and_words_that_do_not_fit(cache, tmp_path):
    (tmp_path / "short.txt").write_text("one\ntwo\nthree\n")
    with pytest.raises(DataError, match="fills not one sample.*--max_length below 128"):
        load(cache, dataset=str(tmp_path / "short.txt"))
    with pytest.raises(DataError, match="vocab_size 20"):
        load(cache, config=SimpleNamespace(vocab_size=20))
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(DataError, match="broken.jsonl: cannot be read"):
        load(cache, dataset=str(tmp_path / "broken.jsonl"))


def test_too_few_samples_or_classes_for_the_run(cache):
    data = load(cache, task="image-classification", dataset="random", num_random_samples=6)
    assert data.problems(6) == []
    (few,) = data.problems(4, num_processes=2)
    assert "8 samples" in few.remedy
    (classes,) = data.problems(1, config=SimpleNamespace(num_labels=3))
    assert "num_labels of its configuration to 10" in classes.remedy
