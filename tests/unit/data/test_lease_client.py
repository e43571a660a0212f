"""The borrower: leases ahead, acknowledgements in order, and what becomes of them when the master says no."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.data.leased import lease_client
from dlrover_hooks.data.leased.lease_client import HeldLease, LeaseClient, LeaseRequester, WorkRate
from dlrover_hooks.errors import BadRequest, HooksError, MasterAway, Stale
from dlrover_hooks.protocol import LedgerState

WAIT_S = 60.0
CLAIM = LeaseRequester("job", "me", "train", 1)


class Master:
    """Answers what a test puts in; a test that forgets to answer fails in `asked`."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def call(self, request: p.Message, *, channel: str = "main", timeout_s: float | None = None) -> Any:
        del channel, timeout_s
        self.requests.put(request)
        reply = self.replies.get(timeout=WAIT_S)
        if isinstance(reply, HooksError):
            raise reply
        return reply

    def asked(self) -> Any:
        return self.requests.get(timeout=WAIT_S)

    def lend(self, *numbers: int, state: LedgerState = LedgerState.OPEN, within_s: float = 600.0) -> None:
        lent = tuple(p.Lease(n, "", 100 * n, 100 * n + 100, within_s) for n in numbers)
        self.replies.put(p.Leases(state, lent))


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def borrow(master: Master) -> Iterator[Callable[..., LeaseClient]]:
    made: list[LeaseClient] = []

    def start(**options: Any) -> LeaseClient:
        made.append(LeaseClient(master, CLAIM, **options))
        return made[-1]

    yield start
    for one in made:
        for _ in range(4):
            master.replies.put(p.Leases(LedgerState.FINISHED))
        one.close()
        assert not one._thread.alive


def taken(borrower: LeaseClient) -> HeldLease:
    while (held := borrower.take()) is None:
        borrower.wait(borrower.state, WAIT_S)
    return held


@pytest.mark.requirement("DL-68")
def test_leases_are_taken_ahead_and_acknowledged_on_the_way(master: Master, borrow: Callable[..., LeaseClient]) -> None:
    """One trip for each lease; what is committed travels with the next request."""
    borrower = borrow(lookahead=1)
    assert master.asked().count == 2
    master.lend(1, 2)
    first = taken(borrower)
    borrower.committed(first, 130)
    borrower.committed(first, 160)
    assert taken(borrower).id == 2
    request = master.asked()
    assert (request.count, request.acks) == (1, (p.Ack(1, 160),))


def test_the_loop_goes_on_while_the_master_is_silent(master: Master, borrow: Callable[..., LeaseClient]) -> None:
    """The loop waits for no trip while there is a lease left."""
    borrower = borrow(lookahead=2)
    master.asked()
    master.lend(1, 2, 3)
    for number in (1, 2, 3):
        held = taken(borrower)
        assert held.id == number
        borrower.committed(held, held.hi)
    assert borrower.take() is None  # no answer came since the first
    assert master.asked().count > 0


