"""The socket of a liveness connection: it ends for the master when its owner closes it, and is never replaced."""

from __future__ import annotations

import http.client
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from dlrover_hooks.client.liveness_connection import LivenessConnection, MasterAddress
from dlrover_hooks.client.master_addresses import MasterAddresses
from tests.waiting import WAIT_S

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n%b\r\n{}"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        yield listener


@pytest.fixture
def line(listener: socket.socket) -> LivenessConnection:
    return LivenessConnection(MasterAddress(MasterAddresses(f"http://127.0.0.1:{listener.getsockname()[1]}"), {}))


def test_its_end_is_seen_although_a_forked_child_has_a_copy(listener: socket.socket, line: LivenessConnection) -> None:
    """A child that is forked while the connection is dropped finds nothing to close."""
    line.connect()
    accepted, _ = listener.accept()
    assert line._sock is not None
    copy = os.dup(line._sock.fileno())
    try:
        line.close()
        accepted.settimeout(WAIT_S)
        assert accepted.recv(1) == b""
    finally:
        os.close(copy)
        accepted.close()


def test_after_the_last_answer_it_opens_no_other_connection(listener: socket.socket, line: LivenessConnection) -> None:
    """The next one must be made by `connect`, with TLS and with its descriptor recorded."""

    def answer() -> None:
        with listener.accept()[0] as accepted:
            accepted.recv(1 << 16)
            accepted.sendall(_ANSWER % b"Connection: close\r\n")

    server = threading.Thread(target=answer)
    server.start()
    assert line.ask("POST", "/v1/watch", b"{}")[0] == 200
    server.join(WAIT_S)
    with pytest.raises(http.client.NotConnected):
        line.ask("POST", "/v1/watch", b"{}")
    line.close()
