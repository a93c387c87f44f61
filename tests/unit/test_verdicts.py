"""Verdicts on records from an H200, good and bad, and on records made from them or from a small training in numpy."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest

from zerolab import verdicts
from zerolab.record import Failure, Record, Step, load_record
from zerolab.verdicts import (
    Verdict,
    costs,
    deviations,
    exit_status,
    fits,
    judge,
    learns_the_same,
    saves,
    trains,
    unmet,
)

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
NAMES = sorted(path.stem for path in (RESULTS / "configurations").glob("*.json"))
# What these two do is known to be different: DeepSpeed 0.19.8 does not scale the loss at stage 0 in fp16, and
# bf16 master weights lose small updates.
DIFFERENT = {"baseline-fp16", "offload_low_precision"}
GIB = 2**30


def real(name: str) -> Record:
    return load_record(RESULTS / f"{name}.json" if "/" in name else RESULTS / "configurations" / f"{name}.json")


def with_losses(losses, name: str = "zero2") -> Record:
    """A real record with other losses; NaN becomes what the callback writes for it."""
    record = real(name)
    record.steps = [
        Step(step=number, loss=float(loss) if math.isfinite(loss) else None, finite=bool(math.isfinite(loss)))
        for number, loss in enumerate(losses, 1)
    ]
    return record


def out_of_memory(cap: int = 12 * GIB) -> Record:
    record = Record(status="oom", phase="step", configuration="none")
    record.device.cap_bytes, record.device.peak_bytes = cap, 11 * GIB
    sizes = {"requested_bytes": 2 * GIB, "free_bytes": GIB // 2}
    record.failure = Failure(type="OutOfMemoryError", message="", phase="step", **sizes)
    return record


@functools.cache
def small_training(rate=0.01, clip=1.0, frozen=False, noise=0.0, adam=True) -> list[float]:
    """Losses of a two-layer classifier in numpy: 200 classes, 40 steps. Synthetic: no model of this project.

    Args:
        noise: relative standard deviation put on the gradients, in place of rounding.
    """
    data, rounding, first = (np.random.default_rng(seed) for seed in (0, 1, 2))
    centers = data.normal(size=(200, 32))
    share = 1 / np.arange(1, 201)
    weights = [first.normal(size=(32, 64)) / 32**0.5, first.normal(size=(64, 200)) * 0.02]
    moments = [[np.zeros_like(w), np.zeros_like(w)] for w in weights]
    losses = []
    for step in range(1, 41):
        labels = data.choice(200, size=32, p=share / share.sum())
        inputs = centers[labels] + 0.3 * data.normal(size=(32, 32))
        hidden = np.maximum(inputs @ weights[0], 0)
        odds = np.exp(hidden @ weights[1])
        odds /= odds.sum(1, keepdims=True)
        losses.append(float(-np.log(odds[np.arange(32), labels]).mean()))
        odds[np.arange(32), labels] -= 1
        gradients = [inputs.T @ ((odds @ weights[1].T) * (hidden > 0)) / 32, hidden.T @ odds / 32]
        norm = sum((g**2).sum() for g in gradients) ** 0.5
        for number, gradient in enumerate(gradients):
            if frozen and number == 0:
                continue
            gradient = gradient * min(1.0, clip / norm) * (1 + noise * rounding.normal(size=gradient.shape))
            mean, square = moments[number]
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            change = (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8) if adam else gradient
            weights[number] = weights[number] - rate * change
    return losses


# ---- trains ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "mnist/3-epochs"])
def test_every_real_run_trains(name):
    outcome, line = trains(real(name))
    assert outcome == "yes" and "means of 10 steps" in line


def test_a_loss_that_wanders_as_the_courses_script_does_is_no_training():
    wander = [10.45 + 0.08 * math.sin(step) - 0.002 * step for step in range(40)]
    outcome, line = trains(with_losses(wander))
    assert outcome == "no" and "falls by 0.0" in line and "needed 0.209" in line


def test_a_rising_loss_is_no_training():
    assert trains(with_losses(np.linspace(5, 9, 40)))[0] == "no"


def test_a_fall_inside_the_noise_of_batches_is_not_known():
    noisy = [8 - 0.01 * step + (3 if step % 2 else -3) for step in range(40)]
    assert trains(with_losses(noisy))[0] == "not known"


def test_too_few_losses_are_not_known():
    assert trains(with_losses([9, 8, 1]))[0] == "not known"


def test_one_nan_fails_however_low_the_loss_ends():
    losses = list(np.linspace(9, 5, 40))
    losses[20] = float("nan")
    outcome, line = trains(with_losses(losses))
    assert outcome == "no" and "from step 21 on, 1 of 40" in line


@pytest.mark.parametrize(
    ("precision", "steps", "outcome"),
    [
        ("float16", range(1, 11), "yes"),
        ("float32 with float16 autocast", range(1, 4), "yes"),
        ("float16", [11], "no"),
        ("bfloat16", [1], "no"),
        ("float32 with bfloat16 autocast", [1], "no"),
        ("float32", [2], "no"),
    ],
)
def test_only_fp16_may_skip_and_only_at_the_start(precision, steps, outcome):
    record = real("zero2")
    record.engine = record.engine.model_copy(update={"precision": precision})
    for number in steps:
        record.steps[number - 1].skipped = True
    answer, line = trains(record)
    assert answer == outcome and "skipped" in line


def test_a_long_fp16_run_may_skip_once_each_time_its_scale_grows():
    record = with_losses(np.linspace(9, 5, 2000), "zero1-fp16")
    record.steps[1000].skipped = record.steps[1999].skipped = True
    assert trains(record)[0] == "yes"
    record.steps[1500].skipped = True
    assert trains(record)[0] == "no"


@pytest.mark.parametrize(
    ("status", "outcome"), [("running", "not known"), ("killed", "no"), ("oom", "no"), ("diverged", "no")]
)
def test_a_run_that_did_not_end_did_not_train(status, outcome):
    record = real("zero2")
    record.status = status
    assert trains(record) == (outcome, f"status {status}")
    assert trains([real("zero2"), record])[0] == outcome


# ---- learns the same ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reference", ["none", "zero2", "zero3"])
def test_real_pairs(name, reference):
    expected = "no" if name in DIFFERENT else "yes"
    assert learns_the_same(real(name), real(reference))[0] == expected


def test_the_fp16_bug_of_stage_0_is_caught_with_its_numbers():
    for sound in ("zero1-fp16", "zero1", "baseline"):
        outcome, line = learns_the_same(real("baseline-fp16"), real(sound), sound)
        assert outcome == "no" and f"against {sound}, 40 steps" in line
    assert line.startswith("loss +0.295 on average (at most 0.1) and +0.502 at step 30 (at most 0.3)")


@pytest.mark.parametrize("adam", [True, False])
def test_noise_of_rounding_passes(adam):
    rate = 0.01 if adam else 1.0
    base = with_losses(small_training(rate=rate, adam=adam))
    noisy = with_losses(small_training(rate=rate, adam=adam, noise=0.02))
    assert learns_the_same(noisy, base)[0] == "yes"


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"rate": 0.005}, {}),
        ({"frozen": True}, {}),
        ({"rate": 0.5}, {"rate": 1.0, "adam": False, "clip": 0.5}),
        ({"clip": math.inf}, {"rate": 1.0, "adam": False, "clip": 0.5}),
        ({"frozen": True}, {"rate": 1.0, "adam": False, "clip": 0.5}),
    ],
    ids=["half-rate", "frozen-layer", "half-rate-sgd", "no-clipping-sgd", "frozen-layer-sgd"],
)
def test_harm_is_caught_by_the_loss(changes, setting):
    base, harmed = small_training(**setting), small_training(**{**setting, **changes})
    outcome, line = learns_the_same(with_losses(harmed), with_losses(base))
    assert outcome == "no", line


def test_clipping_that_adam_hides_from_the_loss_is_caught_by_the_setting():
    base, harmed = with_losses(small_training(clip=0.2)), with_losses(small_training(clip=math.inf))
    assert learns_the_same(harmed, base)[0] == "yes"  # the loss alone does not show it
    del harmed.deepspeed["gradient_clipping"]
    outcome, line = learns_the_same(harmed, base)
    assert outcome == "no" and line.endswith("gradients clipped at 0 against 1 (0: not at all)")


def test_the_flag_is_what_clips_without_deepspeed_and_where_the_json_says_auto():
    plain, auto = real("none"), real("zero2")
    auto.deepspeed["gradient_clipping"] = "auto"
    assert learns_the_same(plain, auto)[0] == "yes"
    plain.arguments["max_grad_norm"] = 0.0
    assert learns_the_same(plain, auto)[0] == "no"


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda n: 0.299 if n == 7 else 0, "yes"),
        (lambda n: -0.301 if n == 7 else 0, "no"),
        (lambda n: 0.099, "yes"),
        (lambda n: -0.101, "no"),
        (lambda n: 0.29 if n % 2 else -0.29, "yes"),
    ],
)
def test_both_bounds_count_and_the_drift_has_a_sign(change, outcome):
    base = np.linspace(9, 6, 40)
    changed = [loss + change(number) for number, loss in enumerate(base)]
    assert learns_the_same(with_losses(changed), with_losses(base))[0] == outcome


def test_a_nan_in_one_arm_is_not_the_same():
    losses = np.linspace(9, 6, 40)
    lost = [*losses[:39], float("inf")]
    assert learns_the_same(with_losses(lost), with_losses(losses)) == ("no", "a loss is no finite number at step 40")


def test_only_common_steps_are_compared_and_few_are_not_known():
    base = np.linspace(9, 6, 40)
    assert learns_the_same(with_losses(base[:10]), with_losses(base))[0] == "yes"
    outcome, line = learns_the_same(with_losses(base[:9]), with_losses(base), "none")
    assert outcome == "not known" and "9 steps in common with none" in line
    assert learns_the_same(out_of_memory(), with_losses(base))[0] == "not known"


def test_of_several_repeats_the_pair_furthest_apart_decides():
    base = np.linspace(9, 6, 40)
    near, far, further = (with_losses(base + shift) for shift in (0.01, 0.15, 0.25))
    assert learns_the_same([near, near], with_losses(base))[0] == "yes"
    outcome, line = learns_the_same([near, further, far], with_losses(base))
    assert outcome == "no" and line.startswith("loss +0.250")


# ---- saves ----------------------------------------------------------------------------------------------------------


def test_offload_saves_what_theory_says():
    outcome, line = saves(real("offload"), real("none"), "none")
    assert outcome == "yes"
    assert "device peak 0.74 GiB, none 1.84 GiB: 1.10 GiB, 59.8% less" in line
    assert "between steps 1.08 GiB, 78.2% less, theory says 1.08 GiB, 79.1% less (2P + 2E against 12P)" in line
    assert "partitions nothing" not in line and "likely" not in line


@pytest.mark.parametrize(("name", "stage"), [("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_one_process_is_told_that_it_partitions_nothing(name, stage):
    outcome, line = saves(real(name), real("none"), "none")
    assert outcome == "no" and line.endswith(f"one process: stage {stage} without offload partitions nothing")
    several = real(name)
    several.engine = several.engine.model_copy(update={"world_size": 4})
    assert "partitions nothing" not in saves(several, real("none"), "none")[1]


@pytest.mark.parametrize("name", NAMES)
def test_no_real_record_parts_from_theory(name):
    assert deviations(real(name)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: setattr(r.phases["init"], "end_bytes", 2 * GIB), "at the end of init 2.00 GiB measured"),
        (lambda r: setattr(r.device, "resident_bytes", GIB), "between steps 1.00 GiB measured, 1.59 GiB expected"),
        (lambda r: setattr(r.phases["step"], "peak_bytes", 3 * GIB), "at the peak of the step 3.00 GiB measured"),
    ],
)
def test_where_measurement_and_theory_part_the_phase_is_named(change, said):
    record = real("zero2")
    change(record)
    (text,) = deviations(record)
    assert text.startswith(said) and ", likely " in text
    assert said in saves(record, real("none"), "none")[1]
    assert f"zero2: {said}" in saves(real("offload"), record, "zero2")[1]


def test_peaks_that_are_missing_or_cut_short_save_nothing_that_is_known():
    outcome, line = saves(real("mnist/3-epochs"), real("none"), "none")
    assert outcome == "not known" and "host peak 0.59 GiB, none 2.21 GiB" in line
    assert saves(out_of_memory(), real("none"))[0] == "not known"
    # A reference that ran out of memory needs at least its peak: lower than that is a saving, higher is not known.
    assert saves(real("offload"), out_of_memory(), "none")[0] == "yes"
    assert "its peak is not all that it needs" in saves(real("offload"), out_of_memory(), "none")[1]
    small = out_of_memory()
    small.device.peak_bytes = GIB // 4
    assert saves(real("offload"), small)[0] == "not known"


def test_an_equal_peak_is_no_saving():
    assert saves(real("none-checkpointing"), real("none"))[0] == "no"


# ---- costs ----------------------------------------------------------------------------------------------------------


def test_costs_names_the_ratio_and_the_spread():
    outcome, line = costs(real("offload"), real("none"), "none")
    assert outcome == "yes"
    assert line == (
        "6.81 times the step of none: 106.0 ms 101.7 ms 115.4 ms against 15.6 ms 14.3 ms 19.6 ms (median, p10, p90)"
    )
    assert costs(real("none"), real("offload"))[0] == "no"


def test_spreads_that_overlap_decide_nothing():
    outcome, line = costs(real("zero1"), real("zero2"), "zero2")
    assert outcome == "not known" and line.endswith("the spreads overlap")


def timed(middle: float) -> Record:
    record = real("zero2")
    record.speed = record.speed.model_copy(
        update={"step_seconds": middle, "step_seconds_p10": middle * 0.99, "step_seconds_p90": middle * 1.01}
    )
    return record


def test_a_small_ratio_needs_repeats():
    # The same arm on two days, 11.8 and 15.6 ms with ranges that do not meet, must not be called a cost.
    outcome, line = costs(real("none"), real("before/none"), "before")
    assert outcome == "not known" and "single runs differ" in line
    assert costs(timed(0.12), timed(0.1))[0] == "not known"
    assert costs([timed(0.12), timed(0.121)], [timed(0.1), timed(0.101)])[0] == "yes"
    assert costs([timed(0.12), timed(0.09)], [timed(0.1), timed(0.101)])[0] == "not known"


def test_an_arm_without_steps_has_no_cost():
    assert costs(out_of_memory(), real("none"), "none") == ("not known", "no step was timed in this arm")
    assert costs(real("none"), out_of_memory(), "none") == ("not known", "no step was timed in none")


# ---- fits -----------------------------------------------------------------------------------------------------------


def test_fits_names_phase_sizes_and_cap():
    assert fits(out_of_memory()) == (
        "no",
        "out of memory in step: 2.00 GiB asked for, 0.50 GiB free, under a cap of 12.00 GiB",
    )
    offload = real("offload")
    offload.device.cap_bytes = 12 * GIB
    assert fits(offload) == ("yes", "peak 0.74 GiB (0.86 GiB reserved) under a cap of 12.00 GiB")
    assert fits(real("mnist/3-epochs")) == ("yes", "peak 0.59 GiB under host memory")
    assert fits([offload, out_of_memory()])[0] == "no"
    assert fits(Record(status="oom")) == ("no", "out of memory under host memory")


@pytest.mark.parametrize("status", ["killed", "failed", "refused", "interrupted", "running"])
def test_other_ends_say_nothing_of_memory(status):
    assert fits(Record(status=status)) == ("not known", f"status {status}")


# ---- all of them, and the exit status -------------------------------------------------------------------------------


def test_the_reference_is_asked_less_and_every_line_is_one_line():
    found = judge({"none": real("none"), "offload": real("offload"), "dead": Record(status="killed")})
    asked = {arm: [verdict.question for verdict in found if verdict.arm == arm] for arm in ("none", "offload")}
    assert asked["none"] == ["trains", "fits"]
    assert asked["offload"] == ["trains", "learns the same", "saves", "costs", "fits"]
    assert all(verdict.line and "\n" not in verdict.line for verdict in found)
    assert {verdict.status for verdict in found if verdict.arm == "dead"} == {"killed"}


def test_without_a_recipe_arms_have_to_train_and_to_learn_the_same():
    good = judge({"none": real("none"), "zero2": real("zero2"), "offload": real("offload")})
    assert exit_status(None, good) == 0
    bad = judge({"none": real("none"), "baseline-fp16": real("baseline-fp16")})
    assert exit_status(None, bad) == 1
    (line,) = unmet(None, bad)
    assert line.startswith("baseline-fp16: learns the same: no: loss +0.325")


def test_not_known_is_not_met():
    assert exit_status(None, judge({"none": real("none"), "dead": Record(status="running")})) == 1


def test_a_recipe_may_expect_an_arm_to_run_out_of_memory():
    found = judge({"none": out_of_memory(), "offload": real("offload")})
    recipe = {"none": "oom", "offload": "trained"}
    assert exit_status(recipe, found) == 0
    assert exit_status(None, found) == 1
    assert exit_status({**recipe, "none": "trained"}, found) == 1
    assert exit_status({**recipe, "offload": ["trained", "saves", "fits"]}, found) == 0
    assert unmet({**recipe, "offload": ["trained", "oom"]}, found) == ["offload: expected oom, it is trained"]
    # An arm that the recipe leaves out keeps the default, and nothing can be learned beside an arm without steps.
    assert exit_status({"none": "oom"}, found) == 1


def test_expectations_that_cannot_be_looked_up_are_refused():
    found = judge({"none": real("none"), "offload": real("offload")})
    with pytest.raises(ValueError, match="not there: zero9"):
        exit_status({"zero9": "oom"}, found)
    with pytest.raises(ValueError, match="'trainde' is neither"):
        exit_status({"offload": "trainde"}, found)
    with pytest.raises(ValueError, match="none: 'saves' is neither"):
        exit_status({"none": "saves"}, found)


def test_the_exit_status_follows_the_outcome_alone():
    def verdict(outcome):
        return Verdict("a", "trains", outcome, "because", "trained")

    assert [exit_status(None, [verdict(outcome)]) for outcome in ("yes", "no", "not known")] == [0, 1, 1]


def test_the_bounds_are_those_of_the_issue():
    assert (verdicts.MAX_DIFFERENCE, verdicts.MAX_DRIFT) == (0.3, 0.1)
