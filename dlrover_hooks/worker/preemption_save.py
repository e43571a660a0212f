"""Leaving on preemption: all ranks leave at one step boundary, saved as far as the time allows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.config import Config, Place
from dlrover_hooks.errors import HooksError
from dlrover_hooks.worker.preemption import Preempted, Preemption, Signals, affordable
from dlrover_hooks.worker.reporter import Reporter
from dlrover_hooks.worker.startup import Restored

if TYPE_CHECKING:
    from dlrover_hooks.client import Caller

log = logging.getLogger("dlrover_hooks")
_PAUSE_S = 0.05
_WAY_OUT_S = 1.0
"""Reserved for shutting down."""


class PreemptionSave:
    """Signal handling of a session, and its save when all ranks leave. Training thread only.

    `before`: the object of the previous round, in a process that survived it. Its signal handlers are still installed:
    a signal between the rounds did not end the process and takes effect in this round.
    """

    def __init__(
        self, config: Config, place: Place, incarnation: str, reporter: Reporter, before: PreemptionSave | None = None
    ) -> None:
        self.here = False
        """All ranks leave at this step boundary."""
        self.on_preempt: Callable[[Preempted], object] | None = None
        """The user's hook, called when all is saved and the process is about to end."""
        self.signals = before.signals if before is not None else Signals(config.signals, self._flag)
        self._config, self._place, self._reporter = config, place, reporter
        self._preemption = Preemption(config.job, incarnation, place.node, config.grace_s)
        reporter.preemption = self._preemption
        if before is not None:
            self.signals.flag = self._flag
            self._preemption.inherit(before._preemption)

    def _flag(self, name: str) -> None:
        self._preemption.flag(name)
        self._reporter.wake()

    def summoned(self) -> None:
        """The master says that a member of the round is preempted: ask what to do, without waiting for the next
        heartbeat. Any thread.
        """
        self._reporter.beat_now()

    def begin(self, restored: Restored | None) -> None:
        """Training starts after the restored step: from here on a signal no longer ends the process at once."""
        whole = restored is not None and not restored.weights_only
        self._preemption.gate.begin(restored.generation.step if restored is not None and whole else 0)
        self.signals.take()

    def overdue(self) -> Preempted | None:
        """Between rounds: the notice, after calling the user's hook, if this process must leave now; else None."""
        if not self._preemption.overdue:
            return None
        return self.tell(self._gone(self._preemption.gate.passed, durable=False))

    def look(self, step: int, caller: Caller) -> None:
        """At the step boundary of `step`. Waits for the other ranks' promises while any rank is preempted."""
        self.here = self._preemption.leaves_at(step, caller)

    def stay(self, gone: Preempted) -> None:
        """Only other ranks leave: this worker trains on, and recovers in process when the round breaks."""
        log.warning("job %s rank %d: others are preempted (%s) and leave at step %d; this worker goes on without them",
                    self._config.job, self._place.rank, gone.reason, gone.step)  # fmt: skip
        self._preemption.stay()
        self.here = False

    def save(
        self, engine: Checkpointer | None, generation: p.Generation, tree: dict[str, Any] | None,
        caller: Caller,
    ) -> Preempted:  # fmt: skip
        """Save `tree` (None: nothing was trained) as durably as the time allows."""
        preemption, durable = self._preemption, False
        if engine is not None and tree is not None:

            def view() -> Any:
                return caller.call(p.ShowJob(self._config.job, self._place.node), timeout_s=1.0)

            save = HastySave(engine, self._reporter, generation, view, lambda: preemption.left_s)
            durable = save.make(tree, alone=preemption.alone)
        return self._gone(generation.step, durable=durable)

    def _gone(self, step: int, *, durable: bool) -> Preempted:
        of = self._preemption
        return Preempted(of.reason, step, mine=of.mine, durable=durable, left_s=of.left_s)

    def tell(self, gone: Preempted) -> Preempted:
        """Log that the process is about to end, and call the user's hook."""
        log.warning("job %s rank %d: %s", self._config.job, self._place.rank, gone)
        if self.on_preempt is not None:
            self.on_preempt(gone)
        return gone


class HastySave:
    """Saves one generation before a deadline. Training thread; errors of storage, keeper and master are not raised.

    Args:
        view: requests the job's state from the master.
        left_s: seconds until this process is killed.
    """

    def __init__(
        self, engine: Checkpointer, reporter: Reporter, generation: p.Generation, view: Callable[[], p.JobView],
        left_s: Callable[[], float],
    ) -> None:  # fmt: skip
        self._engine, self._reporter, self._generation = engine, reporter, generation
        self._view, self._left_s = view, left_s

    def make(self, tree: dict[str, Any], *, alone: bool = False) -> bool:
        """Save `tree`; True once it is durable. `alone`: other ranks do not save this step, so nothing is waited for.

        If the time is too short, the keeper still writes the image when its launcher ends, as far as it has time.
        """
        nbytes = self._engine.image_bytes(tree)
        while (saved := self._engine.save(self._generation.step, tree, last=True)) is None:
            if self._left_s() <= _WAY_OUT_S:
                return False
            time.sleep(_PAUSE_S)
        wanted = not alone and self._engine.save_to is not None
        durable = wanted and affordable(nbytes, self._reporter.stored_bytes_per_s, self._left_s())
        self._reporter.saved(saved.generation, saved.copy_s, durable=durable)
        while not alone and self._left_s() > _WAY_OUT_S:
            if (answer := self._look(durable)) is not None:
                return answer
            time.sleep(_PAUSE_S)
        return False

    def _look(self, durable: bool) -> bool | None:
        """Whether the generation is durable. None: not decided yet."""
        try:
            view = self._view()
        except HooksError:
            return None
        if view.newest_committed is not None and view.newest_committed >= self._generation:
            self._reporter.newest_committed = view.newest_committed
            return True
        if view.newest_complete is None or view.newest_complete < self._generation:
            return False if _lacks_ranks(view) else None
        return None if durable and not self._reporter.generations.failed(self._generation) else False


def _lacks_ranks(view: p.JobView) -> bool:
    """A rank has left this round: an incomplete generation will not become complete."""
    return view.phase is p.Phase.BROKEN or not all(member.alive for member in view.members)
