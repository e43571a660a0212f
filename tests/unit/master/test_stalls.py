"""The verdict on a round in which no rank makes steps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dlrover_hooks.master.core import events, heartbeats, job_registry, stalls
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.stalls import verdict
from dlrover_hooks.protocol import Departure, Leave, Message, Phase, Stall, StallPolicy
from tests.e2e.job_script import attach, join

LOADS = Stall(61.0, "data.py:41, in load")
WAITS = Stall(62.0, "train.py:92, in main", "all_reduce")


class StalledRound:
    """A round in a real core, and the heartbeats of its ranks."""

    def __init__(self, ranks: int) -> None:
        self.state, self.nodes = job_registry.Master(), Nodes()
        self.form(ranks, "w")

    def send(self, event: Message) -> Message:
        return job_registry.apply(self.state, event, 1000.0).reply

    def form(self, ranks: int, lives: str, **more: Any) -> None:
        self.send(join(count=ranks, low=ranks, high=ranks, lives=lives, **more))
        for rank in range(ranks):
            self.send(attach(f"{lives}{rank}"))

    @property
    def job(self) -> Job:
        return self.state.jobs["job"]

    def beat(self, name: str, stall: Stall | None, step: int = 5) -> str:
        """What is logged. Members are ended as by the runtime."""
        heartbeats.beat(self.nodes, ("job", name), 0.0, stall=stall, step=step)
        found = stalls.found(self.nodes, self.job, name)
        if found is not None and found.ends is not None:
            assert events.decode(events.encode(events.Envelope(1000.0, found.ends))).event == found.ends
            self.send(found.ends)
        return found.text if found is not None else ""

    def stall(self, policy: StallPolicy, *places: Stall, lives: str = "w", step: int = 5) -> str:
        """All ranks stall; rank 0 reports it last."""
        said = ""
        for rank, place in reversed(list(enumerate(places))):
            said = self.beat(f"{lives}{rank}", msgspec.structs.replace(place, restart=policy), step)
        return said

    def gone(self) -> dict[int, str | None]:
        current = self.job.rounds.round
        assert current is not None
        return {member.rank: member.gone for member in current.members.values()}


def test_the_rank_outside_of_all_collectives_is_named_first() -> None:
    assert verdict([(0, WAITS), (1, LOADS), (2, WAITS)]) == (
        "no rank has made a step for 61 s: rank 1 at data.py:41, in load; "
        "ranks 0, 2 in all_reduce (train.py:92, in main)"
    )


def test_different_collectives_are_told() -> None:
    other = Stall(70.0, "train.py:99, in main", "broadcast")
    told = verdict([(0, WAITS), (1, other), (2, WAITS)])
    assert told.startswith(
        "no rank has made a step for 62 s: rank 1 in broadcast (train.py:99, in main); ranks 0, 2 in "
    )
    assert told.endswith("; all wait in collectives, perhaps in different ones")


def test_a_thousand_ranks_are_one_short_line() -> None:
    told = verdict([(rank, LOADS if rank == 700 else WAITS) for rank in range(1000)])
    assert "rank 700 at data.py:41" in told
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 991 more in all_reduce" in told
    told = verdict([(rank, Stall(61.0, f"data.py:{rank}, in load")) for rank in range(1000)])
    assert told.endswith("; and 992 other places")
    assert len(told) < 1000


def test_one_verdict_once_all_live_ranks_stall() -> None:
    ranks = StalledRound(3)
    assert [ranks.beat(name, WAITS) for name in ("w2", "w0", "stranger")] == ["", "", ""]
    assert ranks.beat("w1", LOADS) == ""
    assert "rank 1 at" in ranks.beat("w0", WAITS)
    assert [ranks.beat(name, WAITS) for name in ("w0", "w1", "w2", "w0")] == [""] * 4, "it is said once"
    assert ranks.beat("w1", None) == ranks.beat("w0", WAITS) == ""
    ranks.beat("w1", LOADS)
    assert ranks.beat("w0", WAITS)
    assert ranks.gone() == {0: None, 1: None, 2: None}, "nothing is ended by default"


def test_a_rank_that_is_done_is_not_waited_for() -> None:
    ranks = StalledRound(3)
    ranks.send(Leave("job", "w2", Departure.DONE))
    ranks.beat("w1", LOADS)
    assert ranks.beat("w0", WAITS)


def test_a_round_that_restores_or_is_broken_does_not_stall() -> None:
    ranks = StalledRound(1)
    current = ranks.job.rounds.round
    assert current is not None
    for phase in (Phase.ATTACHING, Phase.RESTORING, Phase.BROKEN):
        current.phase = phase
        assert ranks.beat("w0", LOADS) == ""
    ranks.job.rounds.round = None
    assert ranks.beat("w0", LOADS) == ""


def test_the_rank_that_the_others_wait_for_is_replaced_and_it_is_no_failure() -> None:
    ranks = StalledRound(3)
    said = ranks.stall(StallPolicy.RANK, WAITS, LOADS, WAITS)
    assert said.endswith(". Restarting rank 1 (1 of 3 restarts because of stalls)")
    assert ranks.gone() == {0: None, 1: "stalled", 2: None}
    assert ranks.job.rounds.round is not None
    assert ranks.job.rounds.round.phase is Phase.BROKEN
    assert ranks.job.failures == 0
    for name in ("w0", "w1", "w2"):
        assert ranks.beat(name, None) == ranks.beat(name, LOADS) == "", "its round is over"


@pytest.mark.parametrize(
    ("policy", "places", "said", "gone"),
    [
        (StallPolicy.ROUND, (WAITS, LOADS), "Restarting all ranks (1 of 3 restarts because of stalls)", "stalled"),
        (StallPolicy.RANK, (WAITS, WAITS), "Restarting all ranks (1 of 3 restarts because of stalls)", "stalled"),
        (StallPolicy.RANK, (LOADS, LOADS), "Nothing is restarted: no rank waits for another one", None),
        (StallPolicy.NONE, (WAITS, LOADS), "in all_reduce (train.py:92, in main)", None),
    ],
    ids=("round", "all in collectives", "none in a collective", "none"),
)
def test_what_a_policy_restarts(policy: StallPolicy, places: tuple[Stall, ...], said: str, gone: str | None) -> None:
    ranks = StalledRound(2)
    assert ranks.stall(policy, *places).endswith(said)
    assert ranks.gone() == {0: gone, 1: gone}


def test_a_false_alarm_cannot_repeat_for_ever() -> None:
    """A restart needs a step since the last one, and there are three; a job that is launched again has three more."""
    ranks = StalledRound(2)
    said = []
    for lives, step in (("w", 5), ("x", 5), ("y", 6), ("z", 7), ("a", 8)):
        if lives != "w":
            ranks.form(2, lives)
        said.append(ranks.stall(StallPolicy.ROUND, WAITS, LOADS, lives=lives, step=step).rpartition(". ")[2])
    assert said == [
        "Restarting all ranks (1 of 3 restarts because of stalls)",
        "Nothing is restarted: no step was made since the last restart because of a stall",
        "Restarting all ranks (2 of 3 restarts because of stalls)",
        "Restarting all ranks (3 of 3 restarts because of stalls)",
        "Nothing is restarted: this job has used up its 3 restarts because of stalls",
    ]
    ranks.send(Leave("job", "agent", Departure.STOPPED))
    ranks.form(2, "again", agent="again", again=True)
    assert ranks.stall(StallPolicy.ROUND, WAITS, LOADS, lives="again").endswith("(1 of 3 restarts because of stalls)")


def test_a_verdict_on_a_round_that_is_over_ends_nothing() -> None:
    ranks = StalledRound(2)
    ranks.send(events.EndStalled("job", 7, ("w1",), 5))
    assert ranks.gone() == {0: None, 1: None}
    assert ranks.job.stalls.count == 0


def test_a_rank_that_is_active_is_given_longer_and_that_is_said_once() -> None:
    """Rank 1 evaluates, and the others wait for it."""
    ranks = StalledRound(3)
    busy = msgspec.structs.replace(LOADS, busy=True)
    said = ranks.stall(StallPolicy.RANK, WAITS, busy, WAITS)
    assert said.endswith("in all_reduce (train.py:92, in main). Nothing is restarted yet: rank 1 is active")
    assert ranks.stall(StallPolicy.RANK, WAITS, busy, WAITS) == ""
    said = ranks.stall(StallPolicy.RANK, WAITS, LOADS, WAITS)
    assert said.endswith("Restarting rank 1 (1 of 3 restarts because of stalls)")
    ranks = StalledRound(2)
    spins = msgspec.structs.replace(WAITS, busy=True)  # as NCCL does
    assert "Restarting rank 1 " in ranks.stall(StallPolicy.RANK, spins, LOADS)
