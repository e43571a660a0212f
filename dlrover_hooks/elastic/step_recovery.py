"""What an adapter does so that its worker survives its round: keep the small set, leave at quiet points, save the rest.

One for each life; made when everything is restored. Training thread.
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
from dlrover_hooks.elastic.rng_redistribution import gathered
from dlrover_hooks.elastic.rng_replication import told
from dlrover_hooks.elastic.step_snapshot import SmallSet
from dlrover_hooks.rng.step_states import States
from dlrover_hooks.session import Session

log = logging.getLogger("dlrover_hooks")


class Survivor:
    """Of one life.

    Args:
        session: has joined and restored.
        models, optimizers, extra: as `SmallSet` takes them.
        state: the cut's state, with what `extra` gave in it.
        ends: called when the life is over: the loaders' `close`, and whatever holds the model.
        passing: what must be gone before the next life; by default the models.
        lost: asked with what `extra` gave: why it cannot be put back now, else empty.
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
        self._small: SmallSet | None = SmallSet(models, optimizers, extra, self._check)
        self._membership.salvage = self._salvage
        statistics = BatchStatistics(models)
        found = gathered(session.found, session.place.rank, session.place.world_size)
        statistics.put_back(found.statistics)
        if found.note is not None and session.found.note is None:
            session.draw_from(found.note)
        self._membership.noting(statistics.take, statistics.nbytes)
        if (way := told(self._membership.draws, session.place, statistics.nbytes)) is not None:
            way.begin(found.note)
            self._membership.tell = way.tell
        known = [weakref.ref(model) for model in (models if passing is None else passing)]
        self._membership.outlived = lambda: any(model() is not None for model in known)
        self._states = States()
        self._membership.draws.take = self._states.take
        self._random: rng.Taken | None = None
        self._validated = -1
        self.stepped = False
        """An optimizer's step was begun in this life. Known once the life is over."""

    def fetches(self) -> None:
        """What comes behind a step is about to be fetched, ahead of the quiet point: that may draw random numbers."""
        if self._random is None and self._session.at_step_end:
            self._random = self._states.take()

    def quiet(self, step: int, *, step_ends: bool) -> None:
        """A quiet point after `step`, its marks committed.

        Raises:
            RoundEnded: a member is lost or, where a step ends, newcomers wait.
        """
        if step_ends and self._small is not None:
            if self._validated != step or not self._small.stands():
                self._keep(self._small, step)
            self._random = None
        self._membership.on_quiet(step)
        self._membership.check(step_ends=step_ends)

    def validates(self, step: int, extra: Callable[[], Any]) -> None:
        """A validation begins behind `step`: what it needs to go on from here, with `extra` for this once. Averaged
        weights may be swapped in for it. Peers may still be in it while this one is in the next step, and die there:
        so this is what all go on from, until that step is over.

        Raises as `quiet`.
        """
        self._session.step_is_over()
        if self._small is not None:
            self._keep(self._small, step, extra, swaps=True)
            self._validated, self._random = step, None
        self._membership.check(step_ends=True)

    def _keep(self, small: SmallSet, step: int, extra: Callable[[], Any] | None = None, *, swaps: bool = False) -> None:
        small.keep(step, self._random or self._states.take(), extra, swaps=swaps)
        self._membership.draws.over(step, small.random.packed)

    def close(self) -> None:
        """The adapter lets go of the model. What was kept may still be saved."""
        if self._small is not None:
            self._small.close()

    def _check(self) -> None:
        self._membership.check(step_ends=False)
        self._membership.draws.ahead(unless_noted=True)

    def _salvage(self) -> None:
        small, state, lost, ends = self._small, self._state, self._lost, self._ends
        self._membership.noting()
        self._membership.tell = lambda _: None
        self._small, self._state, self._lost, self._ends = None, _nothing, str, ()  # they know the adapter, it this
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
