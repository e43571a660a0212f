"""Notices from the master to an agent: received by a watching thread, handled by the main one."""

from __future__ import annotations

import collections
import selectors
import time

from dlrover_hooks.client import MasterClient
from dlrover_hooks.client.liveness_connection import Watcher
from dlrover_hooks.errors import MasterError
from dlrover_hooks.host.wake_pipe import WakePipe
from dlrover_hooks.protocol import Notice

_AGAIN_S = 1.0


class MasterEvents:
    """An open connection to the master; when it closes, the master detects the loss of this node.

    Wakes `selector` for each notice. The main thread calls all methods except the callbacks.
    """

    def __init__(self, client: MasterClient, job: str, selector: selectors.BaseSelector) -> None:
        self._client, self._job = client, job
        self._heard: collections.deque[Notice | MasterError] = collections.deque()
        self._wake = WakePipe(selector)
        self._watcher: Watcher | None = None
        self._again_at = 0.0

    def open(self, *, again: bool = False) -> None:
        """Start a watch if there is none, once a second at most: the master may refuse it before this agent joins.

        `again`: the agent has joined as a new one, so what was heard before does not count.
        """
        if again:
            self.hang_up()
            self.take()
            self._again_at = 0.0
        if self._watcher is None and time.monotonic() > self._again_at:
            self._again_at = time.monotonic() + _AGAIN_S
            self._watcher = self._client.watch(self._job, self._hear, self._hear)

    @property
    def away_since(self) -> float | None:
        """Since when the master has been unreachable (monotonic seconds); None: it is reachable, as far as is known."""
        return self._watcher.away_since if self._watcher is not None else None

    def take(self) -> list[Notice | MasterError]:
        """The notices since the last call; an error: this agent is unknown to the master."""
        self._wake.drain()
        said = [self._heard.popleft() for _ in range(len(self._heard))]
        if any(isinstance(one, MasterError) or one.finished for one in said):
            self.hang_up()
        return said

    def hang_up(self) -> None:
        """End the thread. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    def close(self) -> None:
        """End the thread, and close the pipe."""
        self.hang_up()
        self._wake.close()

    def _hear(self, said: Notice | MasterError) -> None:
        self._heard.append(said)
        self._wake.wake()
