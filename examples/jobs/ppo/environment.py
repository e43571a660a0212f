"""The roles without a model: `prompts` serves text by position, and `reward` says what an answer is worth.

The text is Python's own standard library. A prompt is 16 characters of it, and the right answer is the kind of the
character after them.
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
    """The number of its kind; the last one is "any other"."""
    return next((number for number, holds in enumerate(KINDS) if holds(character)), len(KINDS))


def batch(positions: list[int]) -> list[tuple[int, str]]:
    """Depends on the positions only, so that a call may be repeated."""
    return [(position, text()[position * APART :][:CONTEXT]) for position in positions]


def score(answers: list[tuple[int, int]]) -> list[float]:
    """1 for each (position, kind) that is right."""
    return [float(kind(text()[position * APART + CONTEXT]) == answer) for position, answer in answers]


def prompts() -> None:
    current_worker().serve(batch=batch)


def reward() -> None:
    current_worker().serve(score=score)
