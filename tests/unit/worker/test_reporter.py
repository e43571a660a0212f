"""The reporter against the real core in memory: votes in order, none lost while the master is away."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.ipc.keeper_messages import Hashed, Persisted, PersistFailed
from dlrover_hooks.config import Config
from dlrover_hooks.errors import HooksError, JournalFailed, MasterAway, Stale, StorageFailed
from dlrover_hooks.testing import MasterFake
from dlrover_hooks.worker import reporter as reporter_module
from dlrover_hooks.worker.reporter import Outage, Reporter
from tests.waiting import until

RUN = uuid.uuid4().hex


class Line:
    """What a reporter calls: the fake master, which may be away, and wakes threads that wait for a vote or a beat."""

    def __init__(self, master: MasterFake) -> None:
        self.master, self.votes = master, list[p.Vote]()
        self.away: HooksError | None = None
        self._heard = threading.Condition()
        self._calls = 0

    def call(self, request: p.Message, *, channel: str = "main", **options: Any) -> Any:
        try:
            if self.away is not None:
                raise self.away
            reply = self.master.call(request, channel=channel, **options)
            if isinstance(request, p.Vote):
                self.votes.append(request)
            return reply
        finally:
            with self._heard:
                self._calls += 1
                self._heard.notify_all()

    def wait(self, true: Callable[[], Any]) -> None:
        with self._heard:
            assert self._heard.wait_for(true, 60.0)


@pytest.fixture
def line() -> Line:
    """One worker `w` of job `j` in training."""
    master = MasterFake()
    seat = (p.Seat("w", 0, 0),)
    master.call(p.Join("j", "w", "n", seat, "h", 0, 1, 1, RUN, last_call_s=0.0))
    master.call(p.Attach("j", "w", "n", 1, save_to="mem://x", save_every=1, persist_every=4))
    return Line(master)


@pytest.fixture
def reporter(line: Line) -> Iterator[Reporter]:
    made = Reporter(line, "j", ("w", 0, 1), None)
    made.start(p.Cadence(every=1))
    yield made
    made.stop()


def generation(step: int, attempt: int = 1) -> p.Generation:
    return p.Generation(attempt, step, RUN)


def hashed(step: int, attempt: int = 1) -> Hashed:
    return Hashed(generation=generation(step, attempt), rank=0, world_size=1)


def test_a_hashed_slot_becomes_a_vote_and_the_answer_is_heard(reporter: Reporter, line: Line) -> None:
    reporter.saved(generation(1), 0.25)
    reporter.notice(hashed(1))
    line.wait(lambda: line.votes)
    reporter.stop()
    assert [(vote.kind, vote.copy_s) for vote in line.votes] == [(p.VoteKind.MEMORY, 0.25)]
    assert reporter.generations.newest_complete == generation(1)
    assert reporter.cadence == p.Cadence(every=1, persist_from=4)


@pytest.mark.parametrize("away", [MasterAway("nobody answers"), JournalFailed("the disk is full")])
def test_votes_wait_for_an_absent_master_in_order(
    reporter: Reporter,
    line: Line,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    away: HooksError,
) -> None:
    """Said once, and again when it is back; training is told nothing.

    A master that cannot write its journal has changed nothing: a dropped vote would keep all that follows from storage.
    """
    monkeypatch.setattr(reporter_module, "STEADY_S", 0.0)
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        line.away = away
        for step in range(1, 6):
            reporter.notice(hashed(step))
        line.wait(lambda: line._calls > 3)
        line.away = None
        line.wait(lambda: len(line.votes) == 5)
        reporter.stop()
    assert [vote.generation.step for vote in line.votes] == [1, 2, 3, 4, 5]
    assert reporter.error is None
    assert caplog.text.count("trains on without its master") == 1
    assert caplog.text.count("is connected to its master again") == 1


def test_a_network_that_comes_and_goes_is_one_outage() -> None:
    """Told of when it begins, and when the master has answered for three seconds without a gap; then once more."""
    outage = Outage()
    told = [(now, outage.heard(answered, now)) for now, answered in (
        (0.0, True), (1.0, False), (1.1, True), (1.2, False), (2.0, True), (4.1, True), (4.15, False),
        (5.0, True), (7.2, True), (8.0, True), (9.0, False),
    )]  # fmt: skip
    assert [(now, news) for now, news in told if any(news)] == [
        (1.0, (True, False)), (7.2, (False, True)), (9.0, (True, False)),
    ]  # fmt: skip


def test_a_refused_vote_is_dropped_and_remembered(reporter: Reporter, line: Line) -> None:
    reporter.notice(hashed(1, attempt=9))
    reporter.notice(hashed(2))
    line.wait(lambda: line.votes)
    reporter.stop()
    assert isinstance(reporter.error, Stale)
    assert [vote.generation for vote in line.votes] == [generation(2)]


def test_an_unexpected_error_ends_no_heartbeats_and_is_surfaced(
    reporter: Reporter, line: Line, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose heartbeats have ended is declared dead, and nobody would know why."""
    vitals, failed = reporter._vitals.sample, threading.Event()

    def broken() -> p.Vitals | None:
        if failed.is_set():
            return vitals()
        failed.set()
        raise ZeroDivisionError("odd vitals")

    monkeypatch.setattr(reporter._vitals, "sample", broken)
    assert failed.wait(60.0)
    calls = line._calls
    line.wait(lambda: line._calls > calls + 1)
    reporter.stop()
    assert "ZeroDivisionError: odd vitals" in str(reporter.error)
    assert "Traceback" in caplog.text


