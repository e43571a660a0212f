"""A proxy in front of the master, as a bad network is (fault kit)."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from dlrover_hooks.testing import Proxy
from tests.waiting import until


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """In front of a server that sends back what it gets."""
    server = socket.create_server(("127.0.0.1", 0))

    def echo(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)

    def serve() -> None:
        try:
            while True:
                threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
        except OSError:
            return

    threading.Thread(target=serve, daemon=True).start()
    with Proxy(f"http://127.0.0.1:{server.getsockname()[1]}") as made:
        yield made
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    assert not [one for one in threading.enumerate() if one.name == "dlrover-hooks-proxy"]


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(proxy.url).port or 0), timeout=10)


def asked(line: socket.socket) -> float:
    """Seconds until an answer; raises ConnectionError at the connection's end."""
    began = time.monotonic()
    line.sendall(b"x")
    if line.recv(1) != b"x":
        raise ConnectionError
    return time.monotonic() - began


def test_it_passes_everything_on(proxy: Proxy) -> None:
    with connected(proxy) as line:
        assert asked(line) < 5


def test_a_cut_ends_connections_and_refuses_new_ones_for_its_time(proxy: Proxy) -> None:
    with connected(proxy) as line:
        asked(line)
        proxy.cut(0.3)
        with pytest.raises(ConnectionError):
            asked(line)
    with connected(proxy) as line, pytest.raises(ConnectionError):
        asked(line)

    def answers() -> bool:
        try:
            with connected(proxy) as line:
                asked(line)
        except ConnectionError:
            return False
        return True

    until(answers, "an answer behind the cut")


def test_clogged_and_delayed_connections_stay_open(proxy: Proxy) -> None:
    with connected(proxy) as line:
        asked(line)
        proxy.clog(0.3)
        assert asked(line) > 0.2
        proxy.delay(0.1)
        assert asked(line) > 0.19
