"""Real keepers of several nodes: a replica is whole, under its right name, found damaged, and never a vote."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.replication import replica_protocol as r
from dlrover_hooks.checkpoint.replication.listener import ReplicationListener
from dlrover_hooks.checkpoint.replication.peer_channel import Channel, Declined, NotAdmitted, call
from dlrover_hooks.errors import Corrupt, KeeperAway
from dlrover_hooks.protocol import Generation, KeeperAddress, Restore, Secret, Source
from tests.e2e.nodes import RUN, SECRET, WAIT_S, Node, Proxy, same
from tests.waiting import until


class Ring:
    """Makes nodes and proxies, and ends them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def node(self, name: str, rank: int = 0, world: int = 2) -> Node:
        made = Node(name, rank, world)
        self._stack.callback(made.close)
        return made

    def proxy(self, to: KeeperAddress, meddle: Callable[[bytes], bytes | None] = lambda data: data) -> Proxy:
        made = Proxy(to, meddle)
        self._stack.callback(made.close)
        return made

    def door(self, serve: Callable[[Channel, str], None]) -> KeeperAddress:
        """A keeper of node `a` that only does what `serve` does."""
        made = ReplicationListener("127.0.0.1", 0, lambda: SECRET, lambda: "a", serve)
        self._stack.callback(made.close)
        return KeeperAddress("a", "127.0.0.1", made.port)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        made = Ring()
        yield made
        made.close()


def restored(node: Node, step: int, rank: int, *at: KeeperAddress, seed: int) -> bool:
    """`node` fetches that image of world 2, and it is what was saved."""
    node.located = at
    node.trainer.begin(RUN, 2, rank, 2)
    found = node.trainer.load(Restore(Generation(1, step, RUN), 2, Source.PEER))
    return found.same_world and same(found.tree, seed)


def test_a_replaced_node_gets_the_very_bytes_from_its_peer(ring: Ring) -> None:
    """Both nodes have a seat 0. Nothing is zero, nothing is mixed up, and nobody votes for what is not its own."""
    a, b = ring.node("a", 0), ring.node("b", 1)
    a.follow(b.at)
    b.follow(a.at)
    for step in (1, 2, 3):
        a.save(step)
        b.save(step)
        a.has(step, "b")
        b.has(step, "a")
    assert a.notices.empty(), "a replica was announced like an image of its own"
    b.kill()
    rows = {(one.generation.step, one.rank, one.home) for one in a.trainer.held()}
    assert rows == {(1, 0, ""), (2, 0, ""), (3, 0, ""), (2, 1, "b"), (3, 1, "b")}
    c = ring.node("c", 1)
    assert restored(c, 3, 1, a.at, seed=301)
    assert restored(c, 2, 1, a.at, seed=201)
    assert [one.home for one in c.trainer.held()] == ["b", "b"]
    a.trainer.begin(RUN, 2, 0, 2)
    own = a.trainer.load(Restore(Generation(1, 3, RUN), 2, Source.MEMORY)).tree
    assert same(own, 300)


def test_a_node_whose_keeper_died_gets_its_own_images_back(ring: Ring) -> None:
    """The new keeper listens where the old one did, since the trainer repeats what that was told."""
    a, b = ring.node("a", 0), ring.node("b", 1)
    a.follow()
    b.follow(a.at)
    b.save(1)
    a.has(1, "b")
    b.kill()
    b.start()
    assert restored(b, 1, 1, b.at, a.at, seed=101)
    b.trainer.begin(RUN, 2, 1, 2)
    b.save(2)
    a.has(2, "b")
    with contextlib.closing(call(b.at, SECRET, "x", within_s=WAIT_S)) as channel:
        channel.send(r.Get(Generation(2, 2, RUN), 1, 2))
        assert channel.receive(r.Offer).rank == 1


