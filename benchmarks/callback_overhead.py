"""What the callback costs: steps with it and without it, in alternating blocks of one process.

    python benchmarks/callback_overhead.py --ds none --out benchmarks/results/overhead
    python benchmarks/callback_overhead.py --ds offload --out benchmarks/results/overhead

Each pair of neighbouring blocks gives one ratio; their order within a pair alternates, so that a drift of the machine
cancels. The upper 95% bound is that of a bootstrap over the pairs (10,000 resamples) of the mean ratio's upper tail.
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

    import torch
    from transformers import TrainerCallback

    from zerolab import environment, training
    from zerolab.request import parse

    num_blocks = 2 * options.pairs
    warmup = options.block

    class Alternate(TrainerCallback):
        """Switches the measuring at the end of a block and takes the block's time, with the device at rest."""

        def __init__(self, callback):
            self.callback = callback
            self.seconds: list[tuple[bool, float]] = []
            self.began = 0.0

        def on_step_end(self, args, state, control, **kwargs):
            step = state.global_step
            if step < warmup or (step - warmup) % options.block:
                return
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            if step > warmup:
                self.seconds.append((self.callback.enabled, now - self.began))
            block = (step - warmup) // options.block
            # on off, off on, on off, ...
            turn_on = (block % 2 == 0) == (block // 2 % 2 == 0)
            self.callback.resume() if turn_on else self.callback.pause()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.began = time.perf_counter()

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

    pairs = [dict(alternate.seconds[index : index + 2]) for index in range(0, len(alternate.seconds) - 1, 2)]
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
        "step_seconds_without": statistics.median(pair[False] for pair in pairs) / options.block,
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
