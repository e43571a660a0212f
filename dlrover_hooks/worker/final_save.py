"""The end of a run: make its last generation durable, or report why that failed. Training thread."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.config import Config
from dlrover_hooks.errors import KeeperAway, MasterAway, StorageFailed
from dlrover_hooks.worker.reporter import Reporter

log = logging.getLogger("dlrover_hooks")

FINISH_S = 600.0
"""Deadline for the last generation to become durable, which includes writing its files."""
KEEPER_S = 60.0
"""Deadline for a keeper to come back."""
MANIFEST_S = 60.0
"""Deadline for the MANIFEST, once the largest file, that of rank 0, was reported to the master."""


class FinalSaveOutcome(enum.Enum):
    """The result for the last generation."""

    DURABLE = enum.auto()
    """Or none had to be made."""
    OWED = enum.auto()
    """Begun and not finished: it has failed."""
    WARNED = enum.auto()
    """It has failed, but the run ends normally (`on_error="warn"`)."""


def farewell(
    config: Config,
    kept: p.Generation | None,
    durable: p.Generation | None,
    end: FinalSaveOutcome,
    last_cut: int,
    keeper_linger_s: float | None = None,
) -> str:
    """What an unfinished run leaves in the keeper that was started for it, and how to resume.

    `kept`: the newest generation known to be complete in memory; the notice of `last_cut` may still be missing.
    `keeper_linger_s`: that of the place, set where something else starts the workers again, such as Ray Train.
    """
    place, again = config.save_to, "start the same command to go on"
    if not config.named:
        again = f"to go on, start it with DLROVER_HOOKS_JOB={config.job}: it has no name of its own"
    elif keeper_linger_s is not None:
        again = "this worker goes on there at its next start"
    what = f"step {kept.step}" if kept is not None else "the newest checkpoint"
    what += " (or a later one)" if kept is not None and kept.step < last_cut else ""
    linger_s = config.linger_s if keeper_linger_s is None else keeper_linger_s
    memory = f"{what} is in memory for {linger_s / 60:g} min"
    if place is None:
        return f"{memory} (no save_to is set); {again}" if config.named else "nothing is kept: no save_to, no job name"
    if durable is not None and durable == kept:
        return f"{what} is saved at {place}; {again}"
    if not config.named:
        return f"{what} is being written to {place}; {again}"
    if end is not FinalSaveOutcome.DURABLE:
        return f"{memory}, and not in {place}: make room there, then {again}"
    return f"{memory}, and is being written to {place}; {again}"


def say_farewell(
    config: Config,
    keeper_linger_s: float | None,
    reporter: Reporter,
    end: FinalSaveOutcome,
    last_cut: int,
    reason: p.Departure,
) -> None:
    """Log the farewell, unless the run has finished or saved nothing."""
    kept = reporter.generations.newest_complete
    if (reason is p.Departure.DONE and end is FinalSaveOutcome.DURABLE) or (kept is None and last_cut < 0):
        return
    said = farewell(config, kept, reporter.newest_committed, end, last_cut, keeper_linger_s)
    log.warning("job %s: %s", config.job, said)


class LastSave:
    """The last generation of a run. `committed`: queries the master, and raises errors of background threads."""

    def __init__(
        self,
        engine: Checkpointer,
        reporter: Reporter,
        generation: p.Generation,
        committed: Callable[[], bool],
        rank: int,
    ) -> None:
        self._engine, self._reporter = engine, reporter
        self._generation, self._committed, self._rank = generation, committed, rank
        self._deadline = time.monotonic() + FINISH_S

    def make(self, tree: dict[str, Any]) -> None:
        """Save `tree` and wait for its MANIFEST.

        Raises:
            StorageFailed: the storage refuses it.
            KeeperAway: no keeper is there to write it.
            MasterAway: it took too long, or the master is unreachable.
        """
        self._save(tree)
        stored_at: float | None = None
        while not self._committed():
            if (broken := self._reporter.broken.get(self._generation)) is not None:
                raise broken
            if self._reporter.generations.retry(self._generation):  # its keeper died: the next save goes to a new one
                self._save(tree)
            if self._rank == 0 and self._reporter.newest_stored == self._generation:
                stored_at = stored_at or time.monotonic()
                self._await_manifest(stored_at)
            self._pause(f"{self._generation} to become durable")

    def _save(self, tree: dict[str, Any]) -> None:
        away_since: float | None = None
        while (saved := self._engine.save(self._generation.step, tree, last=True)) is None:
            error = self._engine.error
            away_since = (away_since or time.monotonic()) if isinstance(error, KeeperAway) else None
            if away_since is not None and time.monotonic() > away_since + KEEPER_S:
                assert error is not None
                raise error
            self._pause(f"a free slot for {self._generation} ({error})")
        self._reporter.saved(saved.generation, saved.copy_s, durable=True)

    def _await_manifest(self, stored_at: float) -> None:
        if time.monotonic() > stored_at + MANIFEST_S:
            raise StorageFailed(
                f"the file of {self._generation} is written, but it is not committed {MANIFEST_S:g} s later",
                hint="the master's log says why, or another worker's which could not write its own file",
            )

    def _pause(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            raise MasterAway(
                f"rank {self._rank} waited {FINISH_S:g} s for {what}",
                hint="look at the other workers' logs and at the storage's speed",
            )
        time.sleep(0.02)
