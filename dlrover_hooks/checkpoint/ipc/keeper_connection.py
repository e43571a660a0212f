"""A trainer's connection to its keeper: starts a keeper if needed, matches replies, delivers notices. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.unix_socket import address, dial, reach
from dlrover_hooks.config import worker_environment
from dlrover_hooks.errors import KeeperAway
from dlrover_hooks.host.background_thread import BackgroundThread

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
_HINT = "its memory is lost; the next save starts a new keeper, older checkpoints come from `save_to`"
_log = logging.getLogger(__name__)
_links: weakref.WeakSet[KeeperLink] = weakref.WeakSet()
_START_S = 60.0
"""A keeper that does not listen after this time is considered hung."""
_starting: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
"""By socket path: starter processes that outlasted their `connect`, and when to kill them."""


class KeeperLink:
    """One connection. `call` and `send` from any thread. `notify` is called on the connection's own reader thread.

    So is `ended`, once, when the keeper (not `close`) ended the connection.
    """

    def __init__(
        self,
        connection: socket.socket,
        notify: Callable[[keeper_messages.Notice], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = connection
        self._notify, self._ended = notify, ended
        self._closed = False
        self._waiting: dict[int, queue.SimpleQueue[tuple[keeper_messages.KeeperMessage, int] | None]] = {}
        self._refs = 0
        self._lock = threading.Lock()
        self._answers = threading.Lock()
        """Held to put a reply into its queue or to remove the queue, so that the two never overlap."""
        self._alive = True
        self._frames = keeper_messages.Frames()
        self._reader = BackgroundThread(
            "dlrover-hooks-keeper-link",
            self._read,
            where="the connection to the keeper",
            kind=KeeperAway,
            failed=lambda _: self._over(),
        )
        self._reader.start()
        _links.add(self)

    @classmethod
    def connect(
        cls,
        job: str,
        node: str,
        *,
        notify: Callable[[keeper_messages.Notice], None],
        ended: Callable[[], None] = lambda: None,
        start: bool = True,
        linger_s: float = 600.0,
        deadline_s: float = 30.0,
    ) -> KeeperLink:
        """Connect to the keeper of (job, node); with `start`, start one first if there is none.

        Raises:
            KeeperAway: no keeper listens within `deadline_s`.
        """
        path, until = address(job, node).socket, time.monotonic() + deadline_s
        while True:
            connection = dial(path)
            if connection is not None:
                return cls(connection, notify, ended)
            if time.monotonic() >= until:
                raise KeeperAway(f"no keeper for job {job!r} on node {node!r} within {deadline_s:g} s", hint=_HINT)
            if start:
                _start(job, node, linger_s, until)
            time.sleep(0.02)

    @staticmethod
    def begin(job: str, node: str, linger_s: float) -> bool:
        """Start a keeper of (job, node) without waiting for it, unless one listens. `connect` waits.

        True: there was none, so this node's memory holds nothing of the job.
        """
        path = address(job, node).socket
        connection = dial(path)
        if connection is not None:
            connection.close()
            return False
        if path not in _starting:
            _starting[path] = _spawned(job, node, linger_s), time.monotonic() + _START_S
        return True

    @property
    def alive(self) -> bool:
        """The connection is open."""
        return self._alive

    def call(
        self, request: Callable[[int], keeper_messages.KeeperMessage], *, timeout_s: float = 60.0
    ) -> tuple[Any, int]:
        """Send `request(ref)` and wait: the reply and its descriptor (-1: none).

        Raises:
            KeeperAway: the keeper is gone or does not reply in time.
        """
        answer: queue.SimpleQueue[tuple[keeper_messages.KeeperMessage, int] | None] = queue.SimpleQueue()
        with self._lock:
            self._refs += 1
            ref = self._refs
            self._waiting[ref] = answer
        try:
            self.send(request(ref))
            if not self._alive:
                raise self._gone()
            got = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise KeeperAway(f"the keeper did not answer within {timeout_s:g} s", hint=_HINT) from None
        finally:
            self._give_up(ref, answer)
        if got is None:
            raise self._gone()
        reply, fd = got
        if fd < 0 and isinstance(reply, keeper_messages.CARRY_FD) and reply.at is not None:
            fd = reach(reply.at)
        return reply, fd

    def _gone(self) -> KeeperAway:
        """The error for a connection that has ended. Raises the reader's own instead, if it ended by that."""
        self._reader.check()
        return KeeperAway("the keeper is gone", hint=_HINT)

    def _give_up(self, ref: int, answer: queue.SimpleQueue[tuple[keeper_messages.KeeperMessage, int] | None]) -> None:
        """Stop waiting for the reply `ref`; close the descriptor of a reply that came too late."""
        with self._answers:
            self._waiting.pop(ref, None)
        while not answer.empty():
            late = answer.get_nowait()
            if late is not None and late[1] >= 0:
                os.close(late[1])

    def send(self, message: keeper_messages.KeeperMessage) -> None:
        """Send without waiting for a reply. A failed send ends the connection.

        Raises:
            KeeperAway: the keeper is gone, or has not read for `unix_socket.SEND_S`.
        """
        try:
            with self._lock:
                self._socket.sendall(keeper_messages.frame(message))
        except OSError as error:
            self._alive = False
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # half a message may be out, and other threads wait to send
            stopped = isinstance(error, BlockingIOError)
            why = "the keeper reads nothing any more" if stopped else f"the keeper is gone: {error.strerror or error}"
            raise KeeperAway(why, hint=_HINT) from error

    def close(self) -> None:
        """Close the connection and end its thread. Idempotent."""
        self._alive, self._closed = False, True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.stop()
        self._socket.close()

    def _read(self) -> None:
        try:
            while self._frames.receive(self._socket):
                for message, fd in self._frames.messages():
                    self._deliver(message, fd)
        except (OSError, KeeperAway) as error:
            _log.debug("the connection to the keeper ended: %s", error)
        self._over()

    def _over(self) -> None:
        """No reply will come any more. On the reader's thread."""
        self._alive = False
        self._frames.close()
        for answer in list(self._waiting.values()):
            answer.put(None)
        if not self._closed:
            self._ended()

    def _deliver(self, message: Any, fd: int) -> None:
        if not message.ref:
            try:
                self._notify(message)
            except Exception:  # the reader must go on; listeners store their own errors
                _log.exception("a keeper's notice was not taken")
            return
        with self._answers:
            answer = self._waiting.get(message.ref)
            if answer is not None:
                answer.put((message, fd))
                return
        if fd >= 0:
            os.close(fd)

    def _forked(self) -> None:
        """In a forked child: close its copy of the socket, or the keeper would not notice that the trainer died."""
        self._alive = False
        self._socket.close()


