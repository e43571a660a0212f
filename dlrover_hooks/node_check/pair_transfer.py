"""A transfer between two nodes over TCP: the round-trip time, then some megabytes in each direction.

Both nodes listen, and each dials the other once, one after the other: that shows which of them cannot be reached. Every
wait has a deadline. A listener serves one caller at a time, and only callers that know its secret.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import statistics
import threading
import time
from types import TracebackType
from typing import NamedTuple, NoReturn

import msgspec

from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.protocol import CheckStep, Count, Message, Secret

NBYTES = 4 << 20
"""In each direction. A link of 10 Gbit/s takes 7 ms for both."""
_LARGEST_BYTES = 64 << 20
_PIECE_BYTES = 1 << 18
_PINGS = 8
_HELLO_BYTES = 512
_HELLO_S = 2.0
"""For a caller to send its first message."""
_FIRST_SHARE = 0.1
"""For the dial of the peer that dials first to arrive, of the time of the transfer."""
_ACCEPT_S = 0.5
_OK = b"\x06"


class TransferHello(Message, frozen=True):
    """The first message of a caller."""

    secret: str
    step: Count
    incarnation: str
    nbytes: Count


class Transfer(NamedTuple):
    """Bytes per second over both directions, and the median round-trip time in seconds."""

    speed: float
    round_trip_s: float


class _Line:
    """A connection whose calls all end by one deadline. Raises TimeoutError, OSError, EOFError."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self.until = connection, until
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            self._wait()
            left = left[self._connection.send(left[:_PIECE_BYTES]) :]

    def receive(self, nbytes: int) -> bytes:
        """Exactly the next `nbytes` bytes, a few."""
        found = b""
        while len(found) < nbytes:
            self._wait()
            found += self._connection.recv(nbytes - len(found)) or self._ended()
        return found

    def skip(self, nbytes: int) -> None:
        """Receive `nbytes` bytes, many, and forget them."""
        buffer = bytearray(_PIECE_BYTES)
        while nbytes:
            self._wait()
            got = self._connection.recv_into(buffer, min(nbytes, len(buffer)))
            nbytes -= got or self._ended()

    def _wait(self) -> None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)

    def _ended(self) -> NoReturn:
        raise EOFError("the connection was closed by the peer")


def dial(
    host: str, port: int, secret: Secret, step: int, incarnation: str, within_s: float, *, nbytes: int = NBYTES
) -> Transfer:
    """Call the listener at `host`:`port` as `incarnation`, and exchange `nbytes` in each direction.

    Raises:
        OSError, EOFError: it failed, or took longer than `within_s`.
    """
    until = time.monotonic() + within_s
    with socket.create_connection((host, port), timeout=within_s) as connection:
        line = _Line(connection, until)
        hello = msgspec.json.encode(TransferHello(secret.key, step, incarnation, nbytes))
        line.send(len(hello).to_bytes(2, "big") + hello)
        line.receive(1)
        trips: list[float] = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            line.send(_OK)
            line.receive(1)
            trips.append(time.perf_counter() - began)
        began = time.perf_counter()
        line.send(memoryview(bytearray(nbytes)))
        line.receive(1)
        line.skip(nbytes)
        spent = time.perf_counter() - began
        line.send(_OK)
    return Transfer(speed=2 * nbytes / spent, round_trip_s=statistics.median(trips))


