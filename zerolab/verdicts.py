"""What a comparison means: one line for each question, with the numbers that decide it. Pure, as compare is.

The bounds are constants here with their reasons; docs and tests name them, nothing tunes them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from zerolab.compare import Arm, clipping, expected_states, logged_losses, measured_records, records_of, status_of
from zerolab.record import Record, Status
from zerolab.units import format_bytes, format_seconds

Outcome = Literal["yes", "no", "not known"]
Question = Literal["trains", "learns the same", "saves", "costs", "fits"]

# Two means of ten batches: one batch of text differs from the next by more than ten steps of training change.
NUM_END_STEPS = 10
# The course's offload script cannot learn (labels drawn anew each step); its loss moved by 0.8%, 10.45 to 10.53
# (measured_h200.md). A fall that counts is more than twice that, and more than the noise between batches.
MIN_FALL = 0.02
NUM_STANDARD_ERRORS = 2.0
# fp16 finds its scale by skipping: from 2**16, ten halvings lead to 2**6. Later it doubles the scale every 1,000
# good steps and may skip one to take that back. bf16 and fp32 have no scale, so no reason to skip.
FP16_FIRST_STEPS = 10
FP16_SCALE_WINDOW = 1000
# Between engines that do the same sums in another order the loss of a step moved by up to 0.13 and the mean by up to
# 0.04; the fp16 stage-0 bug gives 0.5 and 0.3 (benchmarks/results/configurations, 40 steps, losses of 5 to 10).
MAX_DIFFERENCE = 0.3
MAX_DRIFT = 0.1
# Fewer steps cannot show a drift: the arms begin with the same loss, whatever is wrong with their steps.
MIN_COMMON_STEPS = 10
# Peaks repeat to four digits; one percent is more than their noise and less than anybody would call a saving.
MIN_SAVING = 0.01
# Where theory and measurement part. cuBLAS workspaces and other small constants are no model states; they took 17 to
# 72 MiB (benchmarks/results), 64 of them cuBLAS's on Hopper by default.
MAX_DEVIATION = 0.10
SMALL_CONSTANTS_BYTES = 80 * 2**20
# The same arm measured on two days took 11.8 and 15.6 ms a step (benchmarks/results), ranges apart: the spread inside
# one run is not the spread between runs, so one run each cannot show a smaller ratio than this.
RUN_TO_RUN = 1.35


class Verdict(NamedTuple):
    """An answer: `line` has the numbers that decide it; `status` is the arm's, see `compare.status_of`."""

    arm: str
    question: Question
    outcome: Outcome
    line: str
    status: Status


def judge(arms: Mapping[str, Arm]) -> list[Verdict]:
    """Every verdict: `trains` and `fits` for each arm, the other three for each arm but the first, the reference.

    Raises:
        ValueError: an arm without a record.
    """
    verdicts = []
    for number, (name, arm) in enumerate(arms.items()):
        answers: dict[Question, tuple[Outcome, str]] = {"trains": trains(arm)}
        if number:
            reference, first = next(iter(arms.items()))
            answers["learns the same"] = learns_the_same(arm, first, reference)
            answers["saves"] = saves(arm, first, reference)
            answers["costs"] = costs(arm, first, reference)
        answers["fits"] = fits(arm)
        verdicts += [Verdict(name, question, *answer, status_of(arm)) for question, answer in answers.items()]
    return verdicts


def _worst(answers: Sequence[tuple[Outcome, str]]) -> tuple[Outcome, str]:
    """Of several repeats, the one that fails decides, then the one that is not known."""
    return min(answers, key=lambda answer: ("no", "not known", "yes").index(answer[0]))


# ---- learning -------------------------------------------------------------------------------------------------------


def trains(arm: Arm) -> tuple[Outcome, str]:
    """Whether the loss fell by more than chance, without NaN and without steps skipped for no known reason."""
    return _worst([_trains(record) for record in records_of(arm)])


