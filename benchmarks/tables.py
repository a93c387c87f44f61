"""Writes the tables of README.md, ds_configs/README.md and benchmarks/README.md from the records in results/.

python benchmarks/tables.py            # rewrites what stands between <!-- table NAME --> and <!-- end NAME -->
python benchmarks/tables.py --check    # exit status 1 where a table is not what the records say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from zerolab import units  # noqa: E402
from zerolab.record import Record, load_record  # noqa: E402
from zerolab.report.text import render_run  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "ds_configs/README.md", "benchmarks/README.md")
_ORDER = (
    "none",
    "baseline",
    "zero1",
    "zero2",
    "offload",
    "zero3",
    "zero3_offload",
    "zero3_ratio",
    "offload_low_precision",
)


def _records(suite: str) -> dict[str, Record]:
    return {path.stem: load_record(path) for path in sorted((RESULTS / suite).glob("*.json"))}


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["--"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _loss(record: Record) -> str:
    losses = [step.loss for step in record.steps if step.loss is not None]
    return f"{losses[0]:.2f} -> {losses[-1]:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _peak_row(name: str, record: Record) -> list[str]:
    device, phases = record.device, record.phases
    return [
        f"`{name}`",
        f"**{units.gib(device.peak_bytes)}**",
        *(units.gib(phases[phase].peak_bytes) for phase in ("init", "forward", "backward", "step")),
        units.gib(device.resident_bytes),
        units.gib(device.reserved_bytes),
        units.gib(device.driver_bytes),
        units.gib(record.host.peak_bytes),
        _milliseconds(record.speed.step_seconds),
        _loss(record),
    ]


_PEAK_HEAD = (
    "",
    "peak",
    "init",
    "forward",
    "backward",
    "step",
    "between steps",
    "reserved",
    "driver",
    "host",
    "step ms",
)


def configurations() -> str:
    """Every shipped configuration and `none`."""
    records = _records("configurations")
    names = [*(name for name in _ORDER if name in records), *(name for name in records if name not in _ORDER)]
    return _markdown([*_PEAK_HEAD, "loss"], [_peak_row(name, records[name]) for name in names])


def headline() -> str:
    """The short table of the README."""
    records = _records("configurations")
    reference = records["none"].device.peak_bytes
    assert reference is not None
    rows = []
    for name in (*_ORDER, "offload-checkpointing"):
        record = records[name]
        peak = record.device.peak_bytes
        assert peak is not None
        rows.append(
            [
                f"`{name}`",
                units.gib(peak),
                f"{100 * (peak - reference) / reference:+.0f}%",
                units.gib(record.host.peak_bytes),
                _milliseconds(record.speed.step_seconds),
                _loss(record),
            ]
        )
    return _markdown(("configuration", "GPU peak GiB", "to `none`", "host GiB", "step ms", "loss, 40 steps"), rows)


def buckets() -> str:
    """Peak and step time by bucket size."""
    records = _records("buckets")
    sizes = sorted({int(name.rsplit("-", 1)[1]) for name in records})
    rows = []
    for size in sizes:
        row = [f"{size:,}"]
        for ds in ("offload", "zero2", "zero3"):
            record = records[f"{ds}-{size}"]
            row += [units.gib(record.device.peak_bytes), _milliseconds(record.speed.step_seconds)]
        rows.append(row)
    head = ["elements"]
    for ds in ("offload", "zero2", "zero3"):
        head += [f"`{ds}` peak GiB", "step ms"]
    return _markdown(head, rows)


def _suite_table(suite: str) -> str:
    return _markdown([*_PEAK_HEAD, "loss"], [_peak_row(name, record) for name, record in _records(suite).items()])


def mnist() -> str:
    """Accuracy of vit-tiny on the 1,000 held-out images."""
    rows = []
    for name, record in _records("mnist").items():
        rows.append(
            [
                f"`{name}`",
                f"{record.metrics['eval_accuracy']:.1%}",
                units.gib(record.host.peak_bytes),
                _milliseconds(record.speed.step_seconds),
                f"{record.speed.samples_per_second:,.0f}",
            ]
        )
    return _markdown(("run", "accuracy", "host peak GiB", "step ms", "samples/s"), rows)


def overhead() -> str:
    """What the callback costs."""
    rows = []
    for path in sorted((RESULTS / "overhead").glob("*.json")):
        result = json.loads(path.read_text())
        rows.append(
            [
                f"`{result['configuration']}`",
                str(result["pairs"]),
                _milliseconds(result["step_seconds_without"]),
                f"{result['ratio_mean']:.3f}",
                f"{result['ratio_upper_95']:.3f}",
                f"{result['ratio_stdev']:.3f}",
                f"{result['callback_seconds_per_step'] * 1e6:.0f}",
            ]
        )
    head = (
        "configuration",
        "pairs of blocks",
        "step ms without",
        "ratio, mean",
        "upper 95%",
        "stdev of a pair",
        "host us a step",
    )
    return _markdown(head, rows)


def sample() -> str:
    """What a run prints at its end."""
    return "```\n" + render_run(_records("configurations")["offload"]).rstrip() + "\n```"


def machine() -> str:
    """Where and with what the numbers were measured."""
    record = _records("configurations")["none"]
    about, versions = record.machine, record.versions
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "deepspeed", "transformers", "accelerate"))
    gpu, ram = units.format_bytes(about["gpu_total_bytes"]), units.format_bytes(about["host_total_bytes"])
    return (
        f"{record.created[:10]}, one {about['gpu']} ({gpu}), {about['num_cores']} cores, {ram} of RAM; "
        f"python {versions['python']}, {packages}."
    )


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "configurations": configurations,
    "buckets": buckets,
    "before": lambda: _suite_table("before"),
    "mnist": mnist,
    "overhead": overhead,
    "sample": sample,
    "machine": machine,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        renewed = re.sub(
            r"(<!-- table (\w+) -->\n).*?(<!-- end \2 -->)",
            lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}",
            text,
            flags=re.S,
        )
        if renewed != text:
            stale.append(page)
            if not options.check:
                path.write_text(renewed)
    print("\n".join(f"{page}: {'not what the records say' if options.check else 'written'}" for page in stale))
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
