"""Which nodes are to be, which there are, and what is done about the difference. Pure: `now` is given."""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from collections.abc import Iterator

import msgspec

from dlrover_hooks.protocol import Node, NodeExit, NodeGroupResource, NodeResource, NodeType, ScalePlan
from dlrover_hooks.scalers.scaler import NodeChanges, NodeState, ScaledNode

REMEMBERED = 4096
"""Nodes that have gone and are still told to `watch_nodes`."""


class StartRetries(msgspec.Struct, frozen=True):
    """A start that fails is tried again after `first_s` seconds, then after twice as long, up to `longest_s`.

    After `attempts` failed starts the node has ended: `NodeExit.NEVER_STARTED`.
    """

    attempts: int = 6
    first_s: float = 0.5
    longest_s: float = 30.0

    def pause_s(self, failures: int) -> float:
        """After so many failures."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 60))


class ActionKind(enum.Enum):
    START = "start"
    REMOVE = "remove"
    RESIZE = "resize"


class NodeAction(msgspec.Struct, frozen=True):
    """Something to do, once. What comes of it is reported with its `launch`."""

    kind: ActionKind
    launch: int
    node: Node


class _Slot(msgspec.Struct):
    """One node under its name. `number`: of its last change."""

    node: Node
    launch: int
    since: float
    number: int
    state: NodeState = NodeState.WAITING
    due: float = -math.inf
    """When it may be started or removed (again)."""
    failures: int = 0
    created: bool = False
    """Its start has succeeded."""
    asked: bool = False
    """Its removal is under way."""
    resized: bool = False
    """It runs with other resources than it is to have."""
    successor: Node | None = None
    """Is to be started under this name once this node has gone."""
    exit: NodeExit | None = None
    exit_code: int = 0
    detail: str = ""

    @property
    def desired(self) -> Node | None:
        return self.successor if self.state is NodeState.REMOVING else self.node

    @property
    def shown(self) -> ScaledNode:
        return ScaledNode(self.node, self.state, self.since, self.launch, self.exit, self.exit_code, self.detail)


class NodeReconciler:
    """The desired set, and what is known of the nodes. Not thread-safe: one lock or one thread owns it.

    Call `next_start` and `next_change` for what is to be done now, then report with `started`, `start_failed`, `ended`
    or `removal_failed`; reports about a node that has gone are ignored. There is never more than one node of a name.
    """

    def __init__(self, retries: StartRetries) -> None:
        self.number = 0
        """Increases with each change of a node."""
        self._retries = retries
        self._slots: dict[str, _Slot] = {}
        self._launches = itertools.count(1)
        self._gone = deque[tuple[int, ScaledNode]](maxlen=REMEMBERED)
        self._forgotten = 0
        """Number of the newest change that is not remembered."""

    # ---- the desired set --------------------------------------------------------------------------------------------

    def merge(self, plan: ScalePlan, now: float) -> None:
        """See `Scaler.scale`. Raises UsageError."""
        plan.check([node.name for node in plan.remove_nodes])  # unknown ones are no mistake: they are removed already
        removed, launched = {node.name for node in plan.remove_nodes}, {node.name for node in plan.launch_nodes}
        target = {name: node for name, slot in self._slots.items() if (node := slot.desired) is not None}
        target = {name: node for name, node in target.items() if name not in removed}
        for node in plan.launch_nodes:
            target[node.name] = _with(target.get(node.name, node), node.config_resource)
        for name, group in sorted(plan.node_group_resources.items()):
            self._fit(target, NodeType(name), group, launched, removed)
        for name in set(self._slots) - set(target):
            self._drop(name, now)
        for node in target.values():
            self._want(node, now)

    def remove_all(self, now: float) -> None:
        """Nothing is desired any more. Those that are being removed are to be asked again: they may have less time."""
        for name, slot in list(self._slots.items()):
            slot.asked = False
            self._drop(name, now)

    def _drop(self, name: str, now: float) -> None:
        slot = self._slots.get(name)
        if slot is None:
            return
        slot.successor = None
        if slot.state is NodeState.WAITING:
            self._end(slot, NodeExit.REMOVED, 0, slot.detail)
            self._forget(slot, now)
        elif slot.state is NodeState.ENDED:
            self._forget(slot, now)
        elif slot.state is not NodeState.REMOVING:
            slot.created |= slot.state is NodeState.RUNNING
            self._enter(slot, NodeState.REMOVING, now)

    def _want(self, node: Node, now: float) -> None:
        slot = self._slots.get(node.name)
        if slot is None:
            self._add(node, now)
        elif slot.state is NodeState.REMOVING:
            slot.successor = node
        elif slot.node.config_resource != node.config_resource and slot.state is not NodeState.ENDED:
            slot.node = node
            slot.resized = slot.state is not NodeState.WAITING
            self._changed(slot)

    def _fit(
        self, target: dict[str, Node], kind: NodeType, group: NodeGroupResource, launched: set[str], removed: set[str]
    ) -> None:
        """Change `target`, the desired set, so that it has the group. A removed name is not used for a new node."""
        resource = group.node_resource
        present = [node for name, node in target.items() if node.type is kind and self._counts(name)]
        if resource != NodeResource():
            target.update({node.name: _with(node, resource) for node in present if node.name not in launched})
        taken = {node.id for node in target.values() if node.type is kind}
        free = (Node(kind, number, resource) for number in itertools.count() if number not in taken)
        free = (node for node in free if node.name not in target and node.name not in removed)
        target.update({node.name: node for node in itertools.islice(free, max(0, group.count - len(present)))})
        alive = sorted((node for node in present if not self._is_over(node.name)), key=lambda node: -node.id)
        for node in alive[: max(0, len(present) - group.count)]:
            del target[node.name]

    def _is_over(self, name: str) -> bool:
        slot = self._slots.get(name)
        return slot is not None and slot.state is NodeState.ENDED

    def _counts(self, name: str) -> bool:
        """As one of its group: it has not failed."""
        return not self._is_over(name) or self._slots[name].exit is NodeExit.SUCCEEDED

    # ---- actions ----------------------------------------------------------------------------------------------------

    def next_start(self, now: float) -> NodeAction | None:
        """The node to start now that has waited longest. It is STARTING from now on."""
        due = (slot for slot in self._slots.values() if slot.state is NodeState.WAITING and slot.due <= now)
        slot = min(due, key=lambda slot: (slot.due, slot.launch), default=None)
        if slot is None:
            return None
        slot.resized = False
        self._enter(slot, NodeState.STARTING, now)
        return NodeAction(ActionKind.START, slot.launch, slot.node)

    def next_change(self, now: float) -> NodeAction | None:
        """A started node to remove or to resize now."""
        for slot in self._to_change():
            if slot.due > now:
                continue
            if slot.state is NodeState.REMOVING:
                slot.asked = True
                return NodeAction(ActionKind.REMOVE, slot.launch, slot.node)
            slot.resized = False
            return NodeAction(ActionKind.RESIZE, slot.launch, slot.node)
        return None

    def start_due(self) -> float:
        """When `next_start` may have something, on the clock of `now`."""
        return min((slot.due for slot in self._slots.values() if slot.state is NodeState.WAITING), default=math.inf)

    def change_due(self) -> float:
        """When `next_change` may have something."""
        return min((slot.due for slot in self._to_change()), default=math.inf)

    def _to_change(self) -> Iterator[_Slot]:
        for slot in self._slots.values():
            removable = slot.state is NodeState.REMOVING and slot.created and not slot.asked
            if removable or (slot.state is NodeState.RUNNING and slot.resized):
                yield slot

    # ---- reports ----------------------------------------------------------------------------------------------------

    def created(self, launch: int, now: float) -> None:
        """There is the node, but it does not run yet. If it was removed meanwhile, `next_change` says so."""
        slot = self._find(launch)
        if slot is not None and slot.state in (NodeState.STARTING, NodeState.REMOVING):
            slot.created = True
            if slot.failures or slot.detail:
                slot.failures, slot.detail, slot.due = 0, "", -math.inf
                self._changed(slot)

    def adopt(self, node: Node, now: float) -> int:
        """There is such a node already, of a scaler before this one: it is desired. Returns its launch."""
        slot = self._slots.get(node.name)
        if slot is None:
            self._add(node, now)
            slot = self._slots[node.name]
        if slot.state is NodeState.WAITING:
            slot.resized = slot.node.config_resource != node.config_resource
            slot.created = True
            self._enter(slot, NodeState.STARTING, now)
        return slot.launch

    def started(self, launch: int, now: float) -> None:
        """The node runs. If it was removed meanwhile, `next_change` says so."""
        slot = self._find(launch)
        if slot is not None and slot.state is NodeState.STARTING:
            slot.failures, slot.detail, slot.due = 0, "", -math.inf
            self._enter(slot, NodeState.RUNNING, now)
        elif slot is not None and slot.state is NodeState.REMOVING:
            slot.created = True

    def start_failed(self, launch: int, reason: str, now: float) -> None:
        """There is no such node: it is started again after a pause, or given up."""
        slot = self._find(launch)
        if slot is None or slot.state is NodeState.ENDED:
            return
        if slot.state is NodeState.REMOVING:
            self._end(slot, NodeExit.REMOVED, 0, reason)
            self._forget(slot, now)
            return
        slot.failures += 1
        slot.detail = reason
        if slot.failures >= self._retries.attempts:
            self._end(slot, NodeExit.NEVER_STARTED, 0, reason)
            self._enter(slot, NodeState.ENDED, now)
        else:
            slot.due = now + self._retries.pause_s(slot.failures)
            self._enter(slot, NodeState.WAITING, now)

    def ended(self, launch: int, exit_: NodeExit, exit_code: int, detail: str, now: float) -> None:
        """The node is gone for certain. May come before `started`."""
        slot = self._find(launch)
        if slot is None or slot.state is NodeState.ENDED:
            return
        if slot.state is NodeState.REMOVING:
            self._end(slot, NodeExit.REMOVED, exit_code, detail)
            self._forget(slot, now)
        else:
            self._end(slot, exit_, exit_code, detail)
            self._enter(slot, NodeState.ENDED, now)

    def removal_failed(self, launch: int, reason: str, now: float) -> None:
        """It is asked for again after a pause, as often as it takes."""
        slot = self._find(launch)
        if slot is not None and slot.state is NodeState.REMOVING:
            slot.failures += 1
            slot.asked, slot.detail, slot.due = False, reason, now + self._retries.pause_s(slot.failures)
            self._changed(slot)

    # ---- what is known ----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """There is no node, and none is to be."""
        return not self._slots

    def knows(self, launch: int) -> bool:
        """There is such a node, or it is to be."""
        slot = self._find(launch)
        return slot is not None and slot.state is not NodeState.ENDED

    def nodes(self) -> tuple[ScaledNode, ...]:
        """Those that are listed, by type and id."""
        found = [slot.shown for slot in self._slots.values()]
        return tuple(sorted(found, key=lambda one: (one.node.type.value, one.node.id, one.node.name)))

    def changes(self, after: int) -> NodeChanges:
        """See `Scaler.watch_nodes`."""
        whole = after < self._forgotten
        found = [(slot.number, slot.shown) for slot in self._slots.values() if whole or slot.number > after]
        found += [(number, node) for number, node in self._gone if number > after]
        found.sort(key=lambda pair: pair[0])
        return NodeChanges(self.number, tuple(node for _, node in found), whole)

    # ---- within -----------------------------------------------------------------------------------------------------

    def _find(self, launch: int) -> _Slot | None:
        return next((slot for slot in self._slots.values() if slot.launch == launch), None)

    def _add(self, node: Node, now: float) -> None:
        self.number += 1
        self._slots[node.name] = _Slot(node, next(self._launches), now, self.number)

    def _enter(self, slot: _Slot, state: NodeState, now: float) -> None:
        slot.state, slot.since = state, now
        self._changed(slot)

    def _changed(self, slot: _Slot) -> None:
        self.number += 1
        slot.number = self.number

    def _end(self, slot: _Slot, exit_: NodeExit, exit_code: int, detail: str) -> None:
        slot.exit, slot.exit_code, slot.detail = exit_, exit_code, detail

    def _forget(self, slot: _Slot, now: float) -> None:
        self._enter(slot, NodeState.GONE, now)
        if len(self._gone) == REMEMBERED:
            self._forgotten = self._gone[0][0]
        self._gone.append((slot.number, slot.shown))
        del self._slots[slot.node.name]
        if slot.successor is not None:
            self._add(slot.successor, now)


def _with(node: Node, resource: NodeResource) -> Node:
    return msgspec.structs.replace(node, config_resource=resource)
