"""The verdict on a round in which no rank makes steps."""

from __future__ import annotations

from dlrover_hooks.master.core import heartbeats, stalls
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.rounds.members import Member
from dlrover_hooks.master.core.rounds.rendezvous import Round
from dlrover_hooks.master.core.stalls import verdict
from dlrover_hooks.protocol import Departure, Phase, Stall

LOADS = Stall(61.0, "data.py:41, in load")
WAITS = Stall(62.0, "train.py:92, in main", "all_reduce")


class StalledRound:
    """A round, and the heartbeats of its ranks."""

    def __init__(self, *ranks: int, phase: Phase = Phase.TRAINING) -> None:
        members = {f"w{rank}": Member(f"w{rank}", "a", "n", rank, rank) for rank in ranks}
        self.nodes = Nodes()
        self.round = Round(1, phase, members, {}, {"n": 0}, "h", 1, "1", 0)

    def beat(self, name: str, stall: Stall | None) -> str:
        heartbeats.beat(self.nodes, ("job", name), 0.0, stall=stall)
        return stalls.found(self.nodes, "job", name, self.round)


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
    ranks = StalledRound(0, 1, 2)
    assert [ranks.beat(name, WAITS) for name in ("w2", "w0", "stranger")] == ["", "", ""]
    assert ranks.beat("w1", LOADS) == ""
    assert "rank 1 at" in ranks.beat("w0", WAITS)
    assert [ranks.beat(name, WAITS) for name in ("w0", "w1", "w2", "w0")] == [""] * 4, "it is said once"


def test_there_is_another_verdict_after_another_step() -> None:
    ranks = StalledRound(0, 1)
    ranks.beat("w1", LOADS)
    assert ranks.beat("w0", WAITS)
    assert ranks.beat("w1", None) == ranks.beat("w0", WAITS) == ""
    ranks.beat("w1", LOADS)
    assert ranks.beat("w0", WAITS)


def test_a_rank_that_is_done_is_not_waited_for() -> None:
    ranks = StalledRound(0, 1, 2)
    ranks.round.members["w2"].gone = Departure.DONE.value
    ranks.beat("w1", LOADS)
    assert ranks.beat("w0", WAITS)


def test_a_round_that_restores_or_is_broken_does_not_stall() -> None:
    for phase in (Phase.ATTACHING, Phase.RESTORING, Phase.BROKEN):
        ranks = StalledRound(0, phase=phase)
        assert ranks.beat("w0", LOADS) == ""
    heartbeats.beat(ranks.nodes, ("job", "w0"), 0.0, stall=LOADS)
    assert stalls.found(ranks.nodes, "job", "w0", None) == ""
