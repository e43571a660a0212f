"""The end of a connection to the keeper, as the trainer's threads see it."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.errors import KeeperAway


def test_an_unexpected_error_of_the_reader_ends_the_connection_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller is not left waiting for a reply that nobody reads."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def receive(frames: keeper_messages.Frames, connection: socket.socket) -> bool:
        assert theirs.recv(1 << 16)  # the request
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(keeper_messages.Frames, "receive", receive)
    with contextlib.closing(KeeperLink(ours, lambda _: None, ended.set)) as link, theirs:
        with pytest.raises(KeeperAway, match=r"connection to the keeper: .*ZeroDivisionError: unforeseen"):
            link.call(lambda ref: keeper_messages.Inventory(ref=ref, waits=False), timeout_s=60.0)
        assert ended.wait(60.0)
        assert not link.alive
