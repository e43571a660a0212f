"""Jobs on Ray clusters of several nodes: lost and hung nodes, places that are not there, and what earlier jobs left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.job import DLJobBuilder
from tests.integrations.ray_nodes import EDGE, REPOSITORY, Nodes, several_nodes
from tests.waiting import until

ROLES = "tests.contracts.job_roles"
pytestmark = pytest.mark.slow


@pytest.fixture
def two_edges() -> Iterator[Nodes]:
    with several_nodes(2) as nodes:
        yield nodes


def job(folder: Path, name: str = "job") -> DLJobBuilder:
    return DLJobBuilder(name).config(folder=str(folder)).env(PYTHONPATH=str(REPOSITORY))


def runs(handle: Any, role: str, rank: int, life: int = 1) -> p.RoleWorker:
    def found() -> p.RoleWorker | None:
        for one in handle.status().workers:
            if (one.role, one.rank, one.life, one.state) == (role, rank, life, p.WorkerState.RUNNING):
                return one
        return None

    return until(found, f"life {life} of {role} {rank} runs", 120.0, diagnostic=lambda: handle.status().events)


def edge_job(folder: Path) -> Any:
    roles = job(folder).silent_after(6).role("server").run(f"{ROLES}:serve").resource(**{EDGE: 1}).not_driver()
    return roles.role("main").run(f"{ROLES}:call").build().submit(backend="ray", wait=False)


@pytest.mark.requirement("DL-10")
def test_a_worker_of_a_lost_node_goes_on_on_another_one_before_ray_knows(tmp_path: Path, two_edges: Nodes) -> None:
    import ray

    handle = edge_job(tmp_path)
    first = runs(handle, "server", 0)
    lost = two_edges.of(first.node)
    two_edges.lose(lost)
    second = runs(handle, "server", 0, life=2)
    assert second.node != first.node
    assert any(one["NodeID"] == lost.node_id and one["Alive"] for one in ray.nodes())  # Ray has not noticed yet
    (tmp_path / "end").touch()
    assert handle.wait(60) == 0


def test_a_worker_of_a_node_that_hangs_goes_on_and_the_old_process_ends_when_it_wakes(
    tmp_path: Path, two_edges: Nodes
) -> None:
    handle = edge_job(tmp_path)
    first = runs(handle, "server", 0)
    orphan = psutil.Process(first.pid)
    stopped = two_edges.hang(two_edges.of(first.node))
    try:
        second = runs(handle, "server", 0, life=2)
        assert second.node != first.node
        assert orphan.status() == psutil.STATUS_STOPPED
        orphan.send_signal(signal.SIGCONT)  # its master refuses it, and its raylet still hangs
        until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE, "the orphan ends by itself")
        (tmp_path / "end").touch()
        assert handle.wait(60) == 0
    finally:
        for one in stopped:
            if one.is_running():
                os.kill(one.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def one_node() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace="dlrover_hooks", log_to_driver=False)
    yield
    ray.shutdown()


def test_a_job_without_a_place_says_what_is_missing_and_fails_in_time(tmp_path: Path, one_node: None) -> None:
    wants = job(tmp_path, "wide").ready_within(3).role("main").run(f"{ROLES}:wait").workers(2).resource(cpu=3, tpu_v9=1)
    handle = wants.build().submit(backend="ray", wait=False)
    assert handle.wait(60) == 1
    reason = handle.status().reason
    for word in ("never_started", "after 3 s", "2 places", "tpu_v9 1", "1 nodes"):
        assert word in reason


def test_workers_that_are_to_be_apart_need_as_many_nodes(tmp_path: Path, one_node: None) -> None:
    wants = job(tmp_path, "apart").nodes(2).ready_within(3).role("main").run(f"{ROLES}:wait").workers(2).spread("main")
    handle = wants.build().submit(backend="ray", wait=False)
    assert handle.wait(60) == 1
    assert "each on another node" in handle.status().reason


@pytest.mark.requirement("DL-9", "DL-19")
def test_workers_that_are_apart_run_on_different_nodes(tmp_path: Path, two_edges: Nodes) -> None:
    roles = job(tmp_path).nodes(3).role("server").run(f"{ROLES}:serve").workers(2).resource(**{EDGE: 1}).not_driver()
    handle = roles.role("main").run(f"{ROLES}:wait").spread("server").build().submit(backend="ray", wait=False)
    assert runs(handle, "server", 0).node != runs(handle, "server", 1).node
    assert handle.stop() == 130


@pytest.mark.requirement("DL-17", "DL-18")
def test_workers_that_are_collocated_share_a_node_and_a_device(tmp_path: Path) -> None:
    with several_nodes(2, each=1) as nodes:
        roles = job(tmp_path).role("actor").run(f"{ROLES}:wait").workers(2).resource(**{EDGE: 0.5})
        roles = roles.role("rollout").run(f"{ROLES}:serve").workers(2).resource(**{EDGE: 0.5}).not_driver()
        handle = roles.collocate("actor", "rollout").build().submit(backend="ray", wait=False)
        where = [(runs(handle, "actor", rank).node, runs(handle, "rollout", rank).node) for rank in range(2)]
        assert all(actor == rollout for actor, rollout in where)
        assert {nodes.of(actor).node_id for actor, _ in where} == {one.node_id for one in nodes.edges}
        assert handle.stop() == 130


def test_actors_of_an_earlier_job_of_the_name_are_removed(tmp_path: Path, one_node: None) -> None:
    import ray

    from dlrover_hooks.integrations.ray import cluster_state

    handle = job(tmp_path, "again").role("main").run(f"{ROLES}:wait").build().submit(backend="ray", wait=False)
    old = runs(handle, "main", 0)
    cluster_state.kill("again/prime")  # for good: nothing looks after this job any more
    cluster_state.forget("again")
    until(lambda: "again/prime" not in cluster_state.actor_names("again/"), "the PrimeMaster is gone")
    second = job(tmp_path, "again").role("main").run(f"{ROLES}:wait").build().submit(backend="ray", wait=False)
    new = runs(second, "main", 0)
    assert new.pid != old.pid
    until(lambda: not psutil.pid_exists(old.pid), "the old worker is gone")
    (tmp_path / "end").touch()
    assert second.wait(60) == 0
    assert ray.is_initialized()


def test_a_job_is_found_again_by_its_name(tmp_path: Path, one_node: None) -> None:
    from dlrover_hooks.integrations.ray import attach

    handle = job(tmp_path, "named").role("main").run(f"{ROLES}:wait").build().submit(backend="ray", wait=False)
    again = attach("named")
    assert (again.url, again.token) == (handle.url, handle.token)
    assert again.stop("found") == 130
    assert handle.wait(30) == 130
    assert handle.status().reason == "found"
