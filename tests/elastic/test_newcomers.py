"""Newcomers that arrive while others recover, and newcomers that die while they join.

They join as those of a launcher do: before their script begins, with the incarnation that they were given.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.elastic.crew import Crew

STEPS, EPOCHS = 16, 4
Crews = Callable[..., Crew]
pytestmark = pytest.mark.deep


def recovering(crew: Crews, place: str, life: int) -> Crew:
    """Rank 1 is dead; rank 2 knows it, and holds at `place` of its `life`, so that nothing is restored yet."""
    one = crew(2, 3)
    one.start(0)
    one.start(1, at=("fetched", 5), what="kill")
    one.start(2, at=(place, 5 if place == "left" else 0), what="hold", lives=[life])
    one.until(lambda: len(one.events("trouble")) == 2)
    return one


@pytest.mark.deep
@pytest.mark.parametrize(("place", "rounds"), [("left", 2), ("begin", 3), ("grouped", 3)])
def test_a_newcomer_arrives_during_a_recovery(crew: Crews, place: str, rounds: int) -> None:
    """Before all survivors have joined it is in their next round; else in the one after, and each is entered once."""
    one = recovering(crew, place, 1 if place == "left" else 2)
    one.start(1, "w1b", newcomer=True)
    one.until(lambda: one.waits("w1b"))
    one.release()
    one.ended()
    one.check(STEPS, EPOCHS)
    restores = one.restores()
    assert max(restores) == rounds, "nobody is sent back for a newcomer that is in already"
    assert [row["world"] for row in one.events("trained")] == [3, 3, 3]
    assert restores[2][0]["step"] == 5
    made = max(row["step"] for row in one.events("step") if row["round"] < rounds)
    assert restores[rounds][0]["step"] == made, "no step is lost for a newcomer"


@pytest.mark.parametrize("place", ["waiting", "begin", "grouped"])
def test_a_newcomer_dies_while_it_joins(crew: Crews, place: str) -> None:
    """While it waits, once it has a seat, and once the others have built a process group with it."""
    one = recovering(crew, "left", 1)
    one.start(1, "w1b", newcomer=True, at=(place, 0), what="kill")
    one.until(lambda: one.waits("w1b"))
    if place == "waiting":
        one.workers["w1b"].kill()
        one.ended("w1b")
    one.release()
    one.ended()
    one.check(STEPS, EPOCHS)
    restores = one.restores()
    assert [rows[0]["step"] for rows in restores.values()] == [5]
    assert max(restores) == (2 if place == "waiting" else 3)
    assert [row["world"] for row in one.events("trained")] == [2, 2]


def test_the_first_round_of_a_newcomer_breaks_before_it_has_begun(crew: Crews) -> None:
    """It has attached nowhere yet, and the error is none of its own: it joins the next round as the survivors do."""
    one = crew(1, 3, pace_s=0.05)
    one.start(0)
    one.start(2)
    one.stepped(2, "w0", "w2", world=2)
    one.start(1, newcomer=True, at=("begin", 0), what="hold")
    one.until(lambda: one.events("trouble"))
    one.send("w2", signal.SIGKILL)
    one.ended("w2")
    one.release()
    one.ended()
    assert not one.events("failed")
    one.check(STEPS, EPOCHS)
    assert {row["who"] for row in one.events("trained")} == {"w0", "w1"}


def test_the_node_of_a_lost_rank_0_is_asked_too(crew: Crews) -> None:
    """It had spoken for its node; the one beside it goes on to."""
    one = crew(2, 2, pace_s=0.05)
    one.environment["DLROVER_HOOKS_MAX_WORKERS"] = 4  # as of two nodes with two workers each
    one.start(0, at=("fetched", 5), what="kill")
    one.start(1)
    one.ended("w0")
    one.start(2, alone=True)
    one.ended()
    assert [rows[0]["step"] for rows in one.restores().values()] == [5]
    one.check(STEPS, EPOCHS)


@pytest.mark.requirement("DL-85", "SC-1")
@pytest.mark.parametrize("grows", [True, False])
def test_a_newcomer_on_another_node_gets_what_the_survivors_hold(crew: Crews, grows: bool) -> None:
    """Its own node has nothing in memory, and there is neither storage nor a replica: no step is lost all the same."""
    one = crew(2, 3 if grows else 2, pace_s=0.05, epochs=8)
    one.start(0, alone=True)
    one.start(1, alone=True, **({} if grows else {"at": ("fetched", 5), "what": "kill"}))
    if grows:
        one.stepped(4, "w0", "w1")
    else:
        one.ended("w1")
    one.start(2, alone=True)
    one.ended()
    begun = one.restores()[2][0]["step"]
    assert begun == max(row["step"] for row in one.events("step") if row["round"] == 1)
    one.check(2 * STEPS, 8)
    assert {row["who"] for row in one.events("trained")} == ({"w0", "w1", "w2"} if grows else {"w0", "w2"})
