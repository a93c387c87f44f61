"""Images to rows of uint8 pixels of the size that the model takes."""

from __future__ import annotations

import gzip
import hashlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch

from zerolab.data.arguments import DataError
from zerolab.data.rows import Rows, in_memory, list_of, to_table

# Enough for a mean and a deviation to three digits; all of a large set would have to be read from disk.
_STATISTICS_ROWS = 10_000


class Arrays(NamedTuple):
    """Images uint8 [n, C, H, W] and labels int32 [n], small enough for memory."""

    images: np.ndarray
    labels: np.ndarray


def read_idx(path: Path) -> np.ndarray:
    """The array of bytes in one IDX file (http://yann.lecun.com/exdb/mnist), gzipped or not.

    Raises:
        DataError: it is not such a file, or shorter or longer than its header says.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError("--dataset", str(path), f"cannot be read: {error}. Fetch the file again.") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError("--dataset", str(path), "not an IDX file of bytes. Fetch the file again.")
    rank = content[3]
    start = 4 + 4 * rank
    shape = np.frombuffer(content[4:start], dtype=">u4").astype(np.int64)
    if len(shape) != rank or len(content) != start + int(shape.prod()):
        remedy = f"{len(content)} bytes do not match its header {shape.tolist()}. Fetch the file again."
        raise DataError("--dataset", str(path), remedy)
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_idx_folder(files: tuple[Path, ...], folder: str) -> tuple[dict[str, Arrays], str]:
    """The sets `train` and `t10k` as far as the folder has them, and the SHA-256 of its files.

    Raises:
        DataError: images without labels or the reverse, different numbers of them, or an unreadable file.
    """
    digest = hashlib.sha256()
    found: dict[str, dict[str, np.ndarray]] = {}
    for file in files:
        digest.update(file.read_bytes())
        name = "t10k" if any(part in file.name for part in ("t10k", "test")) else "train"
        found.setdefault(name, {})["images" if "images" in file.name else "labels"] = read_idx(file)
    sets = {}
    for name, arrays in found.items():
        if len(arrays) < 2:
            missing = ({"images", "labels"} - set(arrays)).pop()
            raise DataError("--dataset", folder, f"the {missing} of the set {name} are missing. Add that file.")
        images, labels = arrays["images"], arrays["labels"]
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not len(labels):
            remedy = f"images {images.shape} and labels {labels.shape} of the set {name} do not belong together."
            raise DataError("--dataset", folder, remedy + " Fetch the files again.")
        sets[name] = Arrays(images[:, None], labels.astype(np.int32))
    return sets, digest.hexdigest()


def read_digits() -> tuple[Arrays, str]:
    """scikit-learn's 1,797 handwritten digits (UCI ML hand-written digits, 8x8), and the SHA-256 of them."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)[:, None]  # they come as 0..16
    labels = data.target.astype(np.int32)
    return Arrays(images, labels), hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()


def random_images(num_rows: int, shape: tuple[int, int, int], num_labels: int, seed: int) -> datasets.Dataset:
    """Noise: `pixel_values` uint8 [n, C*H*W] and `labels` int32 [n], fixed by the seed."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(256, size=(num_rows, int(np.prod(shape))), dtype=np.uint8)
    return in_memory({"pixel_values": pixels, "labels": generator.integers(num_labels, size=num_rows, dtype=np.int32)})


def image_shape(config: Any) -> tuple[int, int, int]:
    """(channels, height, width) that a model's configuration asks for; 3 x 224 x 224 where it does not say."""
    size = getattr(config, "image_size", None) or 224
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = (size, size) if isinstance(size, int) else size
    return int(getattr(config, "num_channels", None) or 3), int(height), int(width)


