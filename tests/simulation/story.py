"""What happened, in order: a line for each turn of events, and one number that all of it gives."""

from __future__ import annotations

import zlib

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
