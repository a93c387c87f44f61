"""A DeepSpeed JSON: found by name or path, read, and checked against the flags.

Pure: plain dictionaries in, plain values and problems out; no torch. DeepSpeed's own validation is in ds_check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerolab.problems import Problem, did_you_mean

CONFIG_DIR = Path(__file__).resolve().parent.parent / "ds_configs"
NONE = "none"

# The keys whose value TrainingArguments also holds, with the flag that holds it. transformers fills "auto" from the
# flag and stops at train() when the two differ.
FLAG_OF_KEY = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
# What DeepSpeed reads without a model of its own that would check the type; "auto" is always allowed.
_POSITIVE_INTEGERS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BOOLEANS = ("bf16.enabled", "fp16.enabled", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer")
_BETAS = ("adam_beta1", "adam_beta2")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class ZeroPlan(NamedTuple):
    """What a configuration asks of ZeRO, in plain values."""

    stage: int
    offload_optimizer: str | None
    offload_param: str | None

    def text(self) -> str:
        """`stage 2, optimizer on cpu`."""
        words = [f"stage {self.stage}"]
        if self.offload_optimizer:
            words.append(f"optimizer on {self.offload_optimizer}")
        if self.offload_param:
            words.append(f"parameters on {self.offload_param}")
        return ", ".join(words)


def shipped_names() -> list[str]:
    """The bare names of the configurations in ds_configs/, sorted."""
    return sorted(path.stem for path in CONFIG_DIR.glob("*.json"))


def find_config(spec: str) -> Path | Problem | None:
    """Where a configuration is: a file, or a bare name in ds_configs/; None for `none`, a problem for neither."""
    if spec == NONE:
        return None
    path = Path(spec).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return Problem("--ds", spec, f"a folder; name a JSON file or one of {', '.join(shipped_names())}, none")
    if path.suffix == "" and path.name == spec:
        shipped = CONFIG_DIR / f"{spec}.json"
        if shipped.is_file():
            return shipped
        names = [*shipped_names(), NONE]
        return Problem("--ds", spec, f"{did_you_mean(spec, names)}the names are {', '.join(names)}; or name a file")
    known = [f"{path.parent / name}.json" for name in shipped_names()]
    return Problem("--ds", spec, f"no such file; {did_you_mean(spec, known)}give a path from the current folder")


def read_config(path: Path) -> dict[str, Any] | Problem:
    """The JSON object in `path`; a problem with line and column where it is malformed, or names a key twice."""
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                twice.append(key)
            seen[key] = value
        return seen

    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        return Problem("--ds", where, f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}")
    except (OSError, UnicodeDecodeError) as error:
        return Problem("--ds", str(path), f"the file cannot be read: {error}")
    if not isinstance(config, dict):
        return Problem("--ds", str(path), "the file has to hold one JSON object, { ... }")
    if twice:
        return Problem("--ds", f"{path}: {', '.join(twice)}", "the key is there twice; keep one of them")
    return config


def get(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key such as `zero_optimization.stage`, or `default` where a part is missing."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) that is not itself an object."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def zero_plan(config: Mapping[str, Any]) -> ZeroPlan:
    """What the configuration asks of ZeRO. Below stage 3, `offload_param` is ignored by DeepSpeed, so it is here."""
    stage = int(get(config, "zero_optimization.stage", 0))
    devices = {}
    for name in ("offload_optimizer", "offload_param"):
        device = get(config, f"zero_optimization.{name}.device", "none")
        devices[name] = None if device in (None, "none", "auto") else str(device)
    if stage < 3:
        devices["offload_param"] = None
        if devices["offload_optimizer"]:
            devices["offload_optimizer"] = "cpu"  # DeepSpeed turns nvme into cpu below stage 3 without a word
    if stage < 1:
        devices["offload_optimizer"] = None
    return ZeroPlan(stage, devices["offload_optimizer"], devices["offload_param"])


def find_problems(config: Mapping[str, Any], flags: Mapping[str, Any], world_size: int) -> list[Problem]:
    """What makes this JSON unusable with these flags, as far as it shows without DeepSpeed.

    Args:
        config: the JSON as read, "auto" and all.
        flags: the TrainingArguments flags that the user typed, with their values; not the defaults.
        world_size: the number of processes.
    """
    problems = []
    for key, value in leaves(config):
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            problems.append(Problem(f"{key} in the JSON", json.dumps(value), f"a number in quotes; write {value}"))
    problems += _wrong_types(config)
    for section in ("optimizer", "scheduler"):
        if not isinstance(config.get(section, {}), Mapping):
            remedy = 'write an object, {"type": ..., "params": {...}}, or leave it out'
            problems.append(Problem(f"{section} in the JSON", json.dumps(config[section]), remedy))
    if not isinstance(config.get("zero_optimization", {}), Mapping):
        value = json.dumps(config["zero_optimization"])
        return [*problems, Problem("zero_optimization in the JSON", value, 'write an object, {"stage": 2}')]
    if "zero_optimization" not in config:
        remedy = 'add "zero_optimization": {"stage": 0}; accelerate refuses a JSON without it'
        problems.append(Problem("zero_optimization in the JSON", "missing", remedy))
    stage = get(config, "zero_optimization.stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        problems.append(Problem("zero_optimization.stage in the JSON", json.dumps(stage), "0, 1, 2 or 3"))
    for name in ("offload_optimizer", "offload_param"):
        if get(config, f"zero_optimization.{name}.device") == "nvme":
            problems += _nvme_problems(config, name)
    if get(config, "bf16.enabled") is True and get(config, "fp16.enabled") is True:
        problems.append(Problem("bf16.enabled and fp16.enabled", "true, true", "one precision; set one to false"))
    if config.get("optimizer") and flags.get("optim"):
        remedy = "the JSON names an optimizer, which then runs; leave out one of the two"
        problems.append(Problem("--optim", str(flags["optim"]), remedy))
    return problems + _contradictions(config, flags, world_size)


def _wrong_types(config: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for key in (*_POSITIVE_INTEGERS, *_BOOLEANS, "gradient_clipping"):
        value = get(config, key, "auto")
        if isinstance(value, str):
            if value != "auto" and not _NUMBER.fullmatch(value.strip()):
                problems.append(Problem(f"{key} in the JSON", json.dumps(value), 'a value of its kind, or "auto"'))
        elif key in _POSITIVE_INTEGERS:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problems.append(
                    Problem(f"{key} in the JSON", json.dumps(value), 'a whole number from 1 on, or "auto"')
                )
        elif key in _BOOLEANS:
            if not isinstance(value, bool):
                problems.append(Problem(f"{key} in the JSON", json.dumps(value), 'true, false or "auto"'))
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            problems.append(Problem(f"{key} in the JSON", json.dumps(value), 'a number from 0 on, or "auto"'))
    return problems


def _nvme_problems(config: Mapping[str, Any], name: str) -> list[Problem]:
    key = f"zero_optimization.{name}.nvme_path"
    path = get(config, key)
    if not isinstance(path, str) or path in ("", "auto"):
        remedy = "name a folder on a local NVMe disk: --nvme_path FOLDER fills an 'auto', or write it into a copy"
        return [Problem(f"{key} in the JSON", json.dumps(path), remedy)]
    if not Path(path).is_dir():
        return [Problem(f"{key} in the JSON", str(path), "no such folder; create it on a local NVMe disk")]
    return []


def _contradictions(config: Mapping[str, Any], flags: Mapping[str, Any], world_size: int) -> list[Problem]:
    problems = []
    for key, flag in FLAG_OF_KEY.items():
        value = get(config, key)
        if value in (None, "auto") or flag not in flags or _same(value, flags[flag]):
            continue
        remedy = f'--{flag} says {flags[flag]}; write "auto" in the JSON, or leave out the flag'
        problems.append(Problem(f"{key} in the JSON", json.dumps(value), remedy))
    betas = get(config, "optimizer.params.betas")
    if isinstance(betas, list):
        for flag, value in zip(_BETAS, betas, strict=False):
            if flag in flags and not _same(value, flags[flag]):
                remedy = f'--{flag} says {flags[flag]}; write "auto" in the JSON, or leave out the flag'
                problems.append(Problem("optimizer.params.betas in the JSON", json.dumps(betas), remedy))
    total = config.get("train_batch_size")
    if isinstance(total, int):
        micro = flags.get("per_device_train_batch_size", config.get("train_micro_batch_size_per_gpu"))
        steps = flags.get("gradient_accumulation_steps", config.get("gradient_accumulation_steps"))
        if isinstance(micro, int) and isinstance(steps, int) and total != micro * steps * world_size:
            product = f"{micro} (micro-batch) x {steps} (accumulation) x {world_size} (processes)"
            remedy = f'has to be {product} = {micro * steps * world_size}; write "auto"'
            problems.append(Problem("train_batch_size in the JSON", str(total), remedy))
    return problems


def _same(json_value: Any, flag_value: Any) -> bool:
    if isinstance(json_value, (int, float)) and isinstance(flag_value, (int, float)):
        return float(json_value) == float(flag_value)
    return json_value == flag_value


def values_for_flags(config: Mapping[str, Any], flags: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The flags that the user left alone and whose value the JSON fixes, so that the two agree.

    Without this a JSON with `"train_micro_batch_size_per_gpu": 16` would clash with a default that nobody typed.
    """
    values = {}
    for key, flag in FLAG_OF_KEY.items():
        value = get(config, key)
        if value not in (None, "auto") and flag not in flags and isinstance(value, (bool, int, float)):
            values[flag] = value
    betas = get(config, "optimizer.params.betas")
    for flag, value in zip(_BETAS, betas if isinstance(betas, list) else (), strict=False):
        if isinstance(value, float) and flag not in flags:
            values[flag] = value
    total = config.get("train_batch_size")
    micro_flag, steps_flag = "per_device_train_batch_size", "gradient_accumulation_steps"
    if isinstance(total, int) and micro_flag not in flags and micro_flag not in values:
        steps = values.get(steps_flag, flags.get(steps_flag, 1))
        if total % (steps * world_size) == 0:
            values[micro_flag] = total // (steps * world_size)
    return values
