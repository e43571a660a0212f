"""Submissions to a Ray cluster: two of one name, handles of earlier ones, interrupted ones, and what they leave."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import Conflict, MasterAway, Stale, UsageError
from tests.integrations.ray_nodes import ROLES, job, runs
from tests.waiting import WAIT_S, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def placement_groups(name: str) -> list[str]:
    import ray

    groups = ray.util.placement_group_table().values()
    return [one["name"] for one in groups if one["state"] != "REMOVED" and one["name"].startswith(f"{name}/")]


def journals(name: str) -> list[str]:
    """The journals of this cluster's jobs of the name."""
    import ray

    cluster = ray.get_runtime_context().gcs_address.replace(":", "-")
    return glob.glob(os.path.join(tempfile.gettempdir(), f"dlrover-hooks-ray-{os.getuid()}", f"{cluster}-{name}", "*"))


def lose_prime(name: str) -> None:
    """Remove the actor of a job's PrimeMaster, so that Ray does not start it again."""
    from dlrover_hooks.integrations.ray import cluster_state

    cluster_state.kill(f"{name}/prime")
    until(lambda: f"{name}/prime" not in cluster_state.actor_names(f"{name}/"), "the PrimeMaster is gone")


def test_of_two_submissions_of_a_name_at_the_same_time_one_runs(tmp_path: Path, one_ray_node: None) -> None:
    spec = job(tmp_path, "twice").role("main").run(f"{ROLES}:wait").build()
    handles, refused = list[Any](), list[Conflict]()
    together = threading.Barrier(3)

    def submit() -> None:
        together.wait(30)
        try:
            handles.append(spec.submit(backend="ray", wait=False))
        except Conflict as error:
            refused.append(error)

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    assert (len(handles), len(refused)) == (1, 2)
    runs(handles[0], "main", 0)
    (tmp_path / "end").touch()
    assert handles[0].wait(WAIT_S) == 0


def test_a_handle_knows_the_result_of_its_job_when_later_jobs_have_its_name(tmp_path: Path, one_ray_node: None) -> None:
    (tmp_path / "end").touch()
    wants = job(tmp_path, "named-again").role("main").run(f"{ROLES}:wait")
    first = wants.build().submit(backend="ray", wait=False)
    assert first.wait(WAIT_S) == 0
    second = wants.build().submit(backend="ray", wait=False)
    assert second.wait(WAIT_S) == 0
    (tmp_path / "end").unlink()
    third = wants.build().submit(backend="ray", wait=False)
    runs(third, "main", 0)
    assert (first.wait(1), second.wait(1)) == (0, 0)
    assert third.stop() == 130
    assert first.status().phase is p.JobPhase.DONE


def test_a_handle_whose_name_a_later_job_has_is_stale(tmp_path: Path, one_ray_node: None) -> None:
    wants = job(tmp_path, "taken").role("main").run(f"{ROLES}:wait")
    first = wants.build().submit(backend="ray", wait=False)
    lose_prime("taken")
    with pytest.raises(MasterAway, match="PrimeMaster was removed"):
        first.wait(WAIT_S)
    second = wants.build().submit(backend="ray", wait=False)
    for call in (first.wait, first.status):
        with pytest.raises(Stale, match="later job has the name 'taken'"):
            call()
    assert second.stop() == 130


def test_ctrl_c_while_a_job_is_being_started_leaves_nothing(
    tmp_path: Path, one_ray_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlrover_hooks.integrations.ray import cluster_state, ray_job

    def interrupted(self: object) -> None:
        until(lambda: cluster_state.get_address("early") is not None, "its master has begun")
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_job.RayJob, "_await_start", interrupted)
    spec = job(tmp_path, "early").role("main").run(f"{ROLES}:wait").build()
    assert spec.submit(backend="ray") == 130
    until(lambda: not cluster_state.actor_names("early/"), "its actors are gone")
    assert cluster_state.get_address("early") is None
    assert placement_groups("early") == []
    monkeypatch.undo()
    (tmp_path / "end").touch()
    assert spec.submit(backend="ray") == 0


