"""How a master that shares its journal with others learns that it leads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Leadership(Protocol):
    """One process's candidacy. At most one of the processes that share a journal holds the leadership at a time."""

    leader: str
    """Address of the leader at the last look; empty: none was seen."""

    @property
    def epoch(self) -> int:
        """Number of this process's leadership, higher than that of every earlier leader; 0: it was not elected yet.

        It is in every claim and manifest, and the journal refuses the writes of an earlier epoch.
        """
        ...

    def holds(self) -> bool:
        """This process leads for certain. Any thread."""
        ...

    def campaign(self, stop: threading.Event, meanwhile: Callable[[], None]) -> bool:
        """Block until elected (True) or until `stop` is set (False). `meanwhile` is called between two looks."""
        ...

    def resign(self) -> None:
        """Give the leadership up, so that a standby takes over at once. Idempotent."""
        ...
