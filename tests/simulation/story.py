"""What happened, in order: a line for each turn of events, and one number that all of it gives."""

from __future__ import annotations

import traceback
import zlib
from typing import Any, NoReturn

LONGEST = 120
"""So many of the last lines are told."""


class Broken(AssertionError):
    """A promise was broken."""


class Story:
    """`trace` is the same for two runs if and only if the same happened in the same order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.trace = 0
        self.events = 0
        self.faults: dict[str, int] = {}
        self.broken: str | None = None

    def tell(self, now: float, who: str, what: str) -> None:
        """A line worth reading."""
        line = f"{now:10.3f} s  {who:<12} {what}"
        self.lines.append(line)
        self.trace = zlib.crc32(line.encode(), self.trace)

    def note(self, now: float, what: str) -> None:
        """An event that is only counted."""
        self.events += 1
        self.trace = zlib.crc32(f"{now:.6f}{what}".encode(), self.trace)

    def fault(self, now: float, kind: str, whom: str) -> None:
        """The simulation does harm."""
        self.faults[kind] = self.faults.get(kind, 0) + 1
        self.events += 1
        self.tell(now, "FAULT", f"{kind}: {whom}")

    def text(self) -> str:
        """The end of the story, oldest line first."""
        cut = len(self.lines) - LONGEST
        return "\n".join((["... so many lines before: " + str(cut)] if cut > 0 else []) + self.lines[-LONGEST:])


class Checks:
    """Ends a simulation at the first broken promise, with its story. `loop`: a `Loop`, which is stopped then."""

    def __init__(self, loop: Any, story: Story) -> None:
        self._loop, self._story = loop, story

    def check(self, good: object, what: str) -> None:
        """Raises Broken, once and for all."""
        if not good:
            self._broken(what)

    def _broken(self, what: str) -> NoReturn:
        if self._story.broken is None:
            self._story.broken = what
            self._story.tell(self._loop.now, "BROKEN", what)
        self._loop.stopped = True
        raise Broken(what)

    def bug(self, error: Exception) -> None:
        """An exception that no check of the outcome expects."""
        if self._story.broken is None:
            self._story.broken = "".join(traceback.format_exception(error))
            self._story.tell(self._loop.now, "BROKEN", repr(error))
        self._loop.stopped = True
