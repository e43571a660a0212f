"""What keepers of two nodes say to each other: proofs, pacing, what is sent, and deadlines on all of it."""

from __future__ import annotations

import contextlib
import io
import queue
import select
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlrover_hooks.checkpoint.memory.keeper_segments import Found
from dlrover_hooks.checkpoint.memory.slot_states import HashedSlot
from dlrover_hooks.checkpoint.replication import replica_protocol as r, sender
from dlrover_hooks.checkpoint.replication.listener import ReplicationListener
from dlrover_hooks.checkpoint.replication.peer_channel import Channel, admit, call
from dlrover_hooks.errors import CheckpointError, KeeperAway
from dlrover_hooks.protocol import Generation, KeeperAddress, Secret
from tests.descriptors import no_descriptor_left
from tests.waiting import until

SECRET = Secret("a" * 64)
KNOCK, CHALLENGE = r.PeerHello("a", "00"), r.Challenge("b", "11")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel of ours on real TCP, and the other side's socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = Channel(listener.accept()[0], "the other keeper")
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_proof_is_good_for_one_role_one_connection_and_one_secret() -> None:
    good = r.AuthProof(r.mac(SECRET, "caller", KNOCK, CHALLENGE))
    assert r.proves(SECRET, "caller", KNOCK, CHALLENGE, good)
    assert not r.proves(SECRET, "keeper", KNOCK, CHALLENGE, good)
    assert not r.proves(SECRET, "caller", r.PeerHello("c", "00"), CHALLENGE, good)
    assert not r.proves(SECRET, "caller", KNOCK, r.Challenge("b", "12"), good)
    assert not r.proves(Secret("b"), "caller", KNOCK, CHALLENGE, good)
    none = r.AuthProof(r.mac(Secret(), "caller", KNOCK, CHALLENGE))
    assert not r.proves(Secret(), "caller", KNOCK, CHALLENGE, none)


def test_only_what_is_nowhere_here_is_sent() -> None:
    assert r.sources(["a", "b", "c", "d"], ["a", "x"], ["y", "b", "c"]) == ["inside", "beside", "beside", "sent"]
    assert r.sources(["a"], [], []) == ["sent"]


def test_pacing_keeps_the_rate_and_saves_nothing_up() -> None:
    pace = r.TokenBucket(100.0)
    assert pace.wait_s(50, 10.0) == 0.0
    assert pace.wait_s(50, 10.0) == 0.5
    assert pace.wait_s(50, 11.0) == 0.0
    assert pace.wait_s(50, 60.0) == 0.0
    assert pace.wait_s(50, 60.0) == 0.5
    assert r.TokenBucket(0.0).wait_s(1 << 40, 0.0) == 0.0


@pytest.mark.parametrize("drips", [False, True])
def test_a_side_that_hangs_is_dropped(ends: tuple[Channel, socket.socket], drips: bool) -> None:
    """A byte now and then is no reason to wait longer."""
    ours, theirs = ends
    over = threading.Event()

    def drip() -> None:
        while drips and not over.wait(0.05):
            theirs.send(b"\x01")

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    with pytest.raises(KeeperAway, match="the other keeper hangs"):
        ours.fill(memoryview(bytearray(1000)), 0.3)
    assert 0.2 < time.monotonic() - began < 20.0, "a thousand drips take 50 s"
    over.set()
    dripping.join()


def test_a_side_that_does_not_read_is_dropped(ends: tuple[Channel, socket.socket]) -> None:
    ours, _ = ends
    with pytest.raises(KeeperAway, match="hangs"):
        ours.send_bytes(memoryview(bytearray(64 << 20)), 0.3)


def test_messages_are_bounded_before_they_are_read(ends: tuple[Channel, socket.socket]) -> None:
    """A stranger may say 1 KiB; a keeper that has proved itself 8 MiB."""
    ours, theirs = ends
    theirs.sendall((r.STRANGER_BYTES + 1).to_bytes(4, "little"))
    with pytest.raises(KeeperAway, match="1025 bytes; 1024 are allowed"):
        ours.receive(r.PeerHello)


