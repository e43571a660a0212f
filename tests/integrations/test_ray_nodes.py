"""Jobs on Ray clusters of several nodes: lost and hung nodes, places that are not there, and what earlier jobs left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integrations.ray_nodes import EDGE, ROLES, Nodes, job, runs, several_nodes
from tests.waiting import WAIT_S, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def two_edges() -> Iterator[Nodes]:
    with several_nodes(2) as nodes:
        yield nodes


def edge_job(folder: Path) -> Any:
    roles = job(folder).silent_after(6).role("server").run(f"{ROLES}:serve").resource(**{EDGE: 1}).not_driver()
    return roles.role("main").run(f"{ROLES}:call").build().submit(backend="ray", wait=False)


@pytest.mark.requirement("DL-10")
def test_a_worker_of_a_lost_node_goes_on_on_another_one_before_ray_knows(tmp_path: Path, two_edges: Nodes) -> None:
    import ray

    handle = edge_job(tmp_path)
    first = runs(handle, "server", 0)
    runs(handle, "main", 0)
    lost = two_edges.of(first.node)
    two_edges.lose(lost)
    second = runs(handle, "server", 0, life=2)
    assert second.node != first.node
    assert any(one["NodeID"] == lost.node_id and one["Alive"] for one in ray.nodes())  # Ray has not noticed yet
    (tmp_path / "end").touch()
    assert handle.wait(WAIT_S) == 0


def test_a_worker_of_a_node_that_hangs_goes_on_and_the_old_process_ends_when_it_wakes(
    tmp_path: Path, two_edges: Nodes
) -> None:
    handle = edge_job(tmp_path)
    first = runs(handle, "server", 0)
    runs(handle, "main", 0)
    orphan = psutil.Process(first.pid)
    stopped = two_edges.hang(two_edges.of(first.node))
    try:
        second = runs(handle, "server", 0, life=2)
        assert second.node != first.node
        assert orphan.status() == psutil.STATUS_STOPPED
        orphan.send_signal(signal.SIGCONT)  # its master refuses it, and its raylet still hangs
        until(lambda: not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE, "the orphan ends by itself")
        (tmp_path / "end").touch()
        assert handle.wait(WAIT_S) == 0
    finally:
        for one in stopped:
            if one.is_running():
                os.kill(one.pid, signal.SIGCONT)


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
