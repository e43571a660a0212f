"""A Lightning fit outlives its round, by one callback."""

from __future__ import annotations

import csv
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deep import deep
from tests.elastic.crew import Crew, as_if_left_alone, steps_of

WORKER = "tests.elastic.lightning_worker"
STEPS, EPOCHS, MICRO = 16, 4, 32
Crews = Callable[..., Crew]


@pytest.mark.parametrize(("victim", "outer"), [(1, False), deep(0, False), deep(1, True)])
def test_a_fit_goes_on_without_the_lost_worker(crew: Crews, victim: int, outer: bool) -> None:
    """`outer`: under an `elastic_run` of the user's own, that makes a new Trainer in each life."""
    one = crew(1, 3, outer=outer, workers=2 * outer)
    for rank in range(3):
        one.start(rank, **({"at": ("fetched", 5), "what": "kill"} if rank == victim else {}))
    one.ended()
    assert steps_of(one) == [5], one.story()
    assert [row["world"] for row in one.events("trained")] == [2, 2]
    one.check(STEPS, EPOCHS)
    begun = one.events("begin")
    assert len({row["pid"] for row in begun}) == 3
    assert not any(row["alive"] for row in begun), "the wrapped model of the round before takes memory"
    assert len(one.events("recover")) == 2


def test_hooks_that_add_to_checkpoints_are_called_for_saves_only(crew: Crews) -> None:
    """In the middle of a step they would add what they know there, so the newest save is restored."""
    one = crew(1, 3, adds=True, save_every=4)
    for rank in range(3):
        one.start(rank, **({"at": ("fetched", 6), "what": "kill"} if rank == 1 else {}))
    one.ended()
    assert steps_of(one) == [4], one.story()
    one.check(STEPS, EPOCHS)
    assert {row["counted"] for row in one.events("trained")} == {4 * 2 + 12 * 3}
    asked = [row["step"] for row in one.events("asked", who="w0") if row["life"] == 1]
    assert set(asked) <= {0, 1, 4}, "at the start, when the room for saves is made, and for the save"


@pytest.mark.deep
def test_hooks_that_add_to_checkpoints_are_called_when_newcomers_are_let_in(crew: Crews) -> None:
    """That is between two steps: none is lost."""
    one = crew(2, 3, adds=True, pace_s=0.05, epochs=8, global_batch_size=12)
    one.start(0)
    one.start(1)
    one.stepped(4, "w0", "w1")
    one.start(2)
    one.ended()
    before = max(row["step"] for row in one.events("step") if row["world"] == 2)
    assert steps_of(one)[0] == before, one.story()
    one.check(2 * STEPS, 8)
    assert {row["counted"] for row in one.events("trained")} == {before * 3 + (2 * STEPS - before) * 2}


def drawn(crew: Crew, who: str) -> list[tuple[int, float]]:
    """By step, what the random generator of `who` gave in the steps that are in the model."""
    rounds = crew.lineage()
    return [(row["step"], row["draw"]) for row in crew.events("micro", who=who) if row["round"] == rounds[row["step"]]]


@pytest.mark.parametrize(
    "place", [("stepped", 8), *map(deep, [("validating", 8), ("backward", 5), ("fetched", 8), ("stepped", 5)])]
)
def test_a_replaced_worker_makes_it_the_undisturbed_run(crew: Crews, tmp_path: Path, place: tuple[str, int]) -> None:
    """At equal world size the end is bit-equal; the user's own checkpoints are neither doubled nor left out. All draw
    the numbers that they would have drawn, the new one those of the dead. In an epoch's middle, at its start, within
    DDP's own collectives, ahead of a validation, in the one that a learning rate follows from.
    """
    plateau = place[0] == "validating"
    calm = crew(3, 3, files=str(tmp_path / "calm"), plateau=plateau)
    for rank in range(3):
        calm.start(rank)
    calm.ended()
    calm.close()
    one = crew(3, 3, files=str(tmp_path / "one"), plateau=plateau)
    one.start(0)
    one.start(1, at=place, what="kill")
    one.start(2)
    one.ended("w1")
    one.start(1, "w1b")
    one.ended()
    assert steps_of(one) == [place[1]], one.story()
    one.check(STEPS, EPOCHS)
    assert all(row["cut"] == row["cursor"] for rows in one.restores().values() for row in rows), "Lightning has its own"
    assert [drawn(one, who) for who in ("w0", "w2")] == [drawn(calm, who) for who in ("w0", "w2")]
    assert drawn(one, "w1") + drawn(one, "w1b") == drawn(calm, "w1")
    assert one.end() == calm.end()
    assert [row["counted"] for row in one.events("trained")] == [MICRO] * 3, "what a callback keeps is of that step"
    names = [sorted(path.name for path in (tmp_path / run).iterdir()) for run in ("calm", "one")]
    assert names[0] == names[1]
    assert len(names[0]) == STEPS // 4


