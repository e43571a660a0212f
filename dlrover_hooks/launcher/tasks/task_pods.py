"""The tasks of a parameter server job as Pods of a Kubernetes cluster, which a scaler creates and deletes."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Mapping

from dlrover_hooks import protocol as p
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.child_process import described
from dlrover_hooks.host.wake_pipe import WakePipe
from dlrover_hooks.launcher.tasks.task_runner import EndedTask
from dlrover_hooks.scalers.scaler import NodeState, ScaledNode, Scaler

_AGAIN_S, _TURN_S, _CLOSE_S = 0.5, 1.0, 2.0
_PREEMPTED = (p.NodeExit.PREEMPTED, p.NodeExit.REMOVED)


class TaskPods:
    """A `TaskRunner`. Main thread only; it owns a thread that waits for changes.

    Args:
        job: its name.
        scaler: of the Pods; started by the caller. Nodes that it has already are tasks of an earlier runner.
        pod_name: of the Pod of a node.
        selector: wakes when a Pod changes.
    """

    def __init__(
        self, job: str, scaler: Scaler, pod_name: Callable[[p.Node], str], selector: selectors.BaseSelector
    ) -> None:
        self.tasks: dict[int, p.Task] = {_task(one.node).id: _task(one.node) for one in scaler.list_nodes()}
        self.pids: Mapping[int, int] = {}
        self._scaler, self._pod_name = scaler, pod_name
        self._told, self._seen = 0, 0
        """Numbers of the newest changes: told by `ended`; that woke the main thread."""
        self._wake = WakePipe(selector)
        where = f"job {job}"
        self._watcher = BackgroundThread("dlrover-hooks-pods", self._watch, where=where, again_s=_AGAIN_S)
        self._watcher.start()

    may_start = True

    def start(self, task: p.Task) -> str:
        """See `TaskRunner`."""
        node = _node(task)
        self.tasks[task.id] = task
        self._scaler.scale(p.ScalePlan(launch_nodes=[node]))
        return f"Pod {self._pod_name(node)}"

    def resize(self, task: p.Task) -> None:
        """Nothing: a Pod that runs keeps its resources."""
        self.tasks[task.id] = task

    def stop(self, number: int) -> None:
        """See `TaskRunner`."""
        self._scaler.scale(p.ScalePlan(remove_nodes=[_node(self.tasks[number])]))

    def ended(self) -> list[EndedTask]:
        """See `TaskRunner`."""
        self._wake.drain()
        self._watcher.check()
        changes = self._scaler.watch_nodes(self._told, 0.0)
        self._told = changes.number
        found = list[EndedTask]()
        for one in changes.nodes:
            if one.state in (NodeState.ENDED, NodeState.GONE) and one.node.id in self.tasks:
                found.append(self._end(one))
        if changes.whole:
            listed = {one.node.id for one in changes.nodes}
            for number in [one for one in self.tasks if one not in listed]:
                task = self.tasks.pop(number)
                name = self._pod_name(_node(task))
                found.append(EndedTask(task, f"Pod {name}", -signal.SIGKILL, "is gone", preempted=True))
        return found

    def close(self) -> None:
        """End the thread. The Pods stay as they are."""
        self._watcher.stop(_CLOSE_S)
        self._wake.close()

    def _end(self, one: ScaledNode) -> EndedTask:
        task, code = self.tasks.pop(one.node.id), one.exit_code
        if one.state is NodeState.ENDED:  # its Pod stays, with its log
            self._scaler.scale(p.ScalePlan(remove_nodes=[one.node]))
        how = f"ended with {described(code)}"
        if one.exit is p.NodeExit.NEVER_STARTED:
            code, how = -signal.SIGKILL, "could not be started"
        if one.detail and one.detail != f"exit code {code}":
            how = f"{how}: {one.detail}"
        memory, preempted = one.exit is p.NodeExit.OUT_OF_MEMORY, one.exit in _PREEMPTED
        return EndedTask(task, f"Pod {self._pod_name(one.node)}", code, how, memory, preempted)

    def _watch(self) -> None:
        while not self._watcher.stopping.is_set():
            changed = self._scaler.watch_nodes(self._seen, _TURN_S).number
            if changed != self._seen:
                self._seen = changed
                self._wake.wake()


def _node(task: p.Task) -> p.Node:
    return p.Node(task.type, task.id, task.resource, index=task.index)


def _task(node: p.Node) -> p.Task:
    return p.Task(node.id, node.type, node.index or 0, p.NodeStatus.RUNNING, resource=node.config_resource)
