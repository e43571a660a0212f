"""The pure machine of a node check: which nodes meet, which are found bad or slow, and what happens at deadlines."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, GivenUp, Stale, UnknownJob
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.node_check.speed_comparison import reference_of
from dlrover_hooks.testing import MasterFake
from tests.benchmarks.node_check_load import KINDS, NodeFaults, SimulatedCheck, node_names, with_faults
from tests.e2e.job_script import join

OK, SLOW, UNCLEAR, BAD = p.NodeVerdict.OK, p.NodeVerdict.SLOW, p.NodeVerdict.UNCLEAR, p.NodeVerdict.BAD
CUT = NodeFaults(cut=True)


def found(*faults: NodeFaults, seed: int = 0) -> list[p.NodeVerdict]:
    """The verdicts on so many nodes, in the order of their names."""
    check = SimulatedCheck(dict(zip(node_names(len(faults)), faults, strict=True)), seed)
    return [one.verdict for one in sorted(check.run().nodes, key=lambda one: one.node)]


def test_a_thousand_nodes() -> None:
    """Of 1,000 nodes each bad and each slow one is singled out, and no other."""
    faults = with_faults(1000, 50, seed=1)
    report = SimulatedCheck(faults, seed=1).run()
    assert {one.node: one.verdict for one in report.nodes} == {name: one.verdict for name, one in faults.items()}
    assert report.rounds <= 3
    assert len(report.kept_out) == sum(one.verdict is BAD for one in faults.values())


@given(seed=st.integers(0, 2**32), count=st.integers(4, 40))
@settings(max_examples=60)
def test_any_quarter_of_the_nodes(seed: int, count: int) -> None:
    """Whichever of the nodes have whichever faults."""
    chance = random.Random(seed)
    faults = with_faults(count, 0, seed)
    faults |= {name: chance.choice(KINDS) for name in chance.sample(sorted(faults), chance.randint(0, count // 4))}
    report = SimulatedCheck(faults, seed).run()
    assert {one.node: one.verdict for one in report.nodes} == {name: one.verdict for name, one in faults.items()}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("fault", "verdict"), [(kind, kind.verdict) for kind in KINDS])
def test_one_of_three(place: int, fault: NodeFaults, verdict: p.NodeVerdict) -> None:
    faults = [NodeFaults()] * 3
    faults[place] = fault
    assert found(*faults) == [verdict if index == place else OK for index in range(3)]


def test_two_bad_nodes_that_met_each_other_twice() -> None:
    """Both of a round's pairs may be of two bad nodes; a later round has good peers for them."""
    assert found(CUT, CUT, NodeFaults(), NodeFaults(), NodeFaults(), NodeFaults()) == [BAD, BAD, OK, OK, OK, OK]


def test_two_rounds_are_enough_where_bad_nodes_are_neighbours() -> None:
    """Their peers of the first round are suspects, too: in the second one each of the four gets one of the others."""
    faults = dict(zip(node_names(8), [NodeFaults(), CUT, CUT, *[NodeFaults()] * 5], strict=True))
    report = SimulatedCheck(faults, 0).run()
    assert [one.node for one in report.nodes if one.verdict is BAD] == ["node-0001", "node-0002"]
    assert report.rounds == 2


def test_of_two_nodes_none_is_blamed_alone() -> None:
    assert found(CUT, NodeFaults()) == [UNCLEAR, UNCLEAR]
    assert found(NodeFaults(silent=True), NodeFaults()) == [BAD, OK]
    assert found(NodeFaults(compute=0.3), NodeFaults()) == [SLOW, OK]
    assert found(NodeFaults()) == [OK]


def test_where_nothing_works_nobody_is_blamed() -> None:
    assert found(CUT, CUT, CUT, CUT) == [UNCLEAR] * 4


class Fake(MasterFake):
    """Requests of nodes a, b and so on."""

    def comes(self, node: str, least: int = 2, most: int = 2, *, life: str = "", measures: Any = ()) -> p.CheckJoined:
        life = life or f"life of {node}"
        request = p.JoinCheck(
            "job", life, node, "10.0.0.1", 4711, p.Secret(node), least, most, 600.0, 2.0, 30.0, measures
        )
        return self.call(request)

    def task(self, node: str, after: int = 0, life: str = "") -> p.CheckStep:
        return self.call(p.AwaitCheck("job", life or f"life of {node}", after, timeout_s=0.0))

    def reports(self, node: str, *, works: bool = True) -> None:
        step = self.state.jobs["job"].check.step
        speed, failed = (1e9, "") if works else (None, "connection refused")
        self.call(p.ReportTransfer("job", f"life of {node}", step, speed, 1e-4, failed))

    def verdicts(self) -> dict[str, p.NodeVerdict]:
        return {one.node: one.verdict for one in self.call(p.ShowCheck("job")).nodes}


