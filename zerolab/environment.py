"""What a run ran on and with, read from the live objects: machine, versions, model, arguments, engine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import psutil
import torch

from zerolab.launch import available_cores
from zerolab.launch import world_size as launch_world_size
from zerolab.record import Engine

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "evaluate", "tokenizers", "numpy")


def describe_machine() -> dict[str, Any]:
    """The machine without anything private: no host name, no user, no paths. Sizes in bytes."""
    machine: dict[str, Any] = {
        "cpu": _cpu_name(),
        "num_cores": available_cores(),
        "num_threads": torch.get_num_threads(),
        "host_total_bytes": psutil.virtual_memory().total,
        "platform": f"{platform.system()} {platform.machine()}",
        "num_gpus": torch.cuda.device_count(),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        machine["gpu"] = properties.name
        machine["gpu_total_bytes"] = properties.total_memory
        machine["compute_capability"] = f"{properties.major}.{properties.minor}"
    return machine


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def describe_versions() -> dict[str, str]:
    """The versions that a measurement depends on; packages that are not installed are left out."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """Class and numbers of parameters of a model; under ZeRO-3 whole parameters are counted, not shards."""
    sizes = [(getattr(p, "ds_numel", None) or p.numel(), p.requires_grad) for p in model.parameters()]
    config = getattr(model, "config", None)
    return {
        "class": type(model).__name__,
        "model_type": getattr(config, "model_type", None),
        "num_parameters": sum(size for size, _ in sizes),
        "num_trainable_parameters": sum(size for size, trainable in sizes if trainable),
        "largest_parameter": max((size for size, _ in sizes), default=0),
    }


def describe_arguments(args: Any) -> dict[str, Any]:
    """The TrainingArguments that differ from their defaults, as plain values, without tokens, folders and paths."""
    private = {"output_dir", "logging_dir", "hub_token", "push_to_hub_token", "deepspeed", "run_name", "ds", "dataset"}
    changed: dict[str, Any] = {}
    for name, field in type(args).__dataclass_fields__.items():
        value = getattr(args, name, None)
        if name in private or name.startswith("_") or value == field.default:
            continue
        if isinstance(value, (bool, int, float)) or value is None:
            changed[name] = value
        elif isinstance(value, str):
            changed[name] = str(value)
    return changed


def describe_engine(trainer: Any) -> Engine:
    """Which engine really runs, from the live objects: a configuration may have been dropped on the way."""
    model = trainer.model
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    world_size = launch_world_size()
    wrapper = getattr(trainer.accelerator, "deepspeed_engine_wrapped", None)
    if wrapper is None:
        return Engine(
            name="none",
            optimizer_class=_class_name(trainer.optimizer),
            precision=f"{_autocast(trainer.args)}",
            attention=attention,
            world_size=world_size,
        )
    engine = wrapper.engine
    zero = engine._config.zero_config
    devices = {}
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name, None)
        device = getattr(section, "device", None)
        device = str(getattr(device, "value", device)) if device is not None else None
        devices[name] = None if device in (None, "none") else device
    stage = engine.zero_optimization_stage()
    if stage < 3:
        devices["offload_param"] = None
    return Engine(
        name="deepspeed",
        zero_stage=stage,
        optimizer_class=_class_name(getattr(engine, "basic_optimizer", None) or engine.optimizer),
        wrapper_class=_class_name(engine.optimizer),
        precision=str(next(engine.module.parameters()).dtype).removeprefix("torch."),
        attention=attention,
        world_size=engine.world_size,
        **devices,
    )


def _class_name(value: Any) -> str | None:
    if value is None:
        return None
    inner = getattr(value, "optimizer", None)
    # accelerate wraps the optimizer; the class inside is the one that steps.
    if type(value).__name__ in ("AcceleratedOptimizer", "DeepSpeedOptimizerWrapper") and inner is not None:
        value = inner
    return type(value).__name__


def _autocast(args: Any) -> str:
    if getattr(args, "bf16", False):
        return "float32 with bfloat16 autocast"
    if getattr(args, "fp16", False):
        return "float32 with float16 autocast"
    return "float32"
