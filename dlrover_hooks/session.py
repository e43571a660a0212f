"""A worker's seat in a job: the only thing adapters talk to.

The verbs, in the order of a run: `join`, `restore_plan`, then per step `stepped`, `batch_requested`, `cut`, at the end
`finish` and `leave`; all on the training thread. No framework is touched: state is a tree the adapter gives, data
sources are objects with `state_dict`, `load_state_dict`, `mark` and `commit`.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks import rng
from dlrover_hooks.checkpoint import stock
from dlrover_hooks.checkpoint.cadence import Pace, save_due
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.restoring import Fitting
from dlrover_hooks.checkpoint.stock import Restored as Restored
from dlrover_hooks.client import MasterClient
from dlrover_hooks.config import Config, Place, use_seat
from dlrover_hooks.courier import Courier
from dlrover_hooks.data.cut import Cut, Source, united
from dlrover_hooks.errors import (
    CheckpointError,
    HooksError,
    MasterAway,
    MasterError,
    NoCheckpoint,
    Stale,
    UsageError,
)
from dlrover_hooks.last_save import LastSave

if TYPE_CHECKING:
    from dlrover_hooks.alone import Alone, Ear
    from dlrover_hooks.watching import Watcher

log = logging.getLogger("dlrover_hooks")

FORM_S = 900.0
"""Deadline for all workers of a round to come up and load; torchrun's own rendezvous timeout."""


class Leased(Source, Protocol):
    """A dataset that the master lends out; see `dlrover_hooks.data.leased`."""

    def connect(self, caller: Any, job: str, incarnation: str, *, free: bool, rank: int | None = None) -> object: ...


