"""What is told of a round that is over for its listener is no news."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlrover_hooks import config
from dlrover_hooks.checkpoint.ipc.keeper_messages import Hashed
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import MasterAway, Stale
from dlrover_hooks.launcher.agent import Agent
from dlrover_hooks.launcher.master_requests import AgentAddress
from dlrover_hooks.launcher.options import LaunchOptions
from dlrover_hooks.protocol import Generation, JobView, Notice, Phase
from dlrover_hooks.session import Session
from dlrover_hooks.worker.surviving_process import Membership

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def agent() -> Iterator[Agent]:
    """Of round 2; it never speaks to its master here."""
    with contextlib.ExitStack() as owned:
        selector = owned.enter_context(selectors.DefaultSelector())
        client = MasterClient(NOWHERE, incarnation="a")
        owned.callback(client.close)
        workers: Any = None
        address = AgentAddress("job", "node", "127.0.0.1")
        made = Agent(LaunchOptions(command=("true",)), address, client, workers, selector, lambda: None, fresh=False)
        owned.callback(made._events.close)
        made._round = 2
        yield made


@pytest.mark.parametrize(("number", "waiting"), [(1, 0), (2, 1)])
def test_a_newcomer_that_was_taken_in_breaks_no_round(agent: Agent, number: int, waiting: int) -> None:
    """It had waited for a place in round 1, and hears of itself when it has one in round 2."""
    agent._events._hear(Notice(number, waiting=1))
    assert agent._listen() == (False, waiting)


@pytest.mark.parametrize(
    ("number", "phase", "for_all"), [(3, Phase.TRAINING, False), (3, Phase.BROKEN, True), (2, Phase.ATTACHING, True)]
)
def test_a_node_that_found_no_place_does_not_end_the_job(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, number: int, phase: Phase, for_all: bool
) -> None:
    """The others train without it: it goes home. Only where no round forms for anybody, the job is over."""
    view = JobView("job", "run", 1, number, phase, 7)
    monkeypatch.setattr(agent._requests, "view", lambda: view)
    over = agent._no_round(60.0)
    assert (over.code, over.for_all) == (77, for_all)
    assert ("no place for it became free within 60 s" in over.why) is not for_all


@pytest.mark.parametrize(("number", "crowded"), [(1, False), (2, True)])
def test_a_survivor_makes_room_once(number: int, crowded: bool) -> None:
    settings = config.load({}, master=NOWHERE, job="job")
    membership = Membership(settings, config.Place(incarnation="w", world_size=2), lambda: None)
    membership.seated(2)
    membership._noticed(Notice(number, waiting=1))
    assert membership.crowded is crowded
    membership.close()


def test_a_survivor_does_not_wait_for_a_master_that_has_gone() -> None:
    """Though a round may take ten minutes to form: nobody answers."""
    settings = config.load({}, master=NOWHERE, job="job")
    place = config.Place(incarnation="w", world_size=2, master_away_s=0.3)
    membership = Membership(settings, place, lambda: None)
    with pytest.raises(MasterAway, match=f"the master at {NOWHERE} has not answered for 0.3 s"):
        membership.join(600.0)
    membership.close()


@pytest.mark.parametrize(("attempt", "votes"), [(0, 0), (3, 1)])
def test_a_save_of_the_round_before_is_not_voted_for(attempt: int, votes: int) -> None:
    """Until a session begins, its engine hears of the life before: a vote would be stale, and end the worker."""
    told: list[Any] = []
    session = cast("Any", SimpleNamespace(attempt=attempt, _reporter=SimpleNamespace(notice=told.append)))
    Session.heard(session, Hashed(generation=Generation(2, 5, "run"), rank=0, world_size=2))
    assert len(told) == votes


@pytest.mark.parametrize(("attached", "cuts"), [(1, 1), (2, 0)])
def test_a_process_that_is_declared_dead_while_it_waits_for_peers_stops_waiting(attached: int, cuts: int) -> None:
    """The others form a round without it. Once it is attached to its round, its session raises what happened."""
    settings, cut = config.load({}, master=NOWHERE, job="job"), list[int]()
    membership = Membership(settings, config.Place(incarnation="w", world_size=2), lambda: cut.append(1))
    membership.took_seat(attached)
    membership.seated(2)
    membership._refused(Stale("declared dead"))
    assert len(cut) == cuts
    assert not membership.hears_break(0.0)
    membership.close()
