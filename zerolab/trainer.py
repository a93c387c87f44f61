"""The Trainer of run_zero.py: the plain one, with smaller parameter groups where ZeRO copies group by group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback


class ZeroTrainer(Trainer):
    """A Trainer whose optimizer groups can be limited in size, and whose bar shows the loss instead of printing it.

    At its step, ZeRO-1 and ZeRO-2 flatten the gradients of one parameter group and copy them to fp32: six bytes more
    for each parameter of the group, on top of sixteen for each of the model. The Trainer makes two groups, with and
    without weight decay, and nearly everything is in the first. Smaller groups with the same settings compute the same
    update with a smaller copy.

    Args:
        max_group_elements: split groups above so many elements; None leaves them as they are.
    """

    def __init__(self, *args: Any, max_group_elements: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.max_group_elements = max_group_elements
        for plain, quiet in ((ProgressCallback, _LossInBar), (PrinterCallback, _Silent)):
            if self.pop_callback(plain) is not None:
                self.add_callback(quiet)

    def create_optimizer(self, model=None):
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh and self.max_group_elements is not None:
            # Before the first step an optimizer has no state yet, and each group carries its own settings.
            optimizer.param_groups = split_groups(optimizer.param_groups, self.max_group_elements)
        return optimizer


def split_groups(groups: Iterable[dict[str, Any]], max_elements: int) -> list[dict[str, Any]]:
    """Parameter groups of at most `max_elements` elements, or of one parameter that is larger by itself.

    Args:
        groups: as an optimizer holds them, `params` beside the settings; their order is kept.
        max_elements: the limit.

    Returns:
        New groups with the same settings; together they hold every parameter once.
    """
    split = []
    for group in groups:
        chunk: list[Any] = []
        size = 0
        for parameter in group["params"]:
            numel = getattr(parameter, "ds_numel", None) or parameter.numel()
            if chunk and size + numel > max_elements:
                split.append({**group, "params": chunk})
                chunk, size = [], 0
            chunk.append(parameter)
            size += numel
        if chunk:
            split.append({**group, "params": chunk})
    return split


class _LossInBar(ProgressCallback):
    """The bar without a printed line for each log: at logging_steps=1 they would bury everything else."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_description(f"loss {logs['loss']:.3f}", refresh=False)


class _Silent(PrinterCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        return None
