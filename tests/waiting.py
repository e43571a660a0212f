"""How tests wait for what another process or thread does and has no event for, and read the lines that it writes."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_S = 120.0
"""For what takes seconds on a quiet machine: other tests run beside this one, and cores may be slow."""
EVERY_S = 0.01
_PAUSES, _MOST_S = 4.0, 0.25
"""A pause is at least four times as long as the answer before it took, which leaves processor time to the process that
the condition is about; but not longer than a quarter of a second for this reason."""


def until(
    condition: Callable[[], Any],
    what: str,
    timeout_s: float = WAIT_S,
    *,
    between: Callable[[], object] | None = None,
    diagnostic: Callable[[], object] | None = None,
    every_s: float = EVERY_S,
) -> Any:
    """The first true answer of `condition`, which is asked every `every_s` seconds, at least twice.

    If its answers take long, it is asked less often.
    A LookupError of it is a no: what it asks about is not there yet. `between` is called between two questions, in this
    thread; what it raises ends the wait. `what` completes the sentence "not within 120 s: ..."; `diagnostic` is called
    only then, and what it returns is added. Raises AssertionError.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        asked_at, missing = time.monotonic(), None
        try:
            if answer := condition():
                return answer
        except LookupError as error:
            missing = error
        now = time.monotonic()
        if asked_at > deadline:
            found = "" if diagnostic is None else f"\n{diagnostic()}"
            raise AssertionError(f"not within {timeout_s:g} s: {what}{found}") from missing
        if between is not None:
            between()
        select.select([], [], [], max(every_s, min(_PAUSES * (now - asked_at), _MOST_S)))


def json_lines(path: Path) -> list[Any]:
    """The JSON lines of a file to which other processes append, without a last line that is not complete yet.

    A reader can see a part of one `write`: file systems copy it page by page.
    """
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