class Session:
    """One life of one worker in a job.

    Args:
        config: the shared keywords.
        place: rank, world size and node of this process.
        checkpoint: False keeps no checkpoints (membership and data only).

    Raises:
        UsageError: more than one worker but no master to agree through.
    """

    def __init__(self, config: Config, place: Place, *, checkpoint: bool = True) -> None:
        if place.world_size > 1 and config.master is None:
            raise UsageError(
                f"{place.world_size} workers need a master to agree through, and none is known",
                hint="start with `dlrover-hooks run --nproc-per-node N train.py`, or run `python -m "
                "dlrover_hooks.master` and set DLROVER_HOOKS_MASTER=http://HOST:PORT",
            )
        self.config, self.place = config, place
        self.run, self.attempt = "", 0
        self._incarnation = place.incarnation or uuid.uuid4().hex
        self._data = Cut()
        self._restored: Restored | None = None
        self._rng: dict[str, Any] | None = None
        self._pace = Pace()
        self._at_step_end = False
        self._prepared, self._cut_at = False, -1
        self._said = set[str]()
        self._left = False
        self._caller = self._connect()
        self._engine = self._start_engine() if checkpoint else None
        self._courier = Courier(
            self._caller, config.job, (self._incarnation, place.rank, place.world_size), self._engine
        )
        self._watcher: Watcher | Ear | None = None

    # ---- coming up --------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take a seat: ask for one unless the launcher did, attach, and hold the liveness connection open."""
        if not self.place.incarnation:
            self._join_round()
        use_seat()
        attach = stock.attach(self.config, self.place, self._incarnation, self._engine)
        self.run = self._caller.call(attach, timeout_s=60.0).run
        self._watcher = self._caller.watch(self.config.job, self._noticed)

    def restore_plan(self, fitting: Fitting | None = None) -> Restored | None:
        """Wait for all workers, load what the master chose, and begin. None: a fresh start.

        `fitting` gives the adapter's own tensors; they are written once all ranks have verified what they need.

        Raises:
            NoCheckpoint: `resume="require"` and nothing whole was found.
            MasterAway: the round did not come together within its deadline.
        """
        plan, deadline, tried = p.Plan(number=0), time.monotonic() + FORM_S, False
        while plan.phase is not p.Phase.TRAINING:
            plan = self._next_plan(plan, deadline)
            stock.follow(plan, self._engine)
            if plan.refused is not None:
                raise NoCheckpoint(f"job {self.config.job}: {plan.refused}", hint='use resume="auto" to start anew')
            if plan.phase is p.Phase.RESTORING and plan.restore is not None:
                tried = True
                self._load(plan, plan.restore, fitting)
        if plan.restore is None and (tried or plan.attempt == 1):
            stock.refuse_nothing(self.config)
        self._begin(plan)
        return self._restored

    def watch(self, name: str, source: Source, state: dict[str, Any] | None = None) -> None:
        """Make `source` part of every cut under `name`, and put `state` into it (None: the restored one, if any)."""
        self._data.watch(name, source)
        state = state if state is not None else self.restored_data(name)
        if state is not None:
            source.load_state_dict(state)

    def lease(self, name: str, source: Leased) -> None:
        """Make `source` part of every cut under `name`; the master lends it out, from where the restore left it."""
        source.connect(self._caller, self.config.job, self._incarnation, rank=self.place.rank, free=False)
        if self._restored is not None and name in self._restored.leases:
            source.load_state_dict(self._restored.leases[name])
        self._data.lease(name, source)

    def restored_data(self, name: str) -> dict[str, Any] | None:
        """Where dataset `name` stood in the restored generation; None if nothing was restored."""
        return self._restored.data.get(name) if self._restored is not None else None

    def forget_restored(self) -> None:
        """The adapter loads something else: neither data nor random state of the restore is put back."""
        self._restored = None

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """The optimizer stepped. Only a mark: schedulers, scaler, EMA and validation are still to come."""
        self._at_step_end, self._rng = True, None
        self._data.mark()

    def before_fetch(self, step: int) -> None:
        """The next batch is about to be fetched: remember the random state if a cut follows, restore a restored one.

        Of several loaders the first one to fetch after a step counts.
        """
        if self._restored is not None and self._restored.rng is not None:
            rng.restore(self._restored.rng)
            self._restored = msgspec.structs.replace(self._restored, rng=None)
        if self._rng is None and self._cut_due(step):
            self._rng = rng.capture()

    def batch_requested(self, step: int) -> bool:
        """The quiet point after optimizer step `step`: marks become commits. True if a cut is due now."""
        self._surface()
        self._data.commit()
        self._time_step(step)
        due, self._at_step_end = self._cut_due(step), False
        return due

    def cut(self, step: int, state: Any) -> None:
        """Save `state` with the data state and the random state of the same step. Never blocks on a slow store."""
        if self._engine is None:
            return
        self._prepared = True
        if not save_due(self._courier.cadence, step):
            self._engine.prepare(self._engine.image_bytes(self._tree(state)))
            return
        self._cut_at = step
        saved = self._engine.save(step, self._tree(state), behind=True)
        if saved is not None:
            self._courier.saved(saved.generation, saved.copy_s)
        else:
            self._courier.skipped()

    def frozen_among(self, parameters: Callable[[], Iterable[Any]]) -> None:
        """`parameters()`: those of the models. The frozen ones among them are not copied at every save."""
        if self._engine is not None:
            self._engine.parameters = parameters

    def wait_copied(self) -> None:
        """Return when the last cut is copied, before weights are changed other than by an optimizer's step."""
        if self._engine is not None:
            self._engine.wait_copied()

    def finish(self, step: int, state: Any) -> None:
        """Training ended at `step`: make it durable (if there is a `save_to`) and wait for its MANIFEST.

        What prevents it is raised at once, or said once with `on_error="warn"`; see `LastSave.make`.
        """
        if self._engine is None or self.config.save_to is None:
            return
        self._data.commit()
        self._rng = None  # that of the last fetch is not of the end
        generation = p.Generation(attempt=self.attempt, step=step, run=self.run)
        last = LastSave(self._engine, self._courier, generation, lambda: self._committed(generation), self.place.rank)
        try:
            last.make(self._tree(state))
        except (CheckpointError, MasterAway) as error:
            if self.config.on_error == "raise":
                raise
            self._say(error)

    def leave(self, reason: p.Departure, step: int = 0) -> None:
        """Give up the seat and end every thread and socket of this session. Safe to call twice."""
        if self._left:
            return
        self._left = True
        self._courier.stop()
        try:
            self._caller.call(p.Leave(self.config.job, self._incarnation, reason, step), timeout_s=5.0)
        except (MasterAway, MasterError) as error:
            log.debug("left without the master's word: %s", error)
        if self._watcher is not None:
            self._watcher.close()
        if self._engine is not None:
            self._engine.close(finished=reason is p.Departure.DONE)
        self._caller.close()

    @property
    def skipped_saves(self) -> int:
        """Saves that found no free slot since the start."""
        return self._engine.skipped if self._engine is not None else 0

    # ---- within -----------------------------------------------------------------------------------------------------

    def _connect(self) -> MasterClient | Alone:
        if self.config.master is not None:
            return MasterClient(self.config.master, self.config.token, incarnation=self._incarnation)
        from dlrover_hooks.alone import Alone

        return Alone()

    def _start_engine(self) -> Checkpointer:
        launched = bool(self.place.incarnation)
        return Checkpointer(
            self.config.job,
            self.place.node,
            self.place.local_rank,
            master=self.config.master or "",
            save_to=self.config.save_to,
            storage_options=self.config.storage_options,
            keep=self.config.keep,
            linger_s=600.0 if self.config.named else 0.0,
            locate=lambda *image: self._caller.call(p.Locate(self.config.job, self._incarnation, *image)),
            notify=lambda notice: self._courier.notice(notice),
            start_keeper=not launched,
            mode=self.config.snapshot,
        )

    def _join_round(self) -> None:
        place = self.place
        join = p.Join(
            job=self.config.job,
            incarnation=self._incarnation,
            node=place.node,
            seats=(p.Seat(self._incarnation, place.local_rank, place.rank),),
            host=socket.gethostname(),
            port=0,
            min_workers=place.world_size,
            max_workers=place.world_size,
            proposed_run=uuid.uuid4().hex,
            fresh=self.config.fresh,
            again=True,
        )
        joined = self._caller.call(join, timeout_s=60.0)
        if joined.finished:
            raise UsageError(
                f"job {self.config.job} was finished at step {joined.finished_step or 0}; no checkpoint outlived it",
                hint="start anew with DLROVER_HOOKS_FRESH=1 or another job name; with save_to= it could be trained on",
            )
        seated, deadline = p.Seated(), time.monotonic() + FORM_S
        while seated.round is None:
            self._in_time(deadline, f"{place.world_size} workers to join")
            seated = self._caller.call(p.AwaitRound(self.config.job, self._incarnation, timeout_s=20.0), timeout_s=60.0)

    def _next_plan(self, plan: p.Plan, deadline: float) -> p.Plan:
        number = plan.number or 0
        while True:
            self._in_time(deadline, "all workers to come up and load")
            request = p.AwaitPlan(self.config.job, self._incarnation, after=number, timeout_s=20.0)
            answer = self._caller.call(request, timeout_s=60.0)
            if answer.number is not None:
                return answer

    def _load(self, plan: p.Plan, choice: p.Restore, fitting: Fitting | None) -> None:
        """Load the choice and say so; what cannot be loaded is reported and the master chooses again."""
        assert self._engine is not None
        for lost in plan.fallbacks:
            log.warning("job %s rank %d: fell back: %s", self.config.job, self.place.rank, lost)
        self._engine.begin(plan.run, plan.attempt, self.place.rank, self.place.world_size)
        try:
            found = self._engine.load(choice, fitting)
            cuts = {} if choice.weights else united(found.leases)
        except CheckpointError as error:
            log.warning("job %s rank %d cannot load %s: %s", self.config.job, self.place.rank, choice.generation, error)
            ok, reason, cuts, self._restored = False, f"rank {self.place.rank}: {error.message}", {}, None
        else:
            self._restored = stock.restored(choice, found)
            ok, reason = True, ""
        said = p.Loaded(self.config.job, self._incarnation, plan.round, ok, reason, cuts)
        try:
            self._caller.call(said, timeout_s=60.0)
        except Stale as stale:  # another rank could not load it and was quicker to say so; the next plan tells
            log.info("job %s rank %d: %s", self.config.job, self.place.rank, stale.message)

    def _begin(self, plan: p.Plan) -> None:
        self.run, self.attempt = plan.run, plan.attempt
        if plan.restore is None:
            self._restored = None
        if self._engine is not None:
            if self._restored is not None:
                self._engine.fill()
            stock.take_seat(self.config, self._engine, plan, self.place)
        if self._restored is not None:
            self._say_restored(self._restored)
        self._courier.start(plan.cadence)

    def _say_restored(self, restored: Restored) -> None:
        if restored.rng is None and not restored.weights_only:
            rng.reseed(restored.generation.step, self.attempt, self.place.rank)
        level = logging.WARNING if self.place.rank == 0 else logging.INFO  # to be seen, and once
        what = "starts with the weights of" if restored.weights_only else "resumes"
        log.log(level, "job %s %s %s from %s", self.config.job, what, restored.generation, restored.source.value)

    def _cut_due(self, step: int) -> bool:
        """Only at the first request after a step: later ones of an accumulation window count batches not yet in it.

        After the first step always: how much memory a cut needs is known then, and is made ready.
        """
        due = not self._prepared or save_due(self._courier.cadence, step)
        return self._engine is not None and self._at_step_end and due

    def _tree(self, state: Any) -> dict[str, Any]:
        return {"state": state, "rank": {"rng": self._rng or rng.capture()}, **self._data.parts()}

    def _time_step(self, step: int) -> None:
        """For the cadence (smoothed), and for the mode of saves (steps with a cut)."""
        seconds = self._pace.at(step, time.monotonic())
        if self._engine is not None and seconds is not None and self._cut_at == step - 1:
            self._engine.took(seconds)
        self._courier.step, self._courier.step_s = step, self._pace.step_s

    def _committed(self, generation: p.Generation) -> bool:
        self._surface()
        view = self._caller.call(p.ShowJob(self.config.job), timeout_s=60.0)
        return view.newest_committed is not None and view.newest_committed >= generation

    def _noticed(self, notice: p.Notice) -> None:
        if notice.broken:
            log.info("rank %d: round %d lost a member", self.place.rank, notice.round)

    def _surface(self) -> None:
        """Raise (or warn of) what a background thread met. A skipped save costs an interval, not the run: said once.

        `Stale` is always raised: another life has this seat, and two would train apart.
        """
        if self._engine is not None and self._engine.stale is not None:
            raise self._engine.stale
        error, self._courier.error = self._courier.error, None
        if error is not None and (self.config.on_error == "raise" or isinstance(error, Stale)):
            raise error
        skipped = self._engine.error if self._engine is not None else None
        for each in (error, skipped):
            if each is not None:
                self._say(each)

    def _say(self, error: HooksError) -> None:
        if str(error) not in self._said:
            log.warning("job %s rank %d: %s", self.config.job, self.place.rank, error)
            self._said.add(str(error))

    def _in_time(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise MasterAway(
                f"job {self.config.job} rank {self.place.rank}: waited too long for {what}",
                hint="look at the other workers' logs: one of them did not come up",
            )
