"""What is done about a slow rank, by its policy."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlrover_hooks.data.batch_plan import even_shares, uneven_shares
from dlrover_hooks.errors import BadRequest
from dlrover_hooks.master.core import (
    events,
    heartbeats,
    job_registry,
    micro_batch_shares,
    straggler_actions,
    stragglers,
    views,
)
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.straggler_actions import COOLDOWN_S
from dlrover_hooks.protocol import (
    Attach,
    AwaitNodes,
    Departure,
    DesiredNodes,
    JobView,
    Join,
    Leave,
    Message,
    NodeChange,
    NodeGroupResource,
    NodeStatus,
    Phase,
    Preempt,
    RankShare,
    ReportNodes,
    ResourceLimits,
    ResourcePlan,
    ScaleNodes,
    ScalingMode,
    Seat,
    Shares,
    ShowJob,
    StartScaling,
    StepPhase,
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

    total = 0
    """Micro-batches of a step; 0: as they cannot differ."""

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

    def shares(self) -> tuple[int, ...]:
        """As the workers read them."""
        world = len(self.members())
        assert self.job.rounds.round is not None
        return uneven_shares(self.job.rounds.round.shares, self.total, world) or even_shares(self.total, world)

    def return_all(self) -> None:
        """The members keep their processes and join again, a lost one has a successor at its place; then all attach."""
        for name, member in sorted(self.members().items(), key=lambda one: one[1].live):
            seats = (Seat(name if member.live else f"{name}-next", member.local_rank),)
            self.send(
                self.request(
                    member.node,
                    len(self.members()),
                    incarnation=seats[0].incarnation,
                    seats=seats,
                    launcher=member.agent,
                )
            )
        for name, member in self.members().items():
            self.send(Attach(job="job", incarnation=name, node=member.node, pid=1))
        assert self.phase() is Phase.TRAINING

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
                mine = self.shares()[member.rank] if self.total else 0
                if self.total:
                    compute = (0.3 if member.rank in slow else 0.1) * mine
                    network = 1.0 - compute
                window = StepPhases(
                    int(self.now), 50, 10.0, 0.35 if not self.total else 1.0, 0.01, compute, 0.01, 0.0, network,
                    policy=policy, micro_batches=mine, total_micro_batches=self.total,
                )  # fmt: skip
                heartbeats.beat(self.nodes, ("job", name), self.now, step=5, phases=window)
                found = stragglers.found(self.nodes, self.job, name, self.now)
                said += found.lines
                if found.acts is not None:
                    self.send(found.acts)
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


class PlannedRound(SlowRound):
    """A round of two nodes that the master plans, and no fewer."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        super().__init__("worker-0", "worker-1", least=4, serves="")

    def form(self, *nodes: str, serves: str = "", **more: Any) -> None:
        limits = ResourceLimits(8, 8192, min_workers=2, max_workers=2)
        self.send(StartScaling("job", "launcher", ScalingMode.MANUAL, limits))
        self.send(ScaleNodes("job", "cli", ResourcePlan({"worker": NodeGroupResource(2)})))
        self.send(ReportNodes("job", "launcher", tuple(NodeChange(node) for node in nodes)))
        super().form(*nodes, serves=serves, **more)

    def planned(self) -> list[tuple[str, NodeStatus]]:
        reply = views.query(self.state, self.nodes, AwaitNodes("job", "launcher"))
        assert isinstance(reply, DesiredNodes)
        return [(node.name, node.status) for node in reply.nodes]


def test_where_nodes_are_planned_another_one_takes_the_place_of_the_slow_one() -> None:
    """Though the job needs both. The old one leaves as one that a plan removes: its members are not declared dead."""
    ranks = PlannedRound()
    said = ranks.windows(EXCLUDE, 3)
    assert action(said) == ["Replacing node worker-1 (1 of 3 actions because of slow ranks)"]
    assert ranks.planned() == [("worker-0", NodeStatus.RUNNING), ("worker-2", NodeStatus.INITIAL)]
    assert set(ranks.gone().values()) == {None}
    assert ranks.job.scaling is not None
    assert ranks.job.scaling.problem == f"worker-1 was replaced: {said[0].rpartition('. ')[0]}"
    assert not ranks.job.scaling.failed_at


