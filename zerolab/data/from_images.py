"""The data of a run on images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

from zerolab.data import images
from zerolab.data.arguments import DataArguments, DataError, Source
from zerolab.data.collate import ImageCollator
from zerolab.data.result import Data, first, hold_out, random_data
from zerolab.data.rows import Rows, cache_key, prepare
from zerolab.data.sources import LABEL_NAMES, Raw, find_column, label_classes, load_raw

IMAGE_NAMES = ("image", "img", "picture")


def load_images(
    args: DataArguments,
    source: Source,
    task: str,
    config: Any,
    seed: int,
    tokenizer_source: str | None,
    cache_dir: Path,
) -> Data:
    """See `load_data`."""
    shape = images.image_shape(config)
    if source == ("built-in", "random", ()):
        return _random(args, config, shape, seed)
    names: list[str] | None = None
    if source.kind in ("built-in", "idx"):
        raw, array_shape, num_labels = _arrays(source)
        raw = hold_out(raw, args, seed)
        settings: list[Any] = [raw.identity, list(shape)]
        function = images.resized_arrays(array_shape, shape)
    else:
        raw, column = _with_pictures(hold_out(load_raw(source, args, cache_dir), args, seed))
        label = find_column(raw.train, args.label_column, LABEL_NAMES, "--label_column")
        classes, names = label_classes([raw.train, raw.eval], label)
        num_labels = len(classes)
        settings = [raw.identity, list(shape), column, label, list(classes.items())]
        function = images.decoded(column, label, classes, shape)
    features = images.features_of(shape)
    train, held = (
        prepare(rows, function, features, cache_key("images", name, *settings), cache_dir)
        for name, rows in (("train", raw.train), ("eval", raw.eval))
    )
    train_rows = Rows(first(train, args.max_train_samples), _extra(args))
    processor = _image_processor(tokenizer_source)
    mean, std = images.statistics(train_rows, shape)
    if processor is not None and len(getattr(processor, "image_mean", None) or ()) == shape[0]:
        # Pretrained weights expect the pixels that they were trained on.
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    return Data(
        train=train_rows,
        eval=Rows(first(held, args.max_eval_samples)),
        collate=ImageCollator(shape, mean, std, seed),
        tokenizer=processor,
        num_labels=num_labels,
        labels=names,
        description={
            "fingerprint": cache_key(*settings),
            "image_shape": list(shape),
            "mean": list(mean),
            "std": list(std),
            "source_columns": raw.train.column_names,
            "notes": ["training images are shifted and rotated at random"] if args.augment else [],
        },
    )


def _extra(args: DataArguments) -> dict[str, bool] | None:
    return {"augment": True} if args.augment else None


def _random(args: DataArguments, config: Any, shape: tuple[int, int, int], seed: int) -> Data:
    made = images.random_images(args.num_random_samples, shape, config.num_labels, seed)
    collate = ImageCollator(shape, *images.statistics(Rows(made), shape), seed)
    fingerprint = cache_key("random images", args.num_random_samples, list(shape), config.num_labels, seed)
    return random_data(args, made, collate, fingerprint=fingerprint, num_labels=config.num_labels, extra=_extra(args))


def _arrays(source: Source) -> tuple[Raw, tuple[int, ...], int]:
    """Unprepared rows, the shape [C, H, W] of their images, and the number of classes."""
    if source.kind == "idx":
        sets, digest = images.read_idx_folder(source.files, source.name)
    else:
        digits, digest = images.read_digits()
        sets = {"train": digits}
    train, *held = (sets[name] for name in ("train", "t10k") if name in sets)
    array_shape = train.images.shape[1:]
    if held and held[0].images.shape[1:] != array_shape:
        raise DataError("--dataset", source.name, "images of the two sets differ in size. Fetch the files again.")
    num_labels = 1 + max(int(arrays.labels.max()) for arrays in sets.values())
    raw = Raw(images.from_arrays(train), images.from_arrays(held[0]) if held else None, digest)
    return raw, array_shape, num_labels


def _with_pictures(raw: Raw) -> tuple[Raw, str]:
    """The rows with a column that decodes to pictures, and its name.

    Raises:
        DataError: no column holds images; names the columns.
    """
    found = [name for name, feature in raw.train.features.items() if _holds_pictures(feature)]
    column = next((name for name in IMAGE_NAMES if name in found), found[0] if len(found) == 1 else None)
    if column is None:
        columns = ", ".join(raw.train.column_names)
        raise DataError("--dataset", columns, "none of these columns, or more than one, holds images. Name it image.")
    train, held = (rows.cast_column(column, datasets.Image()) for rows in (raw.train, raw.eval) if rows is not None)
    return Raw(train, held, raw.identity), column


def _holds_pictures(feature: Any) -> bool:
    # Parquet that datasets did not write says only that there are bytes.
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)


def _image_processor(name: str | None) -> Any | None:
    if name is None:
        return None
    from transformers import AutoImageProcessor

    from zerolab.data.sources import hub_answers

    folder = Path(name).expanduser()
    try:
        if folder.is_dir():
            return AutoImageProcessor.from_pretrained(str(folder))
        return AutoImageProcessor.from_pretrained(name, local_files_only=not hub_answers(name, "model"))
    except Exception:  # a model without one (ours), or one whose processor needs torchvision
        return None
