"""Rendezvous of a job's agents: the master assigns their ranks and reports losses, newcomers and the end of the job.

Torch-free, one `Meeting` per agent. The agents' rounds are a separate job in the master, called `JOB@agents`. Its ranks
are nodes and have no checkpoints. The workers that the agents start have ranks in the job `JOB`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from typing import Any

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import HooksError, MasterAway, MasterError, Stale, UnknownJob
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.ports import Port

log = logging.getLogger("dlrover_hooks.rendezvous")

BEAT_S = 3.0
"""A third of the master's lease; if the master asks for a longer interval, its lease is longer, too. The watch reports
deaths and newcomers; heartbeats detect hangs."""
_POLL_S = 5.0
"""Longest single request: torchrun's signals raise exceptions in the thread that sends it."""
_FAREWELL_S = 5.0


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of an agent's join.

    `job`: of the workers. `connect_s`: timeout of the first answer, since the master may still be starting.
    """

    url: str
    job: str
    node: str
    host: str
    min_nodes: int
    max_nodes: int
    token: str | None = None
    last_call_s: float = 0.3
    join_s: float = 600.0
    connect_s: float = 60.0
    fresh: bool = False

    @property
    def agents(self) -> str:
        """The name of the agents' own job."""
        return f"{self.job}@agents"


class NotFormed(HooksError):
    """No round formed within `join_s`."""


class JobOver(HooksError):
    """Every agent has left the job after success."""


class Meeting:
    """Joins this agent to successive rounds. Called by the main thread; notices arrive in other threads."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._life: AgentIncarnation | None = None
        self._port: Port | None = None
        self._first = True

    def join(self) -> p.Seated:
        """A rank in the next round. Survivors of the last round keep their ranks as far as the world size allows.

        A node beyond the maximum waits as a spare.

        Raises:
            MasterAway: the master does not answer.
            MasterError: the master refuses, for example `Unauthorized`.
            NotFormed: too few nodes joined.
            JobOver: the job is done.
        """
        deadline = time.monotonic() + self.terms.join_s
        while True:
            life = self._begin_life()
            try:
                return self._seated(life, deadline)
            except (Stale, UnknownJob) as outdated:
                log.warning("job %s: %s Joining as a new node.", self.terms.job, outdated.message)
                self._end_life()
                if time.monotonic() > deadline:
                    raise

    def _begin_life(self) -> AgentIncarnation:
        if self._life is not None and self._life.outdated:
            self._end_life()
        if self._life is None:
            self._life = AgentIncarnation(self.terms)
            self._life.ask(p.ListJobs(), self.terms.connect_s)
        return self._life

    def _seated(self, life: AgentIncarnation, deadline: float) -> p.Seated:
        request = self._request(life)
        joined = life.ask(request, max(1.0, deadline - time.monotonic()))
        if joined.finished and self._first and self._may_go_on(life):
            joined = life.ask(msgspec.structs.replace(request, fresh=True), max(1.0, deadline - time.monotonic()))
        self._first = False
        if joined.finished:
            self._end_life()
            raise JobOver(f"job {self.terms.job} is done: all its nodes have left it", hint=_AGAIN)
        life.listen()
        while (left := deadline - time.monotonic()) > 0:
            request = p.AwaitRound(self.terms.agents, life.incarnation, life.round, min(_POLL_S, left))
            seated = life.ask(request, max(1.0, left))
            if seated.round is not None:
                life.round = seated.round
                return seated
        low, high = self.terms.min_nodes, self.terms.max_nodes
        raise NotFormed(
            f"job {self.terms.job}: waited {self.terms.join_s:g} s for a place among --nnodes={low}:{high} nodes",
            hint="start the nodes that are missing, lower --nnodes, or give --rdzv-conf join_timeout=SECONDS",
        )

    def _request(self, life: AgentIncarnation) -> p.Join:
        """Only an incarnation's first join sends --nnodes: later ones must not override newer values of others."""
        terms, before, self._port = self.terms, self._port, Port()
        if before is not None:
            before.release()
        return p.Join(
            job=terms.agents,
            incarnation=life.incarnation,
            node=terms.node,
            seats=(p.Seat(life.incarnation, 0),),
            host=terms.host,
            port=self._port.number,
            min_workers=terms.min_nodes if life.round == 0 else 0,
            max_workers=terms.max_nodes if life.round == 0 else 0,
            proposed_run=uuid.uuid4().hex,
            last_call_s=terms.last_call_s,
            fresh=terms.fresh and self._first,
            agents=True,
        )

    def _may_go_on(self, life: AgentIncarnation) -> bool:
        """A finished job may be trained for longer if its workers have checkpoints to resume from."""
        try:
            return life.ask(p.ShowJob(self.terms.job, self.terms.node), _FAREWELL_S).save_to is not None
        except UnknownJob:
            return False

    @property
    def life(self) -> AgentIncarnation:
        """The incarnation that joined last. Only after `join`."""
        assert self._life is not None
        return self._life

    def reasons_to_meet(self) -> int:
        """Number of waiting newcomers that would fit, plus one if the round lost a member or this agent its rank."""
        return self._life.reasons_to_meet() if self._life is not None else 0

    @property
    def over(self) -> bool:
        """Every agent has left after success."""
        return self._life is not None and self._life.over

    def leave(self, reason: p.Departure) -> bool:
        """Leave the job; others go on. Ends every thread and connection. False if the master did not acknowledge."""
        life, self._life = self._life, None
        if self._port is not None:
            self._port.release()
        if life is None:
            return True
        try:
            if not life.listens:
                return True
            life.ask(p.Leave(self.terms.agents, life.incarnation, reason), _FAREWELL_S)
        except HooksError as error:
            log.debug("left without a reply of the master: %s", error)
            return False
        finally:
            life.end()
        return True

    def _end_life(self) -> None:
        if self._life is not None:
            self._life.end()
        self._life = None