def test_frozen_chunks_are_not_sent_again(ring: Ring) -> None:
    """16 MiB of the image stay; only the chunks with the header and the moving tensor pass, each time."""
    a, b = ring.node("a", 0), ring.node("b", 1)
    proxy = ring.proxy(a.at)
    a.follow()
    b.follow(proxy.at)
    sent: list[int] = []
    for step in (1, 2, 3, 4):
        before = proxy.sent
        b.save(step, frozen=4 * CHUNK_BYTES)
        a.has(step, "b")
        sent.append(proxy.sent - before)
    assert sent[0] > 4 * CHUNK_BYTES
    assert max(sent[1:]) < 2 * CHUNK_BYTES + 10_000
    b.kill()
    c = ring.node("c", 1)
    c.located = (a.at,)
    c.trainer.begin(RUN, 2, 1, 2)
    tree = c.trainer.load(Restore(Generation(1, 4, RUN), 2, Source.PEER)).tree
    assert same(tree, 401, frozen=4 * CHUNK_BYTES)


def test_a_frozen_chunk_that_was_damaged_where_it_lay_is_sent_again(ring: Ring) -> None:
    a, b = ring.node("a", 0), ring.node("b", 1)
    a.follow()
    b.follow(a.at)
    for step in (1, 2):
        b.save(step, frozen=4 * CHUNK_BYTES)
        a.has(step, "b")
    a.flip(1, 1, at=2 * CHUNK_BYTES)  # in the slot that step 3 will fill
    b.save(3, frozen=4 * CHUNK_BYTES)
    a.has(3, "b")
    c = ring.node("c", 1)
    c.located = (a.at,)
    c.trainer.begin(RUN, 2, 1, 2)
    tree = c.trainer.load(Restore(Generation(1, 3, RUN), 2, Source.PEER)).tree
    assert same(tree, 301, frozen=4 * CHUNK_BYTES)


def test_a_flipped_bit_in_a_replica_is_named_and_the_next_best_serves(ring: Ring) -> None:
    a, b, c = ring.node("a", 0), ring.node("b", 1), ring.node("c", 1)
    a.follow()
    b.follow(a.at)
    for step in (1, 2):
        b.save(step)
        a.has(step, "b")
    a.flip(2, 1)
    with pytest.raises(Corrupt, match=r"step 2 .*rank 1, of node b: chunk 0 from the keeper of node a .* hash"):
        restored(c, 2, 1, a.at, seed=201)
    until(lambda: [one.generation.step for one in a.replicas()] == [1], "the damaged replica is offered no more")
    assert c.replicas() == []
    assert restored(c, 2, 1, a.at, b.at, seed=201), "its own node has it, too"
    assert restored(c, 1, 1, a.at, seed=101)


