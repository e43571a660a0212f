"""`StepDriver`: the one order in which every adapter calls its session, from the join to the end of training.

    driver = StepDriver(adapter, config, place)
    restored = driver.start(fitting, check)    # 1. join the job, load what the master chose
    driver.session.watch("train", sampler)     # 2. once for each dataset (or `lease`)
    driver.begin(recovery)                     # 3. everything is restored; None: no recovery in process
    ...
    driver.stepped()                           # 4. in the optimizer's post-hook: only a mark
    driver.before_fetch(step)                  # 5. before a batch is fetched (the random state of a cut)
    driver.boundary(step, state)               # 6. the step is over: commit, leave a broken round, save what is due
    ...
    driver.finish(step, state)                 # 7. make the last step durable
    driver.close(DONE, step)                   # 8. leave the job; FAILED leaves it unfinished, to be resumed

An adapter turns its framework's events into these calls, and builds the state trees. No framework is imported here, so
that adapters without torch use the same driver. All calls are made on the training thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.restore.generation_loader import Fitting
from dlrover_hooks.config import Config, Place
from dlrover_hooks.session import Preempted, Restored, Session


class StepRecovery(Protocol):
    """What lets a worker outlive its round, see `dlrover_hooks.elastic.adapter_recovery.AdapterRecovery`."""

    def fetches(self) -> None: ...
    def boundary(self, step: int, *, step_ends: bool) -> None: ...
    def close(self) -> None: ...


class StepDriver:
    """Drives one worker's session in one round of a job.

    Args:
        adapter: when it is collected, or when the process ends, the job is left as FAILED unless `close` was called.
        config: the shared keywords.
        place: rank, world size and node of this process.
        on_preempt: called with a `Preempted` when all ranks leave because one is preempted, once the step is saved.
        checkpoint: False keeps no checkpoints (membership and data only).

    Raises:
        UsageError: more than one worker, but no master.
    """

    def __init__(
        self,
        adapter: object,
        config: Config,
        place: Place,
        *,
        on_preempt: Callable[[Preempted], object] | None = None,
        checkpoint: bool = True,
    ) -> None:
        self.session = Session(config, place, checkpoint=checkpoint)
        self.session.parting.on_preempt = on_preempt
        self.restored: Restored | None = None
        """What this start resumed; None for a fresh start."""
        self._recovery: StepRecovery | None = None
        self.alive = True
        """False once `close` was called."""
        self._end = weakref.finalize(adapter, self.session.leave, p.Departure.FAILED)

    def start(self, fitting: Fitting | None = None, check: Callable[[Any], object] = lambda _: None) -> Restored | None:
        """Join, and load what the master chose; arguments, result and errors are those of `Session.restore_plan`.

        Call `close` if anything between this and `begin` fails.
        """
        try:
            self.session.join()
            self.restored = self.session.restore_plan(fitting, check)
        except BaseException:
            self.close(p.Departure.FAILED)
            raise
        return self.restored

    def forget_restored(self) -> None:
        """The adapter loads something else: restore neither data nor random state."""
        self.restored = None
        self.session.forget_restored()

    def begin(self, recovery: StepRecovery | None) -> None:
        """Everything is restored. `recovery` is made after the restore, because it takes the first step snapshot."""
        self._recovery = recovery

    def stepped(self) -> None:
        """The optimizer stepped. Schedulers, scaler and moving averages may still belong to the step."""
        self.session.stepped()

    def before_fetch(self, step: int) -> None:
        """The next batch is about to be fetched. Later fetches before the same `boundary` change nothing."""
        self.session.before_fetch(step)
        if self._recovery is not None:
            self._recovery.fetches()

    def boundary(self, step: int, state: Callable[[], Any]) -> None:
        """The step boundary after optimizer step `step`. Calls `state` for the tree to save if a cut is due.

        Raises:
            RoundEnded: the round is over; `elastic_run` enters the next one.
            Preempted: all ranks leave, and this step is saved.
            HooksError: what a background thread met since the last boundary.
        """
        self.session.clock.boundary()
        step_ends, due = self.session.at_step_end, self.session.batch_requested(step)
        if self._recovery is not None:
            self._recovery.boundary(step, step_ends=step_ends)
        if due:
            self.session.cut(step, state())
        if due or self._recovery is not None:
            self.session.clock.saved()

    def finish(self, step: int, state: Any) -> None:
        """Training ended at `step`: make it durable. `close` with DONE follows, also when this raises."""
        self.session.finish(step, state)

    def close(self, reason: p.Departure, step: int = 0) -> None:
        """Leave the job. Safe to call twice.

        Within `elastic_run` FAILED keeps the rank assignment: `elastic_run` decides what to do about the failure.
        """
        self.alive = False
        if self._end.detach() is None:
            return
        if self._recovery is not None:
            self._recovery.close()
        if self.session.membership is None or reason is not p.Departure.FAILED:
            self.session.leave(reason, step)
