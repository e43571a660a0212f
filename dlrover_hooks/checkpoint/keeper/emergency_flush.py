"""Makes the newest generation that is complete on this node durable: after a trainer died, and at the keeper's end.

A generation that is spread over several nodes is not flushed. A shard file counts only if its rank voted for it, or if
one keeper has all of the shards, and the ranks that could vote are gone. Loop thread only. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.keeper.hasher import SlotHasher
from dlrover_hooks.checkpoint.keeper.persist_queue import PersistQueue
from dlrover_hooks.checkpoint.memory.keeper_segments import SegmentRegistry
from dlrover_hooks.checkpoint.storage.shard_writer import NotAsHashed
from dlrover_hooks.protocol import Generation, Manifest

_log = logging.getLogger(__name__)


class EmergencyFlush:
    """The emergency flush. `saving()`: the newest Hello that names a `save_to`, if any."""

    def __init__(
        self,
        holdings: SegmentRegistry,
        hashes: SlotHasher,
        shards: PersistQueue,
        saving: Callable[[], keeper_messages.Hello | None],
    ) -> None:
        self._holdings, self._hashes, self._shards, self._saving = holdings, hashes, shards, saving
        self._begun: Generation | None = None
        """The generation that is being written, or was written."""
        self._busy = self._again = False
        self._alive_run: str | None = None

    def trainer_died(self) -> None:
        """Flush once all slots published so far are hashed. Requests are served meanwhile."""
        self._again = True
        self._hashes.when_done(self._next)

    def forget(self, run: str) -> None:
        """`run` starts afresh: no generation of an earlier run may be committed after this."""
        self._alive_run = run

    def write(self, then: Callable[[], None]) -> None:
        """Write the newest complete generation unless it is written already; call `then()` at the end, also after
        errors.

        The data is compared with its hashes. A damaged slot no longer counts, and the next newest generation is written
        instead.
        """
        whole, saving = self._holdings.newest_whole(), self._saving()
        if whole is None or saving is None or saving.save_to is None or whole[0] == self._begun:
            then()
            return
        generation, ranks = whole
        self._begun = generation

        def written(manifest: Manifest | Exception) -> None:
            if isinstance(manifest, Exception):
                self._begun = None
                _log.error("%s was not made durable: %s", generation, manifest)
            if isinstance(manifest, NotAsHashed):
                manifest.found.segment.refute(manifest.found.proof.slot)
                self._holdings.damage.append(manifest.message)
                self.write(then)
            else:
                then()

        self._shards.last_will(ranks, generation, saving, written, wanted=lambda: self._wanted(generation))

    def _wanted(self, generation: Generation) -> bool:
        return self._alive_run in (None, generation.run)

    def _next(self) -> None:
        if self._again and not self._busy:
            self._again, self._busy = False, True
            self.write(self._done)

    def _done(self) -> None:
        self._busy = False
        self._next()
