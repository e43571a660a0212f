"""The states of a task, and the only changes between them that occur."""

from __future__ import annotations

import enum
import math

import msgspec

from dlrover_hooks.protocol import NodeResource, NodeStatus, NodeType, Task


class TaskEvent(enum.Enum):
    """What happens to a task.

    REGISTERED: its process is up. LOST: its lease expired, or the chief cannot reach it. DROPPED: a version without it
    is announced. KEPT: that version is rolled back. RELEASED: it is not needed any more. GONE: its process has ended
    for certain, or was replaced by one that was started in its place.
    """

    REGISTERED = "registered"
    LOST = "lost"
    DROPPED = "dropped"
    KEPT = "kept"
    RELEASED = "released"
    GONE = "gone"


TRANSITIONS: dict[tuple[NodeStatus, TaskEvent], NodeStatus | None] = {
    (NodeStatus.INITIAL, TaskEvent.REGISTERED): NodeStatus.RUNNING,
    (NodeStatus.INITIAL, TaskEvent.RELEASED): NodeStatus.RELEASED,
    (NodeStatus.INITIAL, TaskEvent.GONE): None,
    (NodeStatus.RUNNING, TaskEvent.DROPPED): NodeStatus.PRE_DROPPED,
    (NodeStatus.RUNNING, TaskEvent.LOST): NodeStatus.FAILED,
    (NodeStatus.RUNNING, TaskEvent.RELEASED): NodeStatus.RELEASED,
    (NodeStatus.RUNNING, TaskEvent.GONE): None,
    (NodeStatus.PRE_DROPPED, TaskEvent.KEPT): NodeStatus.RUNNING,
    (NodeStatus.PRE_DROPPED, TaskEvent.LOST): NodeStatus.FAILED,
    (NodeStatus.PRE_DROPPED, TaskEvent.RELEASED): NodeStatus.RELEASED,
    (NodeStatus.PRE_DROPPED, TaskEvent.GONE): None,
    (NodeStatus.FAILED, TaskEvent.GONE): None,
    (NodeStatus.RELEASED, TaskEvent.GONE): None,
}
"""None: the task is no longer listed."""
ALIVE = (NodeStatus.RUNNING, NodeStatus.PRE_DROPPED)
"""Registered, and its lease has not expired."""
EXPECTED = (NodeStatus.INITIAL, NodeStatus.RUNNING)
"""It has its place in the next version, or will have it."""


class TaskRecord(msgspec.Struct):
    """What the master keeps of a task. `due`: when an INITIAL one must be registered, by the clock of `now`."""

    id: int
    type: NodeType
    index: int
    status: NodeStatus = NodeStatus.INITIAL
    incarnation: str = ""
    address: str = ""
    reason: str = ""
    due: float = math.inf
    launched: bool = False
    """A launcher started its process and will report that it is gone."""
    resource: NodeResource = NodeResource()

    @property
    def name(self) -> str:
        """As TensorFlow writes it."""
        return name_of(self.place)

    @property
    def place(self) -> tuple[NodeType, int]:
        """Type and index. A replacement has the same."""
        return self.type, self.index


def name_of(place: tuple[NodeType, int]) -> str:
    """As TensorFlow writes it."""
    return f"{place[0].value}:{place[1]}"


def shown(task: TaskRecord) -> Task:
    """The task as messages have it."""
    return Task(
        id=task.id,
        type=task.type,
        index=task.index,
        status=task.status,
        incarnation=task.incarnation,
        address=task.address,
        reason=task.reason,
        resource=task.resource,
    )


def diagram() -> str:
    """`TRANSITIONS` as a graph in the DOT language. A point stands for a task that is not listed."""
    lines = ["digraph task {", "    unlisted [shape=point];", '    unlisted -> INITIAL [label="added"];']
    for (before, event), after in TRANSITIONS.items():
        lines.append(f'    {before.name} -> {after.name if after else "unlisted"} [label="{event.value}"];')
    return "\n".join([*lines, "}"])
