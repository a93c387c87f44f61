"""MemoryCallback inside real Trainers: where phases begin and end, what the logs carry, how runs end."""

import json

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from zerolab import MemoryCallback
from zerolab.failure import failure_of
from zerolab.record import load_record

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
DATA = [{"input_ids": torch.arange(8) + i, "labels": i % 2} for i in range(32)]


class Reporter(TrainerCallback):
    """Stands where the integrations of `report_to` stand: before the callbacks of the user."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


class Witness(TrainerCallback):
    """Notes the meter's phase at each event."""

    def __init__(self, callback):
        self.callback = callback
        self.seen = []

    def note(self, event):
        self.seen.append((event, self.callback.meter.phase))

    def on_substep_end(self, *args, **kwargs):
        self.note("substep_end")

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.note("pre_optimizer_step")

    def on_step_end(self, *args, **kwargs):
        self.note("step_end")

    def on_prediction_step(self, *args, **kwargs):
        self.note("prediction_step")

    def on_save(self, *args, **kwargs):
        self.note("save")


def build(tmp_path, trainer_class=Trainer, callback=None, **arguments):
    callback = callback or MemoryCallback()
    settings = {"max_steps": 4, "report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path / "run"), **{**settings, **arguments})
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**CONFIG))
    reporter, witness = Reporter(), Witness(callback)
    trainer = trainer_class(
        model=model, args=args, train_dataset=DATA, eval_dataset=DATA[:8], callbacks=[reporter, callback, witness]
    )
    return trainer, callback, reporter, witness


def test_each_event_falls_into_the_phase_it_belongs_to(tmp_path):
    trainer, _, _, witness = build(
        tmp_path,
        gradient_accumulation_steps=2,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train()
    one_step = [
        ("substep_end", "backward"),
        ("pre_optimizer_step", "step"),
        ("step_end", "step"),
        ("prediction_step", "eval"),
    ]
    # Saving is over when the Trainer says so, and the run is back in the step.
    assert witness.seen == [*one_step, *one_step, ("save", "step")]
    assert {"init", "forward", "backward", "step", "eval", "save"} <= set(load_record(tmp_path / "run").phases)


def test_memory_is_in_the_logs_that_integrations_see(tmp_path):
    trainer, _, reporter, _ = build(tmp_path)
    trainer.train()
    losses = [logs for logs in reporter.logs if "loss" in logs]
    assert len(losses) == 4
    assert all(logs["host_peak_bytes"] > 2**20 for logs in losses)
    assert losses[-1]["step_seconds"] > 0
    assert [entry["host_peak_bytes"] for entry in trainer.state.log_history if "loss" in entry]


def test_steps_keep_loss_rate_and_norm(tmp_path):
    trainer, callback, _, _ = build(tmp_path)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [step.loss for step in callback.record.steps] == [entry["loss"] for entry in history]
    assert [step.learning_rate for step in callback.record.steps] == [entry["learning_rate"] for entry in history]
    assert all(step.grad_norm > 0 for step in callback.record.steps)


def test_the_callback_changes_nothing_in_the_training(tmp_path):
    trainer, _, _, _ = build(tmp_path / "a", seed=1)
    trainer.train()
    torch.manual_seed(0)
    args = TrainingArguments(
        str(tmp_path / "b"),
        max_steps=4,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        seed=1,
        disable_tqdm=True,
    )
    plain = Trainer(model=BertForSequenceClassification(BertConfig(**CONFIG)), args=args, train_dataset=DATA)
    plain.train()
    for ours, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_callback_added_after_the_trainer_was_built_works(tmp_path):
    trainer, first, _, _ = build(tmp_path)
    late = MemoryCallback(folder=tmp_path / "late")
    (tmp_path / "late").mkdir()
    trainer.remove_callback(first)
    trainer.add_callback(late)
    trainer.train()
    assert load_record(tmp_path / "late").status == "trained"


class OutOfMemory(Trainer):
    def compute_loss(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 11.76 GiB of which "
                "512.00 MiB is free. Including non-PyTorch memory, this process has 11.20 GiB memory in use."
            )
        return super().compute_loss(*args, **kwargs)


def test_running_out_of_memory_is_a_result(tmp_path):
    trainer, _, _, _ = build(tmp_path, OutOfMemory)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    record = load_record(tmp_path / "run")
    assert record.status == "oom"
    assert record.failure.phase == "forward"
    assert (record.failure.requested_bytes, record.failure.free_bytes) == (5 * 2**29, 2**29)
    assert record.failure.total_bytes == round(11.76 * 2**30)
    assert len(record.steps) == 2


class Diverging(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * float("nan")


def test_a_loss_that_is_not_a_number_is_diverged(tmp_path):
    trainer, _, _, _ = build(tmp_path, Diverging, logging_nan_inf_filter=False)
    trainer.train()
    record = load_record(tmp_path / "run")
    assert record.status == "diverged"
    assert [(step.loss, step.finite) for step in record.steps] == [(None, False)] * 4
    json.loads((tmp_path / "run" / "record.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), MemoryError("no RAM")])
def test_other_ways_to_run_out_of_memory(tmp_path, error):
    class Failing(Trainer):
        def compute_loss(self, *args, **kwargs):
            raise error

    trainer, _, _, _ = build(tmp_path, Failing)
    with pytest.raises(type(error)):
        trainer.train()
    assert load_record(tmp_path / "run").status == "oom"


def test_an_error_is_kept_without_sizes_that_it_does_not_have():
    failure = failure_of(ValueError("wrong shape"), "forward")
    assert (failure.type, failure.message, failure.requested_bytes) == ("ValueError", "wrong shape", None)


def test_resuming_is_a_phase_and_goes_on_in_the_same_folder(tmp_path):
    trainer, _, _, _ = build(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    trainer.train()
    (tmp_path / "run" / "record.json").unlink()
    again, callback, _, _ = build(tmp_path, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    record = load_record(tmp_path / "run")
    assert "resume" in record.phases
    assert [step.step for step in record.steps] == [3, 4]


def test_a_folder_that_has_a_record_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text("mine")
    trainer, callback, _, _ = build(tmp_path)
    trainer.train()
    assert (tmp_path / "run" / "record.json").read_text() == "mine"
    assert callback.folder == tmp_path / "run-2"
    assert load_record(callback.folder).status == "trained"


def test_nothing_private_is_in_the_record(tmp_path):
    trainer, callback, _, _ = build(tmp_path, run_name="secret-project", hub_token="hf_secret")
    trainer.train()
    content = json.loads((tmp_path / "run" / "record.json").read_text())
    content.pop("command")  # the command line as typed; what shares a record has to leave it out
    text = json.dumps(content)
    assert "hf_secret" not in text
    assert "secret-project" not in text
    assert str(tmp_path) not in text
