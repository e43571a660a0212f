"""The replacement of a lost worker draws its random numbers (decision 0015): stories of more than one fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.deep import deep
from tests.elastic.crew import Crew, as_if_left_alone, steps_of
from tests.elastic.test_recovery import EPOCHS, STEPS

Crews = Callable[..., Crew]


def test_the_round_after_loses_one_before_its_first_step_is_over(crew: Crews, calm: str) -> None:
    """Rank 0 has made step 6 when the others are left in it: they have a note of within that step alone, and begin the
    step after, which is lost, too: within that one they have noted something else.
    """
    one = crew(3, 3)
    one.start(0)
    one.start(1, at=("reduced", 5), what="kill", after_s=1.0)
    one.start(2, at=("reduced", 5), what="fail", after_s=1.0)
    one.replace(1, "w1", "again", at=("fetched", 6), what="kill", after_s=0.3)
    one.replace(1, "again", "anew")
    one.ended()
    assert steps_of(one) == [6, 6]
    one.check(STEPS, EPOCHS)
    assert one.end() == calm


def test_lost_before_the_first_step_is_over(crew: Crews, calm: str) -> None:
    """The script has seeded the generators before its function was called: each call finds them so."""
    one = crew(3, 3, seeded=True)
    one.start(0)
    one.start(1, at=("backward", 0), what="kill")
    one.start(2)
    one.replace(1, "w1", "again")
    one.ended()
    assert one.end() == calm


def test_at_the_end_of_an_epoch(crew: Crews, calm: str) -> None:
    """Twice: as an epoch ends, and in the first step of the next one."""
    one = crew(3, 3)
    one.start(0)
    one.start(1, at=("stepped", 3), what="kill", after_s=0.3)
    one.start(2)
    one.replace(1, "w1", "again", at=("fetched", 8), what="kill")
    one.replace(1, "again", "anew")
    one.ended()
    one.check(STEPS, EPOCHS)
    assert one.end() == calm


@pytest.mark.parametrize(("place", "step"), [("fetched", 1), ("stepped", 1)])
def test_lost_in_the_first_steps(crew: Crews, calm: str, place: str, step: int) -> None:
    """There is memory for notes before there is any for images."""
    one = crew(3, 3)
    one.start(0)
    one.start(1, at=(place, step), what="kill", after_s=0.3)
    one.start(2)
    one.replace(1, "w1", "again")
    one.ended()
    one.check(STEPS, EPOCHS)
    assert one.end() == calm


@pytest.mark.parametrize("place", [deep("grouped"), deep("fetched"), "stepped"])
def test_a_replacement_dies_early(crew: Crews, calm: str, place: str) -> None:
    """Before anything is restored, in its first step, or behind that; and the next one, too."""
    one = crew(3, 3)
    one.start(0)
    one.start(1, at=("stepped", 5), what="kill", after_s=0.3)
    one.start(2)
    one.replace(1, "w1", "again", at=(place, 0 if place == "grouped" else 6), what="kill", after_s=0.2)
    one.replace(1, "again", "anew", at=("stepped", 7), what="kill", after_s=0.2)
    one.replace(1, "anew", "last")
    one.ended()
    one.check(STEPS, EPOCHS)
    assert one.end() == calm


def test_rank_0_is_lost_again_and_again(crew: Crews) -> None:
    """The second time before a step is made, the third time where its seat is not the lowest: a lone image of the
    lowest seat, which belongs to the newest process, is not that of rank 0 any more.
    """
    ends: list[str] = []
    for shot in (False, True):
        one = crew(3, 3, norm=True)
        one.start(0, **({"at": ("stepped", 5), "what": "kill", "after_s": 0.3} if shot else {}))
        one.start(1, **({"at": ("fetched", 6), "what": "kill", "after_s": 0.3, "lives": [2]} if shot else {}))
        one.start(2, **({"at": ("stepped", 8), "what": "kill", "after_s": 0.3, "lives": [3]} if shot else {}))
        if shot:
            one.replace(0, "w0", "first")
            one.replace(1, "w1", "second")
            one.replace(2, "w2", "third")
        one.ended()
        ends.append(one.end())
        one.close()
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("victim", "norm"), [(0, True), deep(0, False), deep(1, False), deep(1, True)])
def test_each_worker_has_a_node_of_its_own(crew: Crews, victim: int, norm: bool) -> None:
    """Without rank 0 the others change ranks: what each needs to go on with its new one was noted on another node."""
    as_if_left_alone(crew, 3, victim, ("reduced", 5), apart=True, norm=norm)


def test_what_a_node_has_itself_counts_more_than_what_it_told(crew: Crews) -> None:
    """Told was the state of within the step. Behind that another number was drawn; ranks change nodes."""
    as_if_left_alone(crew, 3, 0, ("fetched", 6), apart=True, draws=True)


@pytest.mark.deep
def test_on_nodes_of_their_own_two_are_lost_before_the_first_step(crew: Crews, calm: str) -> None:
    """What came from another node is noted, too: the next round begins from there again."""
    one = crew(3, 3)
    one.start(0, alone=True, at=("stepped", 5), what="kill", after_s=0.3)
    one.start(1, alone=True)
    one.start(2, alone=True)
    one.replace(0, "w0", "again", alone="w0", at=("fetched", 6), what="kill", after_s=0.3)
    one.replace(0, "again", "anew", alone="w0")
    one.ended()
    assert steps_of(one) == [6, 6]
    one.check(STEPS, EPOCHS)
    assert one.end() == calm


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        (0, "reduced"),
        (1, "stepped"),
        *(deep(*case) for case in [(0, "fetched"), (0, "stepped"), (1, "fetched"), (1, "reduced")]),
    ],
)
def test_a_whole_node_is_lost_with_what_its_worker_noted(crew: Crews, victim: int, place: str) -> None:
    """Another node was told of it before anybody could make that step."""
    as_if_left_alone(crew, 3, victim, (place, 5), lost=True, norm=True)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), deep((2, 2)), deep((1, 3))])
def test_a_node_of_several_workers_is_lost(crew: Crews, sizes: tuple[int, int]) -> None:
    """The first one. The other one's workers share out what they are told, and have the lowest ranks next."""
    ends: list[str] = []
    for lost in (False, True):
        one = crew(sum(sizes), sum(sizes))
        trouble = {"at": ("reduced", 5), "what": "kill", "after_s": 0.3} if lost else {}
        for node, size in zip("ab", sizes, strict=True):
            for local in range(size):
                one.start(local, f"{node}{local}", alone=node, among=size, **(trouble if node == "a" else {}))
        if lost:
            one.ended(*(f"a{local}" for local in range(sizes[0])))
            one.lose("a")
            for local in range(sizes[0]):
                one.start(local, f"c{local}", alone="c", among=sizes[0])
        one.ended()
        assert one.samples(EPOCHS) == [list(range(48))] * EPOCHS
        ends.append(one.end())
        one.close()
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("first_node", "second"),
    [deep(False, "w1"), (True, "again"), deep(False, "w2"), deep(False, "again"), deep(True, "w1"), deep(True, "w2")],
)
def test_two_are_lost_before_the_first_step(crew: Crews, calm: str, first_node: bool, second: str) -> None:
    """The first with or without its node, then a survivor or what came in its place, with its node: what a life begins
    from is told when it begins.
    """
    one = crew(3, 3)
    again: dict[str, Any] = {"at": ("fetched", 6), "what": "kill", "after_s": 0.3}
    one.start(0, alone=True, at=("stepped", 5), what="kill", after_s=0.3)
    later: dict[str, Any] = again | {"lives": [2]}
    for rank in (1, 2):
        one.start(rank, alone=True, **(later if second == f"w{rank}" else {}))
    one.ended("w0")
    if first_node:
        one.lose("w0")
    one.start(0, "again", alone=True if first_node else "w0", **(again if second == "again" else {}))
    one.ended(second)
    one.lose("w0" if second == "again" and not first_node else second)
    one.start(1, "anew", alone=True)
    one.ended()
    assert steps_of(one) == [6, 6]
    one.check(STEPS, EPOCHS)
    assert one.end() == calm


