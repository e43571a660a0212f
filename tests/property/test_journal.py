"""Replaying the journal gives the live state, byte by byte, through reopening and snapshots (real SQLite)."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis.stateful import rule

from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from tests.property.master_world import World


class Journaled(World):
    """The world with a journal on disk."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.journal.close()
        self.path = Path(self._folder.name) / "master.db"
        self.journal = SqliteJournal(self.path, synchronous="normal")

    def teardown(self) -> None:
        self.check()
        super().teardown()
        self._folder.cleanup()

    def check(self) -> None:
        assert job_registry.encode(self.journal.load()) == job_registry.encode(self.state)

    @rule()
    def reopen(self) -> None:
        """A new life goes on with the replayed state."""
        owner = self.journal.owner
        self.journal.close()
        self.journal = SqliteJournal(self.path, synchronous="normal")
        self.check()
        self.state = self.journal.load()
        assert self.journal.owner == owner

    @rule()
    def snapshot(self) -> None:
        self.journal.append([], job_registry.encode(self.state))
        self.check()


TestJournaled = Journaled.TestCase
TestJournaled.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
