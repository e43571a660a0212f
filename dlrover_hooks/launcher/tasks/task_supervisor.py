"""Keeps the tasks that run equal to the master's list of tasks, until the chief is done."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Mapping

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import MasterAway
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.wake_pipe import WakePipe
from dlrover_hooks.launcher.failures.restart_budget import Over
from dlrover_hooks.launcher.failures.verdict import DONE, GAVE_UP, USAGE, USER_ERROR, gave_up
from dlrover_hooks.launcher.plan_log import PlanLog
from dlrover_hooks.launcher.tasks.task_runner import EndedTask, TaskRunner, task_name
from dlrover_hooks.protocol import AGAIN

log = logging.getLogger("dlrover_hooks.run")
_POLL_S = 20.0
_PLANS_S = 5.0
"""What became of a plan does not change the tasks, so it is looked for as often."""
_AGAIN_S = 0.5
_TURN_S, _SOON_S = 1.0, 0.02
_CLOSE_S = 2.0
_ENDED = (p.NodeStatus.FAILED, p.NodeStatus.RELEASED)


class TaskSupervisor:
    """Main thread only.

    Args:
        job: its name.
        first: sent at the start: the first target, or the request to plan the tasks. A target that was set before, for
            example by `dlrover-hooks scale`, stays.
        client: a master client of this launcher.
        runner: starts and ends tasks. Those that it has already were started by an earlier supervisor.
        selector: wakes on ends of tasks and services, and on signals.
        look: called at every turn: handles signals (raises Over), restarts services.
        follow: called at every turn with the process ids of the registered tasks, by their incarnations.
        max_restarts: of all tasks together, within `restart_window_s`; after one more failure the run is given up.
    """

    def __init__(
        self,
        job: str,
        first: p.ScaleTasks | p.StartScaling,
        client: MasterClient,
        runner: TaskRunner,
        selector: selectors.BaseSelector,
        look: Callable[[], None],
        follow: Callable[[Mapping[str, int]], None],
        *,
        max_restarts: int,
        restart_window_s: float,
    ) -> None:
        self._job, self._first, self._client = job, first, client
        self._runner, self._selector, self._look = runner, selector, look
        self._follow = follow
        self._most, self._window_s = max_restarts, restart_window_s
        self._failed_at, self._problem = list[float](), ""
        self._due = False
        """A task waits for a warm standby."""
        self._acknowledged = 0
        """The cluster version that the chief had acknowledged when it was started last."""
        self._list = p.Tasks()
        self._started, self._gone = set[int](), set[int]()
        """Ids of tasks: started here; reported as gone. The list may be older than both."""
        self._stopping = dict[int, str | None]()
        """Tasks that are being stopped: why one has failed; empty: it has not; None: the master does not list it."""
        planned = isinstance(first, p.StartScaling)
        self._plan_log = PlanLog(job, client) if planned else None
        self._poll_s = _PLANS_S if planned else _POLL_S
        self._wake = WakePipe(selector)
        self._listener = BackgroundThread("dlrover-hooks-tasks", self._listen, where=f"job {job}", again_s=_AGAIN_S)

    def run(self) -> int:
        """Run until the chief is done; the exit code."""
        try:
            self._begin()
            self._listener.start()
            while True:
                self._turn()
        except Over as over:
            if over.why:
                log.error("%s", over.why)
            return over.code
        finally:
            self._listener.stop(_CLOSE_S)
            self._wake.close()

    def _begin(self) -> None:
        """Set the target, and tell the master which tasks of an earlier supervisor are gone.

        A task that the master does not know to run is replaced: its process may be one of an earlier master.
        """
        self._client.call(self._first)
        self._look()  # it may have more to say to the master before the first list counts
        found: p.Tasks = self._client.call(p.ShowTasks(self._job))
        if found.finished:
            log.info("job %s is finished (dlrover-hooks forget %s makes room for a new one)", self._job, self._job)
            raise Over(DONE)
        listed = {task.id: task for task in found.tasks}
        for number, task in list(self._runner.tasks.items()):
            if number in listed and listed[number].incarnation:
                self._started.add(number)
                continue
            self._stop(task, None)
            if number not in listed:
                self._stopping[number] = None
        for task in found.tasks:
            if task.incarnation and task.id not in self._runner.tasks:
                self._fenced(task, -9)

    def _turn(self) -> None:
        self._look()
        self._judge_all()
        self._compare(self._list)
        self._judge_all()
        pids = self._runner.pids
        self._follow({one.incarnation: pids[one.id] for one in self._list.tasks
                      if one.incarnation and one.id in pids})  # fmt: skip
        self._selector.select(_SOON_S if self._due else _TURN_S)
        self._wake.drain()
        self._listener.check()

    def _compare(self, wanted: p.Tasks) -> None:
        """Start and stop tasks, as the list says."""
        if wanted.problem and wanted.problem != self._problem:
            log.warning("%s", wanted.problem)
        self._problem = wanted.problem
        listed, running = {task.id: task for task in wanted.tasks}, self._runner.tasks
        for number, task in list(running.items()) if wanted.number else ():
            found = listed.get(number)
            if number in self._stopping or (task.type is p.NodeType.CHIEF and wanted.finished):
                continue  # it ends by itself
            if found is None or found.status in _ENDED:
                self._stop(task, found)
            elif found.resource != task.resource:
                self._runner.resize(found)
        self._due = False
        for task in wanted.tasks:
            if task.status is p.NodeStatus.INITIAL and not self._begun(task.id):
                if not self._runner.may_start:
                    self._due = True
                    continue
                self._started.add(task.id)
                log.info("%s: %s", task_name(task), self._runner.start(task))
                if task.type is p.NodeType.CHIEF:
                    self._acknowledged = wanted.acknowledged
            elif task.status in _ENDED and task.id not in self._started | self._gone:
                self._fenced(task, 0)  # it was never started

    def _begun(self, number: int) -> bool:
        return number in self._started or number in self._stopping or number in self._gone

    def _stop(self, task: p.Task, listed: p.Task | None) -> None:
        failed = listed is not None and listed.status is p.NodeStatus.FAILED
        reason = f": {listed.reason}" if listed is not None and listed.reason else ""
        log.log(logging.WARNING if failed else logging.INFO, "%s is ended%s", task_name(task), reason)
        self._stopping[task.id] = f"{task_name(task)} failed{reason}" if failed else ""
        self._runner.stop(task.id)

    def _judge_all(self) -> None:
        for ended in self._runner.ended():
            if ended.task.id not in self._stopping:
                self._judge(ended)
                continue
            failure = self._stopping.pop(ended.task.id)
            if failure is None:
                continue
            self._fenced(ended.task, -9 if failure else 0)
            if failure:
                self._charge(failure)

    def _judge(self, ended: EndedTask) -> None:
        """A task has ended by itself. Raises Over if the run is over."""
        task, code = ended.task, ended.exit_code
        released = _released(task, self._list)
        if not released:  # a task learns from the master itself that it is released, maybe before the list is here
            released = _released(task, self._client.call(p.ShowTasks(self._job)))
        self._fenced(task, code, out_of_memory=ended.out_of_memory)
        if task.type is p.NodeType.CHIEF:
            if code == DONE:
                log.info("the chief is done")
                raise Over(DONE)
            if code == AGAIN:
                return
            if not ended.preempted:
                self._judge_chief(ended)
        if not released and not ended.preempted:
            self._charge(f"{task_name(task)} ({ended.place}) {ended.how}")

    def _judge_chief(self, ended: EndedTask) -> None:
        code = ended.exit_code
        if code == USAGE:
            raise Over(USAGE, f"the chief ({ended.place}) ended with a wrong setting (exit code 78): see what it said")
        connected = self._client.call(p.ShowTasks(self._job)).acknowledged > self._acknowledged
        if code > 0 and not connected:
            raise Over(USER_ERROR, f"the chief ({ended.place}) {ended.how} before it was connected: see what it said")

    def _charge(self, what: str) -> None:
        now = time.monotonic()
        self._failed_at = [*(at for at in self._failed_at if at >= now - self._window_s), now]
        if len(self._failed_at) > self._most:
            raise Over(GAVE_UP, gave_up(what, self._most, self._window_s))
        log.warning("%s; it is replaced (%d of %d restarts)", what, len(self._failed_at), self._most)

    def _fenced(self, task: p.Task, code: int, *, out_of_memory: bool = False) -> None:
        self._gone.add(task.id)
        self._client.call(p.Fenced(self._job, self._client.incarnation, task.id, code, out_of_memory))

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._listener.stopping.is_set():
            if self._plan_log is not None:
                self._plan_log.look(_POLL_S)
            request = p.AwaitTasks(self._job, self._client.incarnation, self._list.number, self._poll_s)
            try:
                found: p.Tasks = self._client.call(request, timeout_s=2 * _POLL_S)
            except MasterAway:
                self._listener.stopping.wait(_AGAIN_S)
                continue
            if found.number > self._list.number:
                self._list = found
                self._wake.wake()


def _released(task: p.Task, tasks: p.Tasks) -> bool:
    listed = next((one for one in tasks.tasks if one.id == task.id), None)
    return tasks.finished or (listed is not None and listed.status is p.NodeStatus.RELEASED)
