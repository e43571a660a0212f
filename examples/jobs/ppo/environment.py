"""The roles without a model: `prompts` serves prompts by position, and `reward` scores answers.

The text is the source of Python's standard library. A prompt is 16 characters of it, and the right answer is the kind
of the character after them.
"""

import sysconfig
from functools import cache
from pathlib import Path

from dlrover_hooks.job import current_worker

CONTEXT, APART = 16, 97  # characters of a prompt; characters between the beginnings of two prompts
KINDS = (str.islower, str.isupper, str.isdigit, str.isspace, "([{".__contains__, ")]}".__contains__, "'\"".__contains__)


@cache
def text() -> str:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files[:60]).decode("ascii", "replace")


def kind(character: str) -> int:
    """The number of the character's kind. The last kind is "any other"."""
    return next((number for number, holds in enumerate(KINDS) if holds(character)), len(KINDS))


def batch(positions: list[int]) -> list[tuple[int, str]]:
    """(position, prompt) for each position. Depends on the positions only, so that a call may be repeated."""
    return [(position, text()[position * APART :][:CONTEXT]) for position in positions]


def score(answers: list[tuple[int, int]]) -> list[float]:
    """For each (position, kind): 1 if the kind is right, else 0."""
    return [float(kind(text()[position * APART + CONTEXT]) == answer) for position, answer in answers]


def prompts() -> None:
    current_worker().serve(batch=batch)


def reward() -> None:
    current_worker().serve(score=score)
