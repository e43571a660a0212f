"""Parameter servers of a planned job, with TensorFlow: too few cores, too little memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.launcher.running_jobs import RunningJob
from dlrover_hooks.scalers.resource_limits import LimitMethods
from tests.integrations.ps_job import WAIT_S, PSJob, ps_job
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.slow, pytest.mark.timeout(280)]
JOB = "planned"


@contextmanager
def planned(folder: Path, plan: dict[str, Any], *options: str) -> Iterator[tuple[PSJob, MasterClient]]:
    """A job of one server and one worker, and a client of its master."""
    flags = ("--mode", "single-job", *options)
    with ps_job(folder, JOB, plan, *flags, ps=1, workers=1) as job:
        job.says("mode single-job, chief, 1 to ")
        (path,) = folder.rglob("job-*.json")
        found = msgspec.json.decode(path.read_bytes(), type=RunningJob)
        client = MasterClient(found.master, found.token, incarnation="test")
        try:
            yield job, client
        finally:
            client.close()


def plans(client: MasterClient) -> list[p.PlanView]:
    found: p.Plans = client.call(p.ShowPlans(JOB))
    return list(found.plans)


def servers(client: MasterClient) -> list[p.Task]:
    found: p.Tasks = client.call(p.ShowTasks(JOB))
    return [task for task in found.tasks if task.type is p.NodeType.PS and task.status is p.NodeStatus.RUNNING]


def test_a_throttled_server_is_recognised_as_hot_and_migrated(tmp_path: Path) -> None:
    """A user has given it a fifth of a core. Once the user's plan is released, a larger one takes its place."""
    steps = {"samples": 100_000, "size": 2, "save_every": 500, "ballast_mib": 8, "works": True}
    flags = ("--min-workers", "2", "--max-workers", "4", "--max-ps", "1", "--max-cpu", "8", "--plan-window", "2s")
    with planned(tmp_path, steps, *flags) as (job, client):
        job.row("step", 20)
        job.says("warm standbys are ready")  # a cold start would take minutes on so little of a core
        (first,) = servers(client)
        throttled = p.NodeGroupResource(1, p.NodeResource(cpu=0.2, memory=4096))
        client.call(p.ScaleNodes(JOB, "test", p.ResourcePlan({"ps": throttled})))
        until(lambda: [one.resource.cpu for one in servers(client)] == [0.2], "the small server", WAIT_S)
        job.scale("--job", JOB, "--release", "--no-wait")
        job.says(r"plan \d+: ps:0: .*more cores for parameter servers that use all they have")
        larger = until(
            lambda: [one for one in servers(client) if one.resource.cpu > 0.2], "the larger server", WAIT_S,
            diagnostic=lambda: plans(client),
        )  # fmt: skip
        assert larger[0].id > first.id
        before = job.steps()[-1]
        until(lambda: job.steps()[-1] > before + 100, "steps after it", WAIT_S)
        job.process.send_signal(signal.SIGINT)
        job.end(130)
        assert job.left() == []


def test_a_server_that_is_killed_for_memory_is_started_again_with_more(tmp_path: Path) -> None:
    if not LimitMethods(JOB).counts_kills:
        pytest.skip("this user can make no control groups")
    steps = {"samples": 200, "size": 2, "ballast_mib": 700}
    with planned(tmp_path, steps, "--max-workers", "1", "--max-ps", "1", "--max-memory", "4096") as (job, client):
        job.says(r"ps 0 \(pid \d+\) ended .*killed for want of memory")
        job.row("step", 20)
        sizes = [one.resource.memory for one in servers(client)]
        assert sizes[0] >= 2 * 820
        why = next(one for one in plans(client) if "used up the memory" in one.reason)
        assert why.what == "ps:0: 1 core, 1640 MiB"
        job.end()
        assert job.row("seen")["seen"] == [1] * 100
        assert job.left() == []
