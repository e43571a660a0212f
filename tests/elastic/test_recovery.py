"""Survivors of a lost worker go on in their processes, at the step where they were.

Real processes, gloo, a real master and keeper; the test plays the launcher. What is asserted of every story: after each
restore all ranks hold the same parameters, buffers and optimizer state, every sample is in the model once per epoch,
and no step is lost or made twice.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.deep import deep
from tests.elastic.crew import Crew, as_if_left_alone, steps_of

STEPS, EPOCHS = 16, 4
Crews = Callable[..., Crew]


@pytest.mark.parametrize(("victim", "workers"), [(1, 2), (0, 0)])
def test_two_survivors_go_on_without_the_third(crew: Crews, victim: int, workers: int) -> None:
    """Rank 0 hosts the store; DataLoader workers inherit the sockets, and would hide their parent's death."""
    one = crew(1, 3, workers=workers)
    for rank in range(3):
        one.start(rank, **({"at": ("fetched", 5), "what": "kill"} if rank == victim else {}))
    one.ended()
    assert steps_of(one) == [5]
    assert [row["world"] for row in one.events("trained")] == [2, 2]
    one.check(STEPS, EPOCHS)
    begun = one.events("begin")
    assert len({row["pid"] for row in begun}) == 3
    assert not any(row["alive"] for row in begun), "the model of the round before takes memory"
    told = one.events("resize", "recover")
    assert {row["event"] for row in told} == {"resize", "recover"}
    assert not any(".cc:" in row["reason"] for row in told), "places in gloo's sources say nothing to a user"
    died = one.events("trouble")[0]["t"]
    assert one.stepped(6, *{f"w{rank}" for rank in range(3)} - {f"w{victim}"}, world=2)[-1]["t"] - died < 5.0


def test_the_last_survivor_trains_alone(crew: Crews) -> None:
    one = crew(1, 3)
    one.start(0)
    for rank in (1, 2):
        one.start(rank, at=("fetched", 5), what="kill")
    one.ended()
    assert steps_of(one)[-1] == 5
    one.check(STEPS, EPOCHS)


def test_lost_again_and_again(crew: Crews) -> None:
    """The second fault hits the first step of the round after; nothing but the first one's image is there then."""
    one = crew(1, 3)
    one.start(0)
    one.start(1, at=("fetched", 5), what="kill")
    one.start(2, at=("fetched", 5), what="kill", lives=[2])
    one.ended()
    assert steps_of(one) == [5, 5]
    one.check(STEPS, EPOCHS)


@pytest.mark.parametrize("place", ["begin", "grouped"])
def test_lost_while_others_recover(crew: Crews, place: str) -> None:
    """Before the process group is made (others wait for it), and before the state is restored."""
    one = crew(1, 3)
    one.start(0)
    one.start(1, at=("fetched", 5), what="kill")
    one.start(2, at=(place, 0), what="kill", lives=[2])
    one.ended()
    assert steps_of(one) == [5]
    one.check(STEPS, EPOCHS)


@pytest.mark.parametrize(
    ("victim", "place", "begun"),
    [
        *[(1, "fetched", 5), (0, "reduced", 6)],
        *[deep(0, "fetched", 5), deep(0, "backward", 5), deep(0, "stepped", 6)],
        *[deep(1, "backward", 5), deep(1, "reduced", 6), deep(1, "stepped", 6)],
    ],
)
def test_a_replaced_worker_makes_it_the_undisturbed_run(
    crew: Crews, calm: str, victim: int, place: str, begun: int
) -> None:
    """Hot recovery: the others wait for a new process, which draws the random numbers of the one that died, wherever in
    the step that was, and be the others a step ahead. At equal world size the end is bit-equal.
    """
    one = crew(3, 3)
    for rank in range(3):
        one.start(rank, **({"at": (place, 5), "what": "kill", "after_s": 0.3} if rank == victim else {}))
    one.replace(victim, f"w{victim}", "again")
    one.ended()
    assert steps_of(one) == [begun]
    one.check(STEPS, EPOCHS)
    assert one.end() == calm
    assert [row["world"] for row in one.events("trained")] == [3, 3, 3]


def test_random_numbers_of_a_step_that_a_hook_of_the_users_reduced(crew: Crews) -> None:
    """Without a hook of ours in DDP they are noted as the optimizer's step begins."""
    assert steps_of(as_if_left_alone(crew, 2, 1, ("stepped", 5), hook=True)) == [6]


@pytest.mark.parametrize(
    ("victim", "place", "begun"),
    [
        *[(1, "fetched", 5), (0, "reduced", 6)],
        *[deep(2, "fetched", 5), deep(0, "fetched", 5), deep(0, "backward", 5), deep(0, "stepped", 6)],
    ],
)
def test_batch_statistics_stay_those_of_rank_0(crew: Crews, victim: int, place: str, begun: int) -> None:
    """Each rank has its own between two steps; DDP goes on with rank 0's. So do all, whichever died, wherever: also
    rank 0 itself, a step behind the others.
    """
    one = as_if_left_alone(crew, 3, victim, (place, 5), norm=True)
    assert steps_of(one) == [begun]
    assert all(len({row["state"] for row in rows}) == 1 for rows in one.restores().values())