def _forked() -> None:
    for link in list(_links):
        link._forked()  # pyright: ignore[reportPrivateUsage]


os.register_at_fork(after_in_child=_forked)


def _start(job: str, node: str, linger_s: float, until: float) -> None:
    """Start a keeper in its own session. Returns when a keeper listens, this or another one, or at `until`.

    On a slow machine a start takes longer than one attempt waits. The start goes on, and a later attempt finds the
    keeper. If it were killed, a trainer whose keeper has died would never get another one.
    """
    path, now = address(job, node).socket, time.monotonic()
    process, hangs = _starting.pop(path, None) or (_spawned(job, node, linger_s), now + _START_S)
    try:
        process.wait(max(until - now, 0.1))
    except subprocess.TimeoutExpired:
        if now < hangs:
            _starting[path] = process, hangs
            return
        process.kill()
        process.wait()


def _spawned(job: str, node: str, linger_s: float) -> subprocess.Popen[bytes]:
    """A process that exits as soon as its keeper, detached from it, listens."""
    command = [sys.executable, "-m", "dlrover_hooks.checkpoint.keeper", "--detach"]
    log = address(job, node).log
    command += ["--job", job, "--node", node, "--linger-s", str(linger_s), "--log", log]
    environment = worker_environment()
    if not _ROOT.endswith("-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, environment.get("PYTHONPATH"))))
    with open(log, "ab") as file:  # the keeper outlives the worker and the worker's standard error
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
            env=environment,
        )