def test_a_stored_file_is_committed(reporter: Reporter, line: Line) -> None:
    file = p.ShardFile("shard", 0, 10, 4, ("a",))
    reporter.notice(hashed(4))
    reporter.notice(Persisted(generation=generation(4), file=file))
    line.wait(lambda: len(line.votes) == 2)
    reporter.stop()
    assert line.master.call(p.ShowJob("j")).newest_committed == generation(4)


@pytest.mark.parametrize("gone", [True, False])
def test_a_failed_file_is_voted_and_only_storage_is_an_error(reporter: Reporter, line: Line, gone: bool) -> None:
    reporter.notice(hashed(4))
    reporter.notice(PersistFailed(generation=generation(4), reason="no room", hint="make room", gone=gone))
    line.wait(lambda: len(line.votes) == 2)
    reporter.stop()
    assert line.votes[1].kind is (p.VoteKind.FAILED if gone else p.VoteKind.REFUSED)
    assert (reporter.error is None) is gone
    assert gone or isinstance(reporter.error, StorageFailed)
    assert gone or ("no room" in str(reporter.error) and str(reporter.error).count("make room") == 1)


def test_stopping_delivers_what_is_left(reporter: Reporter, line: Line) -> None:
    for step in range(1, 4):
        reporter.notice(hashed(step))
    reporter.stop()
    assert [vote.generation.step for vote in line.votes] == [1, 2, 3]


def test_stopping_one_that_never_started_is_fine(line: Line) -> None:
    made = Reporter(line, "j", ("w", 0, 1), None)
    made.stop()
    assert not made._thread.started


def test_an_unexpected_error_is_kept_for_the_session_and_the_thread_goes_on(
    line: Line, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without heartbeats the worker would be declared dead; a vote that follows is delivered."""
    monkeypatch.setattr(reporter_module, "BEAT_S", 0.01)
    line.away = cast(HooksError, ZeroDivisionError("unforeseen"))
    reporter.wake()
    line.wait(lambda: reporter.error is not None)
    assert "rank 0 of job j: the thread dlrover-hooks-reporter met ZeroDivisionError" in str(reporter.error)
    line.away = None
    reporter.notice(hashed(1))
    line.wait(lambda: line.votes)


def test_heartbeats_follow_at_the_interval_that_the_master_asks_for(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one after the request at a random moment within the interval, so that the ranks of a job spread."""
    now, heard = 0.0, list[float]()
    call = line.master.call

    def count(request: p.Message, **options: Any) -> Any:
        if isinstance(request, p.Heartbeat):
            heard.append(now)
        return call(request, **options)

    monkeypatch.setattr(line.master, "call", count)
    monkeypatch.setattr(reporter_module, "time", SimpleNamespace(monotonic=lambda: now))
    made = Reporter(line, "j", ("w", 0, 1), None)
    for second in range(100):
        if second == 10:
            line.master.nodes.beats_per_s = 0.1
        now = float(second)
        made.wake()
        made._turn()
    assert heard[:11] == [float(second) for second in range(11)]
    assert heard[11] in range(11, 21)
    assert {later - before for before, later in itertools.pairwise(heard[11:])} == {10.0}


def test_news_of_a_preemption_need_not_wait_for_the_interval(line: Line) -> None:
    line.master.nodes.beats_per_s = 1e-6
    line.master.call(p.Heartbeat("j", "w"))  # the master asks all that it knows for a heartbeat each 11 days
    made = Reporter(line, "j", ("w", 0, 1), None)
    made.start(p.Cadence())
    line.wait(lambda: line._calls == 1)
    made.beat_now()
    line.wait(lambda: line._calls == 2)
    made.stop()


def test_a_stall_is_said_once_and_shown_while_it_lasts(
    line: Line, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter_module, "BEAT_S", 0.01)
    made = Reporter(line, "j", ("w", 0, 1), None, Config(step_timeout="0.2s"))

    def stall() -> p.Stall | None:
        return line.master.call(p.ShowJob("j")).members[0].stall

    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        made.start(p.Cadence())
        line.wait(lambda: made._stalls._looked_at is not None)
        made.step = 1  # the first step
        line.wait(lambda: made._stalls._step == 1)
        line.wait(stall)
        shown = stall()
        assert shown is not None
        assert shown.where.startswith("test_reporter.py:"), "this thread is the training thread"
        line.wait(lambda: (again := stall()) is not None and again.seconds > shown.seconds + 0.1)
        made.step = 2
        line.wait(lambda: "makes steps again" in caplog.text)  # the view shows it only until the next stall
        line.wait(stall)
        made.ends()
        line.wait(lambda: stall() is None)
        made.stop()
    said = [record.getMessage().partition("(")[0] for record in caplog.records]
    assert [text.partition(" for ")[0].partition(",")[0] for text in said] == [
        "rank 0 of job j has made no step",
        "rank 0 of job j makes steps again",
        "rank 0 of job j has made no step",
        "rank 0 of job j ends its training",
    ]


def test_a_stall_is_looked_for_between_heartbeats(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master of many processes asks for heartbeats less often."""
    monkeypatch.setattr(reporter_module, "BEAT_S", 0.01)
    made = Reporter(line, "j", ("w", 0, 1), None, Config(step_timeout="0.2s"))
    made.start(p.Cadence())
    line.wait(lambda: made._next_beat > 0.0)
    made._next_beat = math.inf
    made.step = 1
    until(lambda: made._stall, "a stall")  # nothing is sent meanwhile
    made.stop()
