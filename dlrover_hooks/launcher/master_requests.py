"""An agent's requests to the master: join, wait for a round, report how its workers ended."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import (
    BadRequest,
    HooksError,
    JournalFailed,
    MasterAway,
    MasterError,
    Unauthorized,
    UnknownJob,
    UsageError,
)
from dlrover_hooks.host.ports import held_port
from dlrover_hooks.launcher.failures.verdict import WorkerExit
from dlrover_hooks.launcher.options import LaunchOptions, Level
from dlrover_hooks.node_check.participation import CheckPlan, ignore, take_part
from dlrover_hooks.worker.round_join import deserted

log = logging.getLogger("dlrover_hooks.run")

FORM_S = 60.0
"""The start of a master, and a round of workers that are all here, take far less."""
_LAST_CALL_S, _GATHER_S = 0.3, 2.0
"""Extra waiting time after the last join, for more than enough workers; the second at the launch of several nodes."""
_POLL_S = 0.5
"""Longest delay of a signal during a request to the master."""


class FailureCount(NamedTuple):
    """Failures of the job: all since its launch, and those within `--restart-window` before the newest one."""

    total: int = 0
    recent: int = 0


class AgentAddress(msgspec.Struct, frozen=True):
    """Identity and address of an agent. `host`: for other nodes. `serves`: its launcher serves the master."""

    job: str
    node: str
    host: str
    serves: bool = True


class MasterRequests:
    """Main thread only.

    Args:
        options: the launcher's.
        address: of the agent.
        client: its connection.
        look: called while it waits: handles signals (raises an exception that ends the run), restarts services.
        away_since: since when the master has been unreachable, as seen by the watch; None: it is reachable.
    """

    def __init__(
        self, options: LaunchOptions, address: AgentAddress, client: MasterClient, look: Callable[[], None],
        away_since: Callable[[], float | None],
    ) -> None:  # fmt: skip
        self._options, self._address, self._client, self._look = options, address, client, look
        self._away_since = away_since
        self._unheard: dict[str, p.Exited] = {}
        """By worker, the ends that the master has not acknowledged; they are sent again at every turn."""

    @property
    def incarnation(self) -> str:
        """Of this agent."""
        return self._client.incarnation

    def await_view(self) -> p.JobView | None:
        """The job's current state; waits up to `--master-away` for the master. None if the master refuses.

        Raises MasterAway.
        """
        try:
            return self._ask(self._show(), self._options.master_away_s)
        except MasterError as error:
            log.warning("job %s: its state is not known: %s", self._address.job, error.message)
            return None

    def view(self, *, all_nodes: bool = False) -> p.JobView | None:
        """The job's current state; None if it has none yet, or the master does not answer soon.

        `all_nodes`: with all their members.
        """
        try:
            return self._ask(p.ShowJob(self._address.job) if all_nodes else self._show(), 10.0)
        except UnknownJob:  # no launcher has joined yet
            return None
        except HooksError as error:
            log.warning("job %s: its state is not known: %s", self._address.job, error.message)
            return None

    def _show(self) -> p.ShowJob:
        return p.ShowJob(self._address.job, self._address.node, self._options.restart_window_s)

    def is_known(self, number: int) -> bool:
        """Whether the master has a round `number`. A master whose journal was deleted counts from 1 again."""
        try:
            return self._ask(self._show(), 10.0).round >= number
        except UnknownJob:
            return False
        except HooksError:
            return True

    def join(self, seats: tuple[p.Seat, ...], within_s: float, *, first: bool, fresh: bool) -> p.Joined:
        """Request `seats` in the next round, from a master that starts within `within_s`. `first`: since the launch.

        Raises:
            UsageError: they are refused.
            MasterAway: no answer.
        """
        join = p.Join(
            job=self._address.job,
            incarnation=self._client.incarnation,
            node=self._address.node,
            seats=seats,
            host=self._address.host,
            port=held_port(),
            min_workers=self._options.min_workers,
            max_workers=self._options.max_workers,
            proposed_run=uuid.uuid4().hex,
            fresh=fresh and first,
            again=first,
            sole=True,
            last_call_s=self._last_call_s(first),
            shrinks=self._options.fault_level is Level.SHRINK,
            serves=self._address.serves,
        )
        runs_already = "://" in self._options.endpoint
        up_s = min(within_s, self._options.master_away_s) if runs_already else within_s
        try:
            # the master may still be starting: an event sent twice would form two rounds
            self._ask(p.ListJobs(), up_s, launch=first)
            return self._ask(join, FORM_S)
        except (BadRequest, Unauthorized) as refusal:
            raise UsageError(f"{self._client.url}: {refusal.message}", hint=refusal.hint) from refusal

    def _last_call_s(self, first: bool) -> float:
        """At a launch nodes join seconds apart; a job that never grows must wait for all of them then."""
        if not first or not self._options.several_nodes:
            return _LAST_CALL_S
        shrinks = self._options.fault_level is Level.SHRINK
        return self._options.replace_timeout_s if shrinks else _GATHER_S

    def await_round(self, after: int, within_s: float) -> p.Seated | None:
        """A round newer than `after` with ranks for this node; None if none forms `within_s`. Raises GivenUp."""
        deadline, said = time.monotonic() + within_s, False
        while (left := deadline - time.monotonic()) > 0:
            ask = p.AwaitRound(self._address.job, self._client.incarnation, after=after, timeout_s=_POLL_S)
            seated = self._ask(ask, left)
            if seated.round is not None:
                return seated
            if not said:
                self._say_waiting(within_s, first=after == 0)
                said = True
        return None

    def _say_waiting(self, within_s: float, *, first: bool) -> None:
        job = self._address.job
        if self._options.nodes.most > 1:
            view = self.view() if first else None
            full = view is not None and view.unlisted.alive >= self._options.max_workers
            if full:
                log.info("job %s: it has all its nodes: this one waits as a spare, for %.0f s at most "
                         "(--replace-timeout)", job, within_s)  # fmt: skip
            else:
                log.info("job %s: waiting for the other nodes", job)
        elif first and (view := self.view(all_nodes=True)) is not None:
            others = sorted({one.node for one in view.members if one.alive} - {self._address.node})
            if others:
                log.warning("job %s runs already, on node %s: this launcher has no place there (--nnodes 1), unless "
                            "that one is lost", job, ", ".join(others))  # fmt: skip

    def check_node(self, plan: CheckPlan, measures: tuple[p.Measure, ...]) -> p.CheckReport:
        """Take part in a check with the other nodes, see `participation.take_part`. The master may still be starting.

        Raises:
            UsageError: no port can be listened on.
            MasterAway, MasterError: no answer, or a refusal.
        """
        try:
            self._ask(p.ListJobs(), max(FORM_S, self._options.master_away_s), launch=True)
            return take_part(
                plan,
                measures,
                lambda request: self._ask(request, self._options.master_away_s),
                lambda: self._client.watch(plan.job, ignore, ignore),
                turn=self._look,
            )
        except OSError as error:
            raise UsageError(
                f"{plan.listen_host or 'this machine'} cannot be listened on for the node check: {error.strerror}",
                hint="check --local-addr",
            ) from error

    def tell(self, ends: Mapping[str, WorkerExit], newcomers: Collection[str] = ()) -> None:
        """Report the ends of this node's workers; `newcomers`: those of them that joined by themselves."""
        for worker, end in ends.items():
            code = -9 if end.exit_code is None else end.exit_code
            own = self._client.incarnation
            self._unheard[worker] = p.Exited(self._address.job, own, worker, code, newcomer=worker in newcomers)
        self._tell_all(again=True)

    def tell_again(self) -> None:
        """Repeat reports that the master missed: it has no other source about a worker that has not attached."""
        self._tell_all(again=False)

    def _tell_all(self, *, again: bool) -> None:
        for worker, exited in list(self._unheard.items()):
            if not self._heard(exited, again=again):
                return
            del self._unheard[worker]

    def _heard(self, exited: p.Exited, *, again: bool) -> bool:
        try:
            self._client.call(exited, timeout_s=2.0, again=again)
        except (MasterAway, JournalFailed):
            return False
        except HooksError as error:  # this worker belongs to no round any more
            log.debug("job %s: the end of %s: %s", self._address.job, exited.worker, error.message)
        return True

    def failures(self, known: FailureCount) -> FailureCount:
        """Failures of the job, on all nodes, once all ends are reported. `known`: without the newest one."""
        view = self.view()
        if view is None:
            return FailureCount(known.total + 1, known.recent + 1)
        return FailureCount(max(known.total, view.failures), view.recent_failures)

    def leave(self, reason: p.Departure, ending: p.Ending | None = None) -> None:
        """This agent leaves the job. `ending`: all other agents end, too."""
        self._say(p.Leave(self._address.job, self._client.incarnation, reason, ending=ending))

    def _say(self, event: p.Message) -> None:
        with contextlib.suppress(HooksError):
            self._client.call(event, timeout_s=2.0)

    def _ask(self, request: p.Message, patience_s: float, *, launch: bool = False) -> Any:
        """The reply; restarts the master meanwhile if needed. `launch`: the master may not have started yet.

        Raises MasterAway.
        """
        key = self._client.key("agent") if p.Routes.by_request[type(request)].event else None
        began, away_s = time.monotonic(), self._options.master_away_s
        given_up = (self._away_since() or began) + away_s
        deadline = began + patience_s if launch else min(began + patience_s, given_up)
        while True:
            self._look()
            try:
                return self._client.call(request, timeout_s=_POLL_S, key=key)  # one event, however often it is sent
            except MasterAway as away:
                if time.monotonic() <= deadline:
                    continue
                if launch or deadline < given_up:
                    raise
                raise deserted(self._client.url, self._address.job, away_s) from away
