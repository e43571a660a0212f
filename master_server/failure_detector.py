"""Failure detection in the runtime: drives the pure `heartbeats` with the master's uptime and one timer.

Verdicts become events. All methods are called in the runtime's event loop.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from collections.abc import Callable, Iterator

from dlrover_hooks.master.clock import Uptime
from dlrover_hooks.master.core import heartbeats, node_vitals, stalls, stragglers
from dlrover_hooks.master.core.events import EndSlow, EndStalled, ForgetFinished, Lost
from dlrover_hooks.master.core.heartbeats import GRACE_S, Name, Nodes
from dlrover_hooks.master.core.job import Job, knows
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.core.views import Poll
from dlrover_hooks.protocol import (
    Attach,
    AwaitCheck,
    AwaitCluster,
    AwaitNodes,
    AwaitPlan,
    AwaitRoles,
    AwaitRound,
    AwaitTasks,
    DeleteJob,
    Exited,
    Heartbeat,
    Join,
    Leave,
    Message,
    NodeVitals,
    OpenLedger,
    Phase,
    RegisterTask,
    RegisterWorker,
    TakeLeases,
    Watch,
)

log = logging.getLogger("dlrover_hooks.master")
_SPEAK = (TakeLeases, Join, RegisterTask)
"""Events that only show that their sender lives, the most frequent first."""
_UNTRACKED = (AwaitTasks, AwaitRoles, AwaitCluster, AwaitCheck, AwaitNodes)


class _Speaker(enum.Enum):
    """What a process of the journaled state does when the master comes back: a worker sends heartbeats, or loads yet
    and sends none. An agent and a holder of leases without a rank send other requests: they connect again, and may be
    silent from then on.
    """

    BEATS = "beats"
    LOADS = "loads"
    ASKS = "asks"


def _speakers(name: str, job: Job) -> Iterator[tuple[Name, _Speaker]]:
    """Each incarnation of `job` that lives by the journaled state; of two entries for one the first counts."""
    current = job.rounds.round
    trains = current is not None and current.phase in (Phase.TRAINING, Phase.BROKEN)
    for member in current.members.values() if current else ():
        if member.live:
            yield (name, member.incarnation), _Speaker.BEATS if trains else _Speaker.LOADS
    for task in sorted(job.ps.incarnations if job.ps is not None else ()):
        yield (name, task), _Speaker.BEATS
    for worker in sorted(job.roles.incarnations if job.roles is not None else ()):
        yield (name, worker), _Speaker.BEATS
    for speaker in sorted({*job.rounds.waiting, *job.ledgers.free}):
        yield (name, speaker), _Speaker.ASKS


class Liveness:
    """Owns the timer.

    Args:
        known: the signs of life.
        state: the current journaled state.
        inform: accepts an internal event of the master.
        uptime: by which leases are measured.
        journal_now: the time of an event that is journaled now.
    """

    def __init__(
        self, known: Nodes, state: Callable[[], Master], inform: Callable[[Message], None], uptime: Uptime,
        journal_now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._journal_now = journal_now
        self._nodes, self._state, self._inform = known, state, inform
        self._uptime, self._now = uptime, uptime.seconds
        self._timer: asyncio.TimerHandle | None = None
        self._at = math.inf
        self._judged_at = -math.inf

    def start(self) -> None:
        """Start after a restart: every incarnation of the journaled state must show that it is alive."""
        self._loop = asyncio.get_running_loop()
        self._expect_all()

    def rolled_back(self) -> None:
        """Events were rolled back: expect the incarnations again that were forgotten because of these events."""
        node_vitals.forget_all_but(self._nodes, self._state().jobs)
        self._expect_all()

    def _expect_all(self) -> None:
        now, unheard = self._now(), dict[Name, _Speaker]()
        for job_name, job in sorted(self._state().jobs.items()):
            for name, kind in _speakers(job_name, job):
                if name not in self._nodes.pulses:
                    unheard.setdefault(name, kind)
        silence_s = heartbeats.silence_s(self._nodes, more=len(unheard))
        for name, kind in unheard.items():
            within_s = GRACE_S if kind is _Speaker.LOADS else silence_s
            heartbeats.expect(self._nodes, name, now, within_s, beats=kind is _Speaker.BEATS)
        self._arm()

    def close(self) -> None:
        """Stop the timer; no more verdicts."""
        self._cancel()
        self._at = -math.inf

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ---- signs of life -----------------------------------------------------------------------------------------------

    def received(self, request: Heartbeat) -> None:
        """A heartbeat was received. It counts at once if its sender is known: the reply may wait for a commit."""
        if (request.job, request.incarnation) in self._nodes.pulses:
            self.beat(request)

    def beat(self, request: Heartbeat, told_s: float | None = None) -> None:
        """A heartbeat was answered, with the interval `told_s`: its sender's lease starts again."""
        name, now = (request.job, request.incarnation), self._now()
        step, vitals, stall, phases = request.step, request.vitals, request.stall, request.phases
        heartbeats.beat(self._nodes, name, now, step=step, vitals=vitals, stall=stall, phases=phases, told_s=told_s)
        job = self._state().jobs.get(request.job)
        if job is not None and (verdict := stalls.found(self._nodes, job, request.incarnation)) is not None:
            log.warning("job %s: %s", request.job, verdict.text)
            if verdict.ends is not None:
                self._inform(verdict.ends)
        if job is not None:
            found = stragglers.found(self._nodes, job, request.incarnation, self._journal_now())
            for text in found.lines:
                log.warning("job %s: %s", request.job, text)
            if found.acts is not None:
                self._inform(found.acts)
        self._arm()

    def reported(self, report: NodeVitals) -> None:
        """A node's report was answered."""
        if report.job in self._state().jobs:  # it may be deleted by now
            node_vitals.keep(self._nodes, report, self._now())

    def heard_of(self, event: Message) -> None:
        """An event shows that its sender is alive; others end the tracking of a process, or of a job's nodes."""
        if isinstance(event, _SPEAK):
            self._heard((event.job, event.incarnation), heartbeats.silence_s(self._nodes))
        elif isinstance(event, RegisterWorker):
            self._heard((event.job, event.incarnation), heartbeats.silence_s(self._nodes), beats=True)
        elif isinstance(event, Attach):
            self._heard((event.job, event.incarnation), GRACE_S)
        elif isinstance(event, OpenLedger):
            name = (event.job, event.incarnation)
            self._heard(name, self._worker_s(name))
        elif isinstance(event, (DeleteJob, ForgetFinished)):
            node_vitals.forget_all_but(self._nodes, self._state().jobs)
        elif isinstance(event, (EndStalled, EndSlow)):
            for incarnation in event.incarnations:
                heartbeats.forget(self._nodes, (event.job, incarnation))
        elif isinstance(event, (Leave, Exited, Lost)):
            gone = event.worker if isinstance(event, Exited) else event.incarnation
            if (job := self._state().jobs.get(event.job)) is not None:
                node_vitals.parted(self._nodes, job, gone)
            if not isinstance(event, Lost):
                heartbeats.forget(self._nodes, (event.job, gone))

    def waits(self, request: Poll, for_s: float) -> None:
        """A long-poll begins. A `Watch` stays open until `waited` is called.

        Those of tasks and of node checks say nothing: the sockets of a stopped process stay open.
        """
        if isinstance(request, _UNTRACKED):
            return
        name = (request.job, request.incarnation)
        if isinstance(request, Watch):
            heartbeats.opened(self._nodes, name, self._now())
            self._arm()
        else:
            self._heard(name, for_s + heartbeats.silence_s(self._nodes))

    def waited(self, request: Poll, *, answered: bool) -> None:
        """The long-poll ended: `answered`, or the client disconnected.

        A client that waits for a round or a lease polls again at once. A worker that received its plan may be busy. One
        that received its rank imports its framework, or waits for another worker that does, before it attaches.
        """
        if isinstance(request, _UNTRACKED):
            return
        name = (request.job, request.incarnation)
        if isinstance(request, Watch):
            heartbeats.closed(self._nodes, name, self._now(), answered=answered)
        else:
            if isinstance(request, AwaitPlan):
                within_s = self._worker_s(name)
            elif isinstance(request, AwaitRound) and self._has_rank(name):
                within_s = GRACE_S
            else:
                within_s = heartbeats.silence_s(self._nodes)
            heartbeats.expect(self._nodes, name, self._now(), within_s)
        self._arm()

    def round_formed(self, job: str) -> None:
        """The members of a new round must attach in time; an agent need not send anything until its next poll."""
        found = self._state().jobs.get(job)  # it may be deleted by now
        current = found.rounds.round if found is not None else None
        if found is not None:
            node_vitals.round_formed(self._nodes, found)
        now = self._now()
        for member in current.members.values() if current else ():
            heartbeats.heard(self._nodes, (job, member.incarnation), now, GRACE_S)
        self._arm()

    def _heard(self, name: Name, for_s: float, *, beats: bool = False) -> None:
        heartbeats.heard(self._nodes, name, self._now(), for_s, beats=beats)
        self._arm()

    def _has_rank(self, name: Name) -> bool:
        """It has a rank in the current round, and has not attached."""
        job = self._state().jobs.get(name[0])
        current = job.rounds.round if job is not None else None
        member = current.members.get(name[1]) if current is not None else None
        return member is not None and not member.attached

    def _worker_s(self, name: Name) -> float:
        """Seconds a worker may be silent; longer if it has sent no heartbeat yet."""
        pulse = self._nodes.pulses.get(name)
        return heartbeats.silence_s(self._nodes, pulse) if pulse is not None and pulse.beats else GRACE_S

    # ---- verdicts ----------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Schedule `_judge` for the time when the first lease expires, and for each tick of the uptime before it."""
        at = heartbeats.next_at(self._nodes)
        if at >= self._at:
            return
        self._cancel()
        now, tick_s = self._now(), self._uptime.tick_s
        delay_s = tick_s if now == self._judged_at else min(max(0.0, at - now), tick_s)  # the uptime may not advance
        self._at = now + delay_s
        self._timer = self._loop.call_later(delay_s, self._judge)

    def _judge(self) -> None:
        """Issue verdicts. Leases are first extended by the time this master was stopped or waited for its journal."""
        self._timer, self._at = None, math.inf
        now = self._judged_at = self._now()
        if (missed_s := self._uptime.missed_s()) > 0.0:
            heartbeats.grant(self._nodes, now, missed_s)
        if missed_s > self._uptime.most_s:
            log.warning("this master was stopped for %.1f s: no lease ends because of that", missed_s)
        for lost in heartbeats.verdicts(self._nodes, now):
            if self._matters(lost):
                log.warning("job %s: %s is lost: %s", lost.job, lost.incarnation, lost.reason)
                self._inform(lost)
        self._arm()

    def _is_watched(self, job: str, launcher: str) -> bool:
        """True if `launcher` has a watch connection open.

        It then reports the end of a process that has not attached yet, or never will (a script without hooks).
        """
        pulse = self._nodes.pulses.get((job, launcher))
        return pulse is not None and pulse.ears > 0

    def _matters(self, lost: Lost) -> bool:
        """False if the loss has no effect, as for an agent that never sent heartbeats: its workers send their own."""
        job = self._state().jobs.get(lost.job)
        if job is None or not knows(job, lost.incarnation):
            return False
        if lost.incarnation in job.ledgers.free or (job.ps is not None and lost.incarnation in job.ps.incarnations):
            return True
        if job.roles is not None and lost.incarnation in job.roles.incarnations:
            return True
        current = job.rounds.round
        member = current.members.get(lost.incarnation) if current is not None else None
        if member is not None and not member.attached and self._is_watched(lost.job, member.launcher):
            return False
        holds_seat = member is not None
        waits = lost.incarnation in job.rounds.waiting or lost.incarnation in job.rounds.seats
        over = job.finished or job.ending is not None
        return holds_seat or waits or (lost.reason != heartbeats.SILENT and not over)