class TransferListener:
    """Listens for the dials of peers, on a thread of its own, until it is closed.

    Args:
        host: the address to listen on; empty: all of this machine.
        port: 0: a free one.
        secret: callers must know it.
        within_s: for one transfer, from its first message on.

    Raises:
        OSError: that address and port cannot be listened on.
    """

    def __init__(self, host: str, port: int, secret: Secret, *, within_s: float = 20.0) -> None:
        self._secret, self._within_s = secret, within_s
        every = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if every or ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, dualstack_ipv6=every)
        self._listener.settimeout(_ACCEPT_S)
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._begun: set[tuple[int, str]] = set()
        self._ended: set[tuple[int, str]] = set()
        """Dials that have begun, and those that are over: step and caller."""
        self._caller: socket.socket | None = None
        self._step = 0
        """Of the caller that is served."""
        self._thread = BackgroundThread(
            "dlrover-hooks-transfers", self._accept, where=f"the listener for transfers at port {self.port}",
            wake=self._hang_up, again_s=_ACCEPT_S,
        )  # fmt: skip
        self._thread.start()

    def expect(self, step: int) -> None:
        """Close a connection of a step before `step`, for which no transfer waits any more. Any thread."""
        with self._changed:
            if 0 < self._step < step:
                self._hang_up_on(self._caller)

    def await_served(self, step: int, caller: str, within_s: float, begun_within_s: float) -> None:
        """Wait until the dial of `caller` is over, at most `within_s`; less if it has not come `begun_within_s`."""
        key, now = (step, caller), time.monotonic()
        with self._changed:
            if self._changed.wait_for(lambda: key in self._begun, begun_within_s):
                self._changed.wait_for(lambda: key in self._ended, now + within_s - time.monotonic())

    def close(self) -> None:
        """End the thread, and close the port. Raises the thread's first unexpected error. Idempotent."""
        self._thread.stop()
        self._listener.close()
        self._thread.check()

    def _hang_up(self) -> None:
        self._hang_up_on(self._listener)
        self._hang_up_on(self._caller)

    @staticmethod
    def _hang_up_on(end: socket.socket | None) -> None:
        with contextlib.suppress(OSError):
            if end is not None:
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> TransferListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._thread.stopping.is_set():
            try:
                self._caller, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._thread.stopping.is_set():  # `close` has shut it down
                    return
                raise
            with self._caller as connection:
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        line = _Line(connection, time.monotonic() + _HELLO_S)
        try:
            hello = self._hello(line)
        except (OSError, EOFError, msgspec.DecodeError):
            return  # a stranger: it gets no answer
        key = (hello.step, hello.incarnation)
        self._note(self._begun, key, hello.step)
        line.until = time.monotonic() + self._within_s
        with contextlib.suppress(OSError, EOFError):  # the caller reports it
            _answer(line, min(hello.nbytes, _LARGEST_BYTES))
        self._note(self._ended, key, 0)

    def _note(self, where: set[tuple[int, str]], key: tuple[int, str], step: int) -> None:
        with self._changed:
            where.add(key)
            self._step = step
            self._changed.notify_all()

    def _hello(self, line: _Line) -> TransferHello:
        """Raises ConnectionError, MsgspecError for a caller that does not know the secret."""
        length = int.from_bytes(line.receive(2), "big")
        if length > _HELLO_BYTES:
            raise ConnectionError
        hello = msgspec.json.decode(line.receive(length), type=TransferHello)
        if not hmac.compare_digest(hello.secret.encode(), self._secret.key.encode()):
            raise ConnectionError
        return hello


def _answer(line: _Line, nbytes: int) -> None:
    """The listener's side of `dial`."""
    line.send(_OK)
    for _ in range(_PINGS):
        line.receive(1)
        line.send(_OK)
    line.skip(nbytes)
    line.send(_OK)
    line.send(memoryview(bytearray(nbytes)))
    line.receive(1)


def exchange(listener: TransferListener, incarnation: str, task: CheckStep) -> Transfer:
    """Dial the peer of `task`, within its time, once the peer has dialled if that one does so first. Blocks.

    Raises:
        OSError, EOFError: as `dial`.
    """
    assert task.peer is not None
    peer, until = task.peer, time.monotonic() + task.within_s
    half_s = task.within_s / 2
    listener.expect(task.step)
    if not task.dials_first:
        listener.await_served(task.step, peer.incarnation, half_s, _FIRST_SHARE * task.within_s)
    within_s = half_s if task.dials_first else until - time.monotonic()
    return dial(peer.host, peer.port, peer.secret, task.step, incarnation, within_s)


def reason_of(error: OSError | EOFError) -> str:
    """The error in a few words."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