def test_an_acknowledgement_does_not_wait_for_the_next_lease(
    master: Master, borrow: Callable[..., LeaseClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long lease the master hears now and then: less is trained again, and it is lent for longer."""
    monkeypatch.setattr(lease_client, "ACK_S", 0.0)
    borrower = borrow(lookahead=0)
    master.asked()
    master.lend(1, within_s=5.0)
    held = taken(borrower)
    before = held.until
    borrower.committed(held, 150)
    assert master.asked() == p.TakeLeases("job", "me", "train", 1, 0, 0, (p.Ack(1, 150),), borrower._pace.rate)
    master.lend()
    borrower.committed(held, 200)
    assert master.asked().acks == (p.Ack(1, 200),)
    assert held.until > before + 50


def test_a_step_longer_than_the_time_to_acknowledge_wakes_nobody(
    master: Master, borrow: Callable[..., LeaseClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The borrower's thread sleeps until something is committed, and tells that at once."""
    naps: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    class Bell(queue.SimpleQueue[None]):
        rings = 0

        def put(self, item: None, block: bool = True, timeout: float | None = None) -> None:
            self.rings += 1
            super().put(item, block, timeout)

        def get(self, block: bool = True, timeout: float | None = None) -> None:
            naps.put(timeout)
            super().get(block, timeout)

    monkeypatch.setattr(lease_client, "ACK_S", 0.0)
    monkeypatch.setattr(queue, "SimpleQueue", Bell)
    borrower = borrow(lookahead=0)
    master.asked()
    master.lend(1)
    assert naps.get(timeout=WAIT_S) is None
    held = taken(borrower)
    bell: Any = borrower._bell
    assert [naps.get(timeout=WAIT_S) for _ in range(bell.rings)] == [None] * bell.rings
    borrower.committed(held, 150)
    assert master.asked().acks == (p.Ack(1, 150),)


def test_others_hold_the_rest(master: Master, borrow: Callable[..., LeaseClient]) -> None:
    """With nothing to take and nothing held it waits at the master, and takes what comes back."""
    borrower = borrow(lookahead=0)
    master.asked()
    master.lend(1, state=LedgerState.WAITING)
    held = taken(borrower)
    assert borrower.take() is None
    assert borrower.dry
    borrower.committed(held, 200)
    assert master.asked().acks == (p.Ack(1, 200),)
    master.lend(state=LedgerState.WAITING)
    assert isinstance(master.asked(), p.AwaitShards)
    master.replies.put(p.Leases())
    assert isinstance(master.asked(), p.AwaitShards)
    master.replies.put(p.Leases(LedgerState.OPEN))
    assert master.asked().count == 1
    master.lend(7, state=LedgerState.WAITING)
    assert taken(borrower).id == 7


def test_a_failure_is_told_when_what_was_before_it_is_done(master: Master, borrow: Callable[..., LeaseClient]) -> None:
    """A position that cannot be read is never acknowledged, and what came before it not too early."""
    borrower = borrow(lookahead=0)
    master.asked()
    master.lend(1)
    held = taken(borrower)
    held.received = 140
    borrower.stop(held, 140, failed="no such file", failed_upto=141)
    borrower.committed(held, 120)
    assert held.ack() == p.Ack(1, 120)
    borrower.committed(held, 140)
    borrower.take()
    assert master.asked().acks == (p.Ack(1, 140, "no such file", 141),)


def test_a_failure_behind_an_acknowledgement_on_its_way_is_told_too(
    master: Master, borrow: Callable[..., LeaseClient]
) -> None:
    """The lease is stopped just where the acknowledgement under way ends: the reason must still be told."""
    borrower = borrow(lookahead=0)
    master.asked()
    master.lend(1)
    held = taken(borrower)
    held.received = 140
    borrower.committed(held, 140)
    borrower.take()
    assert master.asked().acks == (p.Ack(1, 140),)
    borrower.stop(held, 140, failed="bad", failed_upto=141)
    master.lend(2)
    taken(borrower)
    borrower.take()
    assert master.asked().acks == (p.Ack(1, 140, "bad", 141),)


def test_closing_gives_back_what_is_not_done(master: Master, borrow: Callable[..., LeaseClient]) -> None:
    """Scale-down: partial acknowledgement, the rest of the lease and the one ahead go back."""
    borrower = borrow(lookahead=1)
    master.asked()
    master.lend(1, 2)
    held = taken(borrower)
    held.received = 180
    borrower.committed(held, 130)
    closing = threading.Thread(target=borrower.close)
    closing.start()
    assert master.asked().acks == (p.Ack(1, 130, back=True), p.Ack(2, 200, back=True))
    master.lend()
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_one_lost_lease_does_not_hurt_the_others(
    master: Master, borrow: Callable[..., LeaseClient], caplog: pytest.LogCaptureFixture
) -> None:
    """A lease that ran out is given up here; what else was to be told is told."""
    borrower = borrow(lookahead=1)
    master.asked()
    master.lend(1, 2)
    first, second = taken(borrower), taken(borrower)
    master.asked()
    first.received, second.received = 150, 250
    borrower.committed(first, 150)
    borrower.committed(second, 250)
    master.lend(3)
    taken(borrower)
    assert [ack.lease for ack in master.asked().acks] == [1, 2]
    master.replies.put(Stale("lease 1 is over"))
    assert [ack.lease for ack in master.asked().acks] == [1]
    master.replies.put(Stale("lease 1 is over"))
    assert [ack.lease for ack in master.asked().acks] == [2]
    master.lend()
    assert master.asked().acks == ()
    assert not first.whole
    assert second.whole
    assert "lease 1" in caplog.text
    assert "50 of its samples" in caplog.text


@pytest.mark.parametrize("received", [100, 150])
def test_a_lost_lease_that_was_trained_on_ends_an_exact_run(
    master: Master, borrow: Callable[..., LeaseClient], received: int
) -> None:
    """Else its samples would be in the model twice. What was not trained on may be lost."""
    borrower = borrow(exact=True, lookahead=0)
    master.asked()
    master.lend(1, state=LedgerState.WAITING)
    held = taken(borrower)
    held.received = received
    borrower.stop(held, received)
    borrower.committed(held, received)
    for _ in range(2):
        assert [ack.lease for ack in master.asked().acks] == [1]
        master.replies.put(Stale("lease 1 is over"))
    assert borrower.take() is None
    assert isinstance(master.asked(), p.AwaitShards)
    master.replies.put(p.Leases(LedgerState.FINISHED))
    while borrower.state is not LedgerState.FINISHED:
        borrower._answered.wait(WAIT_S)
    if received == held.lo:
        borrower.surface()
        return
    with pytest.raises(Stale, match=r"dataset 'train' of job 'job': lease 1.*50 of its samples") as stale:
        borrower.surface()
    assert "checkpoint before" in stale.value.hint


@pytest.mark.parametrize("refusal", [Stale("fence 1, but it is fence 2"), BadRequest("wrong")])
def test_a_refusal_ends_it_with_the_masters_words(
    master: Master, borrow: Callable[..., LeaseClient], refusal: HooksError
) -> None:
    """A stale fence is a clear error in the training thread, with the dataset and the job."""
    borrower = borrow()
    master.asked()
    master.replies.put(refusal)
    with pytest.raises(type(refusal), match=f"dataset 'train' of job 'job': {refusal.message}"):
        taken(borrower)


def test_without_a_master_the_leases_at_hand_are_worked_off(master: Master, borrow: Callable[..., LeaseClient]) -> None:
    """The master away: train on with what is held, then a clear error."""
    borrower = borrow(lookahead=1, patience_s=7.0)
    master.asked()
    master.lend(1, 2)
    first, second = taken(borrower), taken(borrower)
    assert master.asked().count == 1
    master.replies.put(MasterAway("no answer"))
    borrower._thread.join(WAIT_S)
    borrower.committed(first, 200)
    borrower.committed(second, 300)
    with pytest.raises(MasterAway, match=r"no answer from the master for 7 s"):
        taken(borrower)


def test_the_end_of_a_stream_is_told_when_nothing_is_held(master: Master) -> None:
    """Opening the ledger again gives everything back, so what is begun is worked off first."""
    told: queue.SimpleQueue[dict[str, int]] = queue.SimpleQueue()
    borrower = LeaseClient(master, CLAIM, lookahead=1, reopen=told.put)
    master.asked()
    master.lend(1, 2)
    held = taken(borrower)
    held.received = 150
    borrower.stop(held, 150)
    borrower.ended("", 150)
    assert borrower.dry
    assert master.asked().acks == (p.Ack(2, 200, back=True),)
    master.lend()
    borrower.committed(held, 150)
    assert master.asked().acks == (p.Ack(1, 150, back=True),)
    master.lend()
    assert told.get(timeout=WAIT_S) == {"": 150}
    assert master.asked().count > 0
    master.replies.put(p.Leases(LedgerState.FINISHED))
    borrower.close()


def test_an_end_that_nobody_can_be_told_is_an_error(master: Master, borrow: Callable[..., LeaseClient]) -> None:
    """The thread is gone, and nothing else gives back what was taken ahead: the loop must not wait for that."""
    borrower = borrow(lookahead=1, patience_s=7.0)
    master.asked()
    master.lend(1, 2, state=LedgerState.WAITING)
    held = taken(borrower)
    borrower.committed(held, held.hi)
    assert master.asked().acks == (p.Ack(1, 200),)
    master.replies.put(MasterAway("no answer"))
    borrower._thread.join(WAIT_S)
    borrower.ended("", 250)
    with pytest.raises(MasterAway, match=r"no answer from the master for 7 s"):
        borrower.wait(borrower.state, WAIT_S)


def test_pace_leaves_waiting_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard sizes and deadlines come from the speed of the work, not of the network."""
    now = [0.0]
    monkeypatch.setattr(lease_client.time, "monotonic", lambda: now[0])
    pace = WorkRate()
    for _ in range(100):
        pace.waits(now[0])
        now[0] += 1.0
        pace.measure(now[0])
        pace.goes_on(now[0])
        now[0] += 1.0
        pace.count += 50
        pace.measure(now[0])
    assert pace.rate == pytest.approx(50.0)
    pace.waits(now[0])
    pace.count += 50
    now[0] += 30.0
    pace.measure(now[0])
    assert pace.rate == pytest.approx(50.0), "a wait at hand is no work either"


def test_short_leases_are_fetched_several_at_a_time(master: Master, borrow: Callable[..., LeaseClient]) -> None:
    """A trip for each lease of some milliseconds costs more than the lease's bookkeeping: one trip fetches several."""
    borrower = borrow(lookahead=1)
    assert master.asked().count == 2
    borrower._pace.rate, borrower._pace.settled = 4000.0, True  # 0.25 s: 1000 positions, 10 leases
    master.lend(1, 2)
    assert master.asked().count == 9
    master.lend(*range(3, 12))
    for number in range(1, 10):
        held = taken(borrower)
        assert held.id == number
        borrower.committed(held, held.hi)
    request = master.asked()
    assert (request.count, [ack.lease for ack in request.acks][:8]) == (8, [1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize(("lookahead", "rate", "count"), [(0, 4000.0, 1), (1, 100.0, 1), (1, 1e9, 16), (20, 1.0, 20)])
def test_how_many_leases_are_kept_ready(
    master: Master, borrow: Callable[..., LeaseClient], lookahead: int, rate: float, count: int
) -> None:
    """`lookahead` is the least, 0 means none; of leases that last nothing no more than 16."""
    borrower = borrow(lookahead=lookahead)
    assert master.asked().count == lookahead + 1
    borrower._pace.rate, borrower._pace.settled = rate, True
    master.lend(1)
    while not borrower.ready:
        borrower.wait(borrower.state, WAIT_S)
    taken(borrower)
    borrower.take()
    assert borrower._depth == (count if lookahead else 0)
