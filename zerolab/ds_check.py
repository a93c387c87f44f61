"""DeepSpeed's own word on a configuration: its pydantic models, and the top-level keys that it reads."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Mapping
from typing import Any

from zerolab import ds_config
from zerolab.problems import Problem, did_you_mean


def find_problems(config: Mapping[str, Any]) -> list[Problem]:
    """Unknown keys at any level and values that DeepSpeed's models refuse.

    DeepSpeed ignores unknown keys at the top level without a word, so a misspelt "gradient_cliping" trains without
    clipping; its sections are pydantic models, which refuse them at `deepspeed.initialize`, after the model is built.
    """
    problems = []
    known = known_keys()
    for key in config:
        if key not in known and not key.startswith("_comment"):
            remedy = f"{did_you_mean(key, known)}DeepSpeed reads no such key and would ignore it"
            problems.append(Problem(f"{key} in the JSON", json.dumps(config[key], default=str)[:80], remedy))
    for section, model in _section_models().items():
        values = config.get(section)
        if isinstance(values, Mapping):
            problems += _section_problems(section, model, values)
    return problems


def known_keys() -> set[str]:
    """The top-level keys that the installed DeepSpeed reads, found by handing it a dictionary that takes notes."""
    from deepspeed.runtime.config import DeepSpeedConfig

    _NoteTaker.keys_read = set()
    DeepSpeedConfig(_NoteTaker(train_batch_size=1, zero_optimization={"stage": 0}))
    # Read by engine and accelerate rather than by DeepSpeedConfig.
    return {key for key in _NoteTaker.keys_read if isinstance(key, str)} | {"optimizer", "scheduler", "amp"}


class _NoteTaker(dict):
    """Notes which keys were asked for. The notes are the class's, since DeepSpeed copies the dictionary."""

    keys_read: set[Any] = set()

    def get(self, key, default=None):
        type(self).keys_read.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        type(self).keys_read.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        type(self).keys_read.add(key)
        return super().__getitem__(key)

    def keys(self):
        return self  # `"aio" in config.keys()` has to take notes too


def _section_models() -> dict[str, type]:
    models = {}
    for section, module, name in (
        ("zero_optimization", "deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
        ("bf16", "deepspeed.runtime.precision_config", "DeepSpeedBF16Config"),
        ("fp16", "deepspeed.runtime.precision_config", "DeepSpeedFP16Config"),
        ("comms_logger", "deepspeed.comm.config", "CommsConfig"),
        ("compile", "deepspeed.compile.config", "CompileConfig"),
    ):
        try:
            models[section] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue  # another DeepSpeed version: it will say itself what it does not like
    return models


def _section_problems(section: str, model: Any, values: Mapping[str, Any]) -> list[Problem]:
    from pydantic import ValidationError

    try:
        # "auto" inside a nested section is dropped by the outer model only; drop it everywhere, as HF fills it later.
        model(**_without_auto(values))
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            path = [str(part) for part in detail["loc"]]
            field = ".".join([section, *path])
            value = json.dumps(ds_config.get(values, ".".join(path)), default=str)[:80]
            if detail["type"] == "extra_forbidden":
                fields = _fields_at(model, path[:-1])
                remedy = f"{did_you_mean(path[-1], fields)}DeepSpeed knows no such key here"
            else:
                remedy = detail["msg"]
            problems.append(Problem(f"{field} in the JSON", value, remedy))
        return problems
    except (ValueError, AssertionError) as error:
        return [Problem(f"{section} in the JSON", json.dumps(dict(values), default=str)[:80], str(error))]
    return []


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            kept[key] = _without_auto(value)
        elif value != "auto":
            kept[key] = value
    return kept


def _fields_at(model: Any, path: list[str]) -> list[str]:
    for part in path:
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next((entry for entry in candidates if hasattr(entry, "model_fields")), model)
    return list(model.model_fields)


def find_machine_problems(plan: ds_config.ZeroPlan, config: Mapping[str, Any], has_cuda: bool) -> list[Problem]:
    """What this machine lacks for the configuration: a compiler for DeepSpeed's ops, libaio for NVMe.

    Args:
        plan: what the configuration asks of ZeRO.
        config: the JSON as read.
        has_cuda: whether torch sees a GPU.
    """
    problems = []
    compilers = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    if not any(name and shutil.which(name) for name in compilers):
        needs = []
        if plan.offload_optimizer and config.get("zero_force_ds_cpu_optimizer", True):
            needs.append("the offloaded optimizer (cpu_adam)")
        if not has_cuda:
            needs.append("communication without a GPU (shm_comm)")
        if needs:
            remedy = f"install g++ (Debian: apt install g++): {' and '.join(needs)} is compiled at the first run"
            problems.append(Problem("C++ compiler", "none found", remedy))
    if "nvme" in (plan.offload_optimizer, plan.offload_param):
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            remedy = "install libaio's headers (Debian: apt install libaio-dev); NVMe offload is built on it"
            problems.append(Problem("libaio", "not found", remedy))
    return problems


def build_ops(plan: ds_config.ZeroPlan, config: Mapping[str, Any]) -> None:
    """Compiles the ops of an offload before anything is measured: the compiler's memory is not the run's.

    DeepSpeed compiles it on first use and keeps it in a cache; later runs load it in a second.

    Raises:
        RuntimeError: the compiler failed; its output is in the message.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    if plan.offload_optimizer and config.get("zero_force_ds_cpu_optimizer") is not False:
        CPUAdamBuilder().load(verbose=False)
    if "nvme" in (plan.offload_optimizer, plan.offload_param):
        AsyncIOBuilder().load(verbose=False)
