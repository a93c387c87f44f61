import json
from pathlib import Path

import pytest

from zerolab import ds_config
from zerolab.problems import BadInput, Problem

MINIMAL = {"zero_optimization": {"stage": 2}}


def config(**zero):
    return {"zero_optimization": {"stage": 2, **zero}}


def fields(problems):
    return [problem.field for problem in problems]


def test_every_shipped_configuration_is_found_by_name_and_by_path():
    names = ds_config.shipped_names()
    assert {"baseline", "zero1", "zero2", "offload", "zero3", "zero3_offload"} <= set(names)
    for name in names:
        path = ds_config.find_config(name)
        assert isinstance(path, Path)
        assert ds_config.find_config(str(path)) == path
        assert isinstance(ds_config.read_config(path), dict)


def test_shipped_configurations_leave_to_the_flags_what_the_flags_know():
    for name in ds_config.shipped_names():
        shipped = ds_config.read_config(ds_config.CONFIG_DIR / f"{name}.json")
        for key in ds_config.FLAG_OF_KEY:
            assert ds_config.get(shipped, key, "auto") == "auto", (name, key)
        if shipped["zero_optimization"]["stage"] == 3:
            assert shipped["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_none_is_the_plain_trainer():
    assert ds_config.find_config("none") is None


@pytest.mark.parametrize(
    ("spec", "said"),
    [("ofload", "did you mean 'offload'"), ("ds_configs/ofload.json", "did you mean 'ds_configs/offload.json'")],
)
def test_an_unknown_configuration_gets_the_nearest_name(spec, said):
    problem = ds_config.find_config(spec)
    assert isinstance(problem, Problem)
    assert said in problem.remedy


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [('{"a": 1,\n  "b": }', 2, 8), ('{"a": 1 "b": 2}', 1, 9), ("", 1, 1), ("{'a': 1}", 1, 2)],
)
def test_malformed_json_is_named_by_line_and_column(tmp_path, text, line, column):
    path = tmp_path / "broken.json"
    path.write_text(text)
    problem = ds_config.read_config(path)
    assert isinstance(problem, Problem)
    assert problem.value == f"{path}:{line}:{column}"
    assert f"line {line}, column {column}" in problem.remedy


def test_a_key_given_twice_and_a_list_are_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"bf16": {}, "bf16": {}}')
    assert "twice" in ds_config.read_config(path).remedy
    path.write_text("[1]")
    assert "one JSON object" in ds_config.read_config(path).remedy


def test_a_number_in_quotes_is_found_at_any_depth():
    problems = ds_config.find_problems({**config(reduce_bucket_size="5e6"), "gradient_accumulation_steps": "8"}, {}, 1)
    assert sorted(fields(problems)) == [
        "gradient_accumulation_steps in the JSON",
        "zero_optimization.reduce_bucket_size in the JSON",
    ]
    assert "write 8" in problems[1].remedy or "write 8" in problems[0].remedy


@pytest.mark.parametrize(
    ("key", "value", "flag", "given", "clashes"),
    [
        ("train_micro_batch_size_per_gpu", 16, "per_device_train_batch_size", 8, True),
        ("train_micro_batch_size_per_gpu", 8, "per_device_train_batch_size", 8, False),
        ("train_micro_batch_size_per_gpu", "auto", "per_device_train_batch_size", 8, False),
        ("gradient_clipping", 1, "max_grad_norm", 1.0, False),
        ("gradient_clipping", 0.5, "max_grad_norm", 1.0, True),
    ],
)
def test_a_flag_that_was_typed_and_the_json_have_to_agree(key, value, flag, given, clashes):
    problems = ds_config.find_problems({**MINIMAL, key: value}, {flag: given}, 1)
    assert bool(problems) == clashes
    if clashes:
        assert problems[0].value == json.dumps(value)
        assert f"--{flag}" in problems[0].remedy


def test_nested_values_contradict_too():
    raw = {
        **MINIMAL,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 1]}},
    }
    problems = ds_config.find_problems(raw, {"bf16": False, "learning_rate": 1e-4, "adam_beta2": 0.95}, 1)
    assert fields(problems) == [
        "bf16.enabled in the JSON",
        "optimizer.params.lr in the JSON",
        "optimizer.params.betas in the JSON",
    ]


def test_train_batch_size_has_to_be_the_product():
    raw = {**MINIMAL, "train_batch_size": 32, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 8}
    assert ds_config.find_problems(raw, {}, 2) == []
    problem = ds_config.find_problems(raw, {}, 1)[0]
    assert problem.field == "train_batch_size in the JSON"
    assert "= 16" in problem.remedy


def test_a_value_fixed_by_the_json_is_taken_where_no_flag_was_typed():
    raw = {**MINIMAL, "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 0.5, "fp16": {"enabled": True}}
    taken = ds_config.values_for_flags(raw, {"max_grad_norm": 0.5}, 1)
    assert taken == {"per_device_train_batch_size": 16, "fp16": True}


def test_a_total_batch_alone_gives_the_micro_batch():
    assert ds_config.values_for_flags({**MINIMAL, "train_batch_size": 32}, {"gradient_accumulation_steps": 2}, 2) == {
        "per_device_train_batch_size": 8
    }


@pytest.mark.parametrize(
    ("raw", "field", "said"),
    [
        ({}, "zero_optimization in the JSON", '"stage": 0'),
        ({"zero_optimization": 2}, "zero_optimization in the JSON", "write an object"),
        (config(stage=4), "zero_optimization.stage in the JSON", "0, 1, 2 or 3"),
        ({**MINIMAL, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled and fp16.enabled", "one"),
        (
            config(stage=3, offload_param={"device": "nvme"}),
            "zero_optimization.offload_param.nvme_path in the JSON",
            "NVMe",
        ),
    ],
)
def test_what_cannot_work_is_named(raw, field, said):
    problem = next(entry for entry in ds_config.find_problems(raw, {}, 1) if entry.field == field)
    assert said in problem.remedy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_micro_batch_size_per_gpu", 1.5),
        ("train_micro_batch_size_per_gpu", [8]),
        ("train_batch_size", 0),
        ("gradient_accumulation_steps", True),
        ("gradient_accumulation_steps", None),
        ("gradient_clipping", -1),
        ("gradient_clipping", float("nan")),
        ("bf16", {"enabled": 1}),
        ("fp16", {"enabled": "yes"}),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_and_taken_by_no_flag(key, value):
    raw = {**MINIMAL, key: value}
    named = f"{key}.enabled" if isinstance(value, dict) else key
    assert f"{named} in the JSON" in fields(ds_config.find_problems(raw, {}, 1))


def test_the_plan_says_what_deepspeed_makes_of_it():
    assert ds_config.zero_plan(config()) == (2, None, None)
    assert ds_config.zero_plan(config(offload_optimizer={"device": "cpu"})).offload_optimizer == "cpu"
    # Below stage 3 DeepSpeed ignores offload_param and turns nvme into cpu.
    silent = config(stage=1, offload_param={"device": "cpu"}, offload_optimizer={"device": "nvme", "nvme_path": "/x"})
    assert ds_config.zero_plan(silent) == (1, "cpu", None)
    assert ds_config.zero_plan(config(stage=3, offload_param={"device": "cpu"})).text() == "stage 3, parameters on cpu"


def test_problems_are_said_all_at_once():
    text = BadInput([Problem("--ds", "x", "name a file"), Problem("--bf16", "true", "leave it out")]).text()
    assert text.splitlines()[0].startswith("2 problems")
    for word in ("--ds", "value:  x", "remedy: name a file", "--bf16", "remedy: leave it out"):
        assert word in text
