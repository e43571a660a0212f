"""What is done about a slow rank, by its policy."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks.errors import BadRequest
from dlrover_hooks.master.core import events, heartbeats, job_registry, straggler_actions, stragglers, views
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.straggler_actions import COOLDOWN_S
from dlrover_hooks.protocol import (
    Attach,
    Departure,
    JobView,
    Join,
    Leave,
    Message,
    Phase,
    Preempt,
    ShowJob,
    StepPhases,
    StragglerPolicy,
)
from tests.e2e.job_script import join

RELAUNCH, EXCLUDE = StragglerPolicy.RELAUNCH, StragglerPolicy.EXCLUDE
FAST = (0.1, 0.2)
SLOW = (0.3, 0.0)
"""Compute and network."""


class SlowRound:
    """A round of nodes `a`, `b`, ... with two workers each, in a real core, and the windows of its ranks."""

    def __init__(self, *nodes: str, least: int, serves: str = "a", **more: Any) -> None:
        self.state, self.nodes, self.now, self.lives = job_registry.Master(), Nodes(), 1000.0, 0
        self.least, self.more = least, more
        self.form(*nodes, serves=serves, again=True)

    def send(self, event: Message) -> Message:
        assert events.decode(events.encode(events.Envelope(self.now, event))).event == event
        return job_registry.apply(self.state, event, self.now).reply

    def request(self, node: str, most: int, **more: Any) -> Join:
        """The join of a node with two new workers."""
        self.lives += 1
        fields = {"node": node, "lives": f"{node}{self.lives}-", "low": self.least, "high": most} | self.more | more
        return join(node, **fields)

    def form(self, *nodes: str, serves: str = "", **more: Any) -> None:
        for node in nodes:
            self.send(self.request(node, 2 * len(nodes), serves=node == serves, last_call_s=60.0, **more))
        for name, member in self.members().items():
            self.send(Attach(job="job", incarnation=name, node=member.node, pid=1))
        assert self.phase() is Phase.TRAINING

    @property
    def job(self) -> Job:
        return self.state.jobs["job"]

    def phase(self) -> Phase:
        assert self.job.rounds.round is not None
        return self.job.rounds.round.phase

    def members(self) -> dict[str, Any]:
        assert self.job.rounds.round is not None
        return self.job.rounds.round.members

    def gone(self) -> dict[int, str | None]:
        return {member.rank: member.gone for member in self.members().values()}

    def view(self, node: str) -> JobView:
        reply = views.query(self.state, self.nodes, ShowJob("job", node))
        assert isinstance(reply, JobView)
        return reply

    def windows(self, policy: StragglerPolicy, *slow: int, count: int = 3) -> list[str]:
        """Windows of 10 s in which these ranks are slow; what is logged. The verdict is applied as by the runtime."""
        said: list[str] = []
        for _ in range(count):
            self.now += 10.0
            for name, member in sorted(self.members().items(), key=lambda one: -one[1].rank):
                compute, network = SLOW if member.rank in slow else FAST
                window = StepPhases(int(self.now), 50, 10.0, 0.35, 0.01, compute, 0.01, 0.0, network, policy=policy)
                heartbeats.beat(self.nodes, ("job", name), self.now, step=5, phases=window)
                found = stragglers.found(self.nodes, self.job, name, self.now)
                said += found.lines
                if found.ends is not None:
                    self.send(found.ends)
                if self.phase() is not Phase.TRAINING:
                    return said
        return said


def action(said: list[str]) -> list[str]:
    return [text.rpartition(" s. ")[2] for text in said]


def test_a_report_changes_nothing() -> None:
    ranks = SlowRound("a", "b", least=2)
    assert ranks.windows(StragglerPolicy.REPORT, 3) == [
        "rank 3 (b) is slow: its compute takes 0.3 s per step, the median of all 4 ranks is 0.1 s, for 30 s"
    ]
    assert set(ranks.gone().values()) == {None}


def test_a_slow_rank_is_restarted_and_it_is_no_failure() -> None:
    ranks = SlowRound("a", "b", least=4)
    assert ranks.windows(RELAUNCH, 3) == [
        "rank 3 (b) is slow: its compute takes 0.3 s per step, the median of all 4 ranks is 0.1 s, for 30 s. "
        "Restarting it (1 of 3 actions because of slow ranks)"
    ]
    assert ranks.gone() == {0: None, 1: None, 2: None, 3: "slow"}
    assert ranks.phase() is Phase.BROKEN
    assert ranks.job.failures == 0
    assert ranks.view("b").excluded == ""


def test_a_rank_that_is_slow_after_its_restart_is_only_reported() -> None:
    ranks = SlowRound("a", "b", least=4)
    ranks.windows(RELAUNCH, 3)
    ranks.form("a", "b")
    ranks.now += COOLDOWN_S
    assert action(ranks.windows(RELAUNCH, 3, count=9)) == [
        "It is not restarted: it was slow before, and a restart did not help"
    ]
    assert set(ranks.gone().values()) == {None}


def test_the_next_action_waits_and_is_then_logged() -> None:
    ranks = SlowRound("a", "b", least=4)
    ranks.windows(RELAUNCH, 3)
    ranks.form("a", "b")
    ranks.now += 100.0
    assert action(ranks.windows(RELAUNCH, 2)) == [
        f"Nothing is done yet: the last such action was 130 s ago ({COOLDOWN_S:.0f} s)"
    ]
    assert ranks.windows(RELAUNCH, 2, count=16) == [], "the same until the time is over"
    assert ranks.windows(RELAUNCH, 2, count=9) == [
        "rank 2 (b) is slow: its compute takes 0.3 s per step, the median of all 4 ranks is 0.1 s, for 200 s. "
        "Restarting it (2 of 3 actions because of slow ranks)"
    ]
    assert ranks.gone() == {0: None, 1: None, 2: "slow", 3: None}


def test_a_false_alarm_cannot_repeat_for_ever() -> None:
    """Three actions in a launch; a job that is launched again has three more."""
    ranks, said = SlowRound("a", "b", least=4), list[str]()
    for rank in (0, 1, 2, 3):
        said += action(ranks.windows(RELAUNCH, rank, count=9))
        ranks.now += COOLDOWN_S
        if rank < 3:
            ranks.form("a", "b")
    assert said == [
        *(f"Restarting it ({number} of 3 actions because of slow ranks)" for number in (1, 2, 3)),
        "Nothing is done: this job has used up its 3 actions because of slow ranks",
    ]
    for agent in ("a", "b"):
        ranks.send(Leave("job", agent, Departure.STOPPED))
    for agent in ("c", "d"):
        ranks.send(ranks.request(agent, 4, again=True))
    ranks.form("c", "d")
    assert action(ranks.windows(RELAUNCH, 3)) == ["Restarting it (1 of 3 actions because of slow ranks)"]


def test_of_two_slow_ranks_one_is_restarted_at_a_time() -> None:
    ranks = SlowRound("a", "b", "c", least=6)
    said = ranks.windows(RELAUNCH, 2, 5)
    assert [text.partition(":")[0] for text in said] == ["rank 2 (b) is slow", "rank 5 (c) is slow"]
    assert ["Restarting it" in text for text in said] == [True, False]
    assert [rank for rank, gone in ranks.gone().items() if gone] == [2]


def test_a_slow_node_is_excluded_with_all_its_ranks_and_the_reason() -> None:
    ranks = SlowRound("a", "b", "c", least=4)
    said = ranks.windows(EXCLUDE, 3)
    assert action(said) == ["Excluding node b (1 of 3 actions because of slow ranks)"]
    assert ranks.gone() == {0: None, 1: None, 2: "slow", 3: "slow", 4: None, 5: None}
    reason = said[0].rpartition(". ")[0]
    assert ranks.view("b").excluded == reason
    assert ranks.view("a").excluded == ranks.view("c").excluded == ""
    assert [(one.node, one.reason) for one in ranks.view("a").kept_out] == [("b", reason)]
    with pytest.raises(BadRequest, match=r"Node 'b' is excluded from job 'job': rank 3 \(b\) is slow"):
        ranks.send(ranks.request("b", 6))
    for node in ("a", "c"):
        ranks.send(ranks.request(node, 6))
    assert {member.node for member in ranks.members().values()} == {"a", "c"}
    assert ranks.job.failures == 0


def test_an_excluded_node_that_is_launched_again_is_taken_back() -> None:
    ranks = SlowRound("a", "b", "c", least=4)
    ranks.windows(EXCLUDE, 3)
    ranks.send(ranks.request("b", 6, again=True))
    for node in ("a", "c"):
        ranks.send(ranks.request(node, 6))
    assert {member.node for member in ranks.members().values()} == {"a", "b", "c"}
    assert ranks.view("b").excluded == ""
    assert ranks.job.slow.count == 1, "the budget is that of the launch"


@pytest.mark.parametrize(
    ("nodes", "least", "said"),
    [
        ("ab", 4, "Node b is not excluded: 2 workers would remain, and the job needs 4"),
        ("ab", 2, "Excluding node b (1 of 3 actions because of slow ranks)"),
    ],
)
def test_a_node_without_which_too_few_remain_is_not_excluded(nodes: str, least: int, said: str) -> None:
    ranks = SlowRound(*nodes, least=least)
    assert action(ranks.windows(EXCLUDE, 2)) == [said]
    assert (ranks.phase() is Phase.BROKEN) == said.startswith("Excluding")


def test_a_spare_node_makes_up_for_an_excluded_one() -> None:
    ranks = SlowRound("a", "b", least=4)
    ranks.send(ranks.request("c", 4))
    assert action(ranks.windows(EXCLUDE, 2)) == ["Excluding node b (1 of 3 actions because of slow ranks)"]
    ranks.send(ranks.request("a", 4))
    assert {member.node for member in ranks.members().values()} == {"a", "c"}


def test_the_node_that_serves_the_master_is_not_excluded() -> None:
    ranks = SlowRound("a", "b", least=2, serves="b")
    assert action(ranks.windows(EXCLUDE, 2)) == [
        "Node b is not excluded: it serves the master, which would end with it"
    ]


def test_a_worker_without_a_launcher_is_left_alone() -> None:
    ranks = SlowRound("a", "b", least=2)
    for name, member in ranks.members().items():
        member.launcher = name
    assert action(ranks.windows(RELAUNCH, 2)) == [
        "Nothing is done: it was not started by dlrover-hooks run, which would start it again"
    ]


@pytest.mark.parametrize("policy", [RELAUNCH, EXCLUDE])
def test_a_verdict_that_comes_too_late_ends_nothing(policy: StragglerPolicy) -> None:
    """The rank is gone, the round is over, or too few would remain by now."""
    ranks = SlowRound("a", "b", "c", least=4)
    members = {member.rank: member for member in ranks.members().values()}
    slow, number = members[3], ranks.job.rounds.number
    verdict = straggler_actions.response(ranks.job, slow, policy, "it is slow", ranks.now).ends
    assert verdict is not None
    ranks.send(events.EndSlow("job", number + 1, verdict.incarnations, policy, "it is slow"))
    assert set(ranks.gone().values()) == {None}
    ranks.job.rounds.min_workers = 6
    if policy is EXCLUDE:
        ranks.send(verdict)
        assert set(ranks.gone().values()) == {None}
    ranks.send(events.Lost("job", slow.incarnation, "silent"))
    ranks.send(verdict)
    assert ranks.gone() == {0: None, 1: None, 2: None, 3: "lost", 4: None, 5: None}
    assert ranks.job.slow.count == 0


@pytest.mark.parametrize("how", ["done", "preempted"])
def test_a_round_that_ends_anyway_is_left_alone(how: str) -> None:
    ranks = SlowRound("a", "b", least=2)
    names = {member.rank: name for name, member in ranks.members().items()}
    if how == "done":
        ranks.send(Leave("job", names[1], Departure.DONE))
    else:
        ranks.send(Preempt("job", names[1], "a", 25.0, "SIGTERM"))
    said = ranks.windows(RELAUNCH, 2)
    assert [text.rpartition(", ")[2] for text in said] == ["for 30 s"]
    assert ranks.phase() is Phase.TRAINING
