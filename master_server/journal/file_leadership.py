"""Which of several masters leads: the one that has the SQLite journal open. Its lock ends with its process.

The kernel releases the lock however the process ends, so there is no lease to wait for. It stays with a process that is
stopped: no other master leads until that one goes on or is killed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dlrover_hooks.errors import JournalFailed
from dlrover_hooks.master.journal.sqlite_journal import JournalInUse, SqliteJournal

log = logging.getLogger("dlrover_hooks.master")
POLL_S = 0.1
"""Pause between two tries of a standby to open the journal."""


class FileLeadership:
    """A `Leadership`: this process's candidacy for the journal at `path`. `address`: URL at which it serves."""

    def __init__(self, path: str, address: str, *, synchronous: str = "full") -> None:
        self.leader = ""
        self.journal: SqliteJournal | None = None
        """That of the leader."""
        self._path, self._address, self._synchronous = path, address, synchronous

    @property
    def epoch(self) -> int:
        """See `Leadership`."""
        return self.journal.epoch if self.journal is not None else 0

    def holds(self) -> bool:
        """See `Leadership`. False once a write has found that another process has the journal in spite of the lock."""
        return self.journal is not None and not self.journal.lost

    def campaign(self, stop: threading.Event, meanwhile: Callable[[], None]) -> bool:
        """See `Leadership`. A journal that could be opened at first, and later cannot, is tried again.

        Raises:
            UsageError: the journal is damaged.
            JournalFailed: it cannot be opened at the first look.
        """
        looked = said = False
        while not stop.is_set():
            try:
                self.journal = SqliteJournal(self._path, synchronous=self._synchronous, address=self._address)
                self.leader = self._address
                return True
            except JournalInUse as held:
                self.leader, looked, said = held.address, True, False
            except JournalFailed as error:
                if not looked:
                    raise
                if not said:
                    log.warning("this standby cannot lead: %s. Trying on", error)
                said = True
            meanwhile()
            stop.wait(POLL_S)
        return False

    def resign(self) -> None:
        """See `Leadership`."""
        if self.journal is not None:
            self.journal.close()