def test_who_replaces_one_that_was_a_step_ahead_goes_back_with_the_others(crew: Crews, calm: str) -> None:
    """It has made step 6 and dies. The others have all that this step takes, hear of it, and do not make it."""
    one = crew(3, 3)
    one.start(0, at=("reduced", 5), what="hear")
    one.start(1, at=("fetched", 6), what="kill")
    one.start(2, at=("reduced", 5), what="hear")
    one.replace(1, "w1", "again")
    one.ended()
    assert steps_of(one) == [5]
    one.check(STEPS, EPOCHS)
    assert one.end() == calm


def test_a_copy_is_under_way_at_the_fault(crew: Crews, calm: str) -> None:
    """A lazy save is half copied, behind the step, when a peer dies: it is neither restored nor waited for in
    vain. At equal world size the end is bit-equal to that of the run that was left alone.
    """
    one = crew(3, 3, snapshot="lazy", save_every=5, copy_held=5)
    one.start(0)
    one.start(1, at=("fetched", 5), what="hold")
    one.start(2)
    one.until(lambda: {"w0", "w2"} <= {row["who"] for row in one.events("copying")})
    one.send("w1", signal.SIGKILL)
    one.ended("w1")
    one.start(1, "w1b", newcomer=True)
    one.ended()
    again = min(row["t"] for row in one.events("begin") if row["life"] == 2)
    assert all(row["t"] < again for row in one.events("copied")), "the model is let go of once it is copied"
    assert steps_of(one) == [5]
    one.check(STEPS, EPOCHS)
    assert one.end() == calm


@pytest.mark.parametrize("apart", [False, True])
def test_a_stopped_worker_is_cut_off_by_its_lease(crew: Crews, apart: bool) -> None:
    """On nodes of their own one of the others waits for what the stopped one tells."""
    one = crew(1, 3, lease_s=1.5)
    one.start(0, alone=apart)
    one.start(1, alone=apart, at=("fetched", 5), what="stop")
    one.start(2, alone=apart)
    one.stepped(6, "w0", "w2", world=2)
    stopped = one.events("trouble")[0]["t"]
    assert one.stepped(6, "w0", "w2", world=2)[-1]["t"] - stopped < 6.0
    one.ended("w0", "w2")
    one.send("w1", signal.SIGCONT)
    one.ended()
    assert [row["who"] for row in one.events("failed")] == ["w1"], "who comes back late must not train on"
    assert steps_of(one) == [5]
    one.check(STEPS, EPOCHS)


def test_a_users_error_is_raised_and_the_others_go_on(crew: Crews) -> None:
    one = crew(1, 3)
    one.start(0)
    one.start(1, at=("fetched", 5), what="raise")
    one.start(2)
    one.ended()
    failed = one.events("failed")
    assert [(row["who"], row["error"], row["life"]) for row in failed] == [("w1", "ValueError", 1)]
    assert steps_of(one) == [5]
    one.check(STEPS, EPOCHS)


def test_a_survivor_that_is_a_step_ahead_is_followed(crew: Crews) -> None:
    """Rank 0 has made step 6 when rank 2 fails in it: the greatest committed step is the one that all go on from."""
    one = crew(1, 3)
    one.start(0)
    one.start(1, at=("reduced", 5), what="kill", after_s=1.0)
    one.start(2, at=("reduced", 5), what="fail", after_s=1.0)
    one.ended()
    assert steps_of(one) == [6]
    one.check(STEPS, EPOCHS)


def test_newcomers_are_let_in_at_a_quiet_point(crew: Crews) -> None:
    one = crew(2, 3, pace_s=0.05, epochs=8)
    one.start(0)
    one.start(1)
    one.stepped(4, "w0", "w1")
    one.start(2)
    one.ended()
    assert [row["world"] for row in one.events("trained")] == [3, 3, 3]
    assert {row["before"] for row in one.events("resize")} == {2}
    one.check(2 * STEPS, 8)
    begun = steps_of(one)[0]
    before = max(row["step"] for row in one.events("step") if row["world"] == 2)
    assert begun == before, "no step is lost for a newcomer"


@pytest.mark.parametrize("kind", ["accelerate", deep("fabric")])
def test_accelerate_and_fabric_need_one_more_line(crew: Crews, kind: str) -> None:
    """Under `elastic_run`: Accelerate forgets rank and process group between two lives."""
    one = crew(1, 3, kind=kind, global_batch_size=12)
    one.start(0)
    one.start(1, at=("fetched", 5), what="kill")
    one.start(2)
    one.ended()
    assert steps_of(one) == [5]
    one.check(STEPS, EPOCHS)
    assert not any(row["alive"] for row in one.events("begin")), "the model of the round before takes memory"


@pytest.mark.parametrize("kind", [deep("leased"), deep("leased_fabric"), "sharded"])
def test_what_survivors_cannot_put_together_is_said_before_a_fault(crew: Crews, kind: str) -> None:
    """The launcher asks the master which of them recover, and ends the others: so none of them may go on by itself."""
    one = crew(2, 2, kind=kind, save_every=1)
    for rank in range(2):
        one.start(rank, at=("fetched", 2), what="hold")
    one.until(lambda: len(one.events("trouble")) == 2)
    assert [(member.attached, member.recovers) for member in one.view().members] == [(True, False)] * 2
    one.send("w1", signal.SIGKILL)
    one.ended("w1")
    one.release()
    one.ended()
    assert [row["who"] for row in one.events("failed")] == ["w0"]
    assert one.view().round == 1
