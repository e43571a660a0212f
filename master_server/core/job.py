"""One job: its journaled state, and the effects that a restarted master must perform again.

A job is changed through `dispatch.apply` only.
"""

from __future__ import annotations

import math

import msgspec

from dlrover_hooks.errors import Stale
from dlrover_hooks.master.core.checkpoints import save_votes
from dlrover_hooks.master.core.checkpoints.restore_sources import LoadRefusal, Offers
from dlrover_hooks.master.core.checkpoints.save_votes import CheckpointVotes, Commit, Settings
from dlrover_hooks.master.core.effects import (
    CommitGeneration,
    Deadline,
    Effect,
    Wake,
    WriteFinished,
    plan_topic,
    watch_topic,
)
from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling
from dlrover_hooks.master.core.leased_data.ledger import Ledgers
from dlrover_hooks.master.core.node_check.check_state import NodeCheck
from dlrover_hooks.master.core.ps_clusters.cluster_state import PSClusters
from dlrover_hooks.master.core.roles.role_state import RoleJob
from dlrover_hooks.master.core.rounds import rank_assignment, rendezvous as rounds
from dlrover_hooks.master.core.rounds.key_value_store import Keys
from dlrover_hooks.master.core.rounds.members import Member
from dlrover_hooks.master.core.rounds.rendezvous import Round, Rounds
from dlrover_hooks.protocol import Ending, Phase, Restore, Secret, Source

Effects = list[Effect]


class Remembered(msgspec.Struct, frozen=True, gc=False):
    """The last reply on one channel, as JSON. `event`: checksum of the request."""

    seq: int
    event: int
    reply: bytes


class Choice(msgspec.Struct):
    """The plan of the current round. `number` increases with every change that members must receive."""

    number: int = 0
    restore: Restore | None = None
    refused: str | None = None
    fallbacks: tuple[str, ...] = ()
    lost: int = 0
    replicas_to: dict[str, str] = {}
    """By node, the node that keeps its replicas."""
    holders: tuple[tuple[str, ...], ...] = ()
    """By saved rank, the nodes that hold its image of the generation restored from memory, its own node first."""
    answers: dict[str, tuple[int, ...]] = {}
    """By incarnation, its `Restore.answers`; empty if each local rank 0 answers for its node."""


class Leaving(msgspec.Struct):
    """The preempted nodes of the current round (empty: none) and the step to leave at, see `preemption_agreement`."""

    nodes: tuple[str, ...] = ()
    reason: str = ""
    until: float = math.inf
    """When the first of these nodes is taken away, by the clock of `now`."""
    promised: dict[str, int] = {}
    """By live member: the last step boundary it has passed. `passed`: the greatest of all."""
    passed: int = -1
    step: int | None = None


MOST_FAILURE_TIMES = 1000


class StallRestarts(msgspec.Struct):
    """How often members were ended because they made no steps; `step`: the job's greatest one at the last time."""

    count: int = 0
    step: int = -1


class StragglerActions(msgspec.Struct, frozen=True):
    """What was done about slow ranks since the launch. `at`: when the last time, by the clock of `now`.

    `places`: of the ranks that were restarted or excluded. `excluded`: by node that is kept out, the reason.
    """

    count: int = 0
    at: float = -math.inf
    places: tuple[str, ...] = ()
    excluded: dict[str, str] = {}


class Job(msgspec.Struct):
    """All journaled state of one job."""

    name: str
    run: str
    proposed: str = ""
    """The name that the last join proposed for a new run."""
    fresh: bool = False
    attempt: int = 0
    rounds: Rounds = msgspec.field(default_factory=Rounds)
    settings: Settings = Settings()
    saves: CheckpointVotes = msgspec.field(default_factory=CheckpointVotes)
    offers: Offers = msgspec.field(default_factory=Offers)
    plan: Choice = msgspec.field(default_factory=Choice)
    refusals: list[LoadRefusal] = []
    secret: Secret = Secret()
    ledgers: Ledgers = msgspec.field(default_factory=Ledgers)
    leaving: Leaving = msgspec.field(default_factory=Leaving)
    keys: Keys = msgspec.field(default_factory=Keys)
    """The key-value store of the current round."""
    ps: PSClusters | None = None
    """The tasks of a parameter server job."""
    roles: RoleJob | None = None
    """The workers of a job of several roles."""
    scaling: JobScaling | None = None
    """The plans for its nodes, if the master makes them."""
    check: NodeCheck = msgspec.field(default_factory=NodeCheck)
    restored_from: Source | None = None
    finished: bool = False
    finished_step: int | None = None
    finish_written: bool = False
    ending: Ending | None = None
    """An agent has given up the job for all nodes. Cleared when the job is launched again."""
    failures: int = 0
    """See `JobView`: the launchers count their restart budget by it."""
    failed_at: list[float] = []
    """When the newest of these failures happened; at most `MOST_FAILURE_TIMES`."""
    stalls: StallRestarts = msgspec.field(default_factory=StallRestarts)
    slow: StragglerActions = StragglerActions()
    served_at: str = ""
    """The node that serves the master, if it is one of the job."""
    replies: dict[str, dict[str, Remembered]] = {}
    """By incarnation and channel."""
    alarm: float = math.inf
    """When the last requested `Deadline` is due."""
    changed_at: float = math.inf
    """Time of its last event."""

    @property
    def live(self) -> bool:
        """A live member holds a rank, an agent waits for one, or a task of a parameter server job is registered."""
        return self.standing > 0

    @property
    def writes(self) -> bool:
        """It may write to its checkpoint URL: it is live and not finished."""
        return self.live and not self.finished

    @property
    def over(self) -> bool:
        """It is finished or was only checked, and no process is left: see `processes`."""
        return (self.finished or self.only_checked) and not self.processes

    @property
    def only_checked(self) -> bool:
        """Its nodes were checked, and nothing else has ever been requested for it."""
        checked = self.check.number > 0 and not self.check.standing
        unused = not self.run and self.ps is None and self.scaling is None and self.roles is None
        return checked and unused and not self.ledgers.named

    @property
    def processes(self) -> int:
        """Number of processes that hold a rank or leases, wait for a rank, are registered as a task, or are checked."""
        return self.standing + len(self.ledgers.free) + self.check.standing

    @property
    def standing(self) -> int:
        """Number of waiting agents, live members and registered tasks."""
        tasks = len(self.ps.incarnations) if self.ps is not None else 0
        tasks += len(self.roles.incarnations) if self.roles is not None else 0
        return tasks + len(self.rounds.waiting) + (self.rounds.round.live if self.rounds.round is not None else 0)