def test_groups_of_an_earlier_job_of_the_name_are_removed_even_if_it_had_more(
    tmp_path: Path, one_ray_node: None
) -> None:
    wants = job(tmp_path, "grouped")
    for number in range(3):
        wants.role(f"role{number}").run(f"{ROLES}:wait").resource(cpu=1)
    handle = wants.build().submit(backend="ray", wait=False)
    runs(handle, "role2", 0)
    assert placement_groups("grouped")
    lose_prime("grouped")
    smaller = job(tmp_path, "grouped").role("main").run(f"{ROLES}:wait").resource(cpu=1).build()
    second = smaller.submit(backend="ray", wait=False)
    runs(second, "main", 0)
    assert len(placement_groups("grouped")) == 1
    assert second.stop() == 130


def test_an_address_of_another_cluster_is_refused(tmp_path: Path, one_ray_node: None) -> None:
    import ray

    spec = job(tmp_path, "elsewhere").role("main").run(f"{ROLES}:wait").build()
    with pytest.raises(UsageError, match="not to the one at 127"):
        spec.submit(backend="ray", address="127.0.0.1:1", wait=False)
    (tmp_path / "end").touch()
    assert spec.submit(backend="ray", address=ray.get_runtime_context().gcs_address) == 0


SUBMITTER = """
from dlrover_hooks.errors import LaunchError
from dlrover_hooks.job import DLJobBuilder

job = DLJobBuilder("nowhere").role("main").run("os:getpid").build()
try:
    job.submit(backend="ray", address="127.0.0.1:1")
except LaunchError as error:
    print(error.message)
"""


def test_an_address_where_no_cluster_listens_is_refused_at_once() -> None:
    """Ray alone would try for minutes."""
    told = subprocess.run([sys.executable, "-c", SUBMITTER], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "no Ray cluster answers at '127.0.0.1:1': [Errno 111] Connection refused\n"


def test_a_job_whose_master_cannot_run_fails_with_the_reason(tmp_path: Path, one_ray_node: None) -> None:
    (tmp_path / "file").touch()
    wants = job(tmp_path, "unwritable").state(f"file://{tmp_path}/file/state").role("main").run(f"{ROLES}:wait")
    handle = wants.build().submit(backend="ray", wait=False)
    assert handle.wait(WAIT_S) == 1
    assert "PrimeMaster cannot run" in handle.status().reason
    assert f"{tmp_path}/file/state" in handle.status().reason


def test_journals_are_removed_with_the_job_or_by_the_next_of_its_name(tmp_path: Path, one_ray_node: None) -> None:
    wants = job(tmp_path, "journaled").role("main").run(f"{ROLES}:wait")
    first = wants.build().submit(backend="ray", wait=False)
    (folder,) = journals("journaled")
    lose_prime("journaled")
    second = wants.build().submit(backend="ray", wait=False)
    (other,) = journals("journaled")
    assert other != folder
    assert second.stop() == 130
    until(lambda: not journals("journaled"), "the journal is removed")
    assert first.name == second.name


def test_a_prime_master_that_is_started_again_after_the_end_runs_nothing(tmp_path: Path, one_ray_node: None) -> None:
    import msgspec
    import ray

    from dlrover_hooks.integrations.ray import cluster_state
    from dlrover_hooks.integrations.ray.actors import PrimeActor

    (tmp_path / "end").touch()
    handle = job(tmp_path, "ended").role("main").run(f"{ROLES}:wait").build().submit(backend="ray", wait=False)
    assert handle.wait(WAIT_S) == 0
    until(lambda: not cluster_state.actor_names("ended/"), "its actors are gone")
    (tmp_path / "end").unlink()  # a worker would wait for it
    options = cluster_state.actor_options("ended/prime", num_cpus=0)
    ray.remote(PrimeActor).options(**options).remote(msgspec.json.encode(handle._submission))
    until(lambda: not cluster_state.actor_names("ended/"), "it has ended")
    assert handle.status().phase is p.JobPhase.DONE