_AGAIN = "give it another --rdzv-id, or set DLROVER_HOOKS_FRESH=1 to start it over"


class AgentIncarnation:
    """One incarnation of an agent: its client, its watch and its heartbeats (thread `dlrover-hooks-agent`)."""

    def __init__(self, terms: Terms) -> None:
        self.terms, self.incarnation, self.round = terms, uuid.uuid4().hex, 0
        self.client = MasterClient(terms.url, terms.token, incarnation=self.incarnation)
        self.over = self.outdated = False
        self._lock = threading.Lock()
        self._broken, self._newcomers = 0, (0, 0)
        self._beating = BackgroundThread(
            "dlrover-hooks-agent",
            self._beat,
            where=f"job {terms.job}, agent of node {terms.node}",
            on_error="warn",  # a later heartbeat may succeed; if none does, the master's refusal is reported
            again_s=BEAT_S,
        )

    def ask(self, request: p.Message, patience_s: float) -> Any:
        """The master's reply. Raises MasterAway after `patience_s`, MasterError."""
        return self.client.call(request, timeout_s=patience_s)

    @property
    def listens(self) -> bool:
        """The watch and the heartbeats have started."""
        return self._beating.started

    def listen(self) -> None:
        """Start the watch and the heartbeats. Only the first call has an effect."""
        if not self._beating.started:
            self.client.watch(self.terms.agents, self._noticed, self._refused)
            self._beating.start()

    def reasons_to_meet(self) -> int:
        """See `Meeting`."""
        with self._lock:
            number, newcomers = self._newcomers
            lost = self.outdated or self._broken >= self.round > 0
            return lost + (newcomers if number == self.round else 0)

    def end(self) -> None:
        """Idempotent."""
        self._beating.stopping.set()  # before the client is closed: what the beat then meets is no refusal
        self.client.close()
        self._beating.stop(_FAREWELL_S)

    def _beat(self) -> None:
        pause_s = BEAT_S
        while not self._beating.stopping.wait(pause_s):
            try:
                beat = self.client.call(p.Heartbeat(self.terms.agents, self.incarnation), timeout_s=BEAT_S)
            except MasterAway:
                continue  # workers train on; the watch reconnects when the master is back
            except MasterError as refusal:
                self._refused(refusal)
                return
            pause_s = max(BEAT_S, beat.interval_s)
            self._noticed(p.Notice(beat.round, broken=beat.broken, waiting=beat.waiting))

    def _noticed(self, notice: p.Notice) -> None:
        """Records the notice; it may concern a round that `AwaitRound` has not returned yet."""
        with self._lock:
            if notice.broken:
                self._broken = max(self._broken, notice.round)
            elif not notice.finished and notice.round >= self._newcomers[0]:
                self._newcomers = notice.round, notice.waiting
            self.over = self.over or notice.finished

    def _refused(self, refusal: MasterError) -> None:
        """The master declared this agent dead (or lost its state): the workers here belong to no round any more."""
        if not self._beating.stopping.is_set():
            log.warning("job %s: %s", self.terms.job, refusal.message)
            self.outdated = True
