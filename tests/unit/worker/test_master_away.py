"""A master that is away for less than `--master-away` costs time, and no restart."""

from __future__ import annotations

import types
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.config import Config, Place
from dlrover_hooks.errors import MasterAway, Stale
from dlrover_hooks.launcher import master_requests
from dlrover_hooks.launcher.failures.verdict import farewell
from dlrover_hooks.launcher.master_requests import AgentAddress, MasterRequests
from dlrover_hooks.launcher.options import LaunchOptions
from dlrover_hooks.worker import round_join as seat, surviving_process
from dlrover_hooks.worker.surviving_process import Membership

VIEW = p.JobView(job="job", run="run", attempt=1, round=1, phase=p.Phase.TRAINING, step=7, members=())


class Stopped:
    """A client, and the clock: the master gives no answer until `back_at`; `answer` is what it says then."""

    url, incarnation = "http://master", "agent"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, back_at: float, answer: Any = VIEW) -> None:
        self.now, self._back_at, self._answer = 100.0, 100.0 + back_at, answer
        for module in (surviving_process, seat, master_requests):
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    def call(self, request: p.Message, *, timeout_s: float, **_: Any) -> Any:
        if self.now < self._back_at:
            self.now += timeout_s
            raise MasterAway("no answer in time")
        self.now += 0.1
        return self._answer() if callable(self._answer) else self._answer


def speaks(client: Any, away_s: float = 120.0) -> MasterRequests:
    options = LaunchOptions(command=("true",), master_away_s=away_s)
    return MasterRequests(options, AgentAddress("job", "node", "127.0.0.1"), client, lambda: None, lambda: None)


def test_a_dead_worker_is_seen_to_when_the_master_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert speaks(Stopped(monkeypatch, back_at=20.0)).await_view() == VIEW


def test_a_master_that_stays_away_is_given_up_by_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Stopped(monkeypatch, back_at=1000.0)
    with pytest.raises(MasterAway, match=r"has not answered for 30 s \(--master-away\)"):
        speaks(client, away_s=30.0).await_view()
    assert 130.0 <= client.now < 131.0


def test_a_watch_that_misses_the_master_later_changes_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries to connect again and again: its word on when the absence began is that of the moment."""
    client: Any = Stopped(monkeypatch, back_at=1000.0)
    options, away = LaunchOptions(command=("true",), master_away_s=30.0), iter([None])
    speaks = MasterRequests(
        options, AgentAddress("job", "node", "127.0.0.1"), client, lambda: None, lambda: next(away, client.now)
    )
    with pytest.raises(MasterAway, match=r"has not answered for 30 s \(--master-away\)"):
        speaks.await_view()


def test_another_deadline_is_not_called_master_away(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    assert speaks(Stopped(monkeypatch, back_at=1000.0)).view() is None
    assert "--master-away" not in caplog.text


def member(client: Any) -> Membership:
    place = Place(incarnation="w0", master_away_s=120.0)
    made = Membership(Config(job="job", master="http://master"), place, lambda: None)
    made.client.close()
    made.client, made.round = client, 1
    return made


def test_a_survivor_waits_for_the_word_of_a_master_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its five seconds are for a master that is there."""
    monkeypatch.setattr(surviving_process, "_LOOK_S", 0.0)
    broken = [p.Notice(1, broken=True)]

    def heard() -> p.JobView:
        if client.now > 123.0 and broken:
            one._noticed(broken.pop())
        return VIEW

    client = Stopped(monkeypatch, back_at=20.0, answer=heard)
    one = member(client)
    assert one.hears_break(5.0)
    assert 123.0 < client.now < 125.0


def test_a_survivor_of_no_break_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surviving_process, "_LOOK_S", 0.0)
    client = Stopped(monkeypatch, back_at=0.0)
    assert not member(client).hears_break(5.0)
    assert client.now < 106.0
    gone = Stopped(monkeypatch, back_at=1000.0)
    assert not member(gone).hears_break(5.0)
    assert 220.0 <= gone.now < 222.0


def test_a_newcomer_names_the_deadline_that_it_met(monkeypatch: pytest.MonkeyPatch) -> None:
    join = seat.join_request(Config(job="job"), Place(node="n"), "w0")
    for patience_s, named in ((30.0, False), (900.0, True)):
        client: Any = Stopped(monkeypatch, back_at=1000.0)
        with pytest.raises(MasterAway) as away:
            seat.take_seat(client, join, patience_s=patience_s, away_s=120.0)
        assert ("(--master-away)" in away.value.message) is named


def test_a_refusal_is_no_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise Stale("another life")

    assert speaks(Stopped(monkeypatch, 0.0, refuse)).await_view() is None


def test_a_master_that_should_run_already_is_not_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong URL: `--master-away` bounds the first contact, too."""
    client: Any = Stopped(monkeypatch, back_at=1000.0)
    options = LaunchOptions(command=("true",), endpoint="http://wrong:8780", master_away_s=5.0)
    speaks = MasterRequests(options, AgentAddress("job", "node", "127.0.0.1"), client, lambda: None, lambda: None)
    with pytest.raises(MasterAway):
        speaks.join((p.Seat("w0", 0),), 600.0, first=True, fresh=False)
    assert client.now <= 106.0


@pytest.mark.parametrize(("attached", "said"), [(False, "no worker had begun to train"), (True, "no save_to is set")])
def test_why_nothing_was_saved(attached: bool, said: str) -> None:
    """Only a worker that has begun has told what its `save_to` is."""
    one = p.MemberView(incarnation="w0", node="n", rank=0, local_rank=0, attached=attached, alive=True)
    told = farewell("job", msgspec.structs.replace(VIEW, members=(one,)), "dlrover-hooks run train.py")
    assert told.startswith(f"nothing was saved: {said}")
