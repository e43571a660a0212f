"""The allocator and its policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.di_orchestrator import policies
from dlrover_hooks.master.di_orchestrator.allocator import Allocator, JobInfo, NodeInfo, NodeList, check
from dlrover_hooks.master.di_orchestrator.di_job_resource import Priority
from dlrover_hooks.master.di_orchestrator.policies import FitPolicy, GoodputPolicy, Placement
from dlrover_hooks.protocol import NodeResource
from tests.di_policies import ScriptedPolicy, broken

SIZE = NodeResource(1.0, 1024)


def job(name: str, replicas: int = 1, cpu: float = 1.0, **more: object) -> JobInfo:
    return JobInfo(f"here/{name}", (NodeResource(cpu, 1024),), replicas=replicas, **more)  # type: ignore[arg-type]


def nodes(*cpus: float) -> dict[str, NodeInfo]:
    return {f"n{number}": NodeInfo(f"n{number}", NodeResource(cpu, 1 << 20)) for number, cpu in enumerate(cpus)}


def jobs(*found: JobInfo) -> dict[str, JobInfo]:
    return {one.key: one for one in found}


def test_replicas_are_packed_or_spread() -> None:
    pack, spread = FitPolicy(Placement.PACK), FitPolicy(Placement.SPREAD)
    assert pack.allocate(job("a", 3), nodes(4, 4, 3)) == ("n2", "n2", "n2"), "the node that it fills"
    assert sorted(spread.allocate(job("a", 3), nodes(4, 4, 3))) == ["n0", "n1", "n2"]
    assert Counter(spread.allocate(job("a", 5), nodes(4, 4))) in (Counter(n0=3, n1=2), Counter(n0=2, n1=3))


def test_a_job_gets_what_fits_or_nothing() -> None:
    assert len(FitPolicy().allocate(job("a", 9), nodes(2, 2))) == 4
    assert FitPolicy().allocate(job("a", 9, least=5), nodes(2, 2)) == ()
    assert FitPolicy().allocate(job("a"), {}) == ()


def test_jobs_of_high_priority_are_placed_first_then_the_older_ones() -> None:
    found = FitPolicy().optimize(
        jobs(job("old", 2, submitted_s=1.0), job("new", 2, submitted_s=2.0), job("high", 2, priority=Priority.HIGH)),
        nodes(4), {},
    )  # fmt: skip
    assert sorted(found) == ["here/high", "here/old"]


def test_a_job_keeps_its_nodes() -> None:
    before: dict[str, NodeList] = {"here/b": ("n0", "n1")}
    found = FitPolicy().optimize(jobs(job("b", 3)), nodes(2, 2, 9), before)
    assert found["here/b"][:2] == ("n0", "n1")


def test_goodput_gives_replicas_to_the_job_that_uses_them() -> None:
    pytest.importorskip("scipy")
    scales = {"speeds": {"1": 10.0, "8": 80.0}}
    saturates = {"speeds": {"1": 10.0, "2": 11.0, "8": 11.0}}
    found = GoodputPolicy().optimize(
        jobs(job("scales", 8, profilings=scales), job("saturates", 8, profilings=saturates)), nodes(4, 4), {}
    )
    assert len(found["here/scales"]) > 2 * len(found["here/saturates"]) > 0
    assert GoodputPolicy().optimize({}, nodes(4), {}) == {}


@pytest.mark.parametrize("wrong", [3, {"two": 1.0}, {"2": "fast"}, {"2": -1}, {"2": float("nan")}])
def test_profilings_that_cannot_be_read_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"profilings\.speeds"):
        policies.speeds({"speeds": wrong})
    assert policies.speeds({}) == {}
    assert policies.speeds({"speeds": {"2": 3}}) == {2: 3.0}


JOBS = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 3), st.booleans()), max_size=8
)


@pytest.mark.requirement("DI-38", "DI-39", "DI-40")
@pytest.mark.parametrize(
    "policy", [FitPolicy(), FitPolicy(Placement.SPREAD), GoodputPolicy()], ids=["pack", "spread", "goodput"]
)
@given(JOBS, st.lists(st.integers(0, 8), max_size=5))
def test_no_node_gets_more_than_it_has(
    policy: FitPolicy, found: list[tuple[int, float, int, bool]], cpus: list[int]
) -> None:
    wanted = jobs(*(
        job(str(number), count, cpu, least=least, priority=Priority.HIGH if high else Priority.NORMAL)
        for number, (count, cpu, least, high) in enumerate(found)
    ))  # fmt: skip
    placed = Allocator(policy).allocate_all(wanted, nodes(*cpus), {})
    used = Counter[str]()
    for key, one in placed.items():
        assert len(one) <= max(wanted[key].replicas, wanted[key].least)
        assert not one or len(one) >= wanted[key].least
        for name in one:
            used[name] += wanted[key].sizes[0].cpu  # pyright: ignore[reportArgumentType]
    assert all(used[name] <= node.free.cpu + 1e-6 for name, node in nodes(*cpus).items())
    again = policy.optimize(wanted, nodes(*cpus), placed) if isinstance(policy, FitPolicy) else placed
    assert {key: len(one) for key, one in again.items() if one} == {key: len(one) for key, one in placed.items() if one}


@pytest.mark.requirement("DI-41", "DI-42", "DI-43", "DI-44")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (broken, "a bug"), (lambda: ("n0", "n9"), "on node 'n9', which there is not"),
        (lambda: ("n0", "n0", "n0"), "node n0 has no room for 3"), (lambda: ("n0",), "1 replicas, but it needs 2"),
    ],
)  # fmt: skip
def test_a_policy_that_fails_changes_nothing(
    answer: Callable[[], NodeList], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    allocator, mine = Allocator(ScriptedPolicy(answer)), job("a", 2, least=2)
    before: dict[str, NodeList] = {mine.key: ("n0", "n1")}
    assert allocator.allocate_all(jobs(mine), nodes(2, 2), before) == before
    assert allocator.allocate(mine, nodes(2, 2), {}) == ()
    assert len(caplog.messages) == 2
    assert said in caplog.text


def test_two_jobs_on_one_place_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    found = Allocator(ScriptedPolicy(lambda: ("n0",))).allocate_all(jobs(job("a"), job("b")), nodes(1), {})
    assert found == {"here/a": (), "here/b": ()}
    assert "node n0 has no room" in caplog.text


@pytest.mark.requirement("DI-45")
def test_jobs_that_are_not_preemptible_are_not_scheduled() -> None:
    fixed = job("fixed", preemptible=False)
    allocator = Allocator(FitPolicy())
    assert allocator.allocate(fixed, nodes(4), {}) == ()
    assert allocator.allocate_all(jobs(fixed, job("a")), nodes(4), {}) == {"here/a": ("n0",)}


def test_a_new_job_gets_what_the_others_leave() -> None:
    other = job("other", 3)
    running: dict[str, tuple[JobInfo, NodeList]] = {other.key: (other, ("n0", "n0", "n0"))}
    assert Allocator(FitPolicy()).allocate(job("a", 4), nodes(4, 2), running) == ("n0", "n1", "n1")


def test_an_allocation_of_all_nodes_is_allowed() -> None:
    check(job("a", 2, 0.1), ("n0", "n0"), {"n0": NodeResource(0.2, 2048)})
