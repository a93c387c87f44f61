"""What becomes of "auto" in a DeepSpeed JSON: sizes for the model that runs, and who filled the rest.

Pure, like ds_config. transformers and accelerate fill most of it; the sizes are filled here, since theirs know the
model's width only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from zerolab.ds_config import FLAG_OF_KEY, ZeroPlan, get, leaves, zero_plan


class AutoValue(NamedTuple):
    """An "auto" of the JSON: its key, the value that it got, who gave it and from what."""

    key: str
    value: Any
    filled_by: str
    reason: str


def bucket_elements(plan: ZeroPlan, num_parameters: int, largest: int) -> tuple[int, str]:
    """The size of a communication bucket in elements, with the reason, by stage and for a model of this size.

    DeepSpeed's default of 5e8 elements is a gigabyte in 16 bit, whatever the model; transformers fills hidden size
    squared, which is small for a wide model and nothing for a ViT of width 128. The three rules come from the suite
    `buckets` on an H200 (benchmarks/README.md).

    Args:
        plan: what the configuration asks of ZeRO.
        num_parameters: of the model.
        largest: elements of its largest parameter.
    """
    if plan.stage == 3:
        size, reason = 2**20, "stage 3 keeps the bucket all the time, and a larger one showed no gain"
    elif plan.offload_optimizer:
        size, reason = largest, "the largest parameter fits; one that does not is copied beside the bucket"
    else:
        size, reason = 2**24, "smaller is slower, larger showed no clear gain"
    if size >= num_parameters:
        return max(1, num_parameters), "the whole model fits"
    return size, reason


def fill_sizes(config: Mapping[str, Any], num_parameters: int, largest: int) -> tuple[dict[str, Any], list[AutoValue]]:
    """Fills the sizes that say "auto" for a model of this size: buckets, and the sub-groups of stage 3.

    Args:
        config: the JSON as read.
        num_parameters: of the model.
        largest: elements of its largest parameter.

    Returns:
        A copy of the configuration, and what was filled. The stage-3 persistence threshold stays with transformers.
    """
    filled = copy.deepcopy(dict(config))
    zero = filled.get("zero_optimization", {})
    bucket = bucket_elements(zero_plan(config), num_parameters, largest)
    sizes = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero.get("stage") == 3:
        sizes["stage3_prefetch_bucket_size"] = bucket
        # The step copies gradients to fp32 one sub-group at a time; DeepSpeed's default of 1e9 is all at once.
        sizes["sub_group_size"] = (largest, "the step copies one sub-group at a time; the largest parameter fits")
    autos = []
    for key, (size, reason) in sizes.items():
        if zero.get(key) == "auto":
            zero[key] = size
            autos.append(AutoValue(f"zero_optimization.{key}", size, "zerolab", reason))
    return filled, autos


def explain_auto(raw: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[AutoValue]:
    """Who filled each "auto" of the JSON, by comparing it as read with what the engine was given."""
    values = []
    for key, value in leaves(raw):
        if value != "auto":
            continue
        final = get(resolved, key)
        if key in FLAG_OF_KEY:
            values.append(AutoValue(key, final, "transformers", f"from --{FLAG_OF_KEY[key]}"))
        elif key == "train_batch_size":
            values.append(AutoValue(key, final, "transformers", "micro-batch x accumulation x processes"))
        elif key == "optimizer.params.betas":
            values.append(AutoValue(key, final, "transformers", "from --adam_beta1 and --adam_beta2"))
        elif key.startswith("zero_optimization."):
            values.append(AutoValue(key, final, "transformers", "from the model's hidden size"))
        else:
            values.append(AutoValue(key, final, "accelerate", "its default for this key"))
    return values