def test_what_was_lost_with_a_node_is_said(crew: Crews) -> None:
    """DDP has a communication hook of the user, so no random state is replicated: the run ends with other weights."""
    one = crew(2, 2, hook=True)
    one.start(0, alone=True)
    one.start(1, alone=True, at=("stepped", 5), what="kill", after_s=0.3)
    one.ended("w1")
    one.lose("w1")
    before = len(one.zygote.log.read_text())
    one.start(1, "again", alone=True)
    one.ended()
    one.check(STEPS, EPOCHS)
    rank = one.events("begin", who="w1")[0]["rank"]  # of two nodes, the first to join has rank 0
    assert f"rank {rank}: its random state was lost with its node" in one.zygote.log.read_text()[before:]


@pytest.mark.parametrize(
    ("kind", "victim"), [("accelerate", 0), deep("fabric", 0), deep("accelerate", 1), deep("fabric", 1)]
)
def test_under_a_framework_a_whole_node_is_lost(crew: Crews, kind: str, victim: int) -> None:
    as_if_left_alone(crew, 2, victim, ("fetched", 5), lost=True, kind=kind)


@pytest.mark.deep
def test_the_keeper_was_killed_before(crew: Crews, calm: str) -> None:
    """Notes are of use in the memory of the keeper that is there, though nothing is saved in it yet."""
    one = crew(3, 3, pace_s=0.2)
    one.start(0)
    one.start(1, at=("fetched", 14), what="kill")
    one.start(2, at=("fetched", 5), what="hold")
    one.until(lambda: one.events("trouble"))
    one.new_keeper("n0")
    one.release()
    one.replace(1, "w1", "again")
    one.ended()
    one.check(STEPS, EPOCHS)
    assert one.end() == calm


def test_a_second_call_has_nothing_left_to_train(crew: Crews) -> None:
    """To end the process as one that came too late would leave out the rest of the script without a word."""
    one = crew(1, 1, calls=2)
    one.start(0)
    one.ended()
    (failed,) = one.events("failed")
    assert failed["error"] == "UsageError"
    assert "this process has trained it itself" in failed["text"]
    one.check(STEPS, EPOCHS)