def test_an_image_that_is_found_damaged_while_it_is_sent_never_counts_again(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even when its trainer dies and what was not hashed is hashed: the damage would get a valid hash."""
    b = ring.node("b", 1)

    def complains(channel: Channel, _: str) -> None:
        channel.receive(r.Offer)
        b.flip(1, 1)
        channel.send(r.ChunkDamaged(0))

    b.follow(ring.door(complains))
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        b.save(1)
        until(lambda: "step 1 (attempt 1, run 01234567) has no replica" in caplog.text, "the reason")
    b.next_trainer()
    assert b.trainer.held() == ()


def test_a_bit_flipped_on_the_way_leaves_the_replica_before(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    a, b = ring.node("a", 0), ring.node("b", 1)
    flips = [1]

    def flip(data: bytes) -> bytes:
        if len(data) < 5000 or not flips:
            return data
        flips.pop()
        return data[:-1] + bytes([data[-1] ^ 1])

    proxy = ring.proxy(a.at)
    a.follow()
    b.follow(proxy.at)
    b.save(1)
    a.has(1, "b")
    proxy.meddle = flip
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        b.save(2)
        a.has(2, "b")  # sent again
    assert flips == []
    assert "step 2 (attempt 1, run 01234567) has no replica" in caplog.text
    assert "chunk 0" in caplog.text


@pytest.mark.parametrize("who", ["taker", "giver"])
def test_killed_in_the_middle_of_a_transfer(ring: Ring, who: str) -> None:
    """The one before stays whole on the taker's node; a taker that is back gets the newest."""
    a, b = ring.node("a", 0), ring.node("b", 1)
    seen = threading.Event()
    proxy = ring.proxy(a.at)

    def stop(data: bytes) -> bytes:
        if proxy.sent > before + CHUNK_BYTES and not seen.is_set():
            os.kill((a if who == "taker" else b).keeper.pid, signal.SIGKILL)
            seen.set()
        return data

    a.follow()
    b.follow(proxy.at)
    b.save(1, size=1 << 20)
    a.has(1, "b")
    before, proxy.meddle = proxy.sent, stop
    b.save(2, size=1 << 20)
    assert seen.wait(WAIT_S)
    if who == "giver":
        (shared,) = a.segments()
        until(lambda: not any(slot.torn for slot in shared.slots()), "the torn slot is free")
        shared.close()
        assert [one.generation.step for one in a.replicas()] == [1]
        return
    a.keeper.wait()
    a.start()
    a.sit()  # its trainer takes the seat again, and says again where to listen
    a.has(2, "b")


def test_a_wrong_secret_is_refused_on_either_side(ring: Ring) -> None:
    a, b = ring.node("a", 0), ring.node("b", 1)
    with pytest.raises(NotAdmitted, match="has not begun its round"):
        call(a.at, SECRET, "b", within_s=0)
    a.follow()
    b.follow(a.at, secret=Secret("another"))
    for secret in (Secret("another"), Secret()):
        with pytest.raises(NotAdmitted, match="not the secret of this run"):
            call(a.at, secret, "b", within_s=0)
    b.save(1)
    assert a.replicas() == []
    b.follow(a.at)
    a.has(1, "b")


def test_a_keeper_that_cannot_prove_itself_gets_nothing(ring: Ring) -> None:
    """An impostor at the peer's address, which also tries to have the caller's own proof as his."""

    def answer(connection: socket.socket) -> None:
        with contextlib.closing(Channel(connection, "the caller")) as channel:
            channel.receive(r.PeerHello)
            channel.send(r.Challenge("a", "00" * 16))
            channel.send(channel.receive(r.AuthProof))
            with pytest.raises(KeeperAway, match="closed"):
                channel.receive(r.Offer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        at = KeeperAddress("a", "127.0.0.1", listener.getsockname()[1])
        impostor = threading.Thread(target=lambda: answer(listener.accept()[0]))
        impostor.start()
        with pytest.raises(NotAdmitted, match="does not know the secret"):
            call(at, SECRET, "b", within_s=0)
        impostor.join(WAIT_S)


def test_garbage_and_strangers_change_nothing(ring: Ring) -> None:
    """Bounded before and after the secret is proved; no memory is made for numbers that cannot be."""
    a = ring.node("a", 0)
    a.follow()
    for garbage in (b"\xff" * 64, struct.pack("<I", 1 << 30), struct.pack("<I", 2) + b"{}", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((a.at.host, a.at.port)) as connection:
            connection.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
    for change in ({"image_bytes": 1 << 50}, {"chunks": ()}, {"rank": 7}, {"home": "z"}):
        with contextlib.closing(call(a.at, SECRET, "b", within_s=0)) as channel:
            offer = r.Offer("b", 0, Generation(1, 1, RUN), 1, 2, 100, ("00" * 8,))
            channel.send(msgspec.structs.replace(offer, **change))
            with pytest.raises(Declined, match=r"do not agree|is of node z"):
                channel.receive(r.Want)
    many = -(-(1 << 46) // CHUNK_BYTES)
    huge = r.Offer("b", 0, Generation(1, 1, RUN), 1, 2, 1 << 40, ("0" * 16,) * (many >> 6))
    with contextlib.closing(call(a.at, SECRET, "b", within_s=0)) as channel:
        channel.send(huge)
        with pytest.raises(Declined, match=r"2 replicas of 1.1 TB do not fit into [\d.]+ [KMG]B that are free"):
            channel.receive(r.Want)
    assert a.replicas() == []
    assert a.save(1).step == 1


def test_a_refusal_is_said_once_and_saves_go_on(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    b, refused = ring.node("b", 1), threading.Semaphore(0)

    def refuse(channel: Channel, node: str) -> None:
        channel.receive(r.Offer)
        channel.send(r.Refuse("no room for node " + node))
        refused.release()

    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        b.follow(ring.door(refuse))
        for step in range(1, 4):
            b.save(step)
            assert refused.acquire(timeout=WAIT_S)
        until(lambda: caplog.records, "the reason")
    assert [record.getMessage().count("no room for node b") for record in caplog.records] == [1]


def test_an_image_that_is_overwritten_while_it_is_sent_is_given_up(
    ring: Ring, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow taker is told, gets the newest one next, and the trainer hears that replicas lag behind."""
    b, go_on = ring.node("b", 1), threading.Event()
    steps: list[int] = []

    def slow(channel: Channel, _: str) -> None:
        offer = channel.receive(r.Offer)
        steps.append(offer.generation.step)
        assert go_on.wait(WAIT_S)
        channel.send(r.Want(0))
        if len(steps) == 1:
            with pytest.raises(Declined, match="was overwritten by a newer one"):
                channel.receive(r.ChunkFollows)
        else:
            channel.send(r.TransferComplete())

    b.follow(ring.door(slow))
    b.save(1)
    until(lambda: steps, "an offer")
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        for step in range(2, 6):
            b.save(step)
        go_on.set()
        until(lambda: steps[1:], "the next offer")
        until(lambda: caplog.records, "the reason")
    assert steps[1] == 5
    assert "sending takes longer than two saves" in caplog.text


def test_replicas_of_a_node_that_sends_elsewhere_now_are_let_go(ring: Ring) -> None:
    """With the second generation that is whole in a later attempt: not before there is something newer."""
    a, b = ring.node("a", 0), ring.node("b", 1)
    a.follow()
    b.follow(a.at)
    b.save(1)
    a.has(1, "b")
    a.trainer.begin(RUN, 2, 0, 1)
    for step in (2, 3):
        a.trainer.take_seat()
        a.save(step)
        assert len(a.replicas()) == 1
        a.trainer.complete(Generation(2, step, RUN))
    until(lambda: a.replicas() == [], "no replica of the attempt before")


def test_a_fresh_run_forgets_replicas(ring: Ring) -> None:
    a, b = ring.node("a", 0), ring.node("b", 1)
    a.follow()
    b.follow(a.at)
    b.save(1)
    a.has(1, "b")
    a.trainer.begin("f" * 32, 1, 0, 2)
    a.trainer.drop()
    assert a.replicas() == []


def test_two_nodes_with_the_same_seat_do_not_mix_on_a_third(ring: Ring) -> None:
    """Each has a seat 0; both send to node a, which has one, too."""
    a, b, c = ring.node("a", 0, 3), ring.node("b", 1, 3), ring.node("c", 2, 3)
    a.follow()
    for step in (1, 2):
        a.save(step)
        for other in (b, c):
            other.follow(a.at)
            other.save(step)
            a.has(step, other.name)
    rows = {(one.generation.step, one.rank, one.home) for one in a.trainer.held()}
    assert rows == {(step, *who) for step in (1, 2) for who in ((0, ""), (1, "b"), (2, "c"))}
    for rank in (0, 1, 2):
        a.trainer.begin(RUN, 2, rank, 3)
        tree = a.trainer.load(Restore(Generation(1, 2, RUN), 3, Source.MEMORY)).tree
        assert same(tree, 200 + rank)