def test_where_nodes_are_planned_a_slow_one_runs_fewer_micro_batches_and_is_replaced_if_it_cannot() -> None:
    ranks = PlannedRound(total=16)
    assert "it runs 1 of 16 in a step now, was 4" in ranks.windows(StragglerPolicy.REBALANCE, 3)[0]
    assert [name for name, _ in ranks.planned()] == ["worker-0", "worker-1"]
    none_left = PlannedRound(total=4)
    (said,) = none_left.windows(StragglerPolicy.REBALANCE, 3)
    assert action([said]) == ["Replacing node worker-1 (1 of 3 actions because of slow ranks)"]
    assert [name for name, _ in none_left.planned()] == ["worker-0", "worker-2"]


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
    seen = straggler_actions.SlowRank(slow, policy, StepPhase.COMPUTE, (), "it is slow")
    verdict = straggler_actions.response(ranks.job, seen, ranks.now).acts
    assert isinstance(verdict, events.EndSlow)
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


REBALANCE = StragglerPolicy.REBALANCE


def sharing(total: int, *nodes: str, **more: Any) -> SlowRound:
    ranks = SlowRound(*nodes, least=2, **more)
    ranks.total = total
    return ranks


def test_a_slow_rank_gets_fewer_micro_batches_and_nobody_ends() -> None:
    ranks = sharing(16, "a", "b")
    said = ranks.windows(REBALANCE, 3)
    assert action(said) == [
        "A micro-batch takes it 3 times as long as the others: it runs 1 of 16 in a step now, was 4 (1 of 3 actions "
        "because of slow ranks)"
    ]
    assert (ranks.phase(), set(ranks.gone().values())) == (Phase.BROKEN, {None})
    assert ranks.view("a").rebalance.endswith("it runs 1 of 16 in a step now, was 4")
    assert ranks.job.failures == 0
    before = ranks.job.rounds.number
    ranks.return_all()
    assert ranks.job.rounds.number == before + 1
    assert ranks.shares() == (5, 5, 5, 1)
    assert ranks.view("a").shares == Shares(16, (RankShare(3, 1),))
    assert ranks.view("a").rebalance == ""
    assert ranks.windows(REBALANCE, 3, count=9) == ["rank 3 (b) is no longer slow, after 30 s"]


def test_shares_are_even_again_once_the_rank_is_as_fast_as_the_others() -> None:
    ranks = sharing(8, "a")
    ranks.windows(REBALANCE, 1)
    ranks.return_all()
    assert ranks.shares() == (6, 2)
    ranks.now += COOLDOWN_S
    said = ranks.windows(REBALANCE)
    assert "A micro-batch takes it 1 times as long as the others: it runs 4 of 8 in a step now, was 6" in said[0]
    ranks.return_all()
    assert ranks.shares() == (4, 4)


@pytest.mark.parametrize("how", ["lost", "grown"])
def test_shares_are_even_in_another_world(how: str) -> None:
    """A rank is lost while the round re-forms, or a later round has other members."""
    ranks = sharing(16, "a", "b")
    ranks.windows(REBALANCE, 3)
    names = {member.rank: name for name, member in ranks.members().items()}
    if how == "lost":
        ranks.send(events.Lost("job", names[3], "silent"))
        ranks.return_all()
    else:
        ranks.return_all()
        assert ranks.shares() == (5, 5, 5, 1)
        ranks.form("a", "b", "c")
    assert ranks.shares() == even_shares(16, 4 if how == "lost" else 6)
    assert ranks.view("a").shares is None


def test_processes_that_are_started_again_at_the_same_places_take_the_shares() -> None:
    ranks = sharing(16, "a", "b")
    ranks.windows(REBALANCE, 3)
    ranks.form("a", "b")
    assert ranks.shares() == (5, 5, 5, 1)
    assert ranks.job.failures == 0


@pytest.mark.parametrize(
    ("total", "said"),
    [
        (4, "each rank runs 1 micro-batch of a step. A smaller batch_size with the same global_batch_size makes more"),
        (
            5,
            "it runs 1 of the 5 micro-batches of a step, and no other distribution makes steps much shorter. A smaller",
        ),
        (0, "its ranks cannot run different numbers of micro-batches"),
    ],
)
def test_what_would_help_is_said_if_nothing_can_be_moved(total: int, said: str) -> None:
    ranks = sharing(total, "a", "b")
    found = ranks.windows(REBALANCE, 3)
    assert f". Nothing is done: {said}" in found[0]
    assert (len(found), ranks.phase(), ranks.job.slow.count) == (1, Phase.TRAINING, 0)