def test_the_peers_of_a_pair_and_what_they_need_of_each_other() -> None:
    fake = Fake()
    assert fake.comes("b").number == 1
    assert fake.task("b") == p.CheckStep()
    fake.comes("a")
    (task_a, task_b) = (fake.task("a"), fake.task("b"))
    assert task_a.peer is not None
    assert (task_a.peer.node, task_a.peer.secret, task_a.dials_first, task_a.within_s) == ("b", p.Secret("b"), True, 30)
    assert task_b.peer is not None
    assert (task_b.peer.node, task_b.peer.secret, task_b.dials_first) == ("a", p.Secret("a"), False)
    fake.reports("a")
    assert fake.task("a") == p.CheckStep()  # it has reported: there is nothing to do
    assert fake.task("b").peer is not None  # asked again, as after a lost answer
    fake.reports("b")
    report = fake.task("a", task_a.step).report
    assert report is not None
    assert [(one.node, one.verdict, one.network) for one in report.nodes] == [("a", OK, 1e9), ("b", OK, 1e9)]


def test_the_node_that_cannot_be_reached_is_bad() -> None:
    """Both nodes dial, so that two are enough to tell a closed port from a lost network."""
    fake = Fake()
    for node in ("a", "b"):
        fake.comes(node)
    for _ in range(2):
        fake.reports("a", works=False)
        fake.reports("b")
    report = fake.call(p.ShowCheck("job"))
    assert [(one.node, one.verdict) for one in report.nodes] == [("b", BAD), ("a", UNCLEAR)]
    assert report.nodes[0].reason == "a cannot reach it, but it reaches them: connection refused"


def test_missing_nodes_are_not_waited_for_for_ever() -> None:
    fake = Fake()
    fake.comes("a", 3, 3)
    fake.advance(599.0)
    assert fake.task("a") == p.CheckStep()
    fake.advance(2.0)
    report = fake.task("a").report
    assert report is not None
    assert (report.wanted, [one.node for one in report.nodes]) == (3, ["a"])


def test_a_range_of_nodes_begins_after_the_last_call() -> None:
    fake = Fake()
    fake.comes("a", 1, 4)
    fake.advance(1.5)
    fake.comes("b", 1, 4)
    fake.advance(1.5)
    assert fake.task("a") == p.CheckStep()
    fake.advance(1.0)
    assert fake.task("a").peer is not None


def test_a_replacement_is_not_kept_waiting_while_the_job_trains() -> None:
    fake = Fake()
    fake.call(join("agent", 1, lives="w", low=1, high=2, job="job"))
    fake.advance(1.0)
    fake.comes("c", 2, 2)
    assert fake.verdicts() == {"c": OK}


def test_a_node_that_comes_during_a_check_is_in_the_next() -> None:
    fake = Fake()
    for node in ("a", "b"):
        fake.comes(node)
    assert fake.comes("c", 1, 1).number == 2
    assert fake.task("c") == p.CheckStep()
    assert fake.call(p.ShowCheck("job")).gathering == ("c",)
    fake.reports("a")
    fake.reports("b")
    assert fake.task("c").report is not None
    assert fake.verdicts() == {"c": OK}
    with pytest.raises(Stale, match="in no node check"):
        fake.task("a")


def test_a_process_that_is_started_again_takes_the_place_of_the_first() -> None:
    fake = Fake()
    fake.comes("a", life="first")
    fake.comes("a", life="second")
    fake.comes("b")
    assert fake.task("a", life="second").peer is not None
    with pytest.raises(Stale):
        fake.task("a", life="first")


def test_a_bad_node_is_kept_out_until_it_passes_or_joins() -> None:
    fake = Fake()
    broken = (p.Measure(p.MeasureKind.COMPUTE, "cuda:1", failed="a matrix product is wrong"),)
    fake.comes("a", 1, 1, measures=broken)
    out = fake.call(p.ShowJob("job")).kept_out
    assert out == (p.KeptOut("a", "compute on cuda:1: a matrix product is wrong"),)
    fake.comes("a", 1, 1, life="repaired")
    assert fake.call(p.ShowJob("job")).kept_out == ()
    fake.comes("node-a", 1, 1, measures=broken)
    assert [one.node for one in fake.call(p.ShowJob("job")).kept_out] == ["node-a"]
    fake.call(join("a", 1, lives="w", low=1, high=1, job="job"))
    assert fake.call(p.ShowJob("job")).kept_out == ()


def test_a_restarted_master_goes_on_with_a_check() -> None:
    """The state is journaled: what was reported counts, and the deadline holds."""
    fake = Fake()
    for node in ("a", "b"):
        fake.comes(node)
    fake.reports("a")
    state = job_registry.decode(job_registry.encode(fake.state))
    assert job_registry.encode(state) == job_registry.encode(fake.state)
    (deadline,) = job_registry.unfinished_effects(state)
    assert deadline.at == state.jobs["job"].check.due  # pyright: ignore[reportAttributeAccessIssue]
    fake.state = state
    fake.advance(36.0)
    assert fake.verdicts() == {"a": OK, "b": BAD}


