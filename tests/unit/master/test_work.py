"""What an event costs is counted in calls of Python, not in seconds: it does not grow with the job."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.testing import MasterFake
from tests.e2e.job_script import attach, join

FEW, MANY = 40, 400


def calls_of(work: Callable[[], Any]) -> int:
    """How many functions were called; a generator counts once for each value.

    No garbage is collected meanwhile: the finalizers of what earlier tests have left would count, too.
    """
    seen, collects = 0, gc.isenabled()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal seen
        del frame, arg
        seen += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return seen


def joins(master: MasterFake, nodes: int, life: str, **more: Any) -> list[int]:
    """What each join costs but the last one, which forms the round."""
    costs: list[int] = []
    for index in range(nodes):
        event = join(f"a{index}", 1, lives=f"{life}{index}-", low=nodes, high=nodes + 8, last_call_s=1e6, **more)
        costs.append(calls_of(lambda event=event: master.call(event)))
    return costs[:-1]


def rejoins(nodes: int) -> list[int]:
    """The joins after a break, of agents that start all their workers again."""
    master = MasterFake()
    joins(master, nodes, "w", sole=True)
    master.advance(2e6)
    assert master.call(p.AwaitRound("job", "a0", 0)).world_size == nodes
    master.call(p.Exited("job", "a0", "w0-0", 1))
    return joins(master, nodes, "x", sole=True, again=True)


def spares(nodes: int) -> list[int]:
    """Joins of agents that find the job full."""
    master = MasterFake()
    for index in range(nodes):
        master.call(join(f"a{index}", 1, lives=f"w{index}-", low=nodes, high=nodes, agents=True))
    assert master.call(p.ShowJob("job")).phase is p.Phase.TRAINING
    more = {"low": nodes, "high": nodes, "agents": True, "sole": True}
    late = (join(f"s{index}", 1, lives=f"s{index}-", **more) for index in range(nodes))
    return [calls_of(lambda event=event: master.call(event)) for event in late]


@pytest.mark.parametrize("work", [rejoins, spares])
def test_a_join_costs_the_same_in_a_large_job(work: Callable[[int], list[int]]) -> None:
    """Ten times as many nodes: O(N) work in each join would make it ten times as much."""
    few, many = work(FEW), work(MANY)
    assert max(many) < 1.5 * max(few), (max(few), max(many))
    assert sum(many) / len(many) < 1.2 * sum(few) / len(few)


def views(nodes: int) -> list[int]:
    """What each agent's view of its own node costs after a break, while more and more members are lost."""
    master = MasterFake()
    for index in range(nodes):
        master.call(join(f"a{index}", 1, lives=f"w{index}-", low=nodes, high=nodes))
    for index in range(nodes):
        master.call(attach(f"w{index}-0", f"a{index}"))
        master.call(p.Heartbeat("job", f"w{index}-0", step=7))
    costs: list[int] = []
    master.call(p.ShowJob("job", "node-a0"))  # looks once for the greatest step
    for index in range(p.LISTED_GONE // 4):
        master.call(p.Exited("job", f"a{index}", f"w{index}-0", -9))
        costs.append(calls_of(lambda index=index: master.call(p.ShowJob("job", f"node-a{nodes - 1 - index}"))))
    return costs


def test_a_view_for_a_node_costs_the_same_in_a_large_job() -> None:
    """Every agent asks for one when a round breaks."""
    few, many = views(FEW), views(MANY)
    assert max(many) < 1.1 * max(few), (max(few), max(many))


def checked(nodes: int) -> list[int]:
    """Requests of nodes that are checked together, but the last of each round, after which the next one is made."""
    master, costs = MasterFake(), list[int]()
    names = [f"a{index}" for index in range(nodes)]

    def each(requests: Iterable[p.Message]) -> None:
        costs.extend([calls_of(lambda request=request: master.call(request)) for request in requests][:-1])

    secret = p.Secret("s")
    each(p.JoinCheck("job", name, name, "10.0.0.1", 1, secret, nodes, nodes, 9.0, 9.0, 9.0) for name in names)
    for step in (1, 2):
        each(p.AwaitCheck("job", name, step - 1) for name in names)
        each(p.ReportTransfer("job", name, step, 1e9, 1e-4) for name in names)
    assert len(master.call(p.ShowCheck("job")).nodes) == nodes
    return costs


def test_a_node_check_costs_the_same_for_each_of_many_nodes() -> None:
    few, many = checked(FEW), checked(MANY)
    assert max(many) < 1.5 * max(few), (max(few), max(many))
    assert sum(many) / len(many) < 1.2 * sum(few) / len(few)
