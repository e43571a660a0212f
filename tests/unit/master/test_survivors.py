"""Workers that keep their process speak for themselves."""

from __future__ import annotations

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core import dispatch, views
from dlrover_hooks.master.core.effects import Wake, watch_topic
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.testing import MasterFake
from tests.e2e.job_script import RUN, join


def trains(*, recovers: bool = True, low: int = 1, high: int = 3) -> MasterFake:
    """Three workers of one launcher train; the last call would be long."""
    master = MasterFake()
    master.call(join("launcher", 3, lives="w", node="a", low=low, high=high, last_call_s=60.0))
    master.advance(60.0)
    for worker in ("w0", "w1", "w2"):
        master.call(p.Attach("job", worker, "a", 1, recovers=recovers))
    assert master.call(p.ShowJob("job")).phase is p.Phase.TRAINING
    return master


def comes(name: str, local_rank: int, *, low: int = 1, high: int = 3, launcher: str = "launcher") -> p.Join:
    seat = p.Seat(name, local_rank)
    return join(name, seats=(seat,), node="a", low=low, high=high, last_call_s=60.0, launcher=launcher)


def ranks(master: MasterFake, *names: str, after: int = 1) -> list[int]:
    seated = [master.call(p.AwaitRound("job", name, after, timeout_s=0.0)) for name in names]
    assert all(one.round for one in seated)
    return [one.ranks[0] for one in seated]


def told(master: MasterFake, ask: p.Watch) -> p.Notice | None:
    found = views.query(master.state, master.nodes, ask)
    assert found is None or isinstance(found, p.Notice)
    return found


def test_survivors_join_for_themselves_and_wait_for_nobody_else() -> None:
    """No last call once all that live are back; the oldest gets rank 0, the others keep theirs."""
    master = trains()
    master.call(p.Exited("job", "launcher", "w0", -9))
    master.call(comes("w1", 1))
    assert master.call(p.AwaitRound("job", "w1", 1, timeout_s=0.0)).round is None
    master.call(comes("w2", 2))
    assert ranks(master, "w1", "w2") == [0, 1]
    assert master.call(p.ShowJob("job")).round == 2


def test_a_replaced_worker_takes_the_rank_of_its_place() -> None:
    master = trains(low=3)
    master.call(p.Exited("job", "launcher", "w1", -9))
    for name, local_rank in (("w0", 0), ("w2", 2), ("new", 1)):
        master.call(comes(name, local_rank, low=3))
    assert ranks(master, "w0", "new", "w2") == [0, 1, 2]


def test_with_a_fixed_world_survivors_wait_for_the_replacement() -> None:
    master = trains(low=3)
    master.call(p.Exited("job", "launcher", "w1", -9))
    for name, local_rank in (("w0", 0), ("w2", 2)):
        master.call(comes(name, local_rank, low=3))
    master.advance(120.0)
    assert master.call(p.ShowJob("job")).round == 1


def test_who_started_it_is_believed_though_it_joined_for_itself() -> None:
    """A launcher has no seats of its own any more; a stranger's word does not count."""
    master = trains()
    master.call(p.Exited("job", "launcher", "w0", -9))
    for name, local_rank in (("w1", 1), ("w2", 2)):
        master.call(comes(name, local_rank))
    for name in ("w1", "w2"):
        master.call(p.Attach("job", name, "a", 1, recovers=True))
    with pytest.raises(Stale):
        master.call(p.Exited("job", "stranger", "w1", -9))
    with pytest.raises(BadRequest):
        master.call(p.Exited("job", "w2", "w1", -9))
    assert not master.call(p.Heartbeat("job", "w2")).broken
    master.call(p.Exited("job", "launcher", "w1", -9))
    assert master.call(p.Heartbeat("job", "w2")).broken


def test_newcomers_are_told_of_once_and_only_to_who_can_let_them_in() -> None:
    """The members leave at their next step boundary, and the round grows."""
    for recovers in (True, False):
        master = trains(recovers=recovers, high=4)
        ask = p.Watch("job", "w0")
        master.call(comes("new", 3, high=4))
        assert master.call(p.Heartbeat("job", "w0")).waiting == 1
        notice = told(master, ask)
        assert notice == (p.Notice(1, waiting=1) if recovers else None)
        if notice is not None:
            assert told(master, ask.told(notice)) is None
            master.call(p.Leave("job", "new", p.Departure.STOPPED))
            assert told(master, ask.told(notice)) == p.Notice(1)


