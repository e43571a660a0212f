"""Which sockets are the collectives', and that cutting them ends what waits on them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dlrover_hooks.elastic.gloo_connections import Connections
from dlrover_hooks.elastic.process_groups import Groups, rendezvous
from dlrover_hooks.errors import RoundEnded
from dlrover_hooks.host.ports import free_port
from tests.ranks import ended, started

PEER = """
import sys, threading, torch, torch.distributed as dist
from dlrover_hooks.elastic.process_groups import Groups
rank = int(__import__("os").environ["RANK"])
groups = Groups(lambda: None)
with groups.watched():
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
dist.all_reduce(torch.ones(2), group=pair)
if rank == 1:  # hangs
    sys.stdin.read()
    __import__("os")._exit(0)
threading.Timer(0.2, groups.cut).start()
for group in (None, pair):
    try:
        dist.all_reduce(torch.ones(2), group=group)
        raise SystemExit("a collective without its peer came to an end")
    except RuntimeError as error:
        assert "closed" in str(error).lower() or "reset" in str(error).lower(), error
groups.destroy()
assert not dist.is_initialized()
"""


@pytest.mark.deep
def test_a_collective_that_waits_for_a_hung_peer_is_cut() -> None:
    """Every group that was made, and at once; the group's timeout is half an hour."""
    ranks = started([sys.executable, "-c", PEER], 2)
    (_, errors), _ = ended(ranks[:1], 30.0)[0], ranks[1].kill()
    ranks[1].communicate()
    assert ranks[0].returncode == 0, errors


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_torch_is_as_we_know_it(alone: None) -> None:
    """Both private functions are called, with these arguments; and torch gets its own back."""
    groups = Groups(lambda: None)
    made, stored = dist.distributed_c10d._new_process_group_helper, rendezvous._create_c10d_store
    with groups.watched():
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    assert groups.connections._pollers, "gloo has an event loop of its own"
    assert groups.connections._store_port == int(os.environ["MASTER_PORT"])
    assert (dist.distributed_c10d._new_process_group_helper, rendezvous._create_c10d_store) == (made, stored)
    groups.destroy()


def test_no_group_is_made_in_a_broken_round(alone: None) -> None:
    def broken() -> None:
        raise RoundEnded("lost")

    with Groups(broken).watched(), pytest.raises(RoundEnded):
        dist.init_process_group("gloo")


def test_a_group_that_was_not_made_does_not_count(alone: None) -> None:
    """A newcomer's first one has the number 0, and all ranks of a round find each other by it."""

    def broken() -> None:
        raise RoundEnded("lost")

    before = Groups(broken)
    with before.watched(), pytest.raises(RoundEnded):
        dist.init_process_group("gloo")
    before.destroy()
    groups = Groups(lambda: None)
    with groups.watched():
        dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    assert dist.group.WORLD.group_name == "0"
    groups.destroy()


def test_rank_0_that_never_comes_is_not_waited_for(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would dial its store for half an hour."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = threading.Event()

    def check() -> None:
        if told.wait(0.05):
            raise RoundEnded("rank 0 is lost")

    threading.Timer(0.2, told.set).start()
    with Groups(check).watched(), pytest.raises(RoundEnded):
        dist.init_process_group("gloo")


def test_rank_0_that_dies_when_it_is_dialled_is_not_waited_for(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store was there a moment ago, and torch would dial it for half an hour, where nothing can be cut."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = threading.Event()

    def check() -> None:
        if told.is_set():
            raise RoundEnded("rank 0 is lost")

    def dies(listener: socket.socket) -> None:
        with listener:
            listener.accept()[0].close()
        told.set()

    listener = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    dying = threading.Thread(target=dies, args=(listener,))
    dying.start()
    began = time.monotonic()
    with Groups(check).watched(), pytest.raises(RoundEnded):
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    dying.join()
    assert time.monotonic() - began < 10


def test_a_store_waits_as_long_as_its_group() -> None:
    """Though it was dialled for a shorter time."""
    server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    with Groups(lambda: None).watched():
        store = rendezvous._create_c10d_store("127.0.0.1", server.port, 1, 2, timedelta(seconds=20))
    assert store.timeout == timedelta(seconds=20)


def test_the_users_own_connections_are_left_alone(alone: None) -> None:
    """Made before, meanwhile and after; by hand and by an event loop."""
    found: list[tuple[socket.socket, socket.socket]] = []

    def connect() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            found.append((near, listener.accept()[0]))

    loops: list[asyncio.AbstractEventLoop] = []
    connections, wrapped = Connections(), Groups(lambda: None)
    connect()
    with connections.opening():
        loops.append(asyncio.new_event_loop())
        connect()
        loops[0].add_reader(found[1][0], lambda: None)
        dist.init_process_group("gloo")
    connect()
    connections.cut()
    for near, far in found:
        near.sendall(b"alive")
        assert far.recv(5) == b"alive"
        near.close()
        far.close()
    loops[0].close()
    wrapped.stop()


def test_a_forked_child_holds_no_connection_of_the_groups() -> None:
    """A DataLoader worker that did would hide its parent's death from the peers."""
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = Connections()
        connections.store(listener.getsockname()[1])
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
        pid = os.fork()
        if not pid:
            ours.close()
            theirs.recv(1)
            os._exit(0)
        near.close()
        far.settimeout(5.0)
        assert far.recv(1) == b"", "the child still holds it"
        ours.close()
        theirs.close()
        os.waitpid(pid, 0)
        far.close()


def test_nothing_is_aborted_where_there_is_no_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/elastic/test_nccl.py is about devices")
    groups = Groups(lambda: None)
    groups.cut()
    groups.destroy()
    assert groups._cutter.started
    assert not groups._cutter.alive
