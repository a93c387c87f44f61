"""From a command line to a run that can start: all problems at once, and every automatic choice with its reason."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from models import TASKS, ModelError, ModelSource, resolve_model
from zerolab import ds_check, ds_config, launch
from zerolab.arguments import RunArguments, ZeroArguments, read_flags, select
from zerolab.data.arguments import DataArguments, check_data
from zerolab.launch import EnvironmentChoice
from zerolab.problems import BadInput, Problem, did_you_mean
from zerolab.run_folder import default_run_folder


@dataclass
class Request:
    """A run that can start: arguments, sources and the choices behind them."""

    run: RunArguments
    data: DataArguments
    training: dict[str, Any]
    source: ModelSource
    config: Any
    task: str
    configuration: str
    raw_config: dict[str, Any] | None
    resume: bool
    choices: list[EnvironmentChoice] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def training_arguments(self) -> ZeroArguments:
        """Builds the TrainingArguments. They register the DeepSpeed configuration, so they must outlive the model.

        Raises:
            BadInput: transformers or accelerate objects to a value.
        """
        if self.raw_config is not None:
            choice = launch.set_distributed_variables()
            self.choices += [choice] if choice else []
        try:
            return ZeroArguments(**self.training, deepspeed=copy.deepcopy(self.raw_config))
        except (ValueError, TypeError, ImportError) as error:
            raise BadInput([Problem("TrainingArguments", "as given", str(error))]) from error


def parse(argv: Sequence[str], choices: Sequence[EnvironmentChoice] = ()) -> Request:
    """Reads a command line.

    Args:
        argv: without the program's name.
        choices: what `launch.prepare_process` chose.

    Raises:
        BadInput: with every problem found.
        SystemExit: after --help.
    """
    values, typed, problems = read_flags(argv)
    has_cuda = torch.cuda.is_available()
    choices = [choice for choice in choices if has_cuda or "CUBLAS" not in choice.field]
    ds, ds_problems = _configuration_name(values, typed)
    problems += ds_problems
    configuration, raw, found = _read_configuration(ds)
    problems += found
    world_size = launch.world_size()
    if raw is not None:
        _fill_nvme_path(raw, values.get("nvme_path"))
        problems += _configuration_problems(raw, values, typed, world_size, has_cuda)
        adopted = ds_config.values_for_flags(raw, typed, world_size)
        for name, value in adopted.items():
            choices.append(EnvironmentChoice(f"--{name}", str(value), "the JSON", "fixed there, no flag given"))
        values.update(adopted)
        typed = {**typed, **adopted}
    problems += launch.find_rank_problems()
    problems += _number_problems(values)
    problems += _engine_problems(raw, values, has_cuda)
    precision = _choose_precision(values, typed, has_cuda)
    if isinstance(precision, Problem):
        problems.append(precision)
    else:
        choices.append(precision)
    model, model_choice = _choose_model(values, has_cuda)
    choices += [model_choice] if model_choice else []
    data = DataArguments(**select(values, DataArguments))
    source, config, task, found = _check_model(model, values, data.dataset)
    problems += found
    problems += _data_problems(data, task)
    resume = bool(values.get("resume_from_checkpoint"))
    problems += _checkpoint_problems(values.get("resume_from_checkpoint"))
    problems += _choose_output_dir(values, typed, model, configuration, resume)
    if problems:
        raise BadInput(problems)
    assert source is not None and task is not None
    training = {name: value for name, value in select(values, ZeroArguments).items() if name != "deepspeed"}
    run = RunArguments(**{**select(values, RunArguments), "ds": ds, "model": model})
    request = Request(run, data, training, source, config, task, configuration, raw, resume, choices)
    request.warnings = _warnings(raw, training, world_size)
    return request


def _configuration_name(values: dict[str, Any], typed: dict[str, Any]) -> tuple[str, list[Problem]]:
    ds, alias = typed.get("ds"), typed.get("deepspeed")
    if ds is not None and alias is not None and ds != alias:
        return ds, [Problem("--ds and --deepspeed", f"{ds} and {alias}", "two names for one setting; give one")]
    return ds or alias or ds_config.NONE, []


def _read_configuration(ds: str) -> tuple[str, dict[str, Any] | None, list[Problem]]:
    path = ds_config.find_config(ds)
    if isinstance(path, Problem):
        return Path(ds).stem, None, [path]
    if path is None:
        return ds_config.NONE, None, []
    config = ds_config.read_config(path)
    if isinstance(config, Problem):
        return path.stem, None, [config]
    return path.stem, config, []


def _fill_nvme_path(config: dict[str, Any], nvme_path: str | None) -> None:
    for name in ("offload_optimizer", "offload_param"):
        section = ds_config.get(config, f"zero_optimization.{name}")
        if nvme_path and isinstance(section, dict) and section.get("nvme_path") == "auto":
            section["nvme_path"] = nvme_path


def _configuration_problems(
    config: dict[str, Any], values: dict[str, Any], typed: dict[str, Any], world_size: int, has_cuda: bool
) -> list[Problem]:
    problems = ds_config.find_problems(config, typed, world_size)
    problems += ds_check.find_problems(config)
    try:
        plan = ds_config.zero_plan(config)
    except (TypeError, ValueError, OverflowError):
        return problems  # the stage is not a number, which find_problems has said
    problems += ds_check.find_machine_problems(plan, config, has_cuda)
    optim = str(typed.get("optim", "adamw"))
    if plan.offload_optimizer and not optim.startswith(("adamw", "adagrad")):
        remedy = (
            "under offload accelerate replaces it by DeepSpeedCPUAdam without a word; use adamw_torch, or no offload"
        )
        problems.append(Problem("--optim", optim, remedy))
    gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if plan.stage == 3 and values.get("save_model") and ds_config.get(config, gather) is not True:
        remedy = "set it to true, or the saved model has no weights; or give --save_model false"
        problems.append(Problem(f"{gather} in the JSON", str(ds_config.get(config, gather)), remedy))
    if ds_config.get(config, "bf16.bf16_master_weights_and_grads") and not has_cuda:
        remedy = "needs bf16, which the Trainer refuses without a GPU; use the configuration offload here"
        problems.append(Problem("bf16.bf16_master_weights_and_grads in the JSON", "true", remedy))
    return problems


def _number_problems(values: dict[str, Any]) -> list[Problem]:
    """Numbers with which a training cannot start, or would do nothing."""
    problems = []
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        if values[name] < 1:
            problems.append(Problem(f"--{name}", str(values[name]), "give at least 1"))
    if not 0 <= values["learning_rate"] < float("inf"):
        problems.append(Problem("--learning_rate", str(values["learning_rate"]), "give a finite number from 0 on"))
    if values["max_steps"] == 0 or (values["max_steps"] < 0 and not values["num_train_epochs"] > 0):
        field_name = "--max_steps" if values["max_steps"] == 0 else "--num_train_epochs"
        problems.append(Problem(field_name, str(values[field_name[2:]]), "no step would be made; give more than 0"))
    return problems


def _checkpoint_problems(checkpoint: str | None) -> list[Problem]:
    if checkpoint and not (Path(checkpoint) / "trainer_state.json").is_file():
        remedy = "no checkpoint of the Trainer: name a folder checkpoint-N, which --save_strategy steps writes"
        return [Problem("--resume_from_checkpoint", checkpoint, remedy)]
    return []


def _engine_problems(config: dict[str, Any] | None, values: dict[str, Any], has_cuda: bool) -> list[Problem]:
    if config is None:
        return []
    if values.get("use_cpu") or launch.uses_cpu_only():
        field_name = "--use_cpu" if values.get("use_cpu") else "accelerate launch --cpu (or use_cpu in its YAML)"
        remedy = "accelerate drops DeepSpeed silently under it; leave it out (without a GPU, DeepSpeed uses the CPU)"
        return [Problem(field_name, "with --ds", f"{remedy}, or give --ds none")]
    return []


def _choose_precision(values: dict[str, Any], typed: dict[str, Any], has_cuda: bool) -> EnvironmentChoice | Problem:
    """bf16 from compute capability 8.0, else fp16, else fp32; a flag or the JSON overrides.

    `torch.cuda.is_bf16_supported()` also counts emulation, which is slow, so the capability decides.
    """
    asked = [name for name in ("bf16", "fp16") if typed.get(name)]
    if len(asked) == 2:
        return Problem("--bf16 and --fp16", "both", "one precision; leave one of them out")
    if asked:
        if not has_cuda and not values.get("use_cpu"):
            remedy = "the Trainer refuses it without a GPU unless --use_cpu, which drops DeepSpeed; train in fp32 here"
            return Problem(f"--{asked[0]}", "true", remedy)
        return EnvironmentChoice("precision", asked[0], "user", "a flag or the JSON says so")
    if typed.get("bf16") is False or typed.get("fp16") is False:
        return EnvironmentChoice("precision", "fp32", "user", "a flag or the JSON turns 16 bit off")
    if not has_cuda or values.get("use_cpu"):
        return EnvironmentChoice("precision", "fp32", "zerolab", "no GPU in use")
    major, minor = torch.cuda.get_device_capability()
    name = "bf16" if major >= 8 else "fp16"
    values[name] = True
    reason = f"compute capability {major}.{minor}; bf16 needs 8.0"
    return EnvironmentChoice("precision", name, "zerolab", reason)


def _choose_model(values: dict[str, Any], has_cuda: bool) -> tuple[str, EnvironmentChoice | None]:
    if values.get("model"):
        return values["model"], None
    if has_cuda:
        return "bert-120m", EnvironmentChoice("--model", "bert-120m", "zerolab", "the default with a GPU")
    reason = "NO GPU HERE: a smaller preset of the same model, so that it ends in minutes; --model bert-120m forces it"
    return "bert-mini", EnvironmentChoice("--model", "bert-mini", "zerolab", reason)


def _check_model(
    model: str, values: dict[str, Any], dataset: str | None
) -> tuple[ModelSource | None, Any, str | None, list[Problem]]:
    """(source, configuration, task, problems); None for what could not be found out. Builds nothing."""
    problems = []
    task = values.get("task")
    if task is not None and task not in TASKS:
        problems.append(Problem("--task", task, f"{did_you_mean(task, TASKS)}one of {', '.join(TASKS)}"))
        task = None
    try:
        source = resolve_model(model)
        if source.preset is not None and task is None:
            # Importing the model's code takes seconds, and a preset says itself what it is for.
            return source, None, _task_of_preset(source.preset.task, dataset), problems
        from models.loading import fits_task, infer_task, load_config

        config = load_config(source, values["trust_remote_code"])
        task = task or infer_task(source, config)
        if not fits_task(config, task):
            fitting = [name for name in TASKS if fits_task(config, name)]
            remedy = f"a {config.model_type} model has no head for it; it fits {', '.join(fitting) or 'none'}"
            problems.append(Problem("--task", task, remedy))
    except ModelError as error:
        return None, None, task, [*problems, Problem(error.field, error.value, f"{error.problem}. {error.remedy}")]
    return source, config, task, problems


def _task_of_preset(task: str, dataset: str | None) -> str:
    # The course's second text classifies random sequences; on random text a masked-LM has little to learn.
    return "sequence-classification" if task == "masked-lm" and dataset == "random" else task


def _data_problems(data: DataArguments, task: str | None) -> list[Problem]:
    if task is not None:
        return check_data(data, task)
    # The model is not known, so neither is the task: what is wrong for every task is wrong.
    first, *others = ({problem[:2]: problem for problem in check_data(data, name)} for name in TASKS)
    return [problem for key, problem in first.items() if all(key in found for found in others)]


def _choose_output_dir(
    values: dict[str, Any], typed: dict[str, Any], model: str, configuration: str, resume: bool
) -> list[Problem]:
    if not typed.get("output_dir"):
        if resume and isinstance(values["resume_from_checkpoint"], str):
            values["output_dir"] = str(Path(values["resume_from_checkpoint"]).parent)
        else:
            values["output_dir"] = str(default_run_folder(model, configuration))
    folder = Path(values["output_dir"])
    nearest = next(path for path in [folder, *folder.absolute().parents] if path.exists())
    if not nearest.is_dir():
        return [Problem("--output_dir", str(folder), f"{nearest} is a file, not a folder; name another")]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [Problem("--output_dir", str(folder), f"no permission to write in {nearest}; name another folder")]
    return []


def _warnings(config: dict[str, Any] | None, training: dict[str, Any], world_size: int) -> list[str]:
    if config is None:
        return []
    plan = ds_config.zero_plan(config)
    warnings = []
    if plan.stage == 0 and training.get("fp16"):
        warnings.append(
            "fp16 at stage 0 trains wrongly in deepspeed 0.19.8: the loss is not scaled while the gradients are "
            "unscaled. Use bf16, or stage 1, for anything but showing this."
        )
    if plan.stage > 0 and world_size == 1:
        saved = plan.offload_optimizer or plan.offload_param
        warnings.append(
            f"one process: ZeRO stage {plan.stage} has nothing to partition here. "
            + ("Only the offload saves GPU memory." if saved else "It will not save memory over --ds none.")
        )
    if config.get("gradient_clipping") is None:
        warnings.append("gradients are not clipped: the JSON has no gradient_clipping, so --max_grad_norm is ignored")
    return warnings
