"""The tasks of a parameter server job as processes of this machine: chief, parameter servers and workers."""

from __future__ import annotations

import contextlib
import logging
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.host.child_process import Child, described
from dlrover_hooks.host.memory_limit import MemoryKills
from dlrover_hooks.host.ports import free_port
from dlrover_hooks.launcher.processes.workers import newcomer_command
from dlrover_hooks.launcher.tasks.task_runner import EndedTask, task_name
from dlrover_hooks.launcher.warm.standby_pool import Standbys
from dlrover_hooks.scalers.resource_limits import LimitMethods, NodeLimits

SERVER = (sys.executable, "-u", "-m", "dlrover_hooks.integrations.tensorflow")
_WARM_WITHIN_S = 15.0
"""TensorFlow is imported in three seconds, or ten under load. Without a standby after so long a task starts cold."""


log = logging.getLogger("dlrover_hooks.run")


class TaskProcesses:
    """A `TaskRunner`: running tasks by id, with the limits of their `resource`. Main thread only.

    Args:
        job: its name.
        command: of the chief.
        environment: common to all tasks.
        host: address at which they reach each other.
        selector: wakes when one of them ends.
        standbys: warm processes that become tasks at once.
    """

    def __init__(
        self,
        job: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        host: str,
        selector: selectors.BaseSelector,
        standbys: Standbys | None,
    ) -> None:
        self.children: dict[int, Child] = {}
        self.tasks: dict[int, p.Task] = {}
        self._job, self._command, self._environment, self._host = job, command, environment, host
        self._selector, self._standbys = selector, standbys
        self._cold_at = time.monotonic() + _WARM_WITHIN_S
        self._ports: dict[int, int] = {}
        """Port of each worker by index: its replacement takes it, so the chief need not connect again."""
        self._methods: LimitMethods | None = None
        """Made for the first task that has limits."""
        self._limits: dict[int, NodeLimits] = {}
        """By task, of those that have any."""
        self._kills = MemoryKills()
        self._stopped = list[EndedTask]()
        """Killed since the last call of `ended`."""

    @property
    def pids(self) -> Mapping[int, int]:
        """By id of their task."""
        return {number: child.pid for number, child in self.children.items()}

    @property
    def may_start(self) -> bool:
        """False while a warm standby is about to be ready: it serves sooner than a cold start."""
        if self._standbys is None or self._standbys.ready:
            self._cold_at = time.monotonic() + _WARM_WITHIN_S
            return True
        return time.monotonic() > self._cold_at

    def start(self, task: p.Task) -> str:
        """Start the process of `task`; its process id, in words."""
        chief, name = task.type is p.NodeType.CHIEF, task_name(task)
        port = self._ports.get(task.index) if task.type is p.NodeType.WORKER else None
        if port is None:
            port = free_port()
        if task.type is p.NodeType.WORKER:
            self._ports[task.index] = port
        place = f"{task.type.value}:{task.index}:{task.id}:{self._host}:{port}"
        env = settings.worker_environment(**self._environment, DLROVER_HOOKS_TASK=place)
        command, child = self._command if chief else SERVER, None
        limits = self._limit(task)
        if self._standbys is not None:
            child = self._standbys.take(name, newcomer_command(command), env)
        if child is not None and limits is not None:
            self._apply(name, limits, child.pid)
        if child is None:
            with limits.entrance() if limits is not None else contextlib.nullcontext() as prepared:
                child = Child(name, command, env=env, die_with_parent=True, limits=prepared)
        if limits is not None:
            self._limits[task.id] = limits
        self.children[task.id], self.tasks[task.id] = child, task
        self._selector.register(child, selectors.EVENT_READ)
        return f"pid {child.pid}"

    def _limit(self, task: p.Task) -> NodeLimits | None:
        if task.resource == p.NodeResource():
            return None
        if self._methods is None:
            self._methods = LimitMethods(self._job)
        try:
            return self._methods.limit(task_name(task), task.resource)
        except OSError as error:
            log.warning("%s runs without its limits: %s", task_name(task), error)
            return None

    def _apply(self, name: str, limits: NodeLimits, pid: int) -> None:
        try:
            limits.apply(pid)
        except OSError as error:
            log.warning("%s runs without all of its limits: %s", name, error)

    def resize(self, task: p.Task) -> None:
        """A task that runs gets the limits of `task.resource`."""
        self.tasks[task.id], pid = task, self.children[task.id].pid
        if (limits := self._limits.get(task.id)) is not None:
            try:
                limits.resize(task.resource, pid)
            except OSError as error:
                log.warning("%s keeps some of its old limits: %s", task_name(task), error)
        elif (limits := self._limit(task)) is not None:
            self._limits[task.id] = limits
            self._apply(task_name(task), limits, pid)

    def ended(self) -> list[EndedTask]:
        """See `TaskRunner`."""
        found, self._stopped = self._stopped, []
        for number, child in list(self.children.items()):
            if (code := child.exit_code()) is not None:
                found.append(self._end(number, self._killed_for_memory(number, code)))
        return found

    def _killed_for_memory(self, number: int, exit_code: int) -> bool:
        if (limits := self._limits.get(number)) is not None:
            return limits.killed_for_memory(exit_code)
        return exit_code == -signal.SIGKILL and self._kills.recent(time.monotonic())

    def stop(self, number: int) -> None:
        """See `TaskRunner`."""
        self._stopped.append(self._end(number, False))

    def _end(self, number: int, out_of_memory: bool) -> EndedTask:
        task, pid, code = self.tasks[number], self.children[number].pid, self.kill(number)
        memory = ": it was killed for want of memory" if out_of_memory else ""
        return EndedTask(task, f"pid {pid}", code, f"ended with {described(code)}{memory}", out_of_memory)

    def kill(self, number: int) -> int:
        """Kill one, with all its descendants, and forget it. The exit code."""
        child, task = self.children.pop(number), self.tasks.pop(number)
        self._selector.unregister(child)
        code = child.end()
        if (limits := self._limits.pop(number, None)) is not None:
            limits.close()
        if task.type is p.NodeType.WORKER and code > 0:
            self._ports.pop(task.index, None)  # the port may be the reason
        return code

    def refill(self) -> None:
        """Replace standbys that were taken, and note whether memory is short. Call it at every turn."""
        self._kills.recent(time.monotonic())
        if self._methods is not None:
            self._methods.look()
        if self._standbys is not None:
            self._standbys.refill()

    def signal(self, number: signal.Signals) -> None:
        """Send it to the session of every task."""
        for child in self.children.values():
            child.signal(number)

    def end(self, grace_s: float = 0.0) -> list[int]:
        """End all: the chief gets SIGTERM and `grace_s` to save, then all are killed. Exit codes."""
        chiefs = [self.children[number] for number, task in self.tasks.items() if task.type is p.NodeType.CHIEF]
        if grace_s > 0:
            for child in chiefs:
                child.ask_to_end()
            deadline = time.monotonic() + grace_s
            for child in chiefs:
                child.wait(max(0.0, deadline - time.monotonic()))
        codes = [self.kill(number) for number in list(self.children)]
        if self._methods is not None:
            self._methods.close()
        return codes
