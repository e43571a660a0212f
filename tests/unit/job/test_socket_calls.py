"""Calls over a Unix socket: no call gets the answer of another one, whatever its process, thread or function does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.errors import CallFailed, UsageError
from dlrover_hooks.job import call_codec
from dlrover_hooks.job.call_messages import request, result_of
from dlrover_hooks.job.local.socket_calls import CallClient, CallClients, CallServer
from tests.waiting import WAIT_S, until

CALLS = 200


class Functions:
    """What the server answers. `connection`: tells the connections apart, because each has a thread."""

    def __init__(self) -> None:
        self.more = dict[str, Callable[..., Any]]()
        self.within = list[float]()

    def __call__(self, function: str, arguments: list[Any], within_s: float) -> Any:
        self.within.append(within_s)
        if function in self.more:
            return self.more[function](*arguments)
        return threading.get_ident() if function == "connection" else arguments[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Functions]]:
    """The socket of a server, and what it answers."""
    functions = Functions()
    server = CallServer(str(tmp_path_factory.mktemp("calls") / "socket"), functions)
    yield server.path, functions
    server.close()


@pytest.fixture
def functions(served: tuple[str, Functions]) -> Functions:
    served[1].more.clear()
    served[1].within.clear()
    return served[1]


@pytest.fixture
def client(served: tuple[str, Functions], functions: Functions) -> Iterator[CallClient]:
    del functions
    with contextlib.closing(CallClient(served[0])) as made:
        yield made


def forked(work: Callable[[], object]) -> int:
    """The pid of a forked child that does `work` and exits with 0 if it returns true."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = 0 if work() else 1
    finally:
        os._exit(code)


def ended(pid: int) -> bool:
    """Wait for a child; whether it exited with 0."""
    status = list[int]()

    def gone() -> bool:
        found, code = os.waitpid(pid, os.WNOHANG)
        status[:] = [code] * bool(found)
        return bool(found)

    until(gone, "the child ends")
    return status == [0]


# ---- forked processes ------------------------------------------------------------------------------------------------


def test_a_forked_child_opens_its_own_connection_and_the_parent_keeps_its_own(client: CallClient) -> None:
    own = client.call("connection")
    assert ended(forked(lambda: client.call("connection", timeout_s=WAIT_S) != own))
    assert client.call("connection") == own


def test_a_parent_and_its_child_get_their_own_answers_at_the_same_time(client: CallClient) -> None:
    def echoes(name: str) -> bool:
        return all(client.call("echo", [name, number]) == [name, number] for number in range(CALLS))

    assert echoes("before")
    children = [forked(lambda name=name: echoes(f"child {name}")) for name in range(2)]
    assert echoes("parent")
    assert [ended(child) for child in children] == [True, True]


# ---- answers of other calls ------------------------------------------------------------------------------------------


def test_the_answer_to_another_call_is_an_error_and_ends_the_connection(tmp_path: Path) -> None:
    path, ends = str(tmp_path / "socket"), list[bytes]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as connection:
                frame = bytearray(connection.recv(4096))
                frame[4:12] = (int.from_bytes(frame[4:12], "big") ^ 1).to_bytes(8, "big")
                connection.sendall(frame)
                ends.append(connection.recv(1))

        serving = pool.submit(serve)
        with contextlib.closing(CallClient(path)) as client, pytest.raises(OSError, match="another call"):
            client.call("echo", 1, timeout_s=WAIT_S)
        serving.result(WAIT_S)
    assert ends == [b""], "the client has closed it"


def test_an_interrupted_call_leaves_no_answer_for_the_next_one(client: CallClient, functions: Functions) -> None:
    """As by Ctrl-C, while the call waits for its answer."""
    interrupted, main = threading.Event(), threading.get_ident()

    def slow() -> str:
        signal.pthread_kill(main, signal.SIGUSR1)
        interrupted.wait(WAIT_S)
        return "the answer of the interrupted call"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    functions.more["slow"] = slow
    assert client.call("echo", 1) == 1
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            client.call("slow")
    finally:
        signal.signal(signal.SIGUSR1, before)
    interrupted.set()
    assert client.call("echo", "next") == "next"


def test_a_call_that_timed_out_leaves_no_answer_for_the_next_one(client: CallClient, functions: Functions) -> None:
    late = threading.Event()
    functions.more["slow"] = lambda: late.wait(WAIT_S)
    with pytest.raises(TimeoutError):
        client.call("slow", timeout_s=0.05)
    late.set()
    assert client.call("echo", "next") == "next"
    until(lambda: sorted(functions.within) == [0.05, 60.0], "the server knows how long its callers wait")


# ---- connections -----------------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settled() -> int:
    """How many descriptors there are once the server, too, has closed the connections of earlier tests."""
    until(
        lambda: not any("process_request_thread" in one.name for one in threading.enumerate()),
        "no thread serves a connection",
        diagnostic=threading.enumerate,
    )
    return descriptors()


