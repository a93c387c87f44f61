"""What is wrong with what the user gave: collected, then shown all at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple


class Problem(NamedTuple):
    """One thing to fix: the field as the user typed it, the value it had, and what to do about it."""

    field: str
    value: str
    remedy: str


class BadInput(Exception):
    """Raised once with every problem found, before any model is built.

    Args:
        problems: at least one.
    """

    def __init__(self, problems: Iterable[Problem]):
        self.problems = list(problems)
        super().__init__(self.text())

    def text(self) -> str:
        """The message for the terminal: a headline and three lines for each problem."""
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count > 1 else ''} to fix before anything can run:"]
        for number, problem in enumerate(self.problems, 1):
            lines += [
                f"  {number}. {problem.field}",
                f"     value:  {problem.value}",
                f"     remedy: {problem.remedy}",
            ]
        return "\n".join(lines)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'zero2'? ` for a near miss, or nothing; written so that it can stand before another sentence."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}? " if close else ""
