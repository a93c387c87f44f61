"""What several test files share: the user's own command as a subprocess, run once a session for each set of flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from zerolab.record import Record, RecordError, load_record

ROOT = Path(__file__).resolve().parent.parent

# Two layers, sixteen wide: a launch is then all start-up.
TINY_BERT = {
    "model_type": "zero-bert",
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_labels": 8,
}


@dataclass
class Launch:
    """How a run of the command ended."""

    folder: Path
    returncode: int
    stdout: str
    stderr: str

    @property
    def record(self) -> Record:
        try:
            return load_record(self.folder)
        except RecordError:
            raise AssertionError(f"no record\n{self.stdout[-3000:]}\n{self.stderr[-3000:]}") from None


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what a launcher or an earlier test may have set."""
    dropped = ("ACCELERATE_", "OMP_NUM_THREADS", "ZEROLAB_DEBUG", "ZEROLAB_QUEUE", "CUBLAS_WORKSPACE_CONFIG")
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped) and name not in ranks}
    # Nothing but the package index can be reached, and waiting for the Hub is not what these tests are about.
    return {**kept, "HF_HUB_OFFLINE": "1", **changes}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A config.json of our architecture, small enough for a launch a test."""
    path = tmp_path_factory.mktemp("tiny-bert") / "config.json"
    path.write_text(json.dumps(TINY_BERT))
    return path


@pytest.fixture(scope="session")
def launch(tmp_path_factory, tiny_model):
    """Runs `run_zero.py` with flags, bare or through a launcher, and keeps what the same flags gave before."""
    done: dict[tuple, Launch] = {}

    def run(*flags: str, launcher: tuple[str, ...] = (), timeout: float = 540, **environ: str) -> Launch:
        key = (flags, launcher, tuple(sorted(environ.items())))
        if key not in done:
            folder = tmp_path_factory.mktemp("run") / "run"
            start = [sys.executable] if not launcher else [*launcher]
            command = [*start, "run_zero.py", *flags]
            if "--output_dir" not in flags:
                command += ["--output_dir", str(folder)]
            path = (
                f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # accelerate and ninja beside python
            )
            result = subprocess.run(
                command,
                cwd=ROOT,
                env=environment(PATH=path, **environ),
                capture_output=True,
                text=True,
                timeout=timeout,
            )
            done[key] = Launch(folder, result.returncode, result.stdout, result.stderr)
        return done[key]

    return run
