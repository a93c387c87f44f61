"""Runs side by side: what may be compared, rows, and theory, on records from an H200 and on bad ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from zerolab.compare import check_comparable, compare, expected_states, measured_records, status_of
from zerolab.record import Failure, Record, Step, load_record
from zerolab.verdicts import SMALL_CONSTANTS_BYTES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ON_GPU = sorted((RESULTS / "configurations").glob("*.json")) + sorted((RESULTS / "before").glob("*.json"))


def real(name: str) -> Record:
    return load_record(RESULTS / f"{name}.json")


def changed(part: str, **values) -> Record:
    """zero2 with some entries of `model`, `data`, `arguments` or `engine` changed."""
    record = real("configurations/zero2")
    if part == "engine":
        record.engine = record.engine.model_copy(update=values)
    else:
        getattr(record, part).update(values)
    return record


def died_early(status: str = "failed") -> Record:
    return Record(status=status, phase="init", configuration="zero2")


# ---- comparable -----------------------------------------------------------------------------------------------------


def test_arms_that_differ_in_the_configuration_only_may_be_compared():
    arms = {path.stem: load_record(path) for path in sorted((RESULTS / "configurations").glob("*.json"))}
    assert len(arms) >= 10
    assert check_comparable(arms) == []


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (changed("model", name="bert-1b", num_parameters=10**9), ["model"]),
        (changed("model", **{"class": "ZeroBertForSequenceClassification"}), ["model class"]),
        (changed("model", num_parameters=7), ["number of parameters"]),
        (changed("model", num_trainable_parameters=7), ["number of trained parameters"]),
        (changed("data", name="random", fingerprint="0", num_train_samples=64), ["data"]),
        (changed("data", fingerprint="0"), ["data fingerprint"]),
        (changed("data", num_train_samples=64, fingerprint="0"), ["training samples"]),
        (changed("data", num_tokens_per_sample=256, fingerprint="0"), ["max_length"]),
        (changed("arguments", seed=43), ["seed"]),
        (changed("arguments", data_seed=1), ["order of batches"]),
        (changed("arguments", per_device_train_batch_size=16), ["samples per step"]),
        (changed("arguments", gradient_accumulation_steps=2), ["samples per step"]),
        (changed("engine", world_size=2), ["samples per step"]),
        (changed("arguments", seed=43, data_seed=1), ["seed"]),
        (changed("arguments", seed=43, per_device_train_batch_size=16), ["seed", "samples per step"]),
    ],
)
def test_each_difference_is_one_problem_that_names_fact_arm_and_both_values(record, fields):
    problems = check_comparable({"none": real("configurations/none"), "other": record})
    assert [problem.field for problem in problems] == [f"{field} of other" for field in fields]
    assert all("; none has " in problem.value and problem.remedy for problem in problems)


def test_the_same_samples_per_step_in_another_split_may_be_compared():
    split = changed("arguments", per_device_train_batch_size=2, gradient_accumulation_steps=2)
    split.engine = split.engine.model_copy(update={"world_size": 2})
    assert check_comparable({"none": real("configurations/none"), "split": split}) == []


def test_initial_weights_are_compared_where_both_records_have_their_hash():
    def with_hash(value):
        return changed("model", initial_weights=value)

    assert check_comparable({"a": with_hash("1"), "b": with_hash("1"), "c": real("configurations/zero3")}) == []
    (problem,) = check_comparable({"a": with_hash("1"), "b": with_hash("2")})
    assert (problem.field, problem.value) == ("initial weights of b", "2; a has 1")


def test_a_difference_in_a_repeat_is_named_once():
    other = [real("configurations/zero2"), changed("arguments", seed=1), changed("arguments", seed=1)]
    assert len(check_comparable({"none": real("configurations/none"), "zero2": other})) == 1


def test_what_a_record_does_not_know_is_no_difference():
    assert check_comparable({"none": real("configurations/none"), "dead": died_early()}) == []
    assert check_comparable({}) == []


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_differences_are_to_the_first_arm_in_bytes_and_percent():
    none, offload = real("configurations/none"), real("configurations/offload")
    comparison = compare({"none": none, "offload": offload})
    assert comparison.reference == "none"
    cells = comparison.row("device peak").cells
    assert cells["none"][:4] == (none.device.peak_bytes, none.device.peak_bytes, none.device.peak_bytes, 1)
    assert cells["none"].difference == 0 == cells["none"].percent
    assert cells["offload"].difference == offload.device.peak_bytes - none.device.peak_bytes < 0
    assert cells["offload"].percent == pytest.approx(-59.8, abs=0.1)
    assert comparison.row("backward peak").quantity.phase == "backward"
    assert comparison.row("backward peak").cells["offload"].value == offload.phases["backward"].peak_bytes
    assert comparison.row("first loss").cells["none"].value == none.steps[0].loss
    assert comparison.row("last loss").cells["none"].value == none.steps[-1].loss
    assert comparison.row("eval_accuracy").cells["none"].value == none.metrics["eval_accuracy"]
    assert comparison.row("resume peak") is None and comparison.row("eval_runtime") is None


def test_every_quantity_of_the_issue_has_its_row():
    names = {row.quantity.name for row in compare({"offload": real("configurations/offload")}).rows}
    phases = {f"{phase} peak" for phase in ("init", "forward", "backward", "step", "eval", "save")}
    wanted = {"device peak", "reserved", "driver", "host peak", "pinned", "step time", "samples/s"}
    assert names >= wanted | phases | {"first loss", "last loss", "eval_loss"}


def test_repeats_give_median_and_spread_and_bytes_stay_integers():
    repeats = [real("configurations/zero2") for _ in range(4)]
    for record, peak, seconds in zip(repeats, (10, 13, 14, 21), (0.1, 0.2, 0.3, 0.5), strict=True):
        record.device.peak_bytes, record.speed.step_seconds = peak, seconds
    comparison = compare({"zero2": repeats, "none": real("configurations/none")})
    peak = comparison.row("device peak").cells["zero2"]
    assert peak[:4] == (14, 10, 21, 4) and isinstance(peak.value, int)
    assert comparison.row("step time").cells["zero2"][:4] == (pytest.approx(0.25), 0.1, 0.5, 4)
    assert comparison.statuses["zero2"] == ["trained"] * 4


def test_a_repeat_that_died_is_left_out_of_the_medians_but_not_of_the_status():
    died = real("configurations/zero2")
    died.status, died.device.peak_bytes = "oom", 5
    trained = real("configurations/zero2")
    comparison = compare({"zero2": [trained, died]})
    assert comparison.row("device peak").cells["zero2"].value == trained.device.peak_bytes
    assert comparison.statuses == {"zero2": ["trained", "oom"]}
    assert status_of([trained, died]) == "oom" and status_of([trained, trained]) == "trained"
    assert measured_records([died]) == [died]


def test_arms_without_gpu_steps_or_anything_have_empty_cells():
    no_gpu = real("mnist/3-epochs")
    oom = died_early("oom")
    oom.failure = Failure(type="OutOfMemoryError", message="", phase="step", requested_bytes=2, free_bytes=1)
    comparison = compare({"cpu": no_gpu, "gpu": real("configurations/none"), "oom": oom, "dead": died_early("killed")})
    peak = comparison.row("device peak").cells
    assert peak["cpu"].value is None
    assert peak["gpu"].value is not None and peak["gpu"].difference is None and peak["gpu"].percent is None
    assert comparison.row("host peak").cells["gpu"].difference is not None
    for row in comparison.rows:
        assert row.cells["oom"] == row.cells["dead"] == (None, None, None, 0, None, None)
    assert comparison.statuses["dead"] == ["killed"]


def test_a_last_loss_that_is_no_number_is_not_replaced_by_an_earlier_one():
    record = real("configurations/zero2")
    record.steps.append(Step(step=41, finite=False))
    assert compare({"a": record, "b": real("configurations/none")}).row("last loss").cells["a"].value is None


def test_a_reference_of_zero_has_no_percent():
    zero, one = real("configurations/none"), real("configurations/zero2")
    zero.host.pinned_bytes, one.host.pinned_bytes = 0, 5
    assert compare({"a": zero, "b": one}).row("pinned").cells["b"][4:] == (5, None)


def test_no_arm_and_no_record_are_refused():
    with pytest.raises(ValueError, match="at least one arm"):
        compare({})
    with pytest.raises(ValueError, match="at least one record"):
        compare({"a": []})


# ---- theory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ON_GPU, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_theory_lies_below_what_was_measured_by_small_constants_only(path):
    record = load_record(path)
    expected = expected_states(record)
    if path.stem == "zero3_ratio":
        assert expected is None
        return
    measured = (
        record.phases["init"].end_bytes,
        record.device.resident_bytes,
        record.phases["step"].peak_bytes,
    )
    for size, theory in zip(measured, expected[:3], strict=True):
        # cuBLAS workspaces and rounding; model states of this model are multiples of 232 MiB (2P).
        assert -(2**20) < size - theory < SMALL_CONSTANTS_BYTES


P, E = 1000, 100


@pytest.mark.parametrize(
    ("stage", "world", "precision", "engine", "json", "expected"),
    [
        (None, 1, "float32 with bfloat16 autocast", {}, None, (4000, 12000, 16000, 0)),
        (None, 2, "float32", {}, None, (4000, 16000, 20000, 0)),
        (0, 1, "bfloat16", {}, {}, (14000, 14000, 20000, 0)),
        (0, 1, "float16", {"wrapper_class": "FP16_Optimizer"}, {}, (14000, 14000, 24000, 0)),
        (0, 1, "float32", {}, {}, (4000, 12000, 16000, 0)),
        (1, 1, "bfloat16", {}, {}, (6000, 14000, 22000, 0)),
        (2, 1, "bfloat16", {}, {"data_types": {"grad_accum_dtype": "fp32"}}, (6000, 14000, 18800, 0)),
        (1, 1, "bfloat16", {"wrapper_class": "BF16_Optimizer"}, {}, (10000, 18000, 20800, 0)),
        (2, 4, "bfloat16", {}, {}, (3000, 5000, 7000, 0)),
        (2, 1, "float32", {}, {}, (8000, 16000, 24000, 0)),
        (2, 4, "bfloat16", {"offload_optimizer": "cpu"}, {}, (2200, 2200, 2200, 4700)),
        (3, 2, "bfloat16", {}, {"zero_optimization": {"reduce_bucket_size": 50}}, (4100, 8100, 11100, 0)),
        (3, 1, "float32", {}, {"zero_optimization": {"reduce_bucket_size": 50}}, (12200, 20200, 24200, 0)),
        (
            3,
            2,
            "bfloat16",
            {"offload_optimizer": "cpu", "offload_param": "cpu"},
            {"zero_optimization": {"reduce_bucket_size": 50}},
            (100, 100, 2100, 10000),
        ),
    ],
)
def test_formulas_by_hand(stage, world, precision, engine, json, expected):
    record = changed("model", num_parameters=P, largest_parameter=E)
    record.choices, record.deepspeed = [], json
    name = "none" if stage is None else "deepspeed"
    changes = {"name": name, "zero_stage": stage, "world_size": world, "precision": precision, "wrapper_class": None}
    record.engine = record.engine.model_copy(update={**changes, **engine})
    assert expected_states(record)[:4] == expected


def test_low_precision_states_take_eight_bytes_and_ten_on_the_host():
    record = changed("model", num_parameters=P, largest_parameter=E)
    record.choices = []
    record.deepspeed = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert expected_states(record)[:4] == (4000, 8000, 12000, 0)
    record.engine = record.engine.model_copy(update={"offload_optimizer": "cpu"})
    assert expected_states(record).host_bytes == 10 * P + 2 * E


def test_sizes_that_still_say_auto_take_deepspeeds_default():
    record = changed("engine", zero_stage=3)
    record.deepspeed["zero_optimization"]["reduce_bucket_size"] = "auto"
    assert expected_states(record).init_bytes == 8 * record.model["num_parameters"] + 10**9


def test_no_formula_is_made_up():
    assert expected_states(died_early()) is None
    assert expected_states(changed("engine", optimizer_class="AdamW8bit")) is None


def test_neither_module_imports_a_training_library():
    script = (
        "import sys, zerolab.compare, zerolab.verdicts;"
        "print([n for n in ('torch', 'transformers', 'deepspeed', 'accelerate', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
