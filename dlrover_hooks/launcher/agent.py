"""The agent of one node: joins the round for its workers, starts them, detects their ends, and replaces dead ones.

A round breaks when it loses a member on any node; the master notifies every agent. If all living workers keep their
process and join again by themselves, an agent replaces only its dead ones. Otherwise it ends all its workers, joins
again and restarts them. The fault level decides whether workers are replaced at all.
"""

from __future__ import annotations

import logging
import selectors
import signal
import time
import uuid
from collections.abc import Callable, Collection, Sequence

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import GivenUp, HooksError, MasterAway, Stale, UnknownJob
from dlrover_hooks.host.child_process import Child
from dlrover_hooks.host.memory_limit import MemoryKills
from dlrover_hooks.launcher.failures.restart_budget import Budget, Over, say_echoes
from dlrover_hooks.launcher.failures.round_diagnosis import (
    LOST,
    all_ended,
    elsewhere,
    ended_by_master,
    ended_early,
    is_restart,
    left_only,
    live_on,
    living,
    lost_worker,
    missing,
    needed_again,
)
from dlrover_hooks.launcher.failures.verdict import (
    DONE,
    GAVE_UP,
    USER_ERROR,
    WorkerExit,
    counted,
    end_of,
    finished_before,
    left_by_itself,
    no_place,
    too_few,
    trained_elsewhere,
    workers_missing,
)
from dlrover_hooks.launcher.master_events import MasterEvents
from dlrover_hooks.launcher.master_requests import FORM_S, AgentAddress, MasterRequests
from dlrover_hooks.launcher.options import LaunchOptions, Level
from dlrover_hooks.launcher.processes.workers import Workers
from dlrover_hooks.node_check.local_check import check_folder, measure_node
from dlrover_hooks.node_check.own_report import own_of, told
from dlrover_hooks.node_check.participation import CheckPlan
from dlrover_hooks.worker.thread_stack import line_of_dump

log = logging.getLogger("dlrover_hooks.run")

_LAST_WORDS_S = 1.0
"""A worker whose collective failed may be found dead before the worker that caused it."""
_LEAVING_S = 10.0
"""Time for a worker that has reported its failure to print a traceback and exit."""
_ASK_S = 10.0
_LOOK_S = 2.0
"""Interval between two checks of a round that does not form, if workers of this node were done."""
_PIDS = 16
"""Most workers of a node whose pids are logged at their start."""
_LINGER_S = 2.0
"""Time for the other nodes to receive the end from the master before it ends with its launcher."""


