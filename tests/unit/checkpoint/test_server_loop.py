"""What goes wrong for one trainer costs neither the keeper nor another one's line."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.server_connection import Peer
from dlrover_hooks.checkpoint.ipc.server_loop import ServerLoop
from dlrover_hooks.checkpoint.ipc.unix_socket import dial, listen
from tests.descriptors import no_descriptor_left


class House:
    """A loop whose room raises what nobody foresaw when it is asked to drop a run."""

    def __init__(self, path: str) -> None:
        self.heard: list[Any] = []
        self.lost: list[Peer] = []
        self.loop = ServerLoop(listen(path), self.take, self.lose)
        self.lines = [dial(path), dial(path)]
        self.turn(lambda: len(self.loop.peers) == 2)

    def take(self, peer: Peer, message: Any, fd: int) -> None:
        if isinstance(message, keeper_messages.Drop):
            raise ZeroDivisionError
        self.heard.append(message)

    def lose(self, peer: Peer) -> None:
        self.lost.append(peer)
        raise LookupError

    def turn(self, done: Any) -> None:
        for _ in range(20):
            if done():
                return
            self.loop.turn(0.5)
        raise AssertionError("never")

    def say(self, line: int, message: keeper_messages.KeeperMessage) -> None:
        connection = self.lines[line]
        assert connection is not None
        connection.sendall(keeper_messages.frame(message))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(str(tmp_path / "keeper.sock"))
    yield made
    made.loop.close_door()
    made.loop._selector.close()
    for line in (*made.lines, *(peer.socket for peer in made.loop.peers), made.loop._bell, made.loop._ring):
        if isinstance(line, socket.socket):
            line.close()
    os.close(made.loop._spare)


def test_an_order_that_fails_ends_its_line_alone(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.say(0, keeper_messages.Drop(run="r"))
    house.turn(lambda: house.lost)
    house.say(1, keeper_messages.Inventory(ref=5))
    house.turn(lambda: house.heard)
    assert [one.ref for one in house.heard] == [5]
    assert len(house.loop.peers) == 1
    assert "failed: its connection is closed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert "LookupError" in caplog.text


def test_a_call_that_fails_does_not_keep_the_next_one(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """What crews hand in: the outcomes of hashing, storing and fetching."""
    done: list[int] = []
    with caplog.at_level(logging.ERROR):
        house.loop.post(lambda: done.append(1 // 0))
        house.loop.post(lambda: done.append(2))
        house.turn(lambda: done)
    assert done == [2]
    assert "ZeroDivisionError" in caplog.text


def test_a_trainer_without_a_descriptor_left_for_it_is_turned_away(house: House, tmp_path: Path) -> None:
    """Left in the listener's queue, it would have the loop turn without a pause."""
    late = socket.socket(socket.AF_UNIX)
    with no_descriptor_left():
        late.connect(str(tmp_path / "keeper.sock"))
        house.loop.turn(5.0)
        assert house.loop._selector.select(0.0) == []
    assert late.recv(1) == b""
    late.close()
    house.lines.append(dial(str(tmp_path / "keeper.sock")))
    house.turn(lambda: len(house.loop.peers) == 3)