@pytest.mark.deep
@pytest.mark.parametrize("place", ["fetched", "stepped"])
def test_batch_statistics_of_a_lost_rank_0(crew: Crews, place: str) -> None:
    """All go on with what it had, whether the others are with it in that step or in the next one."""
    as_if_left_alone(crew, 3, 0, (place, 5), norm=True)


@pytest.mark.deep
@pytest.mark.parametrize("victim", [0, 2])
def test_a_whole_node_is_lost_with_what_its_worker_noted(crew: Crews, victim: int) -> None:
    """Another node was told of it."""
    as_if_left_alone(crew, 3, victim, ("stepped", 5), lost=True, norm=True)


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
    assert not any(row["alive"] for row in one.events("begin")), "the wrapped model of the round before takes memory"


@pytest.mark.deep
def test_lost_before_the_first_step(crew: Crews) -> None:
    """Nothing was saved: each Trainer begins at step 0, as if it had never fitted, though its forward has counted."""
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


def test_the_log_of_a_lost_rank_0_goes_on(crew: Crews, tmp_path: Path) -> None:
    """In the same folder and by another rank, each step once."""
    one = crew(1, 3, rows=str(tmp_path / "rows"))
    for rank in range(3):
        one.start(rank, **({"at": ("fetched", 6), "what": "kill"} if rank == 0 else {}))
    one.ended()
    one.check(STEPS, EPOCHS)
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["version_0"]
    with (tmp_path / "rows" / "version_0" / "metrics.csv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    assert steps == list(range(STEPS))


@pytest.mark.deep
def test_newcomers_are_let_in_at_a_quiet_point(crew: Crews) -> None:
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
    assert [(row["who"], row["error"], row["life"]) for row in one.events("failed")] == [("w1", "ValueError", 1)]
    assert steps_of(one) == [5], one.story()
    one.check(STEPS, EPOCHS)


def test_weights_of_a_step_that_is_nowhere_are_not_trained_on(crew: Crews) -> None:
    """A collective of the user's own behind each step, and nothing saved: the model has a step in it that would be made
    again. The workers fail, and the launcher starts them again.
    """
    one = crew(1, 3, talks=True)
    for rank in range(3):
        one.start(rank, **({"at": ("stepped", 1), "what": "kill"} if rank == 1 else {}))
    one.ended()
    assert {(row["who"], row["error"]) for row in one.events("failed")} >= {("w0", "RoundEnded")}, one.story()
    assert not one.events("trained")


def test_restart_leaves_it_to_the_launcher(crew: Crews) -> None:
    """`recover="restart"`: the survivor raises what its lost peer caused."""
    one = crew(1, 2, recover="restart")
    one.start(0)
    one.start(1, at=("fetched", 5), what="kill")
    one.ended()
    assert [row["who"] for row in one.events("failed")] == ["w0"], one.story()
    assert {row["life"] for row in one.events("begin")} == {1}


@pytest.mark.deep
@pytest.mark.parametrize(("every", "step"), [(1.0, 4), (4, 2), (4, 6)])
def test_a_fault_in_a_validation_costs_no_step(crew: Crews, every: float, step: int) -> None:
    """At an epoch's end and in its middle; the validation is made again, of all its data, and training goes on in
    training mode.
    """
    one = crew(1, 3, validate=every)
    for rank in range(3):
        one.start(rank, **({"at": ("validating", step), "what": "kill"} if rank == 1 else {}))
    one.ended()
    assert steps_of(one) == [step], one.story()
    one.check(STEPS, EPOCHS)
    again = [row for row in one.events("validated") if row["step"] == step and row["life"] == 2]
    assert sorted(index for row in again for index in row["ids"]) == list(range(48))
    assert all(all(row["modes"]) for row in one.events("modes"))
    steps = [row["step"] for row in one.events("validated", who="w0") if row["life"] == 2]
    assert sorted(set(steps)) == list(range(step, STEPS + 1, 2 if every == 4 else 4)), "none is left out"


@pytest.mark.deep
def test_who_is_lost_in_a_validation_that_the_others_have_made(crew: Crews) -> None:
    """It has no collectives, so they are in the next step. All make it again, with the random numbers of before it."""
    calm = crew(3, 3, apart=True)
    for rank in range(3):
        calm.start(rank)
    calm.ended()
    calm.close()
    one = crew(3, 3, apart=True)
    one.start(0, newcomer=True)
    one.until(lambda: one.waits("w0"))  # rank 0: Lightning broadcasts from it before each batch
    one.start(1, at=("validating", 4), what="hold")
    one.start(2, at=("fetched", 4), what="hear")
    one.until(lambda: len(one.events("trouble")) == 2)
    one.send("w1", signal.SIGKILL)
    one.ended("w1")
    one.start(1, "again")
    one.ended()
    assert steps_of(one) == [4], one.story()
    one.check(STEPS, EPOCHS)
    assert one.end() == calm.end()


@pytest.mark.deep
def test_a_ckpt_path_is_where_the_first_life_begins(crew: Crews, tmp_path: Path) -> None:
    """A later one goes on from where the fault came, although Lightning is given the same path again."""
    calm = crew(3, 3, files=str(tmp_path))
    for rank in range(3):
        calm.start(rank)
    calm.ended()
    calm.close()
    one = crew(1, 3, ckpt=str(tmp_path / "epoch=0-step=4.ckpt"))
    for rank in range(3):
        one.start(rank, **({"at": ("fetched", 6), "what": "kill"} if rank == 1 else {}))
    one.ended()
    begun = [row["step"] for row in one.events("restored", who="w0")]
    assert begun == [4, 6], one.story()
    assert {row["step"] for row in one.events("trained")} == {STEPS}


@pytest.mark.deep
@pytest.mark.parametrize("step", [6, 8])
def test_a_newcomer_with_a_ckpt_path_goes_on_where_the_others_are(crew: Crews, tmp_path: Path, step: int) -> None:
    """It is given the path as they were, but they have made steps since: with the path's state it would be apart.

    Step 8 is the last one of an epoch. From there the fit once made an epoch too many.
    """
    calm = crew(2, 2, files=str(tmp_path), global_batch_size=12)
    for rank in range(2):
        calm.start(rank)
    calm.ended()
    calm.close()
    path = str(tmp_path / "epoch=0-step=4.ckpt")
    one = crew(2, 3, epochs=8, global_batch_size=12, ckpt=path)
    one.start(0, at=("stepped", step), what="hold")
    one.start(1)
    one.until(lambda: one.events("trouble"))
    one.start(2, newcomer=True)
    one.until(lambda: one.waits("w2"))
    one.release()
    one.ended()
    assert [row["world"] for row in one.events("trained")] == [3, 3, 3], one.story()
    assert {row["step"] for row in one.events("trained")} == {2 * STEPS}
    assert len({row["state"] for row in one.events("trained")}) == 1
    (rows,) = one.restores().values()
    assert len({(row["state"], row["step"], row["cursor"]) for row in rows}) == 1, rows
    assert rows[0]["step"] == step


@pytest.mark.deep
def test_exit_code_0_of_all_is_their_end(crew: Crews) -> None:
    """`sys.exit(0)` in a hook of the module: nobody is lost, no round breaks, and nothing is started again."""
    one = crew(2, 2)
    for rank in range(2):
        one.start(rank, at=("stepped", 3), what="exit")
    one.ended()
    view = one.view()
    assert [(member.gone, member.exit_code) for member in view.members] == [("exited", 0)] * 2
    assert (view.failures, view.finished) == (0, False)