def resize(images: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [n, C, H, W] to uint8 [n, *shape], in one call for all of them; gray and color are converted.

    Raises:
        DataError: no conversion between these numbers of channels.
    """
    pixels = torch.from_numpy(np.array(images, copy=True))
    have, want = pixels.shape[1], shape[0]
    if have == 3 and want == 1:
        weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
        pixels = (pixels * weights).sum(1, keepdim=True).round().byte()
    elif have == 1:
        pixels = pixels.expand(-1, want, -1, -1)
    elif have != want:
        raise DataError("--dataset", f"{have} channels", f"the model takes {want}. Set its num_channels to {have}.")
    if tuple(pixels.shape[2:]) != shape[1:]:
        pixels = torch.nn.functional.interpolate(
            pixels.contiguous(), size=shape[1:], mode="bilinear", antialias=True, align_corners=False
        )
    return pixels.contiguous().numpy()


def features_of(shape: tuple[int, int, int]) -> datasets.Features:
    """The features of prepared images."""
    length = shape[0] * shape[1] * shape[2]
    return datasets.Features({"pixel_values": list_of("uint8", length), "labels": datasets.Value("int32")})


def from_arrays(arrays: Arrays) -> datasets.Dataset:
    """Unprepared rows in memory: `pixels` uint8 [n, C*H*W], `labels` int32 [n], given out as arrays."""
    pixels = arrays.images.reshape(len(arrays.images), -1)
    return in_memory({"pixels": pixels, "labels": arrays.labels}).with_format("numpy")


def resized_arrays(source_shape: tuple[int, ...], shape: tuple[int, int, int]) -> Any:
    """A function for `prepare` over `from_arrays(...)`."""
    return partial(_resized_arrays, source_shape=source_shape, shape=shape)


def _resized_arrays(batch: dict[str, Any], source_shape: tuple[int, ...], shape: tuple[int, int, int]) -> pa.Table:
    images = np.asarray(batch["pixels"], dtype=np.uint8).reshape(-1, *source_shape)
    return to_table(
        {
            "pixel_values": resize(images, shape).reshape(len(images), -1),
            "labels": np.asarray(batch["labels"], dtype=np.int32),
        }
    )


def decoded(image_column: str, label_column: str, classes: dict[object, int], shape: tuple[int, int, int]) -> Any:
    """A function for `prepare` over rows with a `datasets.Image` column; decodes each image this once."""
    return partial(_decoded, image_column=image_column, label_column=label_column, classes=classes, shape=shape)


def _decoded(
    batch: dict[str, list],
    image_column: str,
    label_column: str,
    classes: dict[object, int],
    shape: tuple[int, int, int],
) -> pa.Table:
    mode = "L" if shape[0] == 1 else "RGB"
    pictures = [picture.convert(mode) for picture in batch[image_column]]
    sizes = np.array([picture.size for picture in pictures])
    pixels = np.empty((len(pictures), *shape), dtype=np.uint8)
    # All pictures of one size at once; in most sets that is all of them.
    for size in np.unique(sizes, axis=0):
        chosen = np.flatnonzero((sizes == size).all(axis=1))
        stack = np.stack([np.asarray(pictures[index]) for index in chosen])
        pixels[chosen] = resize(stack[:, None] if mode == "L" else stack.transpose(0, 3, 1, 2), shape)
    labels = np.array([classes[label] for label in batch[label_column]], dtype=np.int32)
    return to_table({"pixel_values": pixels.reshape(len(pixels), -1), "labels": labels})


def statistics(rows: Rows, shape: tuple[int, int, int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over (at most 10,000) rows, of pixels in 0..1."""
    pixels = rows.column("pixel_values", _STATISTICS_ROWS).reshape(-1, shape[0], shape[1] * shape[2])
    # By histogram: 256 counts a channel are exact and need no float copy of the pixels.
    counts = np.stack([np.bincount(pixels[:, channel].reshape(-1), minlength=256) for channel in range(shape[0])])
    levels = np.arange(256) / 255
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ levels
    std = np.sqrt(share @ levels**2 - mean**2)
    # An even channel would divide by zero.
    return tuple(mean.tolist()), tuple(np.maximum(std, 1e-3).tolist())
