"""A preempted worker leaves, the others go on in their processes; a signal in the middle of a recovery is not lost.

Each worker is on a node of its own: nodes are what is taken away.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.elastic.crew import Crew

STEPS, EPOCHS = 16, 4
Crews = Callable[..., Crew]
pytestmark = pytest.mark.deep


def three(crew: Crews, low: int = 1, **trouble: Any) -> Crew:
    """`trouble` by name."""
    one = crew(low, 3, pace_s=0.03)
    for rank in range(3):
        one.start(rank, alone=True, **trouble.get(f"w{rank}", {}))
    return one


def left(one: Crew, who: str) -> int:
    """The step where it left, saved, with 75; nobody else was told that it is about to end."""
    assert [(row["who"], row["code"]) for row in one.events("exit")] == [(who, 75)], one.story()
    told = one.events("preempted")
    assert [(row["who"], row["mine"], row["reason"]) for row in told] == [(who, True, "SIGTERM")]
    return told[0]["step"]


def metrics(one: Crew) -> str:
    return requests.get(one.url + "/metrics", headers={"Authorization": "Bearer secret"}, timeout=30).text


@pytest.mark.requirement("ED-4", "SC-1")
@pytest.mark.parametrize("victim", [0, 1])
def test_one_leaves_and_two_stay(crew: Crews, victim: int) -> None:
    one, who = three(crew), f"w{victim}"
    one.stepped(4, who)
    one.send(who, signal.SIGTERM)
    one.ended()
    step = left(one, who)
    assert one.restores()[2][0]["step"] == step, "no step is lost"
    assert max(one.restores()) == 2
    one.check(STEPS, EPOCHS)
    assert [row["world"] for row in one.events("trained")] == [2, 2]
    assert len({row["pid"] for row in one.events("begin")}) == 3


@pytest.mark.parametrize(("place", "life"), [("left", 1), ("begin", 2), ("grouped", 2)])
def test_the_signal_comes_during_a_recovery(crew: Crews, place: str, life: int) -> None:
    """It recovers first: it may be the only one that has the newest step. Then it leaves, and the last one stays."""
    hold = {"at": (place, 5 if place == "left" else 0), "what": "hold", "lives": [life]}
    one = three(crew, w1={"at": ("fetched", 5), "what": "kill"}, w2=hold)
    one.until(lambda: len(one.events("trouble")) == 2)
    one.send("w2", signal.SIGTERM)
    one.release()
    one.ended()
    step = left(one, "w2")
    assert [rows[0]["step"] for rows in one.restores().values()] == [5, step]
    one.check(STEPS, EPOCHS)
    assert [(row["who"], row["world"]) for row in one.events("trained")] == [("w0", 1)]


def test_the_round_breaks_before_they_have_parted(crew: Crews) -> None:
    """The signal was for the process, not for the round: in the next one it is said again."""
    one = three(crew, w2={"at": ("fetched", 5), "what": "hold"})
    one.until(lambda: one.events("trouble"))
    one.send("w2", signal.SIGTERM)
    one.until(lambda: one.view().parting.step is not None)
    one.send("w1", signal.SIGKILL)
    one.ended("w1")
    one.release()
    one.ended()
    step = left(one, "w2")
    assert [rows[0]["step"] for rows in one.restores().values()] == [5, step]
    one.check(STEPS, EPOCHS)
    assert [row["who"] for row in one.events("trained")] == ["w0"]


def test_who_dies_where_all_leave_is_not_waited_for(crew: Crews) -> None:
    """That step will not be whole on all ranks, however long the grace is: the others save it, and go or go on."""
    one = three(crew, w1={"at": ("stepped", 5), "what": "stop"}, w2={"at": ("fetched", 5), "what": "hold"})
    one.until(lambda: one.events("trouble"))
    one.send("w2", signal.SIGTERM)
    one.until(lambda: one.view().parting.step == 6)
    one.release()
    one.until(lambda: f'dlrover_hooks_votes_total{{job="{one.job}"}} 2.0' in metrics(one))  # two have it, and wait
    died = one.send("w1", signal.SIGKILL)
    one.ended()
    assert left(one, "w2") == 6
    assert one.events("exit", who="w2")[0]["t"] - died < 10.0, "the grace is 25 s"
    assert [rows[0]["step"] for rows in one.restores().values()] == [6]
    one.check(STEPS, EPOCHS)


def test_who_waits_for_a_replacement_does_not_wait_for_ever(crew: Crews) -> None:
    """Hot recovery, and nobody comes: when half of the grace is over it goes. What it had is in its node's memory."""
    one = crew(2, 2)
    one.environment["DLROVER_HOOKS_GRACE"] = 2
    one.start(0, alone=True, at=("left", 5), what="nothing")
    one.start(1, alone=True, at=("fetched", 5), what="kill")
    one.ended("w1")
    one.until(lambda: one.events("trouble", who="w0"))
    sent = one.send("w0", signal.SIGTERM)
    one.ended()
    assert left(one, "w0") == 5
    assert one.events("exit")[0]["t"] - sent < 2.0


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["accelerate", "fabric"])
def test_all_of_one_node_leave_and_the_same_start_goes_on(crew: Crews, tmp_path: Path, kind: str) -> None:
    """One rank alone gets the signal. All save one step, durable, end with 75, and the next start is as undisturbed."""
    calm = crew(2, 2, kind=kind, global_batch_size=12, pace_s=0.0)
    for rank in range(2):
        calm.start(rank)
    calm.ended()
    calm.close()
    one = crew(2, 2, kind=kind, global_batch_size=12, pace_s=0.03, save_to=str(tmp_path / "saved"))
    for rank in range(2):
        one.start(rank)
    one.stepped(4, "w0", "w1")
    one.send("w1", signal.SIGTERM)
    one.ended()
    told = one.events("preempted")
    assert {(row["durable"], row["reason"], row["mine"]) for row in told} == {(True, "SIGTERM", True)}
    assert [row["code"] for row in one.events("exit")] == [75, 75]
    (step,) = {row["step"] for row in told}
    assert step == max(row["step"] for row in one.events("step")), "nothing is trained for nothing"
    for rank in range(2):
        one.start(rank, f"w{rank}b")
    one.ended()
    assert [rows[0]["step"] for rows in one.restores().values()] == [step]
    one.check(STEPS, EPOCHS)
    assert one.end() == calm.end()
