"""Jobs on a Ray cluster of one node: places that are not there, what an earlier job left, and finding a job again."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from dlrover_hooks.job.call_messages import request, result_of
from tests.integrations.ray_nodes import ROLES, job, runs
from tests.waiting import WAIT_S, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_job_without_a_place_says_what_is_missing_and_fails_in_time(tmp_path: Path, one_ray_node: None) -> None:
    wants = job(tmp_path, "wide").ready_within(3).role("main").run(f"{ROLES}:wait").workers(2).resource(cpu=3, tpu_v9=1)
    handle = wants.build().submit(backend="ray", wait=False)
    assert handle.wait(WAIT_S) == 1
    reason = handle.status().reason
    for word in ("never_started", "after 3 s", "2 places", "tpu_v9 1", "1 nodes"):
        assert word in reason


def test_workers_that_are_to_be_apart_need_as_many_nodes(tmp_path: Path, one_ray_node: None) -> None:
    wants = job(tmp_path, "apart").nodes(2).ready_within(3).role("main").run(f"{ROLES}:wait").workers(2).spread("main")
    handle = wants.build().submit(backend="ray", wait=False)
    assert handle.wait(WAIT_S) == 1
    assert "each on another node" in handle.status().reason


def test_actors_of_an_earlier_job_of_the_name_are_removed(tmp_path: Path, one_ray_node: None) -> None:
    import ray

    from dlrover_hooks.integrations.ray import cluster_state

    handle = job(tmp_path, "again").role("main").run(f"{ROLES}:wait").build().submit(backend="ray", wait=False)
    old = runs(handle, "main", 0)
    cluster_state.kill("again/prime")  # for good: nothing looks after this job any more
    cluster_state.delete_address("again")
    until(lambda: "again/prime" not in cluster_state.actor_names("again/"), "the PrimeMaster is gone")
    second = job(tmp_path, "again").role("main").run(f"{ROLES}:wait").build().submit(backend="ray", wait=False)
    new = runs(second, "main", 0)
    assert new.pid != old.pid
    until(lambda: not psutil.pid_exists(old.pid), "the old worker is gone")
    (tmp_path / "end").touch()
    assert second.wait(WAIT_S) == 0
    assert ray.is_initialized()


def test_a_job_is_found_again_by_its_name(tmp_path: Path, one_ray_node: None) -> None:
    from dlrover_hooks.integrations.ray import attach

    handle = job(tmp_path, "named").role("main").run(f"{ROLES}:wait").build().submit(backend="ray", wait=False)
    again = attach("named")
    assert (again.url, again.token) == (handle.url, handle.token)
    assert again.stop("found") == 130
    assert handle.wait(30) == 130
    assert handle.status().reason == "found"


@pytest.mark.requirement("DL-11")
def test_a_call_between_roles_is_a_call_of_an_actor(tmp_path: Path, one_ray_node: None) -> None:
    import ray

    job_of_two = job(tmp_path, "calls").role("server").run(f"{ROLES}:serve").not_driver()
    handle = job_of_two.role("main").run(f"{ROLES}:wait").build().submit(backend="ray", wait=False)
    server = runs(handle, "server", 0)
    runs(handle, "main", 0)
    actor = ray.get_actor(server.address, namespace="dlrover_hooks")
    assert result_of(ray.get(actor.call.remote(request("pid", []), 30.0), timeout=30)) == server.pid
    assert result_of(ray.get(actor.call.remote(request("double", [[1, 2]]), 30.0), timeout=30)) == [2, 4]
    assert handle.stop() == 130
