"""The command line of run_zero.py: every flag of TrainingArguments, and ours beside them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from models import TASKS
from zerolab.data.arguments import DataArguments
from zerolab.problems import Problem, did_you_mean


@dataclass
class RunArguments:
    """Which model under which configuration."""

    ds: str | None = field(
        default=None,
        metadata={
            "help": "DeepSpeed configuration: a JSON file, a bare name in ds_configs/, or none for the plain Trainer. "
            "--deepspeed is an alias."
        },
    )
    model: str | None = field(
        default=None,
        metadata={
            "help": "A preset (bert-mini, bert-120m, bert-1b, vit-tiny, vit-100m) or a config.json: random weights. "
            "A folder or a Hub id: its weights. Default: bert-120m, without a GPU bert-mini."
        },
    )
    task: str | None = field(
        default=None, metadata={"help": f"One of {', '.join(TASKS)}. Default: what the model and the data are for."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that a model's folder brings."})
    save_model: bool = field(default=True, metadata={"help": "Save model and tokenizer once, at the end."})
    max_group_elements: int | None = field(
        default=None,
        metadata={
            "help": "Split the optimizer's parameter groups above so many elements; 0 leaves the Trainer's two. "
            "Default: the largest parameter, at stages 1 and 2 without offload."
        },
    )
    nvme_path: str | None = field(
        default=None, metadata={"help": 'A folder on a local NVMe disk, for a JSON whose nvme_path says "auto".'}
    )


@dataclass
class ZeroArguments(TrainingArguments):
    """TrainingArguments with the defaults of a measured run."""

    output_dir: str | None = field(
        default=None, metadata={"help": "The run's folder. Default: runs/ and a name of model, configuration, date."}
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "The peak learning rate."})
    logging_steps: float = field(default=1, metadata={"help": "Steps between two logs; 1 keeps every loss."})
    save_strategy: str = field(default="no", metadata={"help": "Checkpoints during training: no, steps or epoch."})
    report_to: str | None = field(default="none", metadata={"help": "Integrations that receive the logs."})
    do_eval: bool = field(default=True, metadata={"help": "Evaluate at the end."})
    # The filter replaces a NaN loss by an average of earlier ones, so that a diverged run looks healthy; it also makes
    # the host wait for the device at each step.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide NaN and infinite losses."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "The data holds only what the model takes."})


class _Parser(HfArgumentParser):
    """Collects what argparse would exit for, so that it can be said together with everything else."""

    def __init__(self) -> None:
        super().__init__((RunArguments, DataArguments, ZeroArguments), allow_abbrev=False, prog="run_zero.py")

    def error(self, message: str):
        raise _ParseError(message)

    def flags(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]


class _ParseError(Exception):
    pass


def read_flags(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any], list[Problem]]:
    """Reads a command line without the program's name.

    Returns:
        All values with their defaults, only those that were typed, and every problem.

    Raises:
        SystemExit: after --help.
    """
    parser, words = _Parser(), list(argv)
    if {"-h", "--help"} & set(words):
        parser.print_help()
        raise SystemExit(0)
    problems: list[Problem] = []
    while True:
        try:
            namespace, unknown = parser.parse_known_args(words)
            break
        except _ParseError as error:
            # argparse stops at the first value that it cannot read: note it, go on without it.
            problem, words = _leave_out(words, str(error))
            problems.append(problem)
    problems += _unknown_words(unknown, parser.flags())
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    typed = vars(parser.parse_known_args(words)[0])
    return vars(namespace), typed, problems


def _leave_out(words: list[str], complaint: str) -> tuple[Problem, list[str]]:
    """The problem behind a complaint such as `argument --max_steps/--max-steps: invalid int value: 'x'`."""
    named, _, said = complaint.removeprefix("argument ").partition(": ")
    spellings = named.split("/")
    for start, word in enumerate(words):
        if word.split("=")[0] in spellings:
            end = start + 1
            while end < len(words) and not words[end].startswith("--"):
                end += 1
            value = word.partition("=")[2] or " ".join(words[start + 1 : end])
            return Problem(word.split("=")[0], value or "nothing", said), words[:start] + words[end:]
    return Problem("command line", " ".join(words), complaint), []


def _unknown_words(unknown: list[str], flags: list[str]) -> list[Problem]:
    problems, after_flag = [], False
    for word in unknown:
        if word.startswith("--"):
            flag = word.split("=")[0]
            remedy = f"{did_you_mean(flag, flags)}no such flag; --help lists them"
            problems.append(Problem(flag, word, remedy))
        elif not after_flag:  # else it is the value of the unknown flag before it
            problems.append(Problem("command line", word, "belongs to no flag; check the quotes"))
        after_flag = word.startswith("--")
    return problems


def select(values: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The values that are fields of the dataclass `kind` (a class)."""
    names = {name for name, entry in kind.__dataclass_fields__.items() if entry.init}
    return {name: value for name, value in values.items() if name in names}
