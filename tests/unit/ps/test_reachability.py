"""Servers that can be reached, that come up late, and that never do, with real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from dlrover_hooks.host.ports import free_port
from dlrover_hooks.protocol import PSCluster
from dlrover_hooks.ps.reachability import unreachable


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def not_asked(_: float) -> bool:
    raise AssertionError


def test_servers_that_can_be_reached(server: str) -> None:
    assert unreachable(PSCluster(1, (server, server), (server,)), 10.0, not_asked) == ""


@pytest.mark.parametrize(
    ("address", "problem"),
    [("no-such-host.invalid:1", ""), ("127.0.0.1:nothing", "invalid literal"), (".." * 40 + ":1", "label")],
)
def test_an_address_that_cannot_be(server: str, address: str, problem: str) -> None:
    found = unreachable(PSCluster(1, (server, address), (server,)), 60.0, lambda _: True)
    assert found.startswith(f"failed to connect to ps:1 at {address}: ")
    assert problem in found


def test_a_server_that_comes_up_late(server: str) -> None:
    late = f"127.0.0.1:{free_port()}"
    listeners: list[socket.socket] = []

    def wait(_: float) -> bool:
        listeners.append(socket.create_server(("127.0.0.1", int(late.rpartition(":")[2]))))
        return False

    assert unreachable(PSCluster(1, (server,), (late,)), 60.0, wait) == ""
    assert len(listeners) == 1
    listeners[0].close()


def test_a_newer_version_ends_the_attempts(server: str) -> None:
    dead = f"127.0.0.1:{free_port()}"
    found = unreachable(PSCluster(1, (server,), (dead,)), 60.0, lambda _: True)
    assert found == f"failed to connect to worker:0 at {dead}: [Errno 111] Connection refused"
