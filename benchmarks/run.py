"""Runs a suite of configurations on this machine, each in a process of its own, and keeps their records.

    python benchmarks/run.py configurations buckets --out benchmarks/results

Every run is the user's own command, `accelerate launch run_zero.py ...`. The processes of a suite start together, so
that they import and prepare at the same time; they train one after the other (ZEROLAB_QUEUE), each alone on the GPU
and the CPU, once all are ready. `benchmarks/tables.py` turns the records into Markdown.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from zerolab import ds_config, units  # noqa: E402
from zerolab.record import RecordError, load_record, save_record  # noqa: E402

_BERT = "--model bert-120m --per_device_train_batch_size 8 --max_length 128 --max_steps 40"
_BARE = "--do_eval false --save_model false"
_MNIST = "--model vit-tiny --per_device_train_batch_size 64 --learning_rate 2e-3 --warmup_steps 100 --save_model false"
_KEPT_STEPS = 400
_LARGE_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# From transformers' choice (hidden size squared: 1,048,576) to DeepSpeed's default.
_BUCKETS = (1_048_576, 5_000_000, 16_000_000, 30_720_000, 50_000_000, 121_827_632, 500_000_000)


class Run(NamedTuple):
    """One run of a suite: its name, the flags, changes to the JSON of `ds` by dotted key, and to the environment."""

    name: str
    ds: str
    flags: str
    changes: dict[str, object] = {}
    environment: dict[str, str] = {}


def suites(mnist: str, nvme: str) -> dict[str, list[Run]]:
    """Every suite by name.

    Args:
        mnist: the folder of MNIST's IDX files.
        nvme: a folder for NVMe offload.
    """
    names = ["none", *ds_config.shipped_names()]
    offload = ds_config.get(ds_config.read_config(ds_config.CONFIG_DIR / "offload.json"), "zero_optimization")
    assert offload["stage"] == 2
    return {
        "configurations": [
            *(Run(n, n, f"{_BERT} --nvme_path {nvme}" if n == "zero3_nvme" else _BERT) for n in names),
            Run("offload-checkpointing", "offload", f"{_BERT} --gradient_checkpointing"),
            Run("none-checkpointing", "none", f"{_BERT} --gradient_checkpointing"),
            Run("baseline-fp16", "baseline", f"{_BERT} --fp16 {_BARE}"),
            Run("zero1-fp16", "zero1", f"{_BERT} --fp16 {_BARE}"),
        ],
        "buckets": [
            Run(f"{ds}-{size}", ds, f"{_BERT} {_BARE}", {"zero_optimization.reduce_bucket_size": size})
            for ds in ("offload", "zero2", "zero3")
            for size in _BUCKETS
        ],
        "groups": [
            Run("zero2-two-groups", "zero2", f"{_BERT} --max_group_elements 0"),
            Run("zero2-accumulate-fp32", "zero2", _BERT, {"data_types.grad_accum_dtype": "fp32"}),
            Run("zero3-one-sub-group", "zero3", _BERT, {"zero_optimization.sub_group_size": 1_000_000_000}),
        ],
        # cuBLAS with 8 MiB for each thread, and as torch leaves it on Hopper with 32.
        "workspace": [
            Run(f"{ds}-{name}", ds, f"{_BERT} {_BARE}", environment=environment)
            for ds in ("none", "offload")
            for name, environment in (("8-mib", {}), ("32-mib", _LARGE_WORKSPACE))
        ],
        "mnist": [
            Run("3-epochs", "none", f"{_MNIST} --dataset {mnist} --num_train_epochs 3"),
            Run("20-epochs", "none", f"{_MNIST} --dataset {mnist} --num_train_epochs 20"),
            Run("augmented", "none", f"{_MNIST} --dataset {mnist} --num_train_epochs 40 --augment"),
            Run("20-epochs-zero1", "zero1", f"{_MNIST} --dataset {mnist} --num_train_epochs 20"),
        ],
    }


def _write_config(run: Run, folder: Path) -> str:
    if not run.changes:
        return run.ds
    config = ds_config.read_config(ds_config.CONFIG_DIR / f"{run.ds}.json")
    for key, value in run.changes.items():
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    path = folder / f"{run.name}.json"
    path.write_text(json.dumps(config, indent=2))
    return str(path)


def run_suite(name: str, runs: list[Run], out: Path, limit_s: float) -> None:
    """Starts all runs, lets them through one by one, and copies their records to `out/name/`."""
    out = out / name
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="zerolab-bench-") as temporary:
        work = Path(temporary)
        queue = work / "queue"
        processes = {}
        with queue.open("w") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            for run in runs:
                command = ["accelerate", "launch", "run_zero.py", "--ds", _write_config(run, work)]
                command += ["--output_dir", str(work / run.name), *run.flags.split()]
                log = (work / f"{run.name}.log").open("w")
                environment = {**os.environ, **run.environment, "ZEROLAB_QUEUE": str(queue)}
                processes[run.name] = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            _wait_until_ready(processes, work, limit_s)
        end = time.monotonic() + limit_s
        for run in runs:
            try:
                processes[run.name].wait(timeout=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                processes[run.name].kill()
            _keep(run, work, out)


def _wait_until_ready(processes: dict[str, subprocess.Popen], work: Path, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        ready = len(list(work.glob("queue.*.ready")))
        ended = sum(process.poll() is not None for process in processes.values())
        if ready + ended >= len(processes):
            return
        time.sleep(0.2)


def _keep(run: Run, work: Path, out: Path) -> None:
    log = (work / f"{run.name}.log").read_text(errors="replace")
    try:
        record = load_record(work / run.name)
    except RecordError:
        (out / f"{run.name}.log").write_text(log[-6000:])
        print(f"{run.name:28} no record; see {run.name}.log", flush=True)
        return
    if record.status != "trained":
        (out / f"{run.name}.log").write_text(log[-6000:])
    record.command = [word.replace(str(work), "RUN") for word in record.command]
    losses = [step.loss for step in record.steps if step.loss is not None]
    if len(record.steps) > _KEPT_STEPS:
        # Thousands of steps would be most of the repository; the medians were taken over all of them.
        record.steps = record.steps[:: len(record.steps) // _KEPT_STEPS + 1]
    save_record(record, out)
    (out / "record.json").rename(out / f"{run.name}.json")
    shown = f"{losses[0]:7.3f} ->{losses[-1]:7.3f}" if losses else "no loss"
    seconds = record.speed.step_seconds
    print(
        f"{run.name:28} {record.status:8} peak {units.gib(record.device.peak_bytes)} ({record.device.peak_phase}) "
        f"steady {units.gib(record.device.steady_peak_bytes)} host {units.gib(record.host.peak_bytes)} "
        f"step {units.format_seconds(seconds) if seconds else '-':9} {shown} "
        f"{' '.join(f'{k}={v:.4g}' for k, v in record.metrics.items() if k in ('eval_loss', 'eval_accuracy'))}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--mnist", default="../shared/data/mnist")
    parser.add_argument("--nvme", default="/tmp/zerolab-nvme")
    parser.add_argument("--limit", type=float, default=540, help="seconds for a suite")
    options = parser.parse_args()
    Path(options.nvme).mkdir(parents=True, exist_ok=True)
    known = suites(options.mnist, options.nvme)
    for name in options.suites:
        began = time.monotonic()
        runs = [run for run in known[name] if options.only in run.name]
        run_suite(name, runs, options.out, options.limit)
        print(f"-- {name}: {len(runs)} runs in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
