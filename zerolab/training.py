"""The wiring of one run: data, model, Trainer, callback; then training, evaluation, saving, record and report."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from transformers import Trainer, set_seed

from models import ModelError
from models.loading import build_model, load_config
from zerolab import ds_auto, ds_check, ds_config, environment, launch
from zerolab.arguments import ZeroArguments
from zerolab.callback import MemoryCallback
from zerolab.data import Data, DataError, load_data
from zerolab.metrics import build_metrics
from zerolab.problems import BadInput, Problem
from zerolab.record import Record, save_record, start_record
from zerolab.report import plots, text
from zerolab.request import Request
from zerolab.run_folder import make_run_folder
from zerolab.trainer import ZeroTrainer

RESOLVED_CONFIG = "ds_config.json"
MODEL_FOLDER = "model"


@dataclass
class Preparation:
    """A run whose data is ready and whose record has begun; no model has been built."""

    request: Request
    args: ZeroArguments
    config: Any
    data: Data
    folder: Path
    callback: MemoryCallback
    queue: IO[str] | None

    @property
    def is_main(self) -> bool:
        """Whether this process writes: the first rank."""
        return self.args.process_index == 0


def run(request: Request) -> Record:
    """Trains what was asked for and returns the completed record.

    Raises:
        BadInput: the model, the data or TrainingArguments object, before a model is built.
        BaseException: whatever ended the training; its record is complete and its table printed by then.
    """
    prepared = prepare(request)
    try:
        trainer = build_trainer(prepared)
        if prepared.is_main:
            _say(text.render_plan(prepared.callback.record))
        _train(trainer, prepared)
    except BaseException as error:
        prepared.callback.fail(error)
        if isinstance(error, ModelError):
            prepared.callback.record.status = "refused"
        raise
    finally:
        _report(prepared)
    return prepared.callback.record


def prepare(request: Request) -> Preparation:
    """Builds arguments and data, waits for its turn on a shared GPU, makes the run's folder and begins its record.

    Raises:
        BadInput: as `run`.
    """
    args = request.training_arguments()
    config = request.config if request.config is not None else load_config(request.source)
    data = _data(request, config, args)
    if request.raw_config is not None:
        ds_check.build_ops(ds_config.zero_plan(request.raw_config), request.raw_config)
    queue = launch.wait_for_turn()
    folder = Path(str(args.output_dir))
    is_main = args.process_index == 0
    if is_main:
        folder = _make_folder(folder, request.resume)
        args.output_dir = str(folder)
    record = _begin_record(request, args, data)
    callback = MemoryCallback(folder=folder, record=record)
    if is_main:
        save_record(record, folder)
    return Preparation(request, args, config, data, folder, callback, queue)


def _data(request: Request, config: Any, args: ZeroArguments) -> Data:
    tokenizer_source = request.data.tokenizer
    if tokenizer_source is None and request.source.weights == "pretrained":
        tokenizer_source = request.source.path_or_id
    try:
        data = load_data(
            request.data, task=request.task, config=config, seed=args.seed, tokenizer_source=tokenizer_source
        )
    except DataError as error:
        raise BadInput([error.problem]) from error
    if data.num_labels is not None and request.task.endswith("classification"):
        config.num_labels = data.num_labels
        if data.labels:
            config.id2label = dict(enumerate(data.labels))
            config.label2id = {label: number for number, label in enumerate(data.labels)}
    problems = data.problems(args.per_device_train_batch_size, args.world_size, config)
    if problems:
        raise BadInput(problems)
    return data


def _make_folder(folder: Path, resume: bool) -> Path:
    try:
        return make_run_folder(folder, resume=resume)
    except OSError as error:
        raise BadInput([Problem("--output_dir", str(folder), f"cannot be created: {error.strerror}")]) from error


def _begin_record(request: Request, args: ZeroArguments, data: Data) -> Record:
    record = start_record(sys.argv[:])
    source = request.source
    record.configuration = request.configuration
    record.model = {"name": source.spec, "kind": source.kind, "weights": source.weights, "task": request.task}
    record.data = data.description
    record.deepspeed = request.raw_config
    record.arguments = environment.describe_arguments(args)
    record.warnings = list(request.warnings)
    for choice in request.choices:
        record.choose(*choice)
    return record


def build_trainer(prepared: Preparation) -> Trainer:
    """The model and the Trainer around it, with our callback and progress bar."""
    request, data, record = prepared.request, prepared.data, prepared.callback.record
    set_seed(prepared.args.seed)
    model = build_model(request.source, prepared.config, request.task, request.run.trust_remote_code)
    record.model.update(environment.describe_model(model))
    attention = getattr(model.config, "_attn_implementation", None)
    if attention:
        reason = "what the model offers; sdpa takes its kernel (flash, efficient, math) by dtype, mask and card"
        record.choose("attention", attention, "transformers", reason)
    _fill_sizes(prepared.args, record)
    compute_metrics, preprocess_logits = build_metrics(request.task)
    trainer = ZeroTrainer(
        model=model,
        args=prepared.args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collate,
        processing_class=data.tokenizer,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits,
        callbacks=[prepared.callback],
        max_group_elements=_limit_groups(request, record),
    )
    return trainer


def _fill_sizes(args: ZeroArguments, record: Record) -> None:
    """Gives the sizes that say "auto" a value that fits this model, before transformers fills them."""
    holder = getattr(args, "hf_deepspeed_config", None)  # TrainingArguments has it under DeepSpeed only
    if holder is None:
        return
    live = holder.config
    filled, autos = ds_auto.fill_sizes(live, record.model["num_parameters"], record.model["largest_parameter"])
    # The plugin of accelerate holds the same dictionary: change it in place.
    live.clear()
    live.update(filled)
    for auto in autos:
        record.choose(auto.key, auto.value, auto.filled_by, auto.reason)


def _limit_groups(request: Request, record: Record) -> int | None:
    """The largest parameter group in elements, where ZeRO copies group by group on the GPU; None elsewhere."""
    asked = request.run.max_group_elements
    if asked is not None:
        return asked or None
    if request.raw_config is None or request.raw_config.get("optimizer"):
        return None
    plan = ds_config.zero_plan(request.raw_config)
    if plan.stage not in (1, 2) or plan.offload_optimizer:
        return None
    limit = record.model["largest_parameter"]
    reason = f"stage {plan.stage} copies gradients to fp32 one parameter group at a time; the largest parameter fits"
    record.choose("--max_group_elements", limit, "zerolab", reason)
    return limit


def _train(trainer: Trainer, prepared: Preparation) -> None:
    args, record = prepared.args, prepared.callback.record
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    _keep_resolved_config(trainer, prepared.request, record, prepared.folder)
    if args.do_eval and trainer.eval_dataset is not None:
        trainer.evaluate()
    if prepared.request.run.save_model:
        trainer.save_model(str(prepared.folder / MODEL_FOLDER))
        record.saved_model = MODEL_FOLDER


def _keep_resolved_config(trainer: Trainer, request: Request, record: Record, folder: Path) -> None:
    if request.raw_config is None:
        return
    resolved = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    # accelerate silences DeepSpeed's own progress with an infinite steps_per_print, which is no JSON.
    resolved = {key: value for key, value in resolved.items() if value != float("inf")}
    resolved = json.loads(json.dumps(resolved, default=str))
    for auto in ds_auto.explain_auto(request.raw_config, resolved):
        if not any(choice.field == auto.key for choice in record.choices):
            record.choose(auto.key, auto.value, auto.filled_by, auto.reason)
    record.deepspeed = resolved
    if trainer.is_world_process_zero():
        (folder / RESOLVED_CONFIG).write_text(json.dumps(resolved, indent=2) + "\n", encoding="utf-8")


def _report(prepared: Preparation) -> None:
    record = prepared.callback.finish()
    if not prepared.is_main:
        return
    try:
        plots.save_plots(record, prepared.folder)
    except OSError as error:  # a full disk must not cost the table
        print(f"no plots: {error}", file=sys.stderr)
    _say(text.render_run(record, folder=prepared.folder))


def _say(words: str) -> None:
    """Prints, as long as somebody listens: `| head` or a full disk must not end the training."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(words, flush=True)
