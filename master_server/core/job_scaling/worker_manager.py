"""The workers of a job without parameter servers: which nodes are started, replaced and removed."""

from __future__ import annotations

import msgspec

from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling, NodeRecord
from dlrover_hooks.protocol import (
    NodeChange,
    NodeExit,
    NodeGroupResource,
    NodeResource,
    NodeStatus,
    NodeType,
    ScalePlan,
)

LESS_CPU, LEAST_CPU = 0.5, 1.0
"""A node that could not be started is asked for again with this share of its cores, as DLRover does, and at least so
many: smaller nodes find a place sooner."""
_FAILURES = (NodeExit.ERROR, NodeExit.KILLED, NodeExit.OUT_OF_MEMORY)


class WorkerManager:
    """Keeps the nodes of `scaling` equal to the number of workers that the job is to have. Pure: `now` is given."""

    def __init__(self, scaling: JobScaling, now: float) -> None:
        self._scaling, self._now = scaling, now

    def carry_out(self, group: NodeGroupResource) -> ScalePlan:
        """What a plan for so many workers starts and removes.

        The workers with the highest ids are removed first. Those that stay get the size of the group while they run.
        """
        scaling = self._scaling
        scaling.workers, scaling.worker_resource = group.count, group.node_resource
        for node in scaling.present:
            if node.resource != group.node_resource:
                node.resource = group.node_resource
                scaling.number += 1
        removed = scaling.present[max(0, group.count - scaling.succeeded) :]
        for node in removed:
            self._release(node)
        return ScalePlan(
            {NodeType.WORKER.value: group}, [node.shown for node in self._fill()], [node.shown for node in removed]
        )

    def change(self, change: NodeChange) -> None:
        """A node event: it runs, or has ended. Call `settle` after all of them. Unknown names are ignored."""
        node = next((one for one in self._scaling.nodes if one.shown.name == change.name), None)
        if node is None:
            return
        if change.exit is None:
            if node.status is NodeStatus.INITIAL:
                self._enter(node, NodeStatus.RUNNING)
            return
        self._scaling.nodes.remove(node)
        self._scaling.number += 1
        if not node.is_released and not self._scaling.finished:
            self._ended(node, change, change.exit)

    def replace(self, name: str, reason: str) -> None:
        """Release a node; `settle` starts another one. It counts as no failure."""
        for node in self._scaling.present:
            if node.shown.name == name:
                self._release(node)
                self._scaling.problem = f"{name} was replaced: {reason}"

    def settle(self) -> None:
        """Start what is missing, and give up what did not start in time."""
        scaling = self._scaling
        if scaling.finished:
            return
        if scaling.due <= self._now:
            self._give_up_starting()
        if scaling.succeeded and not scaling.present:
            self._finish(0, "")
        elif not scaling.out_of_memory:  # the plan for these nodes is made first: it says how much memory the next get
            self._fill()

    def forget_processes(self) -> None:
        """All nodes have ended with the launcher that owned them: other ones take their place."""
        scaling = self._scaling
        scaling.nodes.clear()
        scaling.number += 1
        scaling.succeeded, scaling.out_of_memory, scaling.failed_at = 0, (), ()
        scaling.finished, scaling.failure, scaling.exit_code = False, "", 0

    def _fill(self) -> list[NodeRecord]:
        scaling = self._scaling
        missing = scaling.workers - scaling.succeeded - len(scaling.present)
        return [self._add(scaling.worker_resource) for _ in range(missing)]

    def _add(self, resource: NodeResource) -> NodeRecord:
        scaling = self._scaling
        scaling.last_id += 1
        scaling.number += 1
        node = NodeRecord(NodeType.WORKER, scaling.last_id, resource, since=self._now)
        scaling.nodes.append(node)
        return node

    def _enter(self, node: NodeRecord, status: NodeStatus) -> None:
        node.status, node.since = status, self._now
        self._scaling.number += 1

    def _release(self, node: NodeRecord) -> None:
        node.relaunchable, node.is_released = False, True
        self._enter(node, NodeStatus.RELEASED)

    def _ended(self, node: NodeRecord, change: NodeChange, cause: NodeExit) -> None:
        scaling, name = self._scaling, node.shown.name
        detail = f": {change.detail}" if change.detail else ""
        if cause is NodeExit.SUCCEEDED:
            scaling.succeeded += 1
        elif cause is NodeExit.USER_ERROR:
            self._finish(change.exit_code, f"{name} ended with exit code {change.exit_code}{detail}")
        elif cause is NodeExit.PREEMPTED:
            scaling.problem = f"{name} was preempted{detail}"
        elif cause in _FAILURES:
            scaling.problem = f"{name} ended ({cause.value}, exit code {change.exit_code}){detail}"
            if cause is NodeExit.OUT_OF_MEMORY:
                scaling.out_of_memory = (*scaling.out_of_memory, node.shown)
            self._charge(change.exit_code)
        else:
            scaling.problem = f"{name} was not started{detail}"
            self._charge(change.exit_code)

    def _charge(self, exit_code: int) -> None:
        scaling = self._scaling
        since = self._now - scaling.relaunch_window_s
        scaling.failed_at = (*(at for at in scaling.failed_at if at > since), self._now)
        if len(scaling.failed_at) > scaling.relaunches:
            self._finish(
                exit_code or 1,
                f"{scaling.problem}. {len(scaling.failed_at)} nodes failed within {scaling.relaunch_window_s:g} s, "
                f"more than {scaling.relaunches}",
            )

    def _finish(self, exit_code: int, failure: str) -> None:
        scaling = self._scaling
        scaling.finished, scaling.exit_code, scaling.failure = True, exit_code, failure
        scaling.number += 1

    def _give_up_starting(self) -> None:
        scaling, start_s = self._scaling, self._scaling.history.pace.start_s
        late = [node for node in scaling.present if node.status is NodeStatus.INITIAL]
        for node in [node for node in late if node.since + start_s <= self._now]:
            self._release(node)
            cpu = node.resource.cpu
            if cpu > LEAST_CPU and node.type.value not in scaling.sizes:
                cpu = max(LEAST_CPU, cpu * LESS_CPU)
            scaling.problem = f"{node.shown.name} did not start within {start_s:g} s"
            self._charge(1)
            if not scaling.finished:
                self._add(msgspec.structs.replace(node.resource, cpu=cpu))
