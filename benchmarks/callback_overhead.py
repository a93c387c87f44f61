"""What the callback costs: steps with it and without it, in alternating blocks of one process.

    python benchmarks/callback_overhead.py --ds none --out benchmarks/results/overhead
    python benchmarks/callback_overhead.py --ds offload --out benchmarks/results/overhead

A block is timed by the median of its steps on the host's clock (a step ends when the Trainer's log has waited for the
loss), since single steps of a busy machine are off by tens of percent. Each pair of neighbouring blocks gives one
ratio; the order within a pair alternates, so that a drift of the machine cancels. The upper 95% bound is that of the
mean ratio, by bootstrap over the pairs (10,000 resamples). The median hides the one step in 50 that is looked at phase
by phase: `callback_seconds_per_step` is the mean over all steps and has it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from zerolab import launch  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds", default="none")
    parser.add_argument("--model", default="bert-120m")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "overhead")
    options = parser.parse_args()
    choices = launch.prepare_process()

    import tempfile

    from transformers import TrainerCallback

    from zerolab import environment, training
    from zerolab.request import parse

    num_blocks = 2 * options.pairs
    warmup = options.block

    class Alternate(TrainerCallback):
        """Notes the end of each step, and switches the measuring at the end of each block."""

        def __init__(self, callback):
            self.callback = callback
            self.blocks: list[tuple[bool, float]] = []
            self.seconds: list[float] = []
            self.last = 0.0

        def on_step_end(self, args, state, control, **kwargs):
            now = time.perf_counter()
            step = state.global_step - warmup
            if step > 0:
                self.seconds.append(now - self.last)
            if step >= 0 and step % options.block == 0:
                if step > 0:
                    self.blocks.append((self.callback.enabled, statistics.median(self.seconds)))
                    self.seconds.clear()
                block = step // options.block
                # on off, off on, on off, ...
                turn_on = (block % 2 == 0) == (block // 2 % 2 == 0)
                self.callback.resume() if turn_on else self.callback.pause()
            self.last = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"--ds {options.ds} --model {options.model} --output_dir {folder}/run --max_length 128 --disable_tqdm true"
        )
        flags += f" --max_steps {warmup + num_blocks * options.block} --do_eval false --save_model false"
        request = parse(flags.split(), choices)
        prepared = training.prepare(request)
        trainer = training.build_trainer(prepared)
        alternate = Alternate(prepared.callback)
        trainer.add_callback(alternate)
        trainer.train()
        record = prepared.callback.finish()

    pairs = [dict(alternate.blocks[index : index + 2]) for index in range(0, len(alternate.blocks) - 1, 2)]
    ratios = [pair[True] / pair[False] for pair in pairs]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(ratios, k=len(ratios))) for _ in range(10_000))
    result = {
        "configuration": options.ds,
        "model": options.model,
        "pairs": len(ratios),
        "steps_per_block": options.block,
        "ratio_mean": statistics.fmean(ratios),
        "ratio_median": statistics.median(ratios),
        "ratio_upper_95": means[int(0.95 * len(means))],
        "ratio_stdev": statistics.stdev(ratios),
        "step_seconds_without": statistics.median(pair[False] for pair in pairs),
        "callback_seconds_per_step": record.speed.callback_seconds_per_step,
        "ratios": ratios,
        "machine": environment.describe_machine(),
        "versions": environment.describe_versions(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.ds}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name not in ("ratios", "machine", "versions")}))


if __name__ == "__main__":
    main()
