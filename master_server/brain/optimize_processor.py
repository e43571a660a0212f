"""The optimize processor: claims optimize events, picks the algorithm by what is wrong, and keeps its plan.

Each process of the Brain has one; all of them share the events of the database. Beside that its thread lets the
administers look at the jobs, and forgets what is old.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Mapping

import sqlalchemy as sa

from dlrover_hooks.errors import DatabaseFailed
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.master.brain import administer
from dlrover_hooks.master.brain.algorithm_executor import AlgorithmExecutor, Executed, check_name
from dlrover_hooks.master.brain.algorithms.registry import DEFAULTS, PlanProblem, problem
from dlrover_hooks.master.brain.algorithms.speeds import kind_of, units_of
from dlrover_hooks.master.brain.database import events, housekeeping, jobs
from dlrover_hooks.master.brain.database.database import Database
from dlrover_hooks.master.brain.database.events import Claim
from dlrover_hooks.master.brain.database.tables import job
from dlrover_hooks.master.brain.messages import PlanAnswer
from dlrover_hooks.master.brain.records import AlgorithmInput, Proposal
from dlrover_hooks.master.scaling.optimizer import OptimizeStage
from dlrover_hooks.protocol import ResourcePlan

log = logging.getLogger("dlrover_hooks.brain")
CLAIM_S = 60.0
"""A process has so long for an event; then another one takes it over. More than two plug-ins take at their limits."""
EVERY_S = 0.5
"""Between two looks for events that no request waits for."""
LOOKS = 200
"""Jobs that administers look at before events are looked for again."""
CLEAN_EVERY_S = 600.0


class OptimizeProcessor:
    """Args:

    use: the algorithm to ask first for a problem, instead of the built-in one, which answers if it does not.
    quotas: the most units of the jobs of a tenant.
    claim_s: seconds after which another process takes over an event of this one.
    forget_s: finished jobs are forgotten so long after their end.

    Raises `UsageError` if there is no such algorithm.
    """

    def __init__(
        self,
        database: Database,
        *,
        executor: AlgorithmExecutor | None = None,
        use: Mapping[PlanProblem, str] | None = None,
        quotas: Mapping[str, int] | None = None,
        claim_s: float = CLAIM_S,
        forget_s: float = housekeeping.FORGET_S,
    ) -> None:
        self._database, self._executor = database, executor or AlgorithmExecutor()
        self._use, self._quotas = dict(use or {}), dict(quotas or {})
        for name in self._use.values():
            check_name(name)
        self._claim_s, self._forget_s = claim_s, forget_s
        self.worker = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._cleaned_at = 0.0
        self._wake = threading.Event()
        self._thread = BackgroundThread(
            "brain-processor", self._run, where=database.name, on_error="warn", again_s=1.0, wake=self._wake.set
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the event that it works on."""
        self._thread.stop()

    def run_once(self) -> bool:
        """Look at the jobs, then process the oldest event. False: there was none. Raises `DatabaseFailed`."""
        self.look()
        with self._database.reading() as connection:
            event_id = events.next_due(connection, self._database.now(connection))
        return event_id is not None and self.process(event_id)

    def look(self) -> None:
        """Let the administers look at the jobs that have new samples."""
        with self._database.reading() as connection:
            now = self._database.now(connection)
            ids = connection.execute(
                sa.select(job.c.id)
                .where(job.c.ended_at.is_(None), job.c.look_at <= now, job.c.sampled_at.is_not(None))
                .order_by(job.c.look_at).limit(LOOKS)
            ).scalars().all()  # fmt: skip
        for job_id in ids:
            self._look_at(job_id)

    def process(self, event_id: int) -> bool:
        """Claim this event and make its plan. False: another process has it, or it is finished."""
        with self._database.writing() as connection:
            now = self._database.now(connection)
            claimed = events.claim(connection, event_id, self.worker, now, self._claim_s)
        if claimed is None:
            return False
        given, sample_id = self._input(claimed)
        if given is None:
            with self._database.writing() as connection:
                events.drop_open(connection, claimed.job_id, "the job has ended", self._database.now(connection))
            return True
        name, executed = self._executed(claimed, given)
        return self._finish(claimed, given, name, executed, sample_id)

    # ---- the parts of it ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            try:
                found = self.run_once()
                self._clean()
            except DatabaseFailed as error:
                log.error("%s; trying again", error)
                self._wake.wait(10 * EVERY_S)
                continue
            if not found:
                self._wake.wait(EVERY_S)

    def _look_at(self, job_id: int) -> None:
        with self._database.writing() as connection:
            now = self._database.now(connection)
            taken = connection.execute(
                sa.update(job)
                .where(job.c.id == job_id, job.c.look_at <= now)
                .values(look_at=now + administer.LOOK_EVERY_S)
            ).rowcount
            row = jobs.by_id(connection, job_id) if taken else None
            if row is None:
                return
            found, _ = jobs.record(connection, row, OptimizeStage.RUNNING, now)
            for event in administer.looked(found, events.last_created(connection, job_id), now):
                events.create(connection, job_id, event, now)

    def _input(self, claimed: Claim) -> tuple[AlgorithmInput | None, int | None]:
        """What the algorithm is told. None: the job has ended."""
        with self._database.reading() as connection:
            row = jobs.by_id(connection, claimed.job_id)
            if row is None:
                return None, None
            now, event = self._database.now(connection), claimed.event
            found, sample_id = jobs.record(connection, row, event.stage, now, event.oom_nodes)
            past = jobs.history(connection, row.registration)
            view = jobs.cluster(connection, self._quotas, now)
        return AlgorithmInput(found, past, view, event.config or {}), sample_id

    def _executed(self, claimed: Claim, given: AlgorithmInput) -> tuple[str, Executed]:
        """The first answer of the algorithms for the problem, and all errors before it."""
        what, errors = problem(claimed.event.kind, given.job), list[str]()
        names = ([self._use[what]] if what in self._use else []) + list(DEFAULTS[what])
        for name in names:
            executed = self._executor.execute(name, given)
            if executed.error:
                log.warning("job %s: %s", given.job.registration.job, executed.error)
                errors.append(executed.error)
            if executed.proposal is not None:
                return name, Executed(executed.proposal, "; ".join(errors))
        nothing = "no algorithm has a plan" if errors else f"nothing to change ({what.value})"
        return names[-1], Executed(Proposal(ResourcePlan(), nothing), "; ".join(errors))

    def _finish(
        self, claimed: Claim, given: AlgorithmInput, name: str, executed: Executed, sample_id: int | None
    ) -> bool:
        proposal = executed.proposal
        assert proposal is not None
        reason = f"{claimed.event.reason}: {proposal.reason}"
        answer = PlanAnswer(proposal.plan, 0, name, reason, proposal.predicted)
        with self._database.writing() as connection:
            now = self._database.now(connection)
            done = events.finish(connection, claimed, answer, now, error=executed.error, sample_id=sample_id)
            if done and proposal.curve:
                last = given.job.samples[-1]
                jobs.keep_curve(connection, claimed.job_id, kind_of(last), units_of(last), proposal.curve)
        if not done:
            log.warning("event %d of job %s was taken over: its plan is dropped", claimed.event_id,
                        given.job.registration.job)  # fmt: skip
        return done

    def _clean(self) -> None:
        with self._database.reading() as connection:
            now = self._database.now(connection)
        if now >= self._cleaned_at + CLEAN_EVERY_S:
            self._cleaned_at = now
            with self._database.writing() as connection:
                housekeeping.forget(connection, now, self._forget_s)
