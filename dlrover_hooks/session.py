"""A worker's session in a job. `step_driver.StepDriver` makes its calls in the one order that every adapter needs.

All calls are made on the training thread. No framework is used: state is a tree from the adapter, data sources are
objects with `state_dict`, `load_state_dict`, `mark` and `commit`.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover_hooks import protocol as p, rng, testing
from dlrover_hooks.checkpoint.ipc.keeper_messages import SaveNotice
from dlrover_hooks.checkpoint.restore.generation_loader import Fitting
from dlrover_hooks.checkpoint.save.schedule import StepPace, save_due
from dlrover_hooks.config import Config, Place, drill, use_seat
from dlrover_hooks.data.session_datasets import DatasetPosition, Leased, SessionDatasets, united
from dlrover_hooks.errors import (
    CheckpointError,
    HooksError,
    MasterAway,
    MasterError,
    NoCheckpoint,
    RoundEnded,
    Stale,
    StorageFailed,
    UsageError,
)
from dlrover_hooks.host.fork_guard import ForkGuard
from dlrover_hooks.worker import session_collaborators, startup, surviving_process
from dlrover_hooks.worker.deferred_errors import DeferredErrors
from dlrover_hooks.worker.final_save import FinalSaveOutcome, LastSave, say_farewell
from dlrover_hooks.worker.preemption import Preempted as Preempted
from dlrover_hooks.worker.preemption_save import PreemptionSave
from dlrover_hooks.worker.reporter import Reporter
from dlrover_hooks.worker.startup import Restored as Restored

if TYPE_CHECKING:
    from dlrover_hooks.client.in_process_master import InProcessWatch
    from dlrover_hooks.client.liveness_connection import Watcher

log = logging.getLogger("dlrover_hooks")

FORM_S = 900.0
"""Deadline for all workers of a round to start and load; torchrun's own rendezvous timeout."""
LONE_S = 30.0
"""Deadline for the keeper to hash a survivor's single-rank image; enough for 100 GB."""