def test_nobody_is_told_of_whom_there_is_no_room_for() -> None:
    master = trains(high=3)
    master.call(comes("new", 3, high=3))
    assert master.call(p.Heartbeat("job", "w0")).waiting == 0


def test_who_cannot_recover_after_all_leaves_newcomers_to_its_agent() -> None:
    """Leased data comes after the seat with some frameworks: Attach again says so. It never takes it back."""
    master = trains(high=4)
    master.call(comes("new", 3, high=4))
    ask = p.Watch("job", "launcher")
    assert told(master, ask) is None
    for worker in ("w0", "w1", "w2"):
        outcome = dispatch.apply(master.state.jobs["job"], p.Attach("job", worker, "a", 1), 0.0)
        assert Wake(topic=watch_topic("job")) in outcome.effects
        master.call(p.Attach("job", worker, "a", 1, recovers=True))
    assert not any(member.recovers for member in master.call(p.ShowJob("job")).members)
    assert told(master, ask) == p.Notice(1, waiting=1)


def test_a_member_that_joins_again_breaks_the_round_for_all() -> None:
    master = trains(high=4)
    master.call(comes("new", 3, high=4))
    master.call(comes("w0", 0, high=4))
    assert told(master, p.Watch("job", "w1")) == p.Notice(1, broken=True)
    for name, local_rank in (("w1", 1), ("w2", 2)):
        master.call(comes(name, local_rank, high=4))
    assert ranks(master, "w0", "w1", "w2", "new") == [0, 1, 2, 3]


def test_a_launcher_that_starts_all_anew_gives_up_who_had_joined_for_itself() -> None:
    """It ended them, although one had come back: the round is of new processes only."""
    master = trains(low=2)
    master.call(p.Exited("job", "launcher", "w0", -9))
    master.call(comes("w1", 1, low=2))
    master.call(join("launcher", 3, lives="v", node="a", low=2, high=3, last_call_s=0.0))
    assert master.call(p.AwaitRound("job", "launcher", 1, timeout_s=0.0)).ranks == (0, 1, 2)
    with pytest.raises(Stale):
        master.call(p.AwaitRound("job", "w1", 1, timeout_s=0.0))


def test_one_lone_image_is_enough_where_all_reach_it() -> None:
    """Newer than what is complete, though the dead rank never voted. At one step, all ranks' own are better."""
    whole = tuple(p.Held(p.Generation(1, 5, RUN), rank, 3, rank, 0) for rank in range(3))
    for step, world_size in ((7, 1), (5, 3)):
        lone = p.Held(p.Generation(1, step, RUN), 0, 1, 2, 1)
        master = trains()
        master.call(p.Exited("job", "launcher", "w0", -9))
        for name, local_rank in (("w1", 1), ("w2", 2)):
            master.call(comes(name, local_rank))
        master.call(p.Attach("job", "w1", "a", 1, recovers=True, held=(*whole, lone)))
        master.call(p.Attach("job", "w2", "a", 1, recovers=True))
        plan = master.call(p.AwaitPlan("job", "w1", timeout_s=0.0))
        found = plan.restore
        assert found is not None
        assert (found.generation.step, found.world_size, found.source) == (step, world_size, p.Source.MEMORY)


def test_newcomers_that_came_before_the_round_trained_are_told_of_when_it_does() -> None:
    """A watch is open all the time: it has to be woken."""
    job = Job("job", RUN)
    for name in ("w0", "new"):
        seat = p.Seat(name, 0)
        dispatch.apply(job, join(name, seats=(seat,), node=name, low=1, high=2), 0.0)
    outcome = dispatch.apply(job, p.Attach("job", "w0", "w0", 1, recovers=True), 0.0)
    assert job.rounds.round is not None
    assert job.rounds.round.phase is p.Phase.TRAINING
    assert Wake(topic=watch_topic("job")) in outcome.effects


def test_where_local_rank_0_is_gone_the_next_one_answers_for_the_node() -> None:
    """Else nobody says which samples are in the model, and they are trained again."""
    master = trains()
    master.call(p.Exited("job", "launcher", "w0", -9))
    for name, local_rank in (("w1", 1), ("w2", 2)):
        master.call(comes(name, local_rank))
    whole = tuple(p.Held(p.Generation(1, 5, RUN), rank, 3, rank, 0) for rank in range(3))
    for name in ("w1", "w2"):
        master.call(p.Attach("job", name, "a", 1, recovers=True, held=whole))
    plans = [master.call(p.AwaitPlan("job", name, timeout_s=0.0)).restore for name in ("w1", "w2")]
    assert [plan.answers for plan in plans if plan is not None] == [(0, 1, 2), ()]