def _trains(record: Record) -> tuple[Outcome, str]:
    if record.status != "trained":
        return ("not known" if record.status == "running" else "no"), f"status {record.status}"
    losses = logged_losses(record)
    lost = [step for step, loss in losses.items() if loss is None]
    if lost:
        return "no", f"the loss is no finite number from step {lost[0]:,} on, {len(lost):,} of {len(losses):,} steps"
    skipped = [step.step for step in record.steps if step.skipped]
    precision = (record.engine.precision if record.engine else None) or "unknown precision"
    is_fp16 = "float16" in precision.replace("bfloat16", "")
    unexplained = [step for step in skipped if step > FP16_FIRST_STEPS] if is_fp16 else skipped
    if len(unexplained) > (len(record.steps) // FP16_SCALE_WINDOW if is_fp16 else 0):
        return "no", f"{len(unexplained):,} steps skipped in {precision}, the first at {unexplained[0]:,}"
    values = [loss for loss in losses.values() if loss is not None]
    count = min(NUM_END_STEPS, len(values) // 2)
    if count < 2:
        return "not known", f"{len(values)} losses are too few to tell a fall from chance"
    first, last = values[:count], values[-count:]
    start, end = statistics.fmean(first), statistics.fmean(last)
    noise = NUM_STANDARD_ERRORS * math.sqrt((statistics.variance(first) + statistics.variance(last)) / count)
    line = f"loss {start:.3f} to {end:.3f}, means of {count} steps: falls by {start - end:.3f}; "
    line += f"needed {MIN_FALL * abs(start):.3f} and, for the noise of batches, {noise:.3f}"
    line += f"; {len(skipped)} steps skipped" if skipped else ""
    if start - end <= MIN_FALL * abs(start):
        return "no", line
    return ("yes" if start - end > noise else "not known"), line


def learns_the_same(arm: Arm, first: Arm, reference: str = "the reference") -> tuple[Outcome, str]:
    """Whether the losses stay together over all steps that both logged: at each step, and on average with sign.

    The signed mean is what finds slow harm: noise takes turns above and below, half a learning rate does not. Adam
    hides most of what clipping does from the loss, so another clipping is a "no" by itself. Of repeats, the pair that
    lies furthest apart decides.
    """
    pairs = [_same(one, other, reference) for one in records_of(arm) for other in records_of(first)]
    return min(pairs, key=lambda pair: (("no", "not known", "yes").index(pair[0]), -pair[1]))[::2]


def _same(record: Record, other: Record, reference: str) -> tuple[Outcome, float, str]:
    here, there = logged_losses(record), logged_losses(other)
    common = sorted(here.keys() & there.keys())
    lost = [step for step in common if here[step] is None or there[step] is None]
    if lost:
        return "no", math.inf, f"a loss is no finite number at step {lost[0]:,}"
    pairs = [(step, a, b) for step in common if (a := here[step]) is not None and (b := there[step]) is not None]
    if len(pairs) < MIN_COMMON_STEPS:
        return "not known", 0.0, f"{len(pairs)} steps in common with {reference}; {MIN_COMMON_STEPS} are needed"
    at, largest = max(((step, a - b) for step, a, b in pairs), key=lambda pair: abs(pair[1]))
    drift = statistics.fmean(a - b for _, a, b in pairs)
    apart = max(abs(largest) / MAX_DIFFERENCE, abs(drift) / MAX_DRIFT)
    line = f"loss {drift:+.3f} on average (at most {MAX_DRIFT}) and {largest:+.3f} at step {at:,} "
    line += f"(at most {MAX_DIFFERENCE}) against {reference}, {len(pairs):,} steps"
    clips = clipping(record), clipping(other)
    if clips[0] != clips[1]:
        line += f"; gradients clipped at {clips[0]:g} against {clips[1]:g} (0: not at all)"
    return ("yes" if apart <= 1 and clips[0] == clips[1] else "no"), apart, line


# ---- memory and time ------------------------------------------------------------------------------------------------


def saves(arm: Arm, first: Arm, reference: str = "the reference") -> tuple[Outcome, str]:
    """Whether the device's peak is lower, beside what theory expects of the model states between two steps."""
    records, others = measured_records(arm), measured_records(first)
    here = _median([record.device.peak_bytes for record in records])
    there = _median([record.device.peak_bytes for record in others])
    if here is None or there is None:
        host, base = (format_bytes(_median([r.host.peak_bytes for r in several])) for several in (records, others))
        return "not known", f"no GPU was measured in both arms; host peak {host}, {reference} {base}"
    line = f"device peak {format_bytes(here)}, {reference} {format_bytes(there)}: {_change(here - there, there)}"
    if status_of(arm) != "trained":
        return "not known", f"{line}; it is {status_of(arm)}, so its peak is not all that it needs"
    if status_of(first) != "trained":
        line += f"; {reference} is {status_of(first)}, so its peak is not all that it needs"
        if here >= there:
            return "not known", line
    parts = [line]
    mine, theirs = expected_states(records[0]), expected_states(others[0])
    measured = [_median([r.device.resident_bytes for r in several]) for several in (records, others)]
    if mine is None or theirs is None or measured[0] is None or measured[1] is None:
        parts.append("model states: theory or measurement not known")
    else:
        states = f"model states between steps {_change(measured[0] - measured[1], measured[1])}, theory says "
        states += _change(mine.resident_bytes - theirs.resident_bytes, theirs.resident_bytes)
        parts.append(f"{states} ({mine.formula} against {theirs.formula})")
    parts += [*deviations(records[0]), *(f"{reference}: {text}" for text in deviations(others[0]))]
    if (engine := records[0].engine) and engine.zero_stage and engine.world_size == 1 and not engine.offload_optimizer:
        parts.append(f"one process: stage {engine.zero_stage} without offload partitions nothing")
    return ("yes" if there - here > MIN_SAVING * there else "no"), "; ".join(parts)


def deviations(record: Record) -> list[str]:
    """Where measured model states and theory part by more than a tenth, first of init, between steps, step's peak.

    No ledger yet: the first that deviates stands for the rows that are allocated in it.
    """
    expected = expected_states(record)
    if expected is None:
        return []
    ends = {phase: memory.end_bytes for phase, memory in record.phases.items()}
    peaks = {phase: memory.peak_bytes for phase, memory in record.phases.items()}
    checks = (
        ("at the end of init", ends.get("init"), expected.init_bytes, "parameters, master weights or buckets"),
        ("between steps", record.device.resident_bytes, expected.resident_bytes, "optimizer states or gradients"),
        ("at the peak of the step", peaks.get("step"), expected.peak_bytes, "gradients or temporary"),
    )
    texts = []
    for when, measured, theory, rows in checks:
        if measured is not None and abs(measured - theory) > max(MAX_DEVIATION * theory, SMALL_CONSTANTS_BYTES):
            sizes = f"{format_bytes(measured)} measured, {format_bytes(theory)} expected"
            texts.append(f"{when} {sizes}, likely {rows}")
    return texts[:1]


def _median(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known)) if known else None


def _change(difference: int, base: int) -> str:
    percent = f", {abs(difference) / base:.1%}" if base else ""
    return (
        f"{format_bytes(abs(difference))}{percent} {'less' if difference < 0 else 'more'}" if difference else "equal"
    )


def costs(arm: Arm, first: Arm, reference: str = "the reference") -> tuple[Outcome, str]:
    """Whether a step takes longer: the ratio of the medians, with the range of p10 to p90 over all repeats."""
    here, there = _times(arm), _times(first)
    if here is None or there is None:
        return "not known", "no step was timed in " + ("this arm" if here is None else reference)
    ratio = here[1] / there[1]
    own, other = (" ".join(map(format_seconds, (middle, low, high))) for low, middle, high, _ in (here, there))
    line = f"{ratio:.2f} times the step of {reference}: {own} against {other} (median, p10, p90)"
    if here[0] <= there[2] and there[0] <= here[2]:
        return "not known", f"{line}; the spreads overlap"
    if min(here[3], there[3]) < 2 and 1 / RUN_TO_RUN < ratio < RUN_TO_RUN:
        return "not known", f"{line}; single runs differ by up to {RUN_TO_RUN} from one to the next"
    return ("yes" if ratio > 1 else "no"), line


def _times(arm: Arm) -> tuple[float, float, float, int] | None:
    speeds = [
        (s.step_seconds_p10, s.step_seconds, s.step_seconds_p90) for s in (r.speed for r in measured_records(arm))
    ]
    known = [(low or middle, middle, high or middle) for low, middle, high in speeds if middle]
    if not known:
        return None
    lows, middles, highs = zip(*known, strict=True)
    return min(lows), statistics.median(middles), max(highs), len(known)


def fits(arm: Arm) -> tuple[Outcome, str]:
    """Whether the arm found the memory that it asked for, under the allocator's cap where there was one."""
    return _worst([_fits(record) for record in records_of(arm)])


def _fits(record: Record) -> tuple[Outcome, str]:
    cap, total = record.device.cap_bytes, record.machine.get("gpu_total_bytes")
    room = f"a cap of {format_bytes(cap)}" if cap else f"a card of {format_bytes(total)}" if total else "host memory"
    failure = record.failure
    if record.status == "oom":
        if failure is None:
            return "no", f"out of memory under {room}"
        sizes = f"{format_bytes(failure.requested_bytes)} asked for, {format_bytes(failure.free_bytes)} free"
        return "no", f"out of memory in {failure.phase or 'a phase not known'}: {sizes}, under {room}"
    if record.status in ("trained", "diverged"):
        peak = record.host.peak_bytes if record.device.peak_bytes is None else record.device.peak_bytes
        reserved = f" ({format_bytes(record.device.reserved_bytes)} reserved)" if record.device.reserved_bytes else ""
        return "yes", f"peak {format_bytes(peak)}{reserved} under {room}"
    return "not known", f"status {record.status}"


# ---- expectations ---------------------------------------------------------------------------------------------------


def unmet(expectations: Mapping[str, str | Sequence[str]] | None, verdicts: Sequence[Verdict]) -> list[str]:
    """What did not come out as expected, a line each.

    Args:
        expectations: by arm, one or several of a status (`oom`, `trained`) or a question to be answered with yes
            (`trains`, `fits`). An arm that is not named has to train, and to learn the same as the reference.
        verdicts: of `judge`.

    Raises:
        ValueError: an expectation for an arm that has no verdict, or a word that is neither status nor question.
    """
    wanted = dict(expectations or {})
    unknown = wanted.keys() - {verdict.arm for verdict in verdicts}
    if unknown:
        raise ValueError(f"expectations for arms that are not there: {', '.join(sorted(unknown))}")
    lines = []
    for arm in dict.fromkeys(verdict.arm for verdict in verdicts):
        own = {verdict.question: verdict for verdict in verdicts if verdict.arm == arm}
        words = wanted.get(arm, [word for word in ("trains", "learns the same") if word in own])
        for word in [words] if isinstance(words, str) else words:
            if word in get_args(Status):
                status = next(iter(own.values())).status
                lines += [f"{arm}: expected {word}, it is {status}"] if status != word else []
            elif word in get_args(Question) and word in own:
                answer = own[word]
                lines += [f"{arm}: {word}: {answer.outcome}: {answer.line}"] if answer.outcome != "yes" else []
            else:
                raise ValueError(f"{arm}: {word!r} is neither a status nor a question about this arm")
    return lines


def exit_status(expectations: Mapping[str, str | Sequence[str]] | None, verdicts: Sequence[Verdict]) -> int:
    """0 where every expectation is met, 1 where one is not, "not known" included; see `unmet` for the rest."""
    return 1 if unmet(expectations, verdicts) else 0