def test_a_job_that_was_only_checked_is_forgotten() -> None:
    fake = Fake()
    fake.comes("a", 1, 2)
    state = fake.state
    assert job_registry.finished_before(state, float("inf")) == []
    fake.advance(3.0)
    assert job_registry.finished_before(state, float("inf")) == ["job"]
    fake.call(p.DeleteJob("job"))
    with pytest.raises(UnknownJob):
        fake.task("a")


def test_a_node_that_is_lost_is_not_waited_for() -> None:
    """In a round, and before the check begins. The other two nodes then meet each other."""
    fake = Fake()
    for node in ("a", "b", "d"):
        fake.comes(node, 3, 3)
        if node == "d":
            break
        fake.call(p.Leave("job", f"life of {node}", p.Departure.STOPPED))
        assert fake.call(p.ShowCheck("job")).gathering == ()
    for node in ("a", "b"):
        fake.comes(node, 3, 3)
    fake.call(p.Leave("job", "life of b", p.Departure.STOPPED))
    fake.reports("a", works=False)
    fake.reports("a")
    fake.reports("d")
    assert fake.verdicts() == {"a": OK, "b": BAD, "d": OK}


def test_a_node_that_only_lost_its_connection_to_the_master_may_still_report() -> None:
    """Its peer has reached it, so it lives: it is waited for. In the second case it is in no transfer by then."""
    fake = Fake()
    for node in ("a", "b"):
        fake.comes(node)
    fake.call(p.Leave("job", "life of b", p.Departure.STOPPED))
    fake.reports("a")
    assert fake.call(p.ShowCheck("job")).running == 1
    fake.call(p.Leave("job", "life of a", p.Departure.STOPPED))
    fake.reports("b")
    assert fake.verdicts() == {"a": OK, "b": OK}


def test_a_bad_node_that_serves_the_master_ends_the_job_for_all() -> None:
    """It may not join, so the master knows its agent from the check only. The job can be launched again."""
    fake = Fake()
    broken = (p.Measure(p.MeasureKind.COMPUTE, "cuda:1", failed="a matrix product is wrong"),)
    fake.comes("a", measures=broken)
    fake.comes("b")
    fake.call(join("b", 1, lives="w", low=2, high=2, job="job", again=True))
    with pytest.raises(Stale):
        fake.call(p.Leave("job", "life of z", p.Departure.STOPPED, ending=p.Ending(77, "z")))
    with pytest.raises(Stale):
        fake.call(p.Leave("job", "life of a", p.Departure.STOPPED))
    fake.call(p.Leave("job", "life of a", p.Departure.STOPPED, ending=p.Ending(77, "a is bad")))
    with pytest.raises(GivenUp, match="a is bad"):
        fake.call(p.AwaitRound("job", "b", 0, 0.0))
    fake.call(p.Leave("job", "b", p.Departure.STOPPED))
    for agent in ("c", "d"):
        fake.call(join(agent, 1, lives=agent, low=2, high=2, job="job", again=True))
    assert fake.call(p.AwaitRound("job", "c", 0, 0.0)).world_size == 2


def test_reports_that_come_late_change_nothing() -> None:
    fake = Fake()
    for node in ("a", "b"):
        fake.comes(node)
    fake.advance(36.0)
    assert fake.verdicts() == {"a": BAD, "b": BAD}
    fake.reports("a")
    assert fake.verdicts() == {"a": BAD, "b": BAD}
    with pytest.raises(Stale):
        fake.reports("z")


def test_a_report_to_one_of_many_nodes_is_short() -> None:
    faults = with_faults(200, 20, seed=3)
    check = SimulatedCheck(faults, seed=3)
    whole = check.run()
    last = whole.nodes[-1].node
    report = check.ask(last, 0).report
    assert [one.node for one in report.nodes] == [one.node for one in (*whole.nodes[:64], whole.nodes[-1])]
    assert report.unlisted == {"ok": 200 - 65}
    assert [one.node for one in report.nodes if one.measures] == [last]
    first = check.ask(whole.nodes[0].node, 0).report
    assert (first.nodes[0], first.unlisted) == (whole.nodes[0], {"ok": 200 - 64})
    assert len(first.nodes) == 64
    assert len(msgspec.json.encode(report)) < 20_000


def test_what_is_no_check() -> None:
    with pytest.raises(BadRequest, match="2 to 1 nodes"):
        Fake().comes("a", 2, 1)


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        ([], []),
        ([5.0], []),
        ([10.0, 4.0], [4.0]),
        ([10.0, 6.0], []),
        ([10.0, 9.9, 1.0], [1.0]),
        ([100.0, 60.0, 25.0], []),  # as different from each other as the last is from the middle
        ([10.0] * 20 + [4.0] * 3, [4.0]),
    ],
)
def test_slow_is_far_below_the_middle_and_outside_of_the_usual(speeds: list[float], slow: list[float]) -> None:
    reference = reference_of(speeds)
    assert sorted({one for one in speeds if reference.is_slow(one)}) == slow
