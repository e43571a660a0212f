"""A scaler whose nodes exist in memory only."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_hooks.protocol import Node, NodeExit
from dlrover_hooks.scalers.node_reconciler import StartRetries
from dlrover_hooks.scalers.reconciling_scaler import ReconcilingScaler


def _nothing(_: Node) -> None:
    pass


class FakeScaler(ReconcilingScaler):
    """Nodes run at once and end at once; `end` makes one end by itself.

    `before_start`: called on the starting thread with each node; what it raises is a failed start.
    """

    def __init__(self, job: str = "fake", *, starts_at_once: int = 8, retries: StartRetries | None = None) -> None:
        super().__init__(job, starts_at_once=starts_at_once, retries=retries)
        self.before_start: Callable[[Node], object] = _nothing
        self.running: dict[int, Node] = {}
        """Nodes that exist, by launch, with their resources."""

    def end(self, name: str, exit_code: int = 0) -> None:
        """The node ends by itself; negative: killed by that signal. Raises StopIteration if it does not run."""
        launch = next(key for key, node in list(self.running.items()) if node.name == name)
        del self.running[launch]
        cause = NodeExit.KILLED if exit_code < 0 else NodeExit.ERROR if exit_code else NodeExit.SUCCEEDED
        self._ended(launch, cause, exit_code)

    def _create(self, launch: int, node: Node) -> bool:
        self.before_start(node)
        self.running[launch] = node
        return True

    def _remove(self, launch: int, node: Node, grace_s: float | None) -> None:
        del node, grace_s
        if self.running.pop(launch, None) is not None:
            self._ended(launch, NodeExit.REMOVED, 0)

    def _resize(self, launch: int, node: Node) -> None:
        if launch in self.running:
            self.running[launch] = node
