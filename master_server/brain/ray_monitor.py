"""The cluster monitor of Ray: what the nodes of a cluster have for jobs, and which jobs run on it."""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
import time

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.errors import HooksError, MissingExtra
from dlrover_hooks.host.child_process import Child
from dlrover_hooks.master.brain.cluster_monitor import ClusterMonitor
from dlrover_hooks.protocol.samples import ClusterAnswer, ClusterSample

START_S = 60.0
"""Within this time a connection to the cluster must be there."""
ANSWER_S = 15.0
_MODULE = "dlrover_hooks.integrations.ray.cluster_view"


class RayClusterMonitor(ClusterMonitor):
    """The capacity for jobs is what the nodes have, less what others than jobs of this package have reserved there.

    What a job uses is what its actors and placement groups have reserved. Its kinds are "cpu", "gpu" for all GPUs, and
    other accelerators by the names that they have in Ray.

    A process of its own is connected to the cluster: Ray ends a process whose cluster is away for a minute. It is
    started again with the next sample. On this machine there must be a node of the cluster, as Ray wants.

    Args:
        address: of the cluster, such as `10.0.0.1:6379`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._line: socket.socket | None = None
        self._stopped = False

    def start(self) -> None:
        """Connect to the cluster. Raises `MissingExtra` without Ray, `HooksError` if the cluster does not answer."""
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra("Ray is not installed", hint="pip install 'dlrover-hooks[ray]'")
        self.collect()

    def stop(self) -> None:
        """End the process. Idempotent, any thread."""
        with self._lock:
            self._stopped = True
            self._end()

    def collect(self) -> ClusterSample:
        """See the base class. Raises `HooksError` if the cluster does not answer; the next call connects again."""
        limit_s = ANSWER_S
        with self._lock:
            if self._stopped:
                raise HooksError("the monitor of Ray is stopped")
            if self._line is None:
                limit_s = START_S
                self._begin()
            line = self._line
        assert line is not None
        try:
            answer = msgspec.json.decode(_asked(line, limit_s), type=ClusterAnswer)
        except TimeoutError:
            answer = ClusterAnswer(problem=f"no answer within {limit_s:g} s")
        except (OSError, msgspec.MsgspecError) as error:
            answer = ClusterAnswer(problem=f"the process that was connected to it has ended ({error})")
        if answer.sample is not None:
            return answer.sample
        with self._lock:
            self._end()
        raise HooksError(
            f"the Ray cluster at {self._address}: {answer.problem}",
            hint="is it up, is there a node of it on this machine, and is RAY_AUTH_MODE=token set if it needs a token?",
        )

    def _begin(self) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", _MODULE, self._address, str(number)]
            self._child = Child(
                "the monitor of Ray", command, env=_environment(), pass_fds=[number], die_with_parent=True
            )

    def _end(self) -> None:
        """Under the lock. Wakes a thread that waits for an answer."""
        child, line, self._child, self._line = self._child, self._line, None, None
        if child is not None:
            child.end()
        if line is not None:
            line.close()


def _asked(line: socket.socket, limit_s: float) -> bytes:
    """One answer. Raises OSError."""
    deadline, found = time.monotonic() + limit_s, b""
    line.settimeout(limit_s)
    line.sendall(b"?")
    while not found.endswith(b"\n"):
        line.settimeout(max(0.01, deadline - time.monotonic()))
        part = line.recv(1 << 16)
        if not part:
            raise ConnectionResetError("end of file")
        found += part
    return found


def _environment() -> dict[str, str]:
    """Without tokens and the password of the database."""
    return {name: text for name, text in settings.environment().items() if not name.startswith(settings.PREFIX)}