class Agent:
    """Main thread only.

    Args:
        options: the launcher's.
        address: identity and address of this agent.
        client: a master client with this agent's incarnation.
        workers: starts and ends processes.
        selector: wakes on events of workers, services and signals.
        look: called at every turn: handles signals (raises Over), restarts services.
        fresh: the first start of the workers begins a new run.
    """

    def __init__(
        self,
        options: LaunchOptions,
        address: AgentAddress,
        client: MasterClient,
        workers: Workers,
        selector: selectors.BaseSelector,
        look: Callable[[], None],
        *,
        fresh: bool,
    ) -> None:
        self.options, self.job, self.workers = options, address.job, workers
        self._address, self._selector, self._look, self._fresh = address, selector, look, fresh
        self._events = MasterEvents(client, self.job, selector)
        self._memory = MemoryKills()
        self._requests = MasterRequests(options, address, client, look, lambda: self._events.away_since)
        self._local_ranks = list(range(options.workers.most))
        self.budget = Budget(options, address.node, self._requests)
        self._round = 0
        self._failed_here, self._job_over, self._missing = False, False, ""
        self._due: float | None = None
        self._leaving_until: float | None = None
        """Workers have left the round and still run: until this time other workers wait for their exit codes."""
        self._ask_at = 0.0
        self._newcomers = set[str]()

    def run(self) -> int:
        """Run until the job is over for this node; returns the exit code."""
        try:
            if self.options.node_check:
                self._check_node()
            while True:
                self._start_workers()
                self._watch_workers()
        except Over as over:
            self._leave(over)
            return over.code
        finally:
            self._events.close()

    def _check_node(self) -> None:
        """Measure this node, and the network to the other ones. Raises Over if it must not join."""
        options, node = self.options, self._address.node
        measures = measure_node(
            check_folder(), options.node_check_timeout_s, ended=lambda one: log.info("node check: %s", told(one)),
            turn=self._look,
        )  # fmt: skip
        shrinks = options.fault_level is Level.SHRINK  # it never grows, so its launch waits for all nodes
        plan = CheckPlan(
            job=self.job,
            incarnation=self._requests.incarnation,
            node=node,
            host=self._address.host,
            listen_host="" if options.local_addr else self._address.host,
            least=options.nodes.most if shrinks else options.nodes.least,
            most=options.nodes.most,
            gather_s=max(FORM_S, options.replace_timeout_s),
            transfer_s=options.node_check_timeout_s,
        )
        try:
            report = self._requests.check_node(plan, measures)
        except MasterAway as away:
            raise _given_up(away) from away
        own = own_of(report, node)
        for one in report.nodes:
            if one.verdict is not p.NodeVerdict.OK and one is not own:
                log.warning("job %s: node check: node %s is %s: %s", self.job, one.node, one.verdict.value, one.reason)
        if own.verdict is p.NodeVerdict.BAD:
            raise Over(p.BAD_NODE, f"this node is bad; replace it: {own.reason}")
        if own.verdict is p.NodeVerdict.UNCLEAR:
            raise Over(GAVE_UP, f"node check: {own.reason}")
        slow = f": this node is slow: {own.reason}" if own.reason else ""
        log.info("job %s: node check of %s%s", self.job, counted(len(report.nodes), "node"), slow)

    # ---- while workers run ------------------------------------------------------------------------------------------

    def _watch_workers(self) -> None:
        """Returns when all must be restarted. Raises Over when all are done or the run is over for another reason."""
        while True:
            self._turn()
            dead = self.workers.dead()
            failed = {key: child for key, child in dead.items() if child.exit_code()}
            if self.options.several_nodes or self.workers.running():
                self._requests.tell({key: end_of(child) for key, child in dead.items() if key not in failed})
            if not failed and not self.workers.running():
                break
            if self._start_again(failed):
                return
        workers = len(self.workers.children)
        log.info("job %s: %s", self.job, "its worker is done" if workers == 1 else f"all {workers} workers are done")
        self.workers.end()
        self._await_others()

    def _turn(self) -> None:
        self._selector.select(timeout=1.0)
        self._memory.recent(time.monotonic())
        self._look()
        self._requests.tell_again()
        if not self._job_over:
            self._events.open()

    def _start_again(self, failed: dict[str, Child]) -> bool:
        """Follow the master's notices, and handle `failed`. True: all workers must be restarted."""
        broken, waiting = self._listen()
        if failed or broken or self._leaving_until is not None:
            return self._mend(failed)
        if waiting:
            log.info(
                "job %s: %s joined: restarting all workers to include them", self.job, counted(waiting, "newcomer")
            )
            return True
        self._see_to_the_round()
        return False

    def _see_to_the_round(self) -> None:
        """End the run if the next round does not form in time. Restart workers that were done if too few are left."""
        now = time.monotonic()
        late = self._due is not None and now > self._due
        if self._due is None or not (late or (now > self._ask_at and self.workers.done())):
            return
        self._ask_at, view = now + _LOOK_S, self._requests.view()
        if view is not None and view.phase is not p.Phase.BROKEN:
            self._due = None
        elif late:
            raise Over(
                GAVE_UP, workers_missing(self.options, self.options.replace_timeout_s, self._missing), for_all=True
            )
        elif view is not None:
            self._call_back((), view)

    def _listen(self) -> tuple[bool, int]:
        """Whether the workers' round broke, and how many newcomers wait. Raises Over if another agent gave up."""
        broken, waiting = False, 0
        for said in self._events.take():
            if isinstance(said, HooksError):  # this agent is unknown to the master; new workers yet to join change that
                broken = broken or not self.workers.running().keys() <= self._newcomers
            elif said.finished:
                self._obey_ending()
                self._job_over = True
            elif said.broken:
                broken = broken or said.round >= self._round
            elif said.round >= self._round:  # in an earlier round, the waiting newcomer may have been this node
                waiting = said.waiting
        return broken, waiting

    def _obey_ending(self) -> None:
        view = self._requests.view()
        if view is not None and view.ending is not None:
            log.error("job %s was given up: %s", self.job, view.ending.why)
            raise Over(view.ending.exit_code)

    def _await_others(self) -> None:
        """Wait for the other nodes. Returns if they fail: all are needed again. Raises Over when they are done."""
        if self.options.several_nodes:
            log.info("job %s: waiting for the other nodes", self.job)
        ask_at = time.monotonic() + _ASK_S
        while self.options.several_nodes and not self._job_over:
            self._turn()
            if self._listen()[0] or self._leaving_until is not None:
                view = self._requests.view()
                if view is None or not self._may_be_done(view):
                    self._leaving_until = None
                    far = elsewhere(view, self._address.node) if view is not None else []
                    log.info("job %s: another node has failed before it was done: starting again with it", self.job)
                    self.budget.charge(far, view, "starting again")
                    return
                self._job_over = self._job_over or all_ended(view)
            if time.monotonic() > ask_at:  # the master may have ended with its launcher, after the end of the job
                view, ask_at = self._requests.view(), time.monotonic() + _ASK_S
                self._job_over = view is None or view.finished or all_ended(view)
        raise Over(DONE)

    # ---- when the round broke ---------------------------------------------------------------------------------------

    def _mend(self, dead: dict[str, Child]) -> bool:
        """Replace `dead`, and the workers here that the master declared lost. True: all must be restarted.

        Raises Over if the master stays away: only it has the other nodes' state and the budget.
        """
        try:
            view = self._requests.await_view()
        except MasterAway as away:
            raise _given_up(away) from away
        if view is not None:
            self.workers.seated(view)
            if view.excluded:
                raise Over(p.BAD_NODE, f"this node is excluded; replace it: {view.excluded}")
        ends = {key: self._end_of(key, child) for key, child in dead.items()}
        if view is not None and (view.parting.nodes or left_by_itself(ends)) and self._part(ends, view):
            return True
        if view is not None:
            for key, gone in ended_by_master(view, self.workers.running()).items():
                ends[key] = self._killed(key, gone)
            self._missing = missing(view, self._address.node)
            if live_on(view, ends, self._round):
                self._leaving_until = None
                self._replace(ends, view)
                return False
            if not ends and self._may_be_done(view):
                return False
            if not ends and self._leaving_until is not None:
                ends = ended_early(view, self.workers.running())
        self._leaving_until = None
        self._end_all(ends, view)
        return True

    def _may_be_done(self, view: p.JobView) -> bool:
        """Whether workers that left by an exception or `sys.exit` may still end with 0, which means that they are done.

        The script may catch the exception after its checkpointer. The wait is limited only while other workers train.
        """
        if not left_only(view):
            return False
        now = time.monotonic()
        self._leaving_until = self._leaving_until or now + _LEAVING_S
        return now < self._leaving_until or not living(view)

    def _end_of(self, key: str, child: Child) -> WorkerExit:
        return end_of(child, self.workers.final_errors[key].hear(), out_of_memory=self._memory.recent(time.monotonic()))

    def _killed(self, key: str, gone: str) -> WorkerExit:
        """Kill a worker that the master has ended; one that was silent is asked for its stacks first. `gone`: how."""
        child, where = self.workers.running()[key], ""
        if gone == LOST:
            state = child.state()
            stacks = self.workers.final_errors[key].stacks(child) if state != "stopped" else ""
            line = line_of_dump(stacks)
            where = f", at {line}" if line else f"; its process is {state}"
            if stacks:
                log.warning("job %s: %s sends no heartbeats (process state: %s). Its threads:\n%s",
                            self.job, child.name, state, stacks.rstrip())  # fmt: skip
        child.signal(signal.SIGKILL)
        child.wait(_LAST_WORDS_S)
        return lost_worker(child.name, gone, where)

    def _part(self, ends: dict[str, WorkerExit], view: p.JobView) -> bool:
        """A node is preempted: its launcher ends with 75 once its workers have left (raises Over).

        True: this node restarts its workers, unless they recover by themselves. That does not count as a failure.
        """
        nodes = view.parting.nodes or (self._address.node,)  # a round formed by recovering workers has no parting
        mine = self._address.node in nodes
        if mine or not any(one.recovers for one in view.members if one.incarnation in self.workers.children):
            self.workers.await_end(self.options.grace_s)  # each one may still report its final error
            ends |= {key: self._end_of(key, child) for key, child in self.workers.dead().items() if child.exit_code()}
        left = left_by_itself(ends)
        if mine and left:
            self._requests.tell(ends)
            raise Over(p.REQUEUE, f"preempted ({view.parting.reason or 'a signal'}); start it again to go on")
        if left:
            log.warning("job %s: %s is preempted; restarting", self.job, ", ".join(nodes))
            self._requests.tell(ends)
            self.workers.end()
        return left

    def _replace(self, ends: dict[str, WorkerExit], view: p.JobView) -> None:
        """The others recover by themselves: start new workers for the dead ones, if the fault level replaces them."""
        self._requests.tell(ends, self._newcomers)
        shrinks = self.options.fault_level is Level.SHRINK
        then = "the others live on" + (f", replacing {counted(len(ends), 'worker')}" if ends and not shrinks else "")
        self.budget.charge([*ends.values(), *elsewhere(view, self._address.node)], view, then)
        self._call_back(ends, view)
        for key in ends:
            if shrinks:
                self._discard(self.workers.seats[key].local_rank)
                self.workers.forget(key)
            else:
                self._start_newcomer(key, view)
        if shrinks and (live := living(view, ends)) < self.options.min_workers:
            raise Over(GAVE_UP, too_few(self.options, live), for_all=True)
        self._due = time.monotonic() + self.options.replace_timeout_s

    def _call_back(self, ends: Collection[str], view: p.JobView) -> None:
        """Also restart workers that were done, if too few are left without them."""
        coming = self._newcomers & self.workers.running().keys()
        if self.options.fault_level is Level.SHRINK or not (done := self.workers.done()):
            return
        if needed_again(view, ends, coming, self.options.min_workers):
            names = ", ".join(self.workers.children[key].name for key in done)
            log.warning("job %s: %s: done before others failed, and needed again", self.job, names)
            if not ends:
                self.budget.charge([*self._early(view).values()], view, f"starting {names} again")
            for key in done:
                self._start_newcomer(key, view)

    def _start_newcomer(self, predecessor: str, view: p.JobView) -> None:
        newcomer = p.Seat(uuid.uuid4().hex, self.workers.seats[predecessor].local_rank)
        self._newcomers.add(newcomer.incarnation)
        count = {"TORCHELASTIC_RESTART_COUNT": str(self.budget.restarts)}
        self.workers.start_newcomer(predecessor, newcomer, view.round + 1, len(self._local_ranks), **count)
        self._say_pids([newcomer.incarnation])

    def _early(self, view: p.JobView) -> dict[str, WorkerExit]:
        """Ends of this node's workers that exited with 0 without having reported that they were done."""
        return ended_early(view, {key: self.workers.children[key] for key in self.workers.done()})

    def _end_all(self, ends: dict[str, WorkerExit], view: p.JobView | None) -> None:
        """Determine the cause, end all workers of this node, and raise Over unless they are to be restarted."""
        early = [*self._early(view).values()] if view is not None else []
        if (view is None or not view.finished) and not any(end.has_cause for end in early):
            view = self._await_causes(ends, view)
        self._requests.tell(ends, self._newcomers)
        far = elsewhere(view, self._address.node) if view is not None else []
        seats = {key: seat.local_rank for key, seat in self.workers.seats.items()}
        self.workers.end()
        self._newcomers.clear()
        self._failed_here = bool(ends)
        then = f"restarting {counted(len(seats), 'worker')}"
        if found := [*ends.values(), *early, *far]:
            self.budget.charge(found, view, then)
        elif view is not None and view.rebalance:
            log.warning("job %s: %s; %s", self.job, view.rebalance, then)
        elif view is None or not is_restart(view):
            self.budget.charge_unexplained(self._round, then)
        else:
            log.warning("job %s: another node starts its workers again; %s", self.job, then)
        if self.options.fault_level is Level.SHRINK:
            shot = [key for key, end in ends.items() if end.has_cause]
            for key in shot or ([] if any(end.has_cause for end in far) else list(ends)[:1]):
                self._discard(seats[key])

    def _await_causes(self, ends: dict[str, WorkerExit], view: p.JobView | None) -> p.JobView | None:
        """While the cause is unclear, wait for more ends, here (added to `ends`) and elsewhere. The view then."""
        members = view.members if view is not None else ()
        failed = {one.incarnation for one in members if one.gone == p.Departure.FAILED.value}
        leaving = failed & self.workers.running().keys()
        deadline = time.monotonic() + (_LEAVING_S if leaving else _LAST_WORDS_S)
        while not any(end.has_cause for end in ends.values()) and time.monotonic() < deadline:
            if view is not None and any(end.has_cause for end in elsewhere(view, self._address.node)):
                break
            if leaving and leaving <= ends.keys():
                leaving, deadline = set(), min(deadline, time.monotonic() + _LAST_WORDS_S)
            if not self.options.several_nodes and not self.workers.running():
                break
            self.workers.wait(0.1)
            self._look()
            late = {key: self._end_of(key, child) for key, child in self.workers.dead().items() if child.exit_code()}
            ends.update({key: end for key, end in late.items() if key not in ends})
            view = self._requests.view() if self.options.several_nodes else view
        return view

    def _discard(self, local_rank: int) -> None:
        self._local_ranks.remove(local_rank)
        if len(self._local_ranks) < self.options.workers.least:
            alone = not self.options.several_nodes
            raise Over(GAVE_UP, too_few(self.options, len(self._local_ranks), self._address.node), for_all=alone)

    # ---- the start --------------------------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        first = self._round == 0
        if first and (view := self._trains_without_us()) is not None:
            self._start_later_members(view)
            return
        seats = tuple(p.Seat(uuid.uuid4().hex, local_rank) for local_rank in self._local_ranks)
        seated = self._take_seats(seats, first=first)
        self._round, self._due, self._job_over = seated.round or 0, None, False
        self.budget.started(self._requests.view())
        life = {
            "TORCHELASTIC_RESTART_COUNT": str(self.budget.restarts),
            "DLROVER_HOOKS_FRESH": "1" if self._fresh and first else "",
        }
        for index, seat in enumerate(seats):
            self.workers.start(seat, seated, index, len(seats), **life)
        self._say_pids([seat.incarnation for seat in seats])

    def _trains_without_us(self) -> p.JobView | None:
        """The job, if its members train, there is room for this node, and they let workers in without a restart."""
        options = self.options
        if not options.several_nodes or not options.python or options.fault_level is not Level.ELASTIC:
            return None
        view = self._requests.view()
        if view is None or view.finished or view.ending is not None or view.phase is not p.Phase.TRAINING:
            return None
        here = any(one.alive and one.node == self._address.node for one in view.members)
        room = living(view) + len(self._local_ranks) <= options.max_workers
        return view if room and not here and live_on(view, (), view.round) else None

    def _start_later_members(self, view: p.JobView) -> None:
        """Start workers that import first and join by themselves, so that the others train on until they are ready."""
        self._round, self._due, self._job_over = view.round, None, False
        self.budget.started(view)
        names: list[str] = []
        for local_rank in self._local_ranks:
            seat = p.Seat(uuid.uuid4().hex, local_rank)
            self._newcomers.add(seat.incarnation)
            self.workers.start_member(seat, living(view) + len(names), view.round + 1, len(self._local_ranks))
            names.append(seat.incarnation)
        self._say_pids(names)

    def _say_pids(self, workers: Sequence[str]) -> None:
        children = [self.workers.children[worker] for worker in workers[:_PIDS]]
        more = [f"{len(workers) - _PIDS} more"] if len(workers) > _PIDS else []
        log.info("job %s: %s", self.job, ", ".join([f"{one.name} has pid {one.pid}" for one in children] + more))

    def _take_seats(self, seats: tuple[p.Seat, ...], *, first: bool) -> p.Seated:
        """Join the next round, again if the master was replaced by one without a journal: it has another run then."""
        within_s = self._patience_s(first)
        if not first and not self._requests.is_known(self._round):
            self._round = 0
        again, run = False, ""
        while True:
            try:
                joined = self._requests.join(seats, within_s, first=first, fresh=self._fresh)
                run = joined.run
                if joined.finished:
                    raise self._finished(joined.finished_step)
                self._events.open(again=again)
                self.workers.end()  # of the last round, which this node has left now: their ends are no failures
                seated = self._requests.await_round(self._round, within_s)
            except MasterAway as away:
                raise _given_up(away) from away
            except (GivenUp, Stale, UnknownJob) as refusal:
                view = self._follow_the_others(first=first)
                if isinstance(refusal, GivenUp) or (view is not None and view.run == run):
                    raise
                log.warning("job %s: the master does not know this launcher any more: joining again", self.job)
                self._round, again = 0, True
                continue
            if seated is None:
                raise self._no_round(within_s)
            return seated

    def _follow_the_others(self, *, first: bool) -> p.JobView | None:
        """The job as it is. Raises Over if it was given up, or finished by the other nodes while this one waited."""
        self._obey_ending()
        view = self._requests.view()
        if view is None or not view.finished:
            return view
        others = sorted({one.node for one in view.members} - {self._address.node})
        if first and others and self.options.nodes.most == 1:
            raise Over(GAVE_UP, trained_elsewhere(others)) from None
        raise self._finished(view.finished_step) from None

    def _no_round(self, waited_s: float) -> Over:
        view = self._requests.view()
        if view is not None and view.round > self._round and view.phase is not p.Phase.BROKEN:
            return Over(GAVE_UP, no_place(self.options, waited_s, view))
        return Over(GAVE_UP, workers_missing(self.options, waited_s, self._missing), for_all=True)

    def _patience_s(self, first: bool) -> float:
        """Timeout for a round. The members of a job that never grows are there already; a launch may take longer."""
        timeout_s = self.options.replace_timeout_s
        if not self.options.several_nodes:
            return FORM_S
        if first:
            return max(FORM_S, timeout_s)
        return min(FORM_S, timeout_s) if self.options.fault_level is Level.SHRINK else timeout_s

    def _finished(self, step: int | None) -> Over:
        if self._failed_here:
            return Over(USER_ERROR, finished_before(step))
        log.info("job %s was finished at step %d: nothing is left to train; --fresh starts over", self.job, step or 0)
        return Over(DONE)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _leave(self, over: Over) -> None:
        """End the workers and leave the job, with the reason if it concerns other nodes."""
        if over.why:
            log.error("job %s: %s", self.job, over.why)
        say_echoes(over.echoes)
        self.workers.end()
        several, serves = self.options.several_nodes, self._address.serves
        ending = p.Ending(over.code, f"node {self._address.node}: {over.why}") if over.for_all else None
        if several and serves and ending is None and over.code != DONE:
            code = p.REQUEUE if over.code == p.REQUEUE else GAVE_UP
            stopped = f"node {self._address.node}, which serves the master, was stopped"
            ending = p.Ending(code, f"{stopped}: {over.why}" if over.why else stopped)
        done = over.code == DONE and several
        self._requests.leave(p.Departure.DONE if done else p.Departure.STOPPED, ending)
        if ending is not None and serves and several:
            time.sleep(_LINGER_S)


def _given_up(away: MasterAway) -> Over:
    return Over(GAVE_UP, f"{away.message.rstrip('.')}. {away.hint}")
