"""Transfers over real sockets: what they measure, whom a listener serves, and that each wait ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from dlrover_hooks.node_check import pair_transfer
from dlrover_hooks.node_check.pair_transfer import Transfer, TransferHello, TransferListener, dial, exchange
from dlrover_hooks.protocol import CheckPeer, CheckStep, Secret
from dlrover_hooks.testing.tcp_proxy import Proxy

SECRET = Secret("of the listener")
LONG_S, SHORT_S, AGES_S = 60.0, 0.3, 1e6


@pytest.fixture
def listener() -> Iterator[TransferListener]:
    with TransferListener("127.0.0.1", 0, SECRET, within_s=LONG_S) as found:
        yield found


def called(listener: TransferListener, step: int = 1, port: int = 0, within_s: float = LONG_S) -> Transfer:
    return dial("127.0.0.1", port or listener.port, SECRET, step, "caller", within_s)


def test_speed_and_round_trip(listener: TransferListener) -> None:
    """The speed counts both directions; a delay of the network shows in the time of a round trip."""
    near = called(listener)
    with Proxy(f"http://127.0.0.1:{listener.port}") as proxy:
        proxy.delay(0.01)
        far = called(listener, 2, int(proxy.url.rpartition(":")[2]))
    assert far.round_trip_s > 0.02  # each way
    assert near.speed > far.speed > 0


def test_the_bytes_of_both_directions_are_counted(listener: TransferListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances by a second at each look: the transfer lies between the last two looks."""
    ticks = iter(range(1000))
    monkeypatch.setattr(pair_transfer.time, "perf_counter", lambda: float(next(ticks)))
    found = dial("127.0.0.1", listener.port, SECRET, 1, "caller", LONG_S, nbytes=1000)
    assert (found.speed, found.round_trip_s) == (2000.0, 1.0)


def test_a_node_behind_another_address_listens_on_all() -> None:
    with TransferListener("", 0, SECRET) as everywhere:
        assert called(everywhere).speed > 0


def test_a_caller_without_the_secret_gets_nothing(listener: TransferListener) -> None:
    with pytest.raises((EOFError, ConnectionError)):
        dial("127.0.0.1", listener.port, Secret("another"), 1, "caller", LONG_S)
    assert called(listener).speed > 0


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x05hello", b"\xff\xff", b""])
def test_strangers_do_not_disturb(listener: TransferListener, said: bytes) -> None:
    """A port scanner, a browser: the next caller is served."""
    with socket.create_connection(("127.0.0.1", listener.port), LONG_S) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(OSError):  # it may have been reset by now: there were bytes that nobody read
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    assert called(listener).speed > 0


def test_a_peer_that_does_not_answer_is_given_up() -> None:
    """The kernel accepts the connection of a stopped process, too."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        dial("127.0.0.1", silent.getsockname()[1], SECRET, 1, "caller", SHORT_S)


def test_a_peer_that_stops_in_the_middle_is_given_up(listener: TransferListener) -> None:
    """Piece by piece there would always be something within the limit: it holds for the whole."""
    with Proxy(f"http://127.0.0.1:{listener.port}") as proxy:
        proxy.delay(0.05)
        with pytest.raises(TimeoutError):
            called(listener, port=int(proxy.url.rpartition(":")[2]), within_s=2 * SHORT_S)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConnectionRefusedError) as refused:
        dial("127.0.0.1", port, SECRET, 1, "caller", LONG_S)
    assert pair_transfer.reason_of(refused.value) == "Connection refused"


def test_a_new_step_drops_the_caller_of_an_old_one(listener: TransferListener) -> None:
    """A caller whose connection hangs: the peer of the next step would otherwise wait behind it."""
    with socket.create_connection(("127.0.0.1", listener.port), LONG_S) as hung:
        hello = pair_transfer.msgspec.json.encode(TransferHello(SECRET.key, 1, "hung", 1 << 20))
        hung.sendall(len(hello).to_bytes(2, "big") + hello)
        assert hung.recv(1) == b"\x06"
        listener.expect(1)  # the step that it is of
        hung.sendall(b"\x06")
        assert hung.recv(1) == b"\x06"
        listener.expect(2)
        assert hung.recv(1) == b""
        assert called(listener, 2).speed > 0


def test_both_nodes_dial_one_after_the_other(listener: TransferListener) -> None:
    """The one that is second waits for the end of the other's dial."""
    with TransferListener("127.0.0.1", 0, Secret("b")) as other:
        first = _task("b", other.port, Secret("b"), dials_first=True)
        second = _task("a", listener.port, SECRET, dials_first=False)
        found: list[Transfer] = []
        thread = threading.Thread(target=lambda: found.append(exchange(other, "b", second)))
        thread.start()
        assert not found  # it waits for the dial of a
        found.append(exchange(listener, "a", first))
        thread.join(LONG_S)
        assert len(found) == 2
        assert {(7, "a")} == other._ended  # pyright: ignore[reportPrivateUsage]


def _task(node: str, port: int, secret: Secret, *, dials_first: bool) -> CheckStep:
    return CheckStep(7, 1, CheckPeer(node, node, "127.0.0.1", port, secret), dials_first, within_s=LONG_S)


def test_a_closed_listener_leaves_no_port_and_no_thread(listener: TransferListener) -> None:
    """Also while a caller is served."""
    with socket.create_connection(("127.0.0.1", listener.port), LONG_S) as hung:
        listener.close()
        hung.settimeout(LONG_S)
        with contextlib.suppress(ConnectionResetError):
            assert hung.recv(1) == b""
    names = [one.name for one in threading.enumerate()]
    assert "dlrover-hooks-transfers" not in names
    with pytest.raises(ConnectionRefusedError):
        called(listener)