def knows(job: Job, incarnation: str) -> bool:
    """True if `incarnation` holds a rank, waits for one, is a task, is checked, or may hold leases without a rank."""
    if job.ps is not None and incarnation in job.ps.incarnations:
        return True
    if job.roles is not None and incarnation in job.roles.incarnations:
        return True
    if job.check.takes_part(incarnation):
        return True
    return incarnation in job.ledgers.free or rounds.knows(job.rounds, incarnation)


def seat(job: Job, incarnation: str) -> tuple[Round, Member]:
    """The current round and its live member `incarnation`. Raises Stale if there is no such member."""
    member = rounds.member_of(job.rounds, job.name, incarnation)
    assert job.rounds.round is not None
    return job.rounds.round, member


def in_round(job: Job, incarnation: str, number: int) -> Round:
    """Round `number`, if it is the current one and has that live member. Raises Stale."""
    current, _ = seat(job, incarnation)
    if current.number == number:
        return current
    raise Stale(
        f"Round {number} of job {job.name!r} is over: it is at round {current.number}.", hint="Wait for the next round."
    )


def enter(job: Job, current: Round, phase: Phase, effects: Effects) -> None:
    """Move the round to `phase` and wake the requests that wait for its plan."""
    current.phase = phase
    job.plan.number += 1
    effects.append(Wake(topic=plan_topic(job.name)))
    tell_of_newcomers(job, effects)


def tell_of_newcomers(job: Job, effects: Effects) -> None:
    """Wake the watch requests if the number of newcomers changed: by a join, or because the round began to train."""
    waiting = rounds.count_newcomers(job.rounds)
    if waiting != job.rounds.newcomers:
        job.rounds.newcomers = waiting
        effects.append(Wake(topic=watch_topic(job.name)))


def persist_due_at(job: Job) -> float:
    """When a persist is due by time, if the job trains and none is announced yet; else `inf`."""
    current = job.rounds.round
    trains = current is not None and current.phase is Phase.TRAINING and current.attempt > 0 and not job.finished
    return save_votes.persist_due_at(job.saves, job.settings) if trains else math.inf


EVERY_S = 1.0
"""Shortest time between two searches for expired leases of a job."""


def arm(job: Job, now: float, effects: Effects) -> None:
    """Set the job's only `Deadline` to the earliest time at which something is due."""
    forming = rank_assignment.due(job.rounds)
    soonest = job.ledgers.expired_at + EVERY_S
    dues = [max(ledger.heap[0][0], soonest) for ledger in job.ledgers.named.values() if ledger.heap]
    if forming is not None and forming > now:
        dues.append(forming)
    dues.append(persist_due_at(job))
    dues.append(job.check.due)
    if job.ps is not None and not job.finished:
        dues.append(job.ps.due(now))
    if job.roles is not None:
        dues.append(job.roles.due())
    if job.scaling is not None:
        dues.append(job.scaling.due)
    at = min(dues, default=math.inf)
    if at < job.alarm:
        job.alarm = at
        effects.append(Deadline(job=job.name, at=at))


def arm_for_persist(job: Job, now: float, effects: Effects) -> None:
    """Like `arm`, but only if a persist is due before the current deadline."""
    if persist_due_at(job) < job.alarm:
        arm(job, now, effects)


def committing(job: Job, commit: Commit) -> CommitGeneration:
    """The effect that writes this manifest."""
    return CommitGeneration(
        job=job.name, url=commit.url, options=commit.options, manifest=commit.manifest, keep=commit.keep
    )


def finishing(job: Job) -> Effects:
    """The effect that records the run's end, if that is not done yet and storage has the run's last generation."""
    url, step, durable = job.settings.save_to, job.finished_step or 0, job.saves.newest_committed
    if not job.finished or job.finish_written or url is None or durable is None:
        return []
    if (durable.attempt, durable.step) < (job.attempt, step):
        return []
    return [WriteFinished(job=job.name, url=url, options=job.settings.options, run=job.run, step=step)]


def unfinished_effects(job: Job) -> Effects:
    """Effects whose outcome is not journaled yet."""
    effects: Effects = [committing(job, commit) for commit in job.saves.committing]
    if (at := min(job.alarm, rank_assignment.due(job.rounds) or math.inf)) < math.inf:
        effects.append(Deadline(job=job.name, at=at))
    return effects + finishing(job)
