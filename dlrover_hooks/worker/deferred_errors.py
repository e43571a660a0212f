"""Errors of background threads, raised on the training thread at its next call; each warning is logged once."""

from __future__ import annotations

import logging

from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.memory.slot_policy import NoSlot
from dlrover_hooks.config import Config, Place
from dlrover_hooks.errors import HooksError, Stale, StorageFailed
from dlrover_hooks.worker.reporter import Reporter

log = logging.getLogger("dlrover_hooks")
WITHOUT_S = 10.0
"""Seconds without a save after which a missing free slot is logged as a warning."""


class DeferredErrors:
    """Training thread only. `said`: the texts logged so far."""

    def __init__(self, config: Config, place: Place, engine: Checkpointer | None, reporter: Reporter) -> None:
        self.said = set[str]()
        self._config, self._place, self._engine, self._reporter = config, place, engine, reporter

    def raise_if_met(self, *, ending: bool = False) -> None:
        """Raise (or warn of) an error of a background thread. A skipped save only causes one warning.

        A save without a free slot is no warning while other saves succeed: with short steps, saves may come faster than
        they are hashed.

        `Stale` is always raised: another process has this rank, and both would train separately. With `ending`, storage
        errors of older generations are ignored: only the last one counts.
        """
        if self._engine is not None and self._engine.stale is not None:
            raise self._engine.stale
        error, self._reporter.error = self._reporter.error, None
        if ending and isinstance(error, StorageFailed):
            error = None
        if error is not None and (self._config.on_error == "raise" or isinstance(error, Stale)):
            raise error
        skipped = self._engine.error if self._engine is not None else None
        for each in (error, skipped):
            if isinstance(each, NoSlot) and self._engine is not None and self._engine.skipping_s < WITHOUT_S:
                log.debug("job %s rank %d: %s", self._config.job, self._place.rank, each)
            elif each is not None:
                self.say(each)

    def say(self, error: HooksError) -> None:
        """Warn of `error`, once."""
        if str(error) not in self.said:
            log.warning("job %s rank %d: %s", self._config.job, self._place.rank, error)
            self.said.add(str(error))
