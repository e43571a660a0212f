"""All ranks leave at the step boundary of one step, whenever each hears that somebody is preempted.

The real core, the real worker's side; the schedule of background threads and training threads is drawn.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import job_registry, views
from dlrover_hooks.master.core.events import Lost
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.worker.preemption import Passage, Preemption, affordable
from tests.e2e.job_script import attach, join


class Blocked(Exception):
    """The training thread would wait here."""


class Core:
    """The master as one rank calls it; a long-poll that has nothing to tell raises Blocked."""

    def __init__(self, ranks: int) -> None:
        self.state, self.nodes, self.now = job_registry.Master(), Nodes(lease_s=10.0, suspicion_s=0.5), 1000.0
        self.call(join(count=ranks, low=ranks, high=ranks))
        for rank in range(ranks):
            self.call(attach(f"w{rank}"))

    def call(self, request: p.Message, *_: object, **__: object) -> Any:
        if p.Routes.by_request[type(request)].event:
            return job_registry.apply(self.state, request, self.now).reply
        reply = views.query(self.state, self.nodes, request)
        if reply is None:
            raise Blocked
        return reply


class Rank:
    """One worker: `passed` is the step boundary behind which it trains, `left` where it left."""

    def __init__(self, core: Core, rank: int) -> None:
        self.core, self.name = core, f"w{rank}"
        self.preemption = Preemption("job", self.name, f"node-{rank}", 1000.0)
        self.preemption.gate.begin(0)
        self.passed, self.left = -1, -1

    def beat(self) -> None:
        self.preemption.summon(self.core.call(p.Heartbeat("job", self.name)).parting)
        self.preemption.speak(lambda request, _: self.core.call(request))

    def arrive(self) -> None:
        """The training thread comes to its next step boundary."""
        if self.preemption.leaves_at(self.passed + 1, self.core):  # pyright: ignore[reportArgumentType]
            self.left = self.passed + 1
        else:
            self.passed += 1


def play(seed: int, ranks: int, *, lock_step: bool, flagged: int, by_agent: bool) -> list[Rank]:
    """Until all have left. `flagged`: so many ranks get the signal, each at its own moment."""
    draw, core = random.Random(seed), Core(ranks)
    world = [Rank(core, rank) for rank in range(ranks)]
    signals = {draw.randrange(60): rank for rank in draw.sample(world, flagged)}
    for tick in range(5000):
        if tick in signals:
            signals[tick].preemption.flag("SIGTERM")
        if by_agent and tick == 30:
            core.call(p.Preempt("job", "agent", "node-0", 1000.0, "aws"))
        rank = draw.choice(world)
        if draw.random() < 0.2:
            rank.beat()
        # in lock-step a step ends only when every rank has begun it
        elif rank.left < 0 and not (lock_step and any(other.passed < rank.passed for other in world)):
            try:
                rank.arrive()
            except Blocked:
                continue
        if all(one.left >= 0 for one in world):
            return world
    raise AssertionError(f"seed {seed}: they wait for each other: {[(one.passed, one.left) for one in world]}")


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32), ranks=st.integers(1, 5), lock_step=st.booleans(), share=st.integers(0, 5),
    by_agent=st.booleans(),
)  # fmt: skip
def test_all_leave_at_one_step(seed: int, ranks: int, lock_step: bool, share: int, by_agent: bool) -> None:
    flagged = min(share, ranks)
    world = play(seed, ranks, lock_step=lock_step, flagged=flagged, by_agent=by_agent or not flagged)
    assert len({rank.left for rank in world}) == 1, seed
    assert {rank.preemption.alone for rank in world} == {False}


@given(seed=st.integers(0, 2**32))
def test_a_death_before_the_agreement_ends_it(seed: int) -> None:
    """The others are set free; the one that is to go goes alone, at its next step boundary."""
    core = Core(3)
    world = [Rank(core, rank) for rank in range(3)]
    draw = random.Random(seed)
    for rank in draw.sample(world * 3, 6):
        rank.arrive()
    world[0].preemption.flag("SIGTERM")
    for rank in world[:2]:
        rank.beat()
    core.call(p.Exited("job", "agent", "w2", -9)) if seed % 2 else job_registry.apply(
        core.state, Lost("job", "w2"), core.now
    )
    world[1].arrive()
    assert world[1].left == -1
    before = world[0].passed
    world[0].arrive()
    assert (world[0].left, world[0].preemption.alone) == (before + 1, True)


def test_the_agreed_step_outlasts_the_round() -> None:
    """The first to leave breaks the round: a slower rank still hears where to leave; a rank that is done is not waited
    for; in the next round nobody is preempted."""
    core = Core(3)
    world = [Rank(core, rank) for rank in range(3)]
    world[0].preemption.flag("SIGTERM")
    for rank in world:
        rank.beat()
    core.call(p.Leave("job", "w0", p.Departure.PREEMPTED, 0))
    world[1].arrive()
    assert world[1].left == 0
    assert core.call(p.ShowJob("job")).parting == p.Parting(1, 0, "SIGTERM", ("node-0",))
    core.call(join("next", count=3, lives="x", low=3, high=3, sole=True, node="node-agent"))
    assert core.call(p.ShowJob("job")).parting == p.Parting()


def test_whoever_is_done_is_not_waited_for() -> None:
    core = Core(2)
    one, two = Rank(core, 0), Rank(core, 1)
    one.preemption.flag("SIGTERM")
    one.beat()
    with pytest.raises(Blocked):
        one.arrive()
    core.call(p.Leave("job", "w1", p.Departure.DONE, 0))
    one.arrive()
    assert (one.left, two.left) == (0, -1)


def test_the_answer_stays_inside_a_step() -> None:
    """An accumulation window asks for several batches: only its first request may leave."""
    core = Core(1)
    rank = Rank(core, 0)
    assert not rank.preemption.leaves_at(0, core)  # pyright: ignore[reportArgumentType]
    rank.preemption.flag("SIGTERM")
    rank.beat()
    assert not rank.preemption.leaves_at(0, core)  # pyright: ignore[reportArgumentType]
    assert rank.preemption.leaves_at(1, core)  # pyright: ignore[reportArgumentType]
    assert rank.preemption.leaves_at(1, core)  # pyright: ignore[reportArgumentType]
    assert rank.preemption.gate.at(1) is Passage.LEAVE


@pytest.mark.parametrize(
    ("gigabytes", "gb_per_s", "left_s", "enough"),
    [(10, 1, 30, True), (10, 1, 14, False), (10, 0, 3, True), (1, 1, 2, False), (0, 0, 0, False)],
)
def test_what_can_be_stored_in_time(gigabytes: int, gb_per_s: int, left_s: float, enough: bool) -> None:
    assert affordable(gigabytes * 10**9, gb_per_s * 10**9, left_s) is enough


def test_a_step_that_comes_before_the_time_is_not_left_without_any() -> None:
    """The answer to `AwaitParting` names no time, and may overtake the reply to the promise. Nothing could be saved."""
    rank = Rank(Core(2), 0)
    part = rank.preemption
    part.summon(True)
    promise = part.word()
    assert isinstance(promise, p.Hold)
    parting = p.Parting(round=1, step=0, reason="SIGTERM", nodes=("node-1",))

    class Caller:
        def call(self, *_: object, **__: object) -> p.Parting:
            return parting

    assert part.leaves_at(0, Caller())  # pyright: ignore[reportArgumentType]
    assert 990.0 < part.left_s <= 1000.0
    part.hear(promise, msgspec.structs.replace(parting, left_s=20.0))
    assert 0.0 < part.left_s <= 20.0
