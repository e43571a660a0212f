"""The part of a framework adapter that lets its worker survive the end of a round.

Keeps the step snapshot, leaves at step boundaries, and saves the snapshot when the round breaks.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dlrover_hooks import rng
from dlrover_hooks.elastic.batch_statistics import BatchStatistics
from dlrover_hooks.elastic.rng_journal_redistribution import gathered
from dlrover_hooks.elastic.rng_journal_replication import JournalReplication, told
from dlrover_hooks.elastic.step_snapshot import StepSnapshot
from dlrover_hooks.rng.fast_capture import RngCapture
from dlrover_hooks.rng.rank_journal import Statistics
from dlrover_hooks.session import Session

log = logging.getLogger("dlrover_hooks")


class AdapterRecovery:
    """Recovery support for one round; created once everything is restored. Training thread.

    Args:
        session: has joined and restored.
        models, optimizers, extra: as for `StepSnapshot`.
        state: returns the state for the cut, given the result of `extra`.
        ends: called when the round is over: the loaders' `close`, and release of whatever holds the model.
        passing: objects that must be freed before the next round; by default the models.
        lost: given the result of `extra`, returns why that state cannot be restored now, or an empty string.
    """

    def __init__(
        self,
        session: Session,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        extra: Callable[[], Any],
        state: Callable[[Any], Any],
        ends: Sequence[Callable[[], object]],
        *,
        passing: Sequence[nn.Module] | None = None,
        lost: Callable[[Any], str] = lambda _: "",
    ) -> None:
        assert session.membership is not None
        self._session, self._membership = session, session.membership
        self._ends: Sequence[Callable[[], object]] = ends
        self._state: Callable[[Any], Any] = state
        self._lost: Callable[[Any], str] = lost
        self._small: StepSnapshot | None = StepSnapshot(models, optimizers, extra, self._check)
        self._passing = [weakref.ref(model) for model in (models if passing is None else passing)]
        self._states = RngCapture()
        self._replication: JournalReplication | None = None
        self._statistics: BatchStatistics | None = BatchStatistics(models)
        self._membership.supported_by(self, self._statistics.nbytes)
        self._continue_draws(self._statistics)
        self._random: rng.Taken | None = None
        self._validated = -1
        self.stepped = False
        """True if an optimizer step was started in this round. Set when the round is over."""

    def fetches(self) -> None:
        """Called before data is fetched ahead of the step boundary: fetching may draw random numbers."""
        if self._random is None and self._session.at_step_end:
            self._random = self._states.take()

    def boundary(self, step: int, *, step_ends: bool) -> None:
        """Called at a step boundary after `step`, its marks committed.

        Raises:
            RoundEnded: a member is lost or, if `step_ends`, new workers wait to join.
        """
        if step_ends and self._small is not None:
            if self._validated != step or not self._small.stands():
                self._keep(self._small, step)
            self._random = None
        self._membership.on_boundary(step)
        self._membership.check(step_ends=step_ends)

    def validates(self, step: int, extra: Callable[[], Any]) -> None:
        """A validation begins after `step`: snapshot what is needed to continue from here, with `extra` this one time.

        Averaged weights may be swapped in for the validation. Peers may still be in the validation while this rank is
        in the next step, and may die there. So all ranks continue from this snapshot until that step is over.

        Raises as `boundary`.
        """
        self._session.step_is_over()
        if self._small is not None:
            self._keep(self._small, step, extra, swaps=True)
            self._validated, self._random = step, None
        self._membership.check(step_ends=True)

    def _keep(
        self, small: StepSnapshot, step: int, extra: Callable[[], Any] | None = None, *, swaps: bool = False
    ) -> None:
        small.keep(step, self._random or self._states.take(), extra, swaps=swaps)
        self._membership.draws.over(step, small.random.packed)

    def close(self) -> None:
        """Detach from the model. The snapshot may still be saved."""
        if self._small is not None:
            self._small.close()

    def _check(self) -> None:
        self._membership.check(step_ends=False)
        self._membership.draws.ahead(unless_noted=True)

    def _continue_draws(self, statistics: BatchStatistics) -> None:
        """Continue from the notes of the last round, and replicate the coming ones."""
        session = self._session
        found = gathered(session.found, session.place.rank, session.place.world_size)
        statistics.put_back(found.statistics)
        if found.note is not None and session.found.note is None:
            session.draw_from(found.note)
        self._replication = told(self._membership.draws, session.place, statistics.nbytes)
        if self._replication is not None:
            self._replication.begin(found.note)

    # ---- `RecoverySupport` ------------------------------------------------------------------------------------------

    def random_state(self) -> rng.Taken:
        """The random state of this process now."""
        return self._states.take()

    def statistics(self) -> Statistics:
        """The batch statistics of the models now."""
        return self._statistics.take() if self._statistics is not None else ()

    def replicate(self, ranks: int) -> None:
        """Replicate the newest note within a step to another node, if all ranks do."""
        if (replication := self._replication) is not None:
            replication.tell(ranks)

    @property
    def holds_memory(self) -> bool:
        """True while the models still exist."""
        return any(model() is not None for model in self._passing)

    def salvage(self) -> None:
        """The round is over: save the last step snapshot, and release the model."""
        small, state, lost, ends = self._small, self._state, self._lost, self._ends
        self._statistics = self._replication = None
        self._small, self._state, self._lost, self._ends = None, _nothing, str, ()  # breaks reference cycles
        assert small is not None
        small.close()
        self.stepped = small.stepped
        reason = lost(small.extra) if small.step is not None else ""
        if (reason := reason or small.roll_back()) == "":
            self._session.salvage(small.step or 0, state(small.extra), small.random.state())
        else:
            log.info("job %s: the newest save is restored: %s", self._session.config.job, reason)
        for end in ends:
            end()


def _nothing(_: Any) -> None: ...
