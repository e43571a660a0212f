"""Planned parameter server jobs: what a plan changes of their tasks, and the `ScalePlan` that it gives."""

from __future__ import annotations

from dlrover_hooks.master.core.job_scaling.scaling_state import JobScaling
from dlrover_hooks.master.core.ps_clusters import decisions
from dlrover_hooks.master.core.ps_clusters.cluster_state import Goal, Place, PSClusters
from dlrover_hooks.master.core.ps_clusters.task_states import EXPECTED, TaskRecord, name_of
from dlrover_hooks.protocol import (
    Node,
    NodeGroupResource,
    NodeResource,
    NodeStatus,
    NodeType,
    ResourcePlan,
    ScalePlan,
)

_KINDS = (NodeType.PS, NodeType.WORKER)
_ENDED = (NodeStatus.FAILED, NodeStatus.RELEASED)


class PSManager:
    """Has the parameter servers and workers of a job become those of a plan. Pure: `now` is given.

    A server holds a part of the model, so one of another size is a new task, which runs before the old one is left. A
    worker holds nothing: it gets another size while it runs.
    """

    def __init__(self, clusters: PSClusters, scaling: JobScaling, now: float) -> None:
        self._clusters, self._scaling, self._now = clusters, scaling, now

    def start(self) -> None:
        """The tasks are planned from now on; numbers that a plan gave before are brought within the limits."""
        clusters, scaling, limits = self._clusters, self._scaling, self._scaling.limits
        clusters.planned, clusters.within_s = True, scaling.history.pace.start_s
        scaling.finished = clusters.finished
        if clusters.finished or not clusters.ps:
            return
        ps = min(max(clusters.ps, limits.min_ps), limits.max_ps)
        workers = min(max(clusters.workers, limits.min_workers), limits.max_workers)
        decisions.ask(clusters, Goal(ps=ps, workers=workers, within_s=clusters.within_s), self._now)

    def carry_out(self, plan: ResourcePlan) -> ScalePlan:
        """Begin what `plan` asks for: the machine of `ps_clusters` goes on with it as tasks start and end.

        Groups change numbers, and the size of all tasks of a type; a group without a size changes only the number.
        `node_resources` changes the size of single tasks, by their names. Unknown names are ignored: the task has gone
        since the plan was made.
        """
        counts, moves, sizes, before = dict[NodeType, int](), list[Place](), dict[str, NodeResource](), self.groups()
        for kind in _KINDS:
            if (group := plan.node_group_resources.get(kind.value)) is None:
                continue
            counts[kind], size = group.count, group.node_resource
            if size == NodeResource():
                size = before.get(kind.value, group).node_resource
            else:
                sizes |= {task.name: size for task in self._tasks(kind)}
            decisions.set_resource(self._clusters, kind, size)
        sizes |= plan.node_resources
        for task in [*self._tasks(NodeType.PS), *self._tasks(NodeType.WORKER)]:
            size = sizes.get(task.name, task.resource)
            if size == task.resource:
                continue
            if task.type is NodeType.PS and task.status is NodeStatus.RUNNING and self._clusters.announced is not None:
                moves.append(task.place)
            else:
                task.resource = size
                self._clusters.number += 1
        for lost in self._clusters.out_of_memory:  # not replaced yet: its successor gets the size of the plan
            if lost.name in plan.node_resources:
                self._clusters.resources[lost.name] = plan.node_resources[lost.name]
        goal = Goal(
            ps=counts.get(NodeType.PS),
            workers=counts.get(NodeType.WORKER),
            moves=tuple(moves),
            within_s=self._scaling.history.pace.start_s,
            resources={name_of(place): sizes[name_of(place)] for place in moves},
        )
        decisions.ask(self._clusters, goal, self._now)
        return self.scale_plan()

    def scale_plan(self) -> ScalePlan:
        """What is to be started and stopped now. Tasks are called by type and id here, such as `ps-7`: in a migration
        both have the same index. `ps_addrs`: the servers of the newest cluster, by index."""
        tasks, announced = self._clusters.tasks, self._clusters.announced
        return ScalePlan(
            node_group_resources=self.groups(),
            launch_nodes=[_node(task) for task in tasks if task.status is NodeStatus.INITIAL],
            remove_nodes=[_node(task) for task in tasks if task.status in _ENDED],
            ps_addrs=list(announced.addresses.ps) if announced is not None else [],
        )

    def groups(self) -> dict[str, NodeGroupResource]:
        """What the job has, by type; empty before its first plan. Of different sizes the largest is given."""
        found = dict[str, NodeGroupResource]()
        for kind, count in zip(_KINDS, (self._clusters.ps, self._clusters.workers), strict=True):
            usual = self._clusters.resources.get(kind.value, NodeResource())
            sizes = [usual, *(task.resource for task in self._tasks(kind))]
            if count:
                found[kind.value] = NodeGroupResource(count, max(sizes, key=lambda one: (one.cpu, one.memory)))
        return found

    def nodes(self) -> tuple[Node, ...]:
        """The tasks that the job is to have, for a person: by their own names, the chief first."""
        order = (NodeType.CHIEF, *_KINDS)
        tasks = sorted((task for kind in order for task in self._tasks(kind)), key=lambda one: order.index(one.type))
        return tuple(Node(task.type, task.id, task.resource, task.name, task.status) for task in tasks)

    def _tasks(self, kind: NodeType) -> list[TaskRecord]:
        """Those that have their place in the next cluster."""
        return [task for task in self._clusters.tasks if task.type is kind and task.status in EXPECTED]


def _node(task: TaskRecord) -> Node:
    return Node(task.type, task.id, task.resource, status=task.status, index=task.index)