def test_an_unexpected_or_unreadable_message_ends_it(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(b"\x1b\x00\x00\x00" + b'{"type":"TransferComplete"}')
    with pytest.raises(KeeperAway, match="unexpected TransferComplete"):
        ours.receive(r.PeerHello)
    theirs.sendall(b"\x02\x00\x00\x00{]")
    with pytest.raises(KeeperAway, match="cannot be read"):
        ours.receive(r.PeerHello)


@pytest.mark.parametrize(
    "word",
    [r.Want(-1), r.ChunkDamaged(-1), r.Get(Generation(1, 1, "a" * 32), -1, 2), r.Get(Generation(1, -1, "a" * 32), 0, 2),
     r.Offer("b", 0, Generation(-1, 1, "a" * 32), 0, 1, 100, ("00" * 8,)),
     r.Offer("b", 0, Generation(1, 1, "a" * 32), 0, 1, -1, ("00" * 8,))],
)  # fmt: skip
def test_a_number_out_of_bounds_is_refused_as_it_is_read(ends: tuple[Channel, socket.socket], word: r.Word) -> None:
    ours, theirs = ends
    with contextlib.closing(Channel(theirs, "this keeper")) as sender_end:
        sender_end.send(word)
        with pytest.raises(KeeperAway, match="cannot be read: Expected `int` >="):
            ours.receive(type(word))


def test_who_proves_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More silent callers than there is room for: a keeper still comes in at once, and one that is in stays."""
    monkeypatch.setattr("dlrover_hooks.checkpoint.replication.listener.STRANGERS", 4)
    monkeypatch.setattr("dlrover_hooks.checkpoint.replication.peer_channel.GREET_S", 60.0)
    began = time.monotonic()
    door = ReplicationListener(
        "127.0.0.1", 0, lambda: SECRET, lambda: "b", lambda channel, node: channel.send(channel.receive(r.Get))
    )
    at, get = KeeperAddress("b", door.host, door.port), r.Get(Generation(1, 1, "a" * 32), 0, 1)
    with contextlib.ExitStack() as ours:
        ours.callback(door.close)
        first = call(at, SECRET, "a", within_s=60.0)
        ours.callback(first.close)
        for _ in range(12):
            ours.enter_context(socket.create_connection((door.host, door.port)))
        second = call(at, SECRET, "c", within_s=0.0)  # once, and not until a silent one is given up
        assert time.monotonic() - began < 50.0
        ours.callback(second.close)
        for channel in (second, first):
            channel.send(get)
            assert channel.receive(r.Get) == get


def test_a_caller_is_known_before_it_is_answered() -> None:
    """A caller that has its answer is no stranger any more, so that no later connection takes its place."""
    answered, known = list[bool](), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()

    def proven() -> None:
        answered.append(bool(select.select([caller], [], [], 0.0)[0]))
        known.set()

    with contextlib.closing(accepted), contextlib.closing(Channel(caller, "this keeper")) as channel:
        admitting = threading.Thread(target=admit, args=(accepted, "127.0.0.1", SECRET, "b", proven))
        admitting.start()
        channel.send(KNOCK)
        challenge = channel.receive(r.Challenge)
        assert not known.is_set()
        channel.send(r.AuthProof(r.mac(SECRET, "caller", KNOCK, challenge)))
        assert known.wait(30.0)
        assert answered == [False]
        assert r.proves(SECRET, "keeper", KNOCK, challenge, channel.receive(r.AuthProof))
        admitting.join(30.0)


def test_callers_are_counted_once_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrover_hooks.checkpoint.replication.listener.CALLERS", 1)

    def echo(channel: Channel, node: str) -> None:
        for _ in range(2):
            channel.send(channel.receive(r.Get))

    door = ReplicationListener("127.0.0.1", 0, lambda: SECRET, lambda: "b", echo)
    at, get = KeeperAddress("b", door.host, door.port), r.Get(Generation(1, 1, "a" * 32), 0, 1)
    with contextlib.ExitStack() as ours:
        ours.callback(door.close)
        first = call(at, SECRET, "a", within_s=60.0)
        ours.callback(first.close)
        first.send(get)
        assert first.receive(r.Get) == get
        second = call(at, SECRET, "c", within_s=60.0)
        ours.callback(second.close)
        with pytest.raises(KeeperAway, match="closed the connection"):
            second.receive(r.Get, within_s=60.0)
        first.send(get)
        assert first.receive(r.Get) == get


def test_a_door_that_had_no_descriptor_left_opens_again(caplog: pytest.LogCaptureFixture) -> None:
    def echo(channel: Channel, node: str) -> None:
        channel.send(channel.receive(r.Get))

    door = ReplicationListener("127.0.0.1", 0, lambda: SECRET, lambda: "b", echo)
    at, get = KeeperAddress("b", door.host, door.port), r.Get(Generation(1, 1, "a" * 32), 0, 1)
    waiting = socket.socket()
    with contextlib.ExitStack() as ours:
        ours.callback(door.close)
        ours.callback(waiting.close)
        with no_descriptor_left():
            waiting.connect((door.host, door.port))  # takes the descriptor that `accept` has set aside
            until(lambda: "takes no connection for now" in caplog.text, "accept fails")
        caller = call(at, SECRET, "a", within_s=60.0)
        ours.callback(caller.close)
        caller.send(get)
        assert caller.receive(r.Get) == get


def test_an_unexpected_error_costs_one_image_not_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next image is sent all the same."""
    failures, sent = queue.SimpleQueue[CheckpointError](), queue.SimpleQueue[object]()
    tries = iter([ZeroDivisionError("unforeseen")])

    def give(channel: object, found: Found, node: str, pacer: object) -> None:
        for error in tries:
            raise error
        sent.put(found)

    monkeypatch.setattr(sender, "call", lambda *_, **__: io.BytesIO())
    monkeypatch.setattr(sender, "give", give)
    made = sender.Sender(lambda _, error: failures.put(error))
    made.aim(KeeperAddress("b", "127.0.0.1", 1), SECRET, "a", 0.0)
    images = [Found(cast(Any, SimpleNamespace(seat=seat)), HashedSlot(cast(Any, None), ())) for seat in (0, 1)]
    made.put(images[0])
    assert "unforeseen" in failures.get(timeout=60.0).message
    made.put(images[1])
    assert sent.get(timeout=60.0) is images[1]
    made.close()
