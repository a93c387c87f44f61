"""Trains one model under one ZeRO configuration, and measures where its memory goes.

    accelerate launch run_zero.py --ds ds_configs/offload.json
    accelerate launch run_zero.py --ds none --model vit-tiny --dataset digits
    python run_zero.py --ds zero2 --model bert-120m --max_steps 40 --gradient_checkpointing

Every flag of TrainingArguments works; `--help` lists them and ours. The run's folder (printed at the end) holds the
record, the plots, the resolved DeepSpeed JSON and the trained model.

Exit status: 0 trained; 1 anything that ended the training (its record says what); 2 bad input. Under
`accelerate launch` each failure is 1, with accelerate's own traceback below our message.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs one configuration and returns the exit status."""
    # A terminal that is not UTF-8 must not end a run over the line under a table.
    if sys.stdout is not None:  # a service may have closed it
        sys.stdout.reconfigure(errors="replace")
    debug = os.environ.get("ZEROLAB_DEBUG") == "1"
    # A batch system ends a run with SIGTERM: it leaves as complete a record as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    from zerolab.problems import BadInput

    try:
        return _run(argv)
    except BadInput as error:
        if debug:
            raise
        print(error.text(), file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            raise
        print(f"{type(error).__name__}: {error}\n(ZEROLAB_DEBUG=1 shows the traceback)", file=sys.stderr, flush=True)
        return 1


def _run(argv: Sequence[str]) -> int:
    # The number of CPU threads has to be in the environment before torch is imported.
    from zerolab import launch

    choices = launch.prepare_process()
    from zerolab.request import parse

    request = parse(argv, choices)
    from zerolab import training  # imports the Trainer, which takes seconds that bad input need not wait for

    return 0 if training.run(request).status == "trained" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
