"""Reports of nodes: who may send one, what is shown of it, and when it is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, Stale, UnknownJob
from dlrover_hooks.master.core import heartbeats, job_registry, node_vitals
from dlrover_hooks.master.core.events import Lost
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.master.metrics import USES, Metrics
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.testing import StorageFake
from tests.e2e.job_script import attach, join

GPU = p.AcceleratorVitals(name="GPU", use_percent=93.0, ecc_errors=1, throttled_by=("power cap",))


def report(agent: str = "agent", *, workers: tuple[str, ...] = ("w0", "w1"), **more: Any) -> p.NodeVitals:
    fields: dict[str, Any] = {
        "job": "job",
        "incarnation": agent,
        "node": f"node-{agent}",
        "cpu": p.CPUVitals(cores=8, busy_cores=2.5, load=(1.0, 2.0, 3.0), limit_cores=4.0),
        "memory": p.MemoryVitals(total_bytes=100, used_bytes=40, oom_kills=1),
        "network": p.NetworkVitals(1.0, 2.0),
        "workers": tuple(p.WorkerProcesses(worker, 3, 150.0, 1000) for worker in workers),
    }
    return p.NodeVitals(**(fields | more))


def run(tmp_path: Path, story: Callable[[Runtime], Awaitable[None]]) -> None:
    async def scenario() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "m.db"), storage=StorageFake())
        runtime.start()
        try:
            await asyncio.wait_for(story(runtime), 60)
        finally:
            await runtime.close()

    asyncio.run(scenario())


async def two_nodes(master: Runtime) -> None:
    """A round of two nodes with a worker each, `x0` and `y0`; both have reported."""
    for agent, lives in (("a", "x"), ("b", "y")):
        await master.event(join(agent, 1, lives=lives))
    for agent, worker in (("a", "x0"), ("b", "y0")):
        await master.event(attach(worker, agent))
        assert await master.query(report(agent, workers=(worker,))) == p.NextVitals(node_vitals.EVERY_S)


async def shown(master: Runtime) -> p.JobVitals:
    view = await master.query(p.ShowVitals("job"))
    assert isinstance(view, p.JobVitals)
    return view


def test_a_report_is_shown_with_its_ranks(tmp_path: Path) -> None:
    async def story(master: Runtime) -> None:
        await two_nodes(master)
        vitals = p.Vitals(50.0, 700, GPU)
        await master.query(p.Heartbeat("job", "y0", 7, vitals))
        await master.query(p.Heartbeat("job", "y0", 8, stall=p.Stall(70.0, "train.py:3")))
        view = await shown(master)
        assert [(one.node, one.cpu.busy_cores, one.memory.oom_kills) for one in view.nodes] == [
            ("node-a", 2.5, 1), ("node-b", 2.5, 1),
        ]  # fmt: skip
        assert 0 <= view.nodes[0].age_s < 60
        first, second = view.ranks
        assert (first.rank, first.node, first.vitals, first.stall) == (0, "node-a", None, None)
        assert first.processes == p.WorkerProcesses("x0", 3, 150.0, 1000)
        assert (second.rank, second.step, second.vitals) == (1, 8, vitals)
        assert second.stall == p.Stall(70.0, "train.py:3")
        text = Metrics().text(master.state, master.nodes).decode()
        assert 'dlrover_hooks_node_cpu_busy_cores{job="job",node="node-a"} 2.5' in text
        assert 'dlrover_hooks_node_memory_oom_kills{job="job",node="node-b"} 1.0' in text
        assert 'dlrover_hooks_rank_tree_cpu_percent{job="job",rank="0"} 150.0' in text
        assert 'dlrover_hooks_rank_process_memory_bytes{job="job",rank="1"} 700.0' in text
        assert 'dlrover_hooks_rank_accelerator_use_percent{job="job",rank="1"} 93.0' in text

    run(tmp_path, story)


def test_reports_are_not_journaled(tmp_path: Path) -> None:
    async def story(master: Runtime) -> None:
        await two_nodes(master)
        before = job_registry.encode(master.state)
        await master.query(report("a"))
        assert job_registry.encode(master.state) == before

    run(tmp_path, story)
    run(tmp_path, _nothing_is_kept)


async def _nothing_is_kept(master: Runtime) -> None:
    view = await shown(master)
    assert (view.nodes, len(view.ranks)) == ((), 2)


@pytest.mark.parametrize(
    ("event", "left"),
    [
        (p.Leave("job", "b", p.Departure.STOPPED), ["node-a"]),
        (p.Exited("job", "b", "y0", -9), ["node-a"]),
        (p.Leave("job", "y0", p.Departure.DONE), ["node-a"]),
        (p.Exited("job", "a", "x0", 0), ["node-b"]),
        (Lost(job="job", incarnation="y0", reason="no heartbeat"), ["node-a"]),
    ],
)
def test_a_node_without_workers_is_forgotten(tmp_path: Path, event: p.Message, left: list[str]) -> None:
    async def story(master: Runtime) -> None:
        await two_nodes(master)
        await master.event(event)
        assert [one.node for one in (await shown(master)).nodes] == left
        assert list(master.nodes.reports["job"]) == left
        gone = {"node-a": "b", "node-b": "a"}[left[0]]
        with pytest.raises(Stale, match=f"'node-{gone}' has no workers"):
            await master.query(report(gone))
        assert list(master.nodes.reports["job"]) == left

    run(tmp_path, story)


def test_a_deleted_job_leaves_nothing(tmp_path: Path) -> None:
    async def story(master: Runtime) -> None:
        await two_nodes(master)
        await master.event(p.DeleteJob("job", force=True))
        assert master.nodes.reports == {}
        with pytest.raises(UnknownJob):
            await shown(master)
        with pytest.raises(UnknownJob):
            await master.query(report("a"))
        assert master.nodes.reports == {}

    run(tmp_path, story)


def test_a_round_leaves_nodes_behind(tmp_path: Path) -> None:
    """One that waited for a place has reported, and its agent has vanished before it got one."""

    async def story(master: Runtime) -> None:
        await master.event(join("b", 1, lives="y", low=2, high=2))
        await master.query(report("b"))
        assert [one.node for one in (await shown(master)).nodes] == ["node-b"], "it waits for ranks"
        await master.event(p.Leave("job", "b", p.Departure.STOPPED))
        assert (await shown(master)).nodes == ()
        for agent, lives in (("a", "x"), ("c", "z")):
            await master.event(join(agent, 1, lives=lives))
        assert master.nodes.reports.get("job", {}) == {}

    run(tmp_path, story)


def test_a_stranger_is_refused() -> None:
    state = Master()
    job_registry.apply(state, join(), 0.0)
    for one in (report("stranger"), report(node="elsewhere"), report("agent", incarnation="stranger")):
        with pytest.raises(Stale):
            node_vitals.accepted(state.jobs["job"], one)
    assert node_vitals.accepted(state.jobs["job"], report()).within_s == node_vitals.EVERY_S


def test_no_job_has_a_name_that_is_a_route() -> None:
    with pytest.raises(BadRequest, match="ends with '/tasks', '/vitals', '/check' or '/plans'"):
        job_registry.apply(Master(), msgspec.structs.replace(join(), job="team/vitals"), 0.0)


def test_the_series_of_nodes_and_ranks_are_bounded() -> None:
    state, nodes, world = Master(), Nodes(), USES + 40
    for index in range(world):
        job_registry.apply(state, join(f"a{index}", 1, lives=f"w{index}-", low=world, high=world), 0.0)
    for index in range(world):
        one = report(f"a{index}", workers=(f"w{index}-0",))
        node_vitals.accepted(state.jobs["job"], one)
        node_vitals.keep(nodes, one, 0.0)
        heartbeats.beat(nodes, ("job", f"w{index}-0"), 0.0, vitals=p.Vitals(1.0, 2, GPU))
    assert len(list(node_vitals.rank_uses(nodes, state.jobs["job"]))) == world
    text = Metrics().text(state, nodes).decode()
    assert text.count("dlrover_hooks_node_cpu_cores{") == USES
    assert text.count("dlrover_hooks_rank_tree_processes{") == USES


def test_each_launcher_of_a_parameter_server_job_may_report_until_it_is_finished() -> None:
    """Launchers are no members of such a job. A task is shown with the processes that were reported of it."""
    state, nodes = Master(), Nodes()
    job_registry.apply(state, p.ScaleTasks("job", "cli", 1, 1), 0.0)
    job = state.jobs["job"]
    chief = next(task for task in job.ps.tasks if task.type is p.NodeType.CHIEF) if job.ps is not None else None
    assert chief is not None
    job_registry.apply(state, p.RegisterTask("job", "c", p.NodeType.CHIEF, 0, "", chief.id), 0.0)
    one = report("launcher", workers=("c", "not registered"))
    assert node_vitals.accepted(job, one).within_s == node_vitals.EVERY_S
    node_vitals.keep(nodes, one, 0.0)
    assert [use.node for use in node_vitals.node_uses(nodes, job, 0.0)] == [one.node]
    assert list(node_vitals.task_uses(nodes, job)) == [
        p.TaskUse(p.NodeType.CHIEF, 0, p.NodeStatus.RUNNING, node=one.node, processes=one.workers[0])
    ]
    job_registry.apply(state, p.EndTasks("job", "c"), 0.0)
    with pytest.raises(Stale):
        node_vitals.accepted(job, one)
    assert list(node_vitals.node_uses(nodes, job, 0.0)) == []
