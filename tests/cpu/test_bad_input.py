"""Bad input through the user's own command: every problem at once, in seconds, before anything is built or written."""

import json
import time

import pytest

from zerolab.arguments import read_flags
from zerolab.problems import BadInput
from zerolab.request import parse

ACCELERATE = ("accelerate", "launch")


def problems(*argv):
    with pytest.raises(BadInput) as error:
        parse(list(argv))
    return {problem.field: problem for problem in error.value.problems}


@pytest.fixture
def config(tmp_path):
    def write(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_everything_wrong_is_said_at_once_in_under_ten_seconds(launch, tmp_path):
    began = time.monotonic()
    run = launch(
        "--ds", "ofload", "--max_steps", "ten", "--model", "bert-120", "--dataset", "/nowhere/data.txt", "--modle", "x"
    )
    assert time.monotonic() - began < 10
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    message = run.stderr[run.stderr.index("5 problems") :]
    for word in (
        "--ds",
        "did you mean 'offload'",
        "--max_steps",
        "ten",
        "bert-120m",
        "/nowhere/data.txt",
        "--modle",
        "--model",
    ):
        assert word in message
    assert message.count("remedy:") == 5
    assert not run.folder.exists()


def test_under_accelerate_our_message_comes_first_and_whole(launch):
    run = launch("--ds", "ofload", launcher=ACCELERATE)
    assert run.returncode == 1
    ours = run.stderr.index("did you mean 'offload'")
    assert ours < run.stderr.index("Traceback")
    assert "CalledProcessError" in run.stderr


def test_debug_shows_our_traceback(launch):
    run = launch("--ds", "ofload", ZEROLAB_DEBUG="1")
    assert "Traceback" in run.stderr
    assert "BadInput" in run.stderr


def test_deepspeed_that_accelerate_would_drop_is_refused(launch):
    run = launch("--ds", "zero2", launcher=(*ACCELERATE, "--cpu"))
    assert run.returncode == 1
    assert "accelerate drops DeepSpeed silently" in run.stderr
    assert "--use_cpu" in problems("--ds", "zero2", "--use_cpu", "true")


def test_malformed_json_has_line_and_column(config):
    problem = problems("--ds", config('{"zero_optimization": {"stage": 2},\n "bf16": }'))["--ds"]
    assert "line 2, column 10" in problem.remedy


def test_unknown_keys_at_any_level_get_the_nearest(config):
    found = problems(
        "--ds",
        config(
            {
                "zero_optimization": {
                    "stage": 2,
                    "ofload_optimizer": {},
                    "offload_optimizer": {"device": "cpu", "pin": 1},
                },
                "gradient_cliping": 1.0,
                "bf16": {"enable": True},
            }
        ),
    )
    assert "did you mean 'gradient_clipping'" in found["gradient_cliping in the JSON"].remedy
    assert "did you mean 'offload_optimizer'" in found["zero_optimization.ofload_optimizer in the JSON"].remedy
    assert "zero_optimization.offload_optimizer.pin in the JSON" in found
    assert "did you mean 'enabled'" in found["bf16.enable in the JSON"].remedy


def test_a_contradicted_flag_and_a_number_in_quotes(config):
    path = config({"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 8, "train_batch_size": "8"})
    found = problems("--ds", path, "--gradient_accumulation_steps", "2")
    assert found["gradient_accumulation_steps in the JSON"].value == "8"
    assert "write 8" in found["train_batch_size in the JSON"].remedy


def test_a_value_of_the_json_wins_over_a_default_that_nobody_typed(config):
    path = config({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 0.5})
    request = parse(["--ds", path])
    assert request.training["per_device_train_batch_size"] == 16
    assert request.training["max_grad_norm"] == 0.5
    assert {"--per_device_train_batch_size", "--max_grad_norm"} <= {choice.field for choice in request.choices}


def test_two_names_for_one_setting_have_to_agree():
    assert "--ds and --deepspeed" in problems("--ds", "zero2", "--deepspeed", "zero3")
    assert parse(["--deepspeed", "zero2"]).configuration == "zero2"


def test_a_model_that_does_not_fit_the_task():
    assert "image-classification" in problems("--model", "vit-tiny", "--task", "masked-lm")["--task"].remedy


def test_stage_3_that_would_save_no_weights(config):
    path = config({"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0})
    found = problems("--ds", path)
    assert any("stage3_gather_16bit_weights_on_model_save" in field for field in found)
    assert parse(["--ds", path, "--save_model", "false"]).configuration == "config"


def test_no_permission_to_write(tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert "not a folder" in problems("--output_dir", str(occupied / "run"))["--output_dir"].remedy


def test_no_compiler(monkeypatch):
    from zerolab import ds_check, ds_config

    monkeypatch.setattr(ds_check.shutil, "which", lambda name: None)
    plan = ds_config.ZeroPlan(2, "cpu", None)
    problem = ds_check.find_machine_problems(plan, {}, has_cuda=True)[0]
    assert problem.field == "C++ compiler"
    assert "g++" in problem.remedy
    assert ds_check.find_machine_problems(ds_config.ZeroPlan(2, None, None), {}, has_cuda=True) == []


def test_an_unknown_hub_model_offline_is_said_before_anything_is_built():
    problem = problems("--model", "nobody-here/no-such-model")["--model"]
    assert "Hub" in problem.remedy


def test_flags_that_cannot_be_read_do_not_hide_each_other():
    _, _, found = read_flags(["--max_steps", "ten", "--learning_rate", "fast", "--seed", "7"])
    assert [problem.field for problem in found] == ["--max_steps", "--learning_rate"]


def test_fp16_at_stage_0_is_a_warning_and_no_refusal(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    request = parse(["--ds", "baseline", "--fp16"])
    assert any("fp16 at stage 0" in warning for warning in request.warnings)


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16")])
def test_precision_follows_the_card(monkeypatch, capability, expected):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    request = parse(["--ds", "zero2"])
    assert request.training[expected] is True
    choice = next(choice for choice in request.choices if choice.field == "precision")
    assert choice.value == expected
    assert str(capability[0]) in choice.reason
    assert request.run.model == "bert-120m"


def test_without_a_gpu_the_smaller_model_is_named_loudly(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    request = parse([])
    choice = next(choice for choice in request.choices if choice.field == "--model")
    assert choice.value == "bert-mini"
    assert "NO GPU" in choice.reason
    assert "--model bert-120m" in choice.reason


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--per_device_train_batch_size", "0"),
        ("--gradient_accumulation_steps", "0"),
        ("--learning_rate", "nan"),
        ("--max_steps", "0"),
        ("--num_train_epochs", "0"),
        ("--resume_from_checkpoint", "/nowhere/checkpoint-3"),
    ],
)
def test_numbers_and_checkpoints_with_which_nothing_can_start(flag, value):
    assert problems(flag, value)[flag].value.startswith(value[:3])


def test_an_optimizer_that_offload_would_replace_is_refused():
    assert "DeepSpeedCPUAdam" in problems("--ds", "offload", "--optim", "sgd")["--optim"].remedy
    assert parse(["--ds", "zero2", "--optim", "sgd"]).configuration == "zero2"


def test_half_of_the_launchers_variables(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK" in problems("--ds", "none")["WORLD_SIZE"].remedy


@pytest.mark.parametrize("section", [{"optimizer": "AdamW"}, {"scheduler": "WarmupLR"}])
def test_a_section_that_is_no_object(config, section):
    found = problems("--ds", config({"zero_optimization": {"stage": 2}, **section}))
    assert f"{next(iter(section))} in the JSON" in found