def test_budget_and_cooldown_are_those_of_the_other_policies() -> None:
    ranks = sharing(16, "a", "b")
    ranks.windows(REBALANCE, 3)
    ranks.return_all()
    assert any("the last such action was" in text for text in ranks.windows(REBALANCE, 0))
    ranks.job.slow = msgspec.structs.replace(ranks.job.slow, count=3)
    ranks.windows(REBALANCE, count=4)
    assert any("has used up its 3 actions" in text for text in ranks.windows(REBALANCE, 0))
    assert ranks.phase() is Phase.TRAINING


@pytest.mark.parametrize("late", ["round", "gone", "preempted", "spent"])
def test_shares_that_come_too_late_change_nothing(late: str) -> None:
    ranks = sharing(16, "a", "b")
    names = {member.rank: name for name, member in ranks.members().items()}
    number = ranks.job.rounds.number + (late == "round")
    event = events.Reshare("job", number, names[3], Shares(16, (RankShare(3, 1),)), "it is slow")
    if late == "gone":
        ranks.send(events.Lost("job", names[3], "silent"))
    elif late == "preempted":
        ranks.send(Preempt("job", names[1], "a", 25.0, "SIGTERM"))
    elif late == "spent":
        ranks.job.slow = msgspec.structs.replace(ranks.job.slow, count=3)
    before = ranks.phase()
    ranks.send(event)
    assert ranks.phase() is before
    assert ranks.view("a").rebalance == ""


@settings(max_examples=300, deadline=None)
@given(data=st.data(), costs=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5))
def test_no_distribution_is_shorter(data: st.DataObject, costs: list[float]) -> None:
    total = data.draw(st.integers(len(costs), len(costs) + 9))
    shares = micro_batch_shares.shortest(total, costs)
    assert sum(shares) == total
    assert min(shares) >= 1
    every = (one for one in product(range(1, total + 1), repeat=len(costs)) if sum(one) == total)
    least = min(max(share * cost for share, cost in zip(one, costs, strict=True)) for one in every)
    assert max(share * cost for share, cost in zip(shares, costs, strict=True)) <= least * (1 + 1e-9)
    equal = micro_batch_shares.shortest(total, [0.3] * len(costs))
    assert tuple(equal) == even_shares(total, len(costs))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), world=st.integers(2, 6))
def test_workers_read_the_shares_that_were_chosen(data: st.DataObject, world: int) -> None:
    """What is sent names the slow ranks only."""
    total = data.draw(st.integers(world, 40))
    slow = data.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=(world - 1) // 2 or 1))
    counts = even_shares(total, world)
    windows = [
        StepPhases(1, 50, 10.0, 100.0, 0.0, (3.0 if rank in slow else 1.0) * counts[rank], 0.0, 0.0, 1.0,
                   micro_batches=counts[rank], total_micro_batches=total)
        for rank in range(world)
    ]  # fmt: skip
    found = micro_batch_shares.rebalance(windows, min(slow), StepPhase.COMPUTE, factor=1.5, least=0.0001)
    if isinstance(found, micro_batch_shares.Rebalance):
        costs = [3.0 if rank in slow else 1.0 for rank in range(world)]
        assert uneven_shares(found.shares, total, world) == tuple(micro_batch_shares.shortest(total, costs))


def test_a_rank_with_one_more_micro_batch_is_not_slow() -> None:
    """3 micro-batches on 2 equally fast ranks: the others do wait, and no rank is to blame."""
    windows = [
        StepPhases(1, 50, 10.0, 0.25, 0.01, 0.1 * count, 0.01, 0.0, 0.2 - 0.1 * count, micro_batches=count,
                   total_micro_batches=3)
        for count in (2, 1)
    ]  # fmt: skip
    assert stragglers.slow_ranks(windows) == {}
    unknown = [msgspec.structs.replace(one, micro_batches=0, total_micro_batches=0) for one in windows]
    assert list(stragglers.slow_ranks(unknown)) == [0]
