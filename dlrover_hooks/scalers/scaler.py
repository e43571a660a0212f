"""What every scaler does, whatever its nodes are: processes, pods or actors."""

from __future__ import annotations

import abc
import enum

import msgspec

from dlrover_hooks.protocol import Node, NodeExit, ScalePlan


class NodeState(enum.Enum):
    """Where a node is.

    WAITING: it is to be started, perhaps again after a failed start. STARTING: its start is under way. RUNNING: it was
    started, and has not ended. REMOVING: it is to end, and has not ended yet. ENDED: it ended by itself, or could not
    be started; it stays listed until a plan removes it. GONE: it has ended and is not listed any more; only in
    `NodeChanges`.
    """

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    REMOVING = "removing"
    ENDED = "ended"
    GONE = "gone"


class ScaledNode(msgspec.Struct, frozen=True):
    """A node and its state. `since`: when it entered the state, in seconds of `time.monotonic` of the scaler."""

    node: Node
    state: NodeState
    since: float
    launch: int
    """Of this one life: no other node of the scaler has the same number, not even a later one of the same name."""
    exit: NodeExit | None = None
    """Why it ended; None while it has not."""
    exit_code: int = 0
    """Negative: the signal that ended it."""
    detail: str = ""
    """More about its end, or about the last failed start."""


class NodeChanges(msgspec.Struct, frozen=True):
    """The nodes that changed since a number, each with its newest state, in the order of these changes.

    `number`: give it to the next `watch_nodes`. `whole`: the scaler does not remember all nodes that have gone since
    then. `nodes` has then all nodes that are listed: forget every other one.
    """

    number: int
    nodes: tuple[ScaledNode, ...] = ()
    whole: bool = False


class Scaler(abc.ABC):
    """Keeps the nodes of one job equal to one desired set. Call all methods on any thread, after `start`.

    A node that ends by itself is not started again: it stays listed with the reason until a plan removes or replaces
    it. An error in a thread of a scaler is logged, and raised by the next call of `scale`, `list_nodes` or
    `watch_nodes`; the scaler goes on.
    """

    @abc.abstractmethod
    def start(self) -> None:
        """Start its threads. Plans that were given before are carried out from now on. Idempotent."""

    @abc.abstractmethod
    def scale(self, plan: ScalePlan) -> None:
        """Merge `plan` into the desired set, and return at once; the nodes follow.

        First `remove_nodes` are removed by their names; unknown names are ignored. Then `launch_nodes` are added by
        their names. A node that is in the set already, or ends before it is removed, is not started again; its
        resources are changed to those of the plan. A new node of the name of one that is being removed is started when
        that one has gone. Then each type in `node_group_resources` gets `count` nodes: missing ones are created with
        the lowest ids that are free in the set, those with the highest ids are removed. A node that has ended
        counts only if it succeeded. The nodes of the group get its resources, unless these are all 0. The same plan
        twice changes nothing.

        Raises `UsageError`, and changes nothing, if `ScalePlan.check` refuses the plan, or after `stop`.
        """

    @abc.abstractmethod
    def list_nodes(self) -> tuple[ScaledNode, ...]:
        """All nodes of the desired set, and those that are being removed, by type and id."""

    @abc.abstractmethod
    def watch_nodes(self, after: int, within_s: float) -> NodeChanges:
        """What changed since the number `after` (0: everything), as soon as there is something.

        After `within_s` seconds, or as `stop` ends, without nodes and with the number `after`.
        """

    @abc.abstractmethod
    def stop(self, grace_s: float) -> None:
        """Remove all nodes, each with `grace_s` seconds to end, wait for that, and end the threads. Only the first call
        does so.

        A node that does not end even when it is killed is logged and abandoned.
        """
