"""The training of a Trainer outlives its round."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.deep import deep
from tests.elastic.crew import Crew, steps_of

WORKER = "tests.elastic.transformers_worker"
STEPS, EPOCHS = 16, 4
Crews = Callable[..., Crew]


@pytest.mark.parametrize(("victim", "outer"), [(1, False), deep(0, False), deep(1, True)])
def test_a_training_goes_on_without_the_lost_worker(crew: Crews, victim: int, outer: bool) -> None:
    """`outer`: under an `elastic_run` of the user's own, that makes a new Trainer in each round."""
    one = crew(1, 3, outer=outer)
    for rank in range(3):
        one.start(rank, **({"at": ("fetched", 5), "what": "kill"} if rank == victim else {}))
    one.ended()
    assert steps_of(one) == [5], one.story()
    assert [row["world"] for row in one.events("trained")] == [2, 2], one.story()
    one.check(STEPS, EPOCHS)
    assert len({row["pid"] for row in one.events("begin")}) == 3
    assert len(one.events("recover")) == 2
    assert not any(row["alive"] for row in one.events("begin")), "the wrapped model of the round before takes memory"


def drawn(crew: Crew, who: str) -> list[tuple[int, float]]:
    """By step, what the random generator of `who` gave in the steps that are in the model."""
    rounds = crew.lineage()
    return [(row["step"], row["draw"]) for row in crew.events("micro", who=who) if row["round"] == rounds[row["step"]]]


@pytest.mark.parametrize("place", [("stepped", 8), *map(deep, [("backward", 5), ("fetched", 8), ("stepped", 5)])])
def test_a_replaced_worker_makes_it_the_undisturbed_run(crew: Crews, place: tuple[str, int]) -> None:
    """At equal world size the end is bit-equal. All draw the numbers that they would have drawn, the new one those of
    the dead. In an epoch's middle and at its end.
    """
    calm = crew(3, 3)
    for rank in range(3):
        calm.start(rank)
    calm.ended()
    calm.close()
    one = crew(3, 3)
    one.start(0)
    one.start(1, at=place, what="kill")
    one.start(2)
    one.ended("w1")
    one.start(1, "w1b")
    one.ended()
    assert steps_of(one) == [place[1]], one.story()
    one.check(STEPS, EPOCHS)
    assert [drawn(one, who) for who in ("w0", "w2")] == [drawn(calm, who) for who in ("w0", "w2")]
    assert drawn(one, "w1") + drawn(one, "w1b") == drawn(calm, "w1")
    assert one.end() == calm.end()


@pytest.mark.deep
@pytest.mark.parametrize("place", ["begin", "restored"])
def test_lost_while_others_recover(crew: Crews, place: str) -> None:
    """Before the process group is made, and when all is restored but nothing trained."""
    one = crew(1, 3)
    one.start(0)
    one.start(1, at=("fetched", 5), what="kill")
    one.start(2, at=(place, 0), what="kill", lives=[2])
    one.ended()
    assert steps_of(one)[-1] == 5, one.story()
    one.check(STEPS, EPOCHS)


@pytest.mark.deep
def test_lost_before_the_first_step(crew: Crews) -> None:
    """Nothing was saved: the Trainer begins at step 0, as if it had never trained, though its forward has counted."""
    calm = crew(2, 2, global_batch_size=12)
    for rank in range(2):
        calm.start(rank)
    calm.ended()
    calm.close()
    one = crew(1, 3, global_batch_size=12)
    for rank in range(3):
        one.start(rank, **({"at": ("backward", 0), "what": "kill"} if rank == 1 else {}))
    one.ended()
    assert steps_of(one) == [0], one.story()
    one.check(STEPS, EPOCHS)
    assert one.end() == calm.end()


def test_newcomers_are_let_in_at_a_step_boundary(crew: Crews) -> None:
    one = crew(2, 3, pace_s=0.05, epochs=8, global_batch_size=12)
    one.start(0)
    one.start(1)
    one.stepped(4, "w0", "w1")
    one.start(2)
    one.ended()
    assert [row["world"] for row in one.events("trained")] == [3, 3, 3], one.story()
    assert {row["before"] for row in one.events("resize")} == {2}
    one.check(2 * STEPS, 8)
    before = max(row["step"] for row in one.events("step") if row["world"] == 2)
    assert steps_of(one)[0] == before, "no step is lost for a newcomer"


def test_a_users_error_is_raised_and_the_others_go_on(crew: Crews) -> None:
    one = crew(1, 3)
    one.start(0)
    one.start(1, at=("fetched", 5), what="raise")
    one.start(2)
    one.ended()
    failed = [(row["who"], row["error"], row["life"]) for row in one.events("failed")]
    assert failed == [("w1", "ValueError", 1)], one.story()
    assert steps_of(one) == [5], one.story()
    one.check(STEPS, EPOCHS)


@pytest.mark.deep
def test_restart_leaves_it_to_the_launcher(crew: Crews) -> None:
    """`recover="restart"`: the survivor raises what its lost peer caused."""
    one = crew(1, 2, recover="restart")
    one.start(0)
    one.start(1, at=("fetched", 5), what="kill")
    one.ended()
    assert [row["who"] for row in one.events("failed")] == ["w0"], one.story()
    assert {row["life"] for row in one.events("begin")} <= {1}


@pytest.mark.deep
@pytest.mark.parametrize(("strategy", "step"), [("steps", 8), ("epoch", 8), ("steps", 16), ("epoch", 16)])
def test_a_fault_in_an_evaluation_costs_no_step(crew: Crews, strategy: str, step: int) -> None:
    """At an epoch's end, and at that of the training: the evaluation is made again, of all its data."""
    one = crew(1, 3, evaluates=strategy)
    for rank in range(3):
        one.start(rank, **({"at": ("validating", step), "what": "kill"} if rank == 1 else {}))
    one.ended()
    assert steps_of(one) == [step], one.story()
    one.check(STEPS, EPOCHS)
    again = [row for row in one.events("validated") if row["step"] == step and row["life"] == 2]
    assert sorted(index for row in again for index in row["ids"]) == list(range(48))
    steps = {row["step"] for row in one.events("validated", who="w0")}
    assert steps == {4, 8, 12, 16}, "none is left out"