class Session:
    """One worker's part in one round of a job. Does nothing in a forked child: the rank belongs to the parent.

    Args:
        config: the shared keywords.
        place: rank, world size and node of this process.
        checkpoint: False keeps no checkpoints (membership and data only).

    Raises:
        UsageError: more than one worker, but no master.
    """

    def __init__(self, config: Config, place: Place, *, checkpoint: bool = True) -> None:
        if place.world_size > 1 and config.master is None:
            raise UsageError(
                f"{place.world_size} workers need a master to agree through, and none is known",
                hint="start with `dlrover-hooks run --nproc-per-node N train.py`, or with `torchrun "
                "--rdzv-backend=dlrover --rdzv-endpoint=HOST:8780 --rdzv-id=NAME ...`, where HOST is the first node, "
                "or run `python -m dlrover_hooks.master` and set DLROVER_HOOKS_MASTER=http://HOST:PORT",
            )
        self.config, self.place = config, place
        self.membership = surviving_process.entered(self, config)
        self.run, self.attempt = "", 0
        self._incarnation = place.incarnation or uuid.uuid4().hex
        self._data = SessionDatasets()
        self._restored: Restored | None = None
        self.found = session_collaborators.Noted()  # notes found with the restored generation
        self._rng: dict[str, Any] | None = None
        self._pace = StepPace()
        self.at_step_end = False  # a step was made, and no batch requested since
        self._prepared, self._cut_at, self._looked = False, -1, -1
        self._saves = self._due = False
        """Whether the step `_looked` is saved, and whether `cut` is called for it."""
        self._left, self._here, self._end = False, ForkGuard(), FinalSaveOutcome.DURABLE
        self._caller = session_collaborators.caller(config, self._incarnation, self.membership)
        self._engine = session_collaborators.engine(config, place, self, self.membership) if checkpoint else None
        seat = (self._incarnation, place.rank, place.world_size)
        self._reporter = Reporter(self._caller, config.job, seat, self._engine, config)
        self.clock = self._reporter.clock
        self._surface = DeferredErrors(config, place, self._engine, self._reporter)
        self.parting = PreemptionSave(
            config, place, seat[0], self._reporter, self.membership and self.membership.parting
        )
        self._watcher: Watcher | InProcessWatch | None = None

    # ---- start ------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Obtain a rank unless the launcher has done so, attach, and open the liveness connection."""
        if not self.place.incarnation:
            startup.take_fixed_seat(self._caller.call, self.config, self.place, self._incarnation, FORM_S)
        use_seat()
        kept = self.membership
        survives = kept is not None and kept.survives
        recovers = kept is not None and not kept.unsupported
        attach = startup.attach(
            self.config, self.place, self._incarnation, self._engine, speaks=survives, recovers=recovers
        )
        attached = startup.seated_alike(self._caller.call(attach, timeout_s=60.0), self.config.job, self.place)
        self.run = attached.run
        if kept is None:
            self._watcher = self._caller.watch(self.config.job, self._noticed, on_failure=self.met)
            return
        self._watcher = kept.took_seat(attached.round)
        if survives:  # the master already receives this process's heartbeats and expects them to continue
            self._reporter.start(p.Cadence())

    def restore_plan(
        self, fitting: Fitting | None = None, check: Callable[[Any], object] = lambda _: None
    ) -> Restored | None:
        """Wait for all workers, load what the master chose, and begin. None: a fresh start.

        `fitting` gives the adapter's own tensors; they are written once all ranks have verified what they need.
        `check` raises UsageError for a state that is not the adapter's, Corrupt for one that no adapter saves. It runs
        before any rank reports that it resumes.

        Raises:
            NoCheckpoint: `resume="require"` and no complete generation was found.
            MasterAway: the round did not form within its deadline.
        """
        plan, deadline, tried = p.Plan(number=0), time.monotonic() + FORM_S, False
        while plan.phase is not p.Phase.TRAINING:
            plan = startup.next_plan(self._caller.call, self.config.job, self._incarnation, plan, deadline)
            if plan.phase is p.Phase.BROKEN and self.membership is not None:
                raise RoundEnded(f"round {plan.round} of job {self.config.job} lost a member before all had loaded")
            startup.follow(plan, self._engine)
            if plan.refused is not None:
                raise NoCheckpoint(f"job {self.config.job}: {plan.refused}", hint=startup.instead(plan))
            if plan.phase is p.Phase.RESTORING and plan.restore is not None:
                tried = True
                self._load(plan, plan.restore, fitting, check)
        if plan.restore is None and (tried or plan.attempt == 1):
            startup.refuse_nothing(self.config)
        self._begin(plan)
        return self._restored

    def watch(self, name: str, source: DatasetPosition, state: dict[str, Any] | None = None) -> None:
        """Make `source` part of every cut under `name`, and load `state` into it (None: the restored one, if any)."""
        self._data.watch(name, source)
        state = state if state is not None else self.restored_data(name)
        if state is not None:
            source.load_state_dict(state)

    def lease(self, name: str, source: Leased) -> None:
        """Make `source` part of every cut under `name`; the master leases its ranges, from the restored position on."""
        source.connect(self._caller, self.config.job, self._incarnation, rank=self.place.rank, free=False)
        if self._restored is not None and name in self._restored.leases:
            source.load_state_dict(self._restored.leases[name])
        self._data.lease(name, source)

    def restored_data(self, name: str) -> dict[str, Any] | None:
        """Position of dataset `name` in the restored generation; None if nothing was restored."""
        return self._restored.data.get(name) if self._restored is not None else None

    def draw_from(self, note: bytes) -> None:
        """Continue from `note`, this rank's random state as replicated to another node."""
        if self._restored is not None and self.membership is not None:
            self._restored = session_collaborators.drawing(self._restored, note, self.place, self.attempt)
            self.membership.draws.took(note)

    def forget_restored(self) -> None:
        """The adapter loads something else: restore neither data nor random state."""
        self._restored = None

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """The optimizer stepped. Only sets a mark: schedulers, scaler, EMA and validation are still to come."""
        self.clock.stepped()
        self.at_step_end, self._rng = True, None
        self._data.mark()

    def step_is_over(self) -> None:
        """The last step is entirely over, although no batch was requested yet, because a validation comes first."""
        self._data.commit()

    def before_fetch(self, step: int) -> None:
        """Before the next batch is fetched: capture the random state if a cut follows; restore a pending one first.

        With several loaders, the first one to fetch after a step counts.
        """
        if self._restored is not None and self._restored.rng is not None:
            rng.restore(self._restored.rng)
            self._restored = msgspec.structs.replace(self._restored, rng=None)
        if step != self._looked:
            self._look(step)
        if self._rng is None and self._engine is not None and ((self.at_step_end and self._due) or self.parting.here):
            self._rng = rng.capture()

    def _look(self, step: int) -> None:
        """Once per step: whether a cut is due, and whether all ranks leave. The answers hold for the whole step.

        A cut is always due after the first step: the memory that a save needs is known then, and is allocated.
        """
        self.parting.look(step, self._caller)
        self._saves = save_due(self._reporter.cadence, step)
        self._due = self._saves or not self._prepared
        self._looked = step

    def batch_requested(self, step: int) -> bool:
        """The step boundary after optimizer step `step`: marks become commits. True if a cut is due now."""
        if not self._here:
            self._surface.say(HooksError(f"process {os.getpid()} was forked from this worker: nothing of it is saved"))
            return False
        engine = self._engine
        if self._reporter.error is not None or (engine is not None and (engine.stale or engine.error) is not None):
            self._surface.raise_if_met()
        self._data.commit()
        self._time_step(step)
        if step != self._looked:
            self._look(step)
        # later requests of an accumulation window count batches that are not in the step yet
        ended, self.at_step_end = self.at_step_end, False
        if self._engine is None:
            if self.parting.here:
                self._part(step, None)
            return False
        return (ended and self._due) or self.parting.here

    def cut(self, step: int, state: Any) -> None:
        """Save `state` with the data state and the random state of the same step. Never blocks on a slow store."""
        if self._engine is None or not self._here:
            return
        if self.parting.here:
            return self._part(step, state)
        self._prepared = True
        if not self._saves:
            self._engine.prepare(self._engine.image_bytes(self._tree(state)))
            return
        self._cut_at = step
        saved = self._engine.save(step, self._tree(state), behind=True)
        if saved is not None:
            self._reporter.saved(saved.generation, saved.copy_s)
        else:
            self._reporter.skipped(p.Generation(attempt=self.attempt, step=step, run=self.run))

    def _part(self, step: int, state: Any) -> None:
        """Leave at this step on all ranks, saved as far as time allows. Raises Preempted, unless this rank may stay."""
        tree = self._tree(state) if self._engine is not None and step > 0 else None
        gone = self.parting.save(self._engine, p.Generation(self.attempt, step, self.run), tree, self._caller)
        if not gone.mine and self.membership is not None and not self.membership.unsupported:
            return self.parting.stay(gone)
        self.leave(p.Departure.PREEMPTED, step)
        raise self.parting.tell(gone)

    def frozen_among(self, parameters: Callable[[], Iterable[Any]]) -> None:
        """`parameters()` returns those of the models; frozen ones are not copied at every save."""
        if self._engine is not None:
            self._engine.parameters = parameters

    def wait_copied(self) -> None:
        """Return when the last cut is copied. Call before weights change other than by an optimizer step."""
        if self._engine is not None:
            self._engine.wait_copied()

    def finish(self, step: int, state: Any) -> None:
        """Training ended at `step`: make it durable (if there is a `save_to`) and wait for its MANIFEST.

        A failure is raised at once, or logged once with `on_error="warn"`; see `LastSave.make`.
        """
        self._reporter.ends()
        if self._engine is None or self.config.save_to is None or not self._here:
            return
        self._data.commit()
        self._rng = None  # captured at the last fetch, not at the end
        generation = p.Generation(attempt=self.attempt, step=step, run=self.run)
        last = LastSave(self._engine, self._reporter, generation, lambda: self._committed(generation), self.place.rank)
        self._end = FinalSaveOutcome.OWED
        try:
            last.make(self._tree(state))
            self._end = FinalSaveOutcome.DURABLE
        except (CheckpointError, MasterAway) as error:
            if self.config.on_error == "raise":
                raise
            self._end = FinalSaveOutcome.WARNED
            self._surface.say(error)

    def leave(self, reason: p.Departure, step: int = 0) -> None:
        """Leave the job and end every thread and socket of this session. Safe to call twice.

        After a `finish` that raised, DONE is reported as FAILED. Checkpoints that are only in memory stay there: the
        same command resumes from them.
        """
        if self._left or not self._here:
            return
        self._left = True
        self.parting.signals.give_back()
        if reason is p.Departure.DONE and self._end is FinalSaveOutcome.OWED:
            reason = p.Departure.FAILED
        self._reporter.stop()
        if not self.place.incarnation and not self.place.rank:  # a launcher prints its own final message
            linger_s = self.place.keeper_linger_s
            say_farewell(self.config, linger_s, self._reporter, self._end, self._cut_at, reason)
        try:
            self._caller.call(p.Leave(self.config.job, self._incarnation, reason, step), timeout_s=5.0)
        except (MasterAway, MasterError) as error:
            log.debug("left without a reply of the master: %s", error)
        if self._watcher is not None:
            self._watcher.close()
        if self._engine is not None:
            self._engine.close(finished=reason is p.Departure.DONE and self._end is not FinalSaveOutcome.WARNED)
        (self.membership or self._caller).close()

    def salvage(self, step: int, state: Any, random: dict[str, Any]) -> None:
        """Save the state after `step` at once, although the round is over. A failure is logged.

        Does nothing after `leave`: what this worker leaves is saved already.
        """
        if self._engine is None or self.membership is None or self._left or not self._here:
            return
        self._rng = random
        if not self._engine.save_lone(step, self._tree(state), LONE_S):
            why = self._engine.error or f"not hashed within {LONE_S:g} s"
            log.warning("job %s rank %d: step %d could not be saved when its round broke, so an earlier save is "
                        "restored: %s", self.config.job, self.place.rank, step, why)  # fmt: skip

    def part(self) -> None:
        """The round is over, the process continues: end this session's resources except signal handlers. Idempotent."""
        if self._left or not self._here:
            return
        self._left, self._restored = True, None
        if self._engine is not None:
            self._engine.wait_copied()
            self._engine.parameters = tuple
        self._reporter.stop()

    def locate(self, generation: p.Generation, rank: int) -> p.Located:
        """Where that image is stored. Any thread."""
        return self._caller.call(p.Locate(self.config.job, self._incarnation, generation, rank))

    def heard(self, notice: SaveNotice) -> None:
        """Receives the keeper's notice of a save, on the keeper connection's thread."""
        if self.attempt:  # before that, the notice is of the previous round; voting for it would end this worker
            self._reporter.notice(notice)

    def met(self, error: HooksError) -> None:
        """An error of a background thread: the next call raises it, or warns of it. Any thread."""
        self._reporter.met(error)

    @property
    def skipped_saves(self) -> int:
        """Saves that found no free slot since the start."""
        return self._engine.skipped if self._engine is not None else 0

    # ---- within -----------------------------------------------------------------------------------------------------

    def _load(self, plan: p.Plan, choice: p.Restore, fitting: Fitting | None, check: Callable[[Any], object]) -> None:
        """Load the choice and report the result. After a failure the master chooses again."""
        assert self._engine is not None
        startup.say_fallbacks(plan, self.config, self.place, self._surface.said)
        self._engine.begin(plan.run, plan.attempt, self.place.rank, self.place.world_size)
        try:
            found = self._engine.load(choice, fitting)
            check(found.tree["state"])
            cuts = {} if choice.weights else united(found.leases)
            restored = startup.restored(choice, found)
        except CheckpointError as error:
            log.warning("job %s rank %d cannot load %s: %s", self.config.job, self.place.rank, choice.generation, error)
            ok, reason, cuts, self._restored = False, error.message, {}, None
        else:
            self._restored = restored
            # before training resumes and overwrites the notes of dead processes
            self.found = session_collaborators.noted(self._restored, self.place, self._engine, self.membership)
            ok, reason = True, ""
        said = p.Loaded(self.config.job, self._incarnation, plan.round, ok, reason, cuts)
        try:
            self._caller.call(said, timeout_s=60.0)
        except Stale as stale:  # another rank has already reported a failure to load; follow the next plan
            log.info("job %s rank %d: %s", self.config.job, self.place.rank, stale.message)

    def _begin(self, plan: p.Plan) -> None:
        self.run, self.attempt = plan.run, plan.attempt
        if plan.restore is None:
            self._restored, self.found = None, session_collaborators.Noted()
        if self._engine is not None:
            if self._restored is not None:
                self._engine.fill()
            startup.take_seat(self.config, self._engine, plan, self.place)
        if self._restored is not None:
            self._restored = session_collaborators.drawing(self._restored, self.found.note, self.place, self.attempt)
            startup.say(self._restored, self.config, self.place)
        if self.membership is not None:
            session_collaborators.notes(plan, self.place, self._engine, self.membership, self.found.note)
        self.parting.begin(self._restored)
        self._reporter.start(plan.cadence, plan.restore.generation.step if plan.restore is not None else 0)
        if orders := drill():
            testing.arm(self, orders)

    def _tree(self, state: Any) -> dict[str, Any]:
        return {"state": state, "rank": {"rng": self._rng or rng.capture()}, **self._data.parts()}

    def _time_step(self, step: int) -> None:
        """Measures steps: all for the cadence (smoothed), those with a cut for the choice of the save mode."""
        seconds = self._pace.at(step, time.monotonic())
        if self._engine is not None and seconds is not None and self._cut_at == step - 1:
            self._engine.took(seconds)
        self._reporter.step, self._reporter.step_s = step, self._pace.step_s

    def _committed(self, generation: p.Generation) -> bool:
        if self.membership is not None:
            self.membership.check(step_ends=False)
        self._surface.raise_if_met(ending=True)
        view = self._caller.call(p.ShowJob(self.config.job, self.place.node), timeout_s=60.0)
        refused = view.unstored
        if refused is not None and refused.generation == generation and refused.rank != self.place.rank:
            why = f"rank {refused.rank} could not make {generation} durable: {refused.reason}"
            raise StorageFailed(why, hint="its log says what to do")
        return view.newest_committed is not None and view.newest_committed >= generation

    def _noticed(self, notice: p.Notice) -> None:
        if notice.parting:
            self.parting.summoned()
        if notice.broken:
            why = surviving_process.broken_by(notice)
            log.info("rank %d: round %d %s", self.place.rank, notice.round, why)
