"""From a batch of rows to the tensors a model takes.

A collator here has no state. What it draws at random is seeded by the run's seed and the batch's content, so that two
runs (arms of a comparison) see the same masks whatever else draws numbers; so do a resumed run, a worker process and
each evaluation. A shuffled training set gives other batches, hence other masks, in each epoch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

IGNORED = -100
Batch = dict[str, torch.Tensor] | Sequence[dict[str, torch.Tensor]]


def _stacked(batch: Batch) -> dict[str, torch.Tensor]:
    """The columns of a batch, whether it comes as such or as a list of samples."""
    if isinstance(batch, dict):
        return batch
    return {name: torch.stack([torch.as_tensor(sample[name]) for sample in batch]) for name in batch[0]}


def _generator(seed: int, content: torch.Tensor) -> torch.Generator:
    # One number of 32 bits: torch's CPU generator ignores all bits of a seed beyond these.
    checksum = zlib.crc32(content.contiguous().numpy().data, zlib.crc32(str(seed).encode()))
    return torch.Generator().manual_seed(checksum)


def _attention_mask(lengths: torch.Tensor, max_length: int) -> torch.Tensor:
    return (torch.arange(max_length) < lengths[:, None]).long()


@dataclass(frozen=True)
class TextCollator:
    """Rows of `input_ids` int32 [B, S], perhaps `length` [B] (tokens before the padding) and `labels` [B].

    Returns `input_ids` and `labels` as int64, and `attention_mask` int64 [B, S] where the rows have a `length`:
    without padding there is no mask, so that attention takes its fastest kernel.
    For causal-LM labels are the inputs, for sequence classification those of the rows.
    """

    task: str

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        rows = _stacked(batch)
        tensors = {"input_ids": rows["input_ids"].long()}
        if "length" in rows:
            tensors["attention_mask"] = _attention_mask(rows["length"], tensors["input_ids"].shape[1])
        if self.task == "sequence-classification":
            tensors["labels"] = rows["labels"].long()
        else:
            labels = tensors["input_ids"].clone()
            if "length" in rows:
                labels[tensors["attention_mask"] == 0] = IGNORED
            tensors["labels"] = labels
        return tensors


@dataclass(frozen=True)
class MaskingCollator:
    """Rows of `input_ids` int32 [B, S] to a masked-LM batch, all rows at once.

    Of the tokens chosen with `probability`, 80% become `mask_id`, 10% a random token, 10% stay; `labels` int64 [B, S]
    holds the token where chosen, else -100. At least one token of a batch is chosen, if it has an ordinary one.

    Attributes:
        special: tokens never chosen and never drawn, and all ids below `vocab_size` may be drawn otherwise.
    """

    probability: float
    mask_id: int
    vocab_size: int
    special: tuple[int, ...]
    seed: int

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        raw = _stacked(batch)["input_ids"]
        generator = _generator(self.seed, raw)
        ids = raw.long()
        special = torch.tensor(sorted(self.special))
        ordinary = ~torch.isin(ids, special)
        draw = torch.rand(ids.shape, generator=generator)
        chosen = ordinary & (draw < self.probability)
        if not chosen.any() and ordinary.any():
            chosen.view(-1)[torch.where(ordinary, draw, 2.0).argmin()] = True
        fate = torch.rand(ids.shape, generator=generator)
        allowed = self._allowed(special)
        random_ids = allowed[torch.randint(len(allowed), ids.shape, generator=generator)]
        inputs = torch.where(chosen & (fate < 0.8), self.mask_id, ids)
        inputs = torch.where(chosen & (fate >= 0.9), random_ids, inputs)
        return {"input_ids": inputs, "labels": torch.where(chosen, ids, IGNORED)}

    def _allowed(self, special: torch.Tensor) -> torch.Tensor:
        keep = torch.ones(self.vocab_size, dtype=torch.bool)
        keep[special[special < self.vocab_size]] = False
        return keep.nonzero().squeeze(1)


@dataclass(frozen=True)
class ImageCollator:
    """Rows of `pixel_values` uint8 [B, C*H*W] and `labels` [B] to float32 [B, C, H, W] and int64 [B].

    Pixels are scaled to 0..1, then normalized by `mean` and `std` of each channel. Rows marked `augment` are shifted
    by up to a fourteenth of the side (2 of 28 pixels) and rotated by up to 12 degrees before that.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    seed: int

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        rows = _stacked(batch)
        raw = rows["pixel_values"]
        pixels = raw.view(-1, *self.shape).float().div_(255)
        if "augment" in rows and bool(rows["augment"].any()):
            pixels = _moved(pixels, _generator(self.seed, raw))
        mean = torch.tensor(self.mean).view(1, -1, 1, 1)
        std = torch.tensor(self.std).view(1, -1, 1, 1)
        return {"pixel_values": pixels.sub_(mean).div_(std), "labels": rows["labels"].long()}


def _moved(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # In affine_grid's units an image is 2 wide: a fourteenth of the side is 1/7.
    draw = torch.rand((len(pixels), 3), generator=generator) * 2 - 1
    angle, shift = draw[:, 0] * torch.pi / 15, draw[:, 1:] / 7
    cos, sin = angle.cos(), angle.sin()
    # Width and height may differ: without the ratio a rotation would also shear.
    ratio = pixels.shape[-2] / pixels.shape[-1]
    matrix = torch.stack(
        [torch.stack([cos, -sin * ratio, shift[:, 0]], 1), torch.stack([sin / ratio, cos, shift[:, 1]], 1)], 1
    )
    grid = F.affine_grid(matrix, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, align_corners=False)