def test_threads_share_connections(client: CallClient) -> None:
    found = set[int]()
    for _ in range(20):
        with ThreadPoolExecutor(1) as pool:
            found.add(pool.submit(client.call, "connection").result(WAIT_S))
    assert len(found) == 1


def test_few_idle_connections_are_kept(client: CallClient, functions: Functions) -> None:
    before, together = settled(), threading.Barrier(12)
    functions.more["together"] = lambda: together.wait(WAIT_S)
    with ThreadPoolExecutor(12) as pool:
        assert sorted(pool.map(lambda _: client.call("together"), range(12))) == list(range(12))
    until(
        lambda: descriptors() <= before + 2 * 4, "of each of 4 connections both ends are left", diagnostic=descriptors
    )
    assert client.call("echo", 1) == 1


def test_a_client_of_a_process_that_ended_is_dropped_with_its_connections(tmp_path: Path) -> None:
    path, (alive, writes) = str(tmp_path / "socket"), os.pipe()

    def serve() -> None:
        together = threading.Barrier(3)
        server = CallServer(path, lambda *_: together.wait(WAIT_S))
        os.write(writes, b"1")
        threading.Event().wait(WAIT_S)
        server.close()

    server, clients = forked(serve), CallClients()
    os.close(writes)
    assert os.read(alive, 1) == b"1"
    before = settled()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(clients.exchange, path, request("f", []), WAIT_S) for _ in range(3)]
        assert sorted(result_of(one.result(WAIT_S)) for one in calls) == [0, 1, 2]
    assert descriptors() == before + 3
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    with pytest.raises(OSError, match=r"refused|reset|ended|pipe"):
        clients.exchange(path, request("f", []), WAIT_S)
    assert descriptors() == before
    assert vars(clients) == {"_clients": {}}
    os.close(alive)


# ---- what functions raise and return ---------------------------------------------------------------------------------


class Unspeakable(Exception):
    """Its text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unusual(BaseException):
    """No `Exception`."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no such prompt"), "ValueError: no such prompt\nTraceback"), (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"), (Unusual("odd"), "Unusual: odd"),
        (Unspeakable(), "Unspeakable, whose text cannot be read"), (RecursionError("deep"), "RecursionError: deep"),
        (ValueError("no \ud800 such prompt"), r"ValueError: no \ud800 such prompt"),
        (ValueError("x" * 1_000_000), "x\n...\n"), (CallFailed("no weights", hint="send them"), "HINT: send them"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_whatever_a_function_raises_is_told_to_the_caller(
    client: CallClient, functions: Functions, error: BaseException, says: str
) -> None:
    def fail() -> None:
        raise error

    functions.more["fail"] = fail
    own = client.call("connection")
    with pytest.raises(CallFailed) as failed:
        client.call("fail", timeout_s=WAIT_S)
    assert says in failed.value.message
    assert len(failed.value.message) < 300_000
    assert client.call("connection") == own, "the connection is kept"


def itself() -> list[Any]:
    found = list[Any]()
    found.append(found)
    return found


NO_VALUES = [object(), 1 << 64, "\ud800", {"k": "\udfff"}, itself(), (itself(),), {1}]


@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: type(value).__name__)
def test_a_result_that_cannot_be_sent_fails_the_call(client: CallClient, functions: Functions, value: Any) -> None:
    functions.more["give"] = lambda: value
    with pytest.raises(CallFailed, match=r"its result: .* cannot be sent to another worker"):
        client.call("give", timeout_s=WAIT_S)
    assert client.call("echo", 1) == 1


@pytest.mark.parametrize("value", NO_VALUES, ids=lambda value: type(value).__name__)
def test_an_argument_that_cannot_be_sent_is_refused_before_anything_is_sent(tmp_path: Path, value: Any) -> None:
    client = CallClient(str(tmp_path / "no-server"))
    with pytest.raises(UsageError, match="cannot be sent to another worker"):
        client.call("echo", value)


def test_what_is_too_large_is_refused_by_its_sender(
    client: CallClient, functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    monkeypatch.setattr(call_codec, "MOST_BYTES", 1000)
    functions.more["give"] = bytes
    assert client.call("give", 900) == bytes(900)
    with pytest.raises(UsageError, match="a value of 2010 bytes: at most 1000 bytes") as refused:
        client.call("echo", b"x" * 2000)
    assert refused.value.hint == "Send it in parts."
    with pytest.raises(UsageError, match="a NumPy array of 8000 bytes"):
        client.call("echo", np.zeros(1000))
    with pytest.raises(CallFailed, match="its result: a value of 2005 bytes"):
        client.call("give", 2000)
    assert client.call("echo", 1) == 1


@pytest.mark.parametrize("size", [0, 4000, 4096, 1 << 16, (1 << 16) + 1, 5_000_000])
def test_data_of_any_size_arrives(client: CallClient, size: int) -> None:
    data = bytes(number % 251 for number in range(min(size, 251))) * (size // 251 + 1)
    assert client.call("echo", data[:size]) == data[:size]
