"""The cluster monitor of Ray, on a real cluster, and the plans that are made of what it writes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from dlrover_hooks.errors import HooksError, MissingExtra
from dlrover_hooks.master.brain import ray_monitor
from dlrover_hooks.master.brain.__main__ import command
from dlrover_hooks.master.brain.app import BrainService
from dlrover_hooks.master.brain.cluster_monitor import ClusterMonitor, ClusterSampler
from dlrover_hooks.master.brain.database.database import Database
from dlrover_hooks.master.brain.database.tables import cluster_sample
from dlrover_hooks.master.brain.kubernetes_monitor import cluster_sample_of
from dlrover_hooks.master.brain.messages import AskPlan, PlanAnswer, ReportSamples
from dlrover_hooks.master.brain.optimize_processor import OptimizeProcessor
from dlrover_hooks.master.brain.ray_monitor import RayClusterMonitor
from dlrover_hooks.master.scaling import OptimizeStage
from dlrover_hooks.protocol import Node, NodeResource, NodeType, ScalePlan
from dlrover_hooks.protocol.samples import ClusterJob, ClusterSample
from dlrover_hooks.scalers.scaler import NodeState
from tests.brain_jobs import sample, timed, told
from tests.descendants import descendants
from tests.e2e.brain_process import BrainProcess
from tests.integrations.ray_nodes import ROLES, job, runs
from tests.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CORES = 24


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster with 24 cores, 2 GPUs and 3 units of another accelerator."""
    import ray

    ray.init(
        address="local", num_cpus=CORES, num_gpus=2, resources={"tpu_v9": 3}, include_dashboard=False,
        namespace="dlrover_hooks", log_to_driver=False,
    )  # fmt: skip
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def monitor(cluster: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayClusterMonitor]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    made = RayClusterMonitor(cluster)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[str], Database]]:
    made = list[Database]()

    def one(name: str) -> Database:
        made.append(Database(str(tmp_path / f"{name}.db")))
        made[-1].prepare()
        return made[-1]

    yield one
    for database in made:
        database.close()


@pytest.fixture
def nodes_of_a_job(cluster: str) -> Iterator[None]:
    """The job "scaled": two nodes of 2 cores and 256 MiB as actors."""
    from dlrover_hooks.integrations.ray.actor_scaler import ActorScaler

    scaler = ActorScaler("scaled", lambda node: ["sleep", "1000"], lambda node: {})
    scaler.start()
    size = NodeResource(cpu=2.0, memory=256)
    scaler.scale(ScalePlan(launch_nodes=[Node(NodeType.WORKER, 0, size), Node(NodeType.WORKER, 1, size)]))
    try:
        until(lambda: [one.state for one in scaler.list_nodes()] == [NodeState.RUNNING] * 2, "the nodes run")
        yield
    finally:
        scaler.stop(0.0)


def test_the_monitor_sees_what_nodes_have_and_what_jobs_have_reserved(
    monitor: RayClusterMonitor, nodes_of_a_job: None, tmp_path: Path
) -> None:
    """A scaled job, a job of roles in placement groups, and an actor of another program."""
    import ray

    def settled(found: ClusterSample) -> bool:  # Ray gathers what is free from its nodes
        return found.capacity == {"cpu": CORES - 4, "gpu": 2, "tpu_v9": 2}

    handle = job(tmp_path, "roles").role("main").run(f"{ROLES}:wait").resource(cpu=1.5).build().submit(
        backend="ray", wait=False
    )  # fmt: skip
    strangers: Any = ray.remote(_Stranger)
    stranger = strangers.options(num_cpus=4, resources={"tpu_v9": 1}).remote()
    try:
        runs(handle, "main", 0)
        ray.get(stranger.ping.remote())
        found = until(
            lambda: (now := monitor.collect()) and settled(now) and now, "a sample", diagnostic=monitor.collect
        )
        assert (found.platform, found.source, found.used_cpu, found.used_memory) == ("ray", "", 5.5, 512)
        assert found.jobs == (ClusterJob("roles", 3, 1.5, 0), ClusterJob("scaled", 2, 4.0, 512))
        assert found.memory > found.used_memory
    finally:
        ray.kill(stranger)
        handle.stop()


class _Stranger:
    def ping(self) -> None:
        pass


class Written(ClusterMonitor):
    """What the monitor of Kubernetes makes of a node with as many cores, where another Pod has two of them."""

    def collect(self) -> ClusterSample:
        node = {"metadata": {"name": "a"}, "spec": {},
                "status": {"allocatable": {"cpu": str(CORES + 2), "memory": "64Gi"},
                           "conditions": [{"type": "Ready", "status": "True"}]}}  # fmt: skip
        requests = {"cpu": "2", "memory": "1Gi"}
        pod = {"metadata": {"labels": {}}, "status": {"phase": "Running"},
               "spec": {"nodeName": "a", "containers": [{"resources": {"requests": requests}}]}}  # fmt: skip
        return cluster_sample_of([node], [pod])


@pytest.mark.requirement("DL-105")
def test_the_same_algorithm_divides_a_cluster_of_ray_and_one_of_kubernetes(
    monitor: RayClusterMonitor, nodes_of_a_job: None, opened: Callable[[str], Database]
) -> None:
    """Two jobs with the same measurements get the same plans, from the same algorithm, by the capacity of either."""
    alone, on_ray = plans(opened("alone"), None), plans(opened("ray"), monitor)
    assert on_ray == plans(opened("kubernetes"), Written())
    assert (alone[1].algorithm, on_ray[1].algorithm) == ("running", "running")
    assert on_ray[0].reason.endswith("its share of the cluster is what it has"), "a has 20 of the 24 cores"
    assert on_ray[1].plan.node_group_resources["worker"].count == 4, "beside 2 workers of b, which doubles at most"
    assert not any("share of the cluster" in one.reason for one in alone)


def plans(database: Database, monitor: ClusterMonitor | None) -> list[PlanAnswer]:
    """Of two jobs that both want more of a cluster, of which `monitor` writes a sample."""
    if monitor is not None:
        ClusterSampler(monitor, database).write()
    served = BrainService(database, OptimizeProcessor(database))
    for name, workers in (("a", (1, 2, 4, 5)), ("b", (4, 2, 1))):
        served.register(told(name, global_batch=256))
        served.report(ReportSamples(name, timed(*(sample(n, speed=1 / (0.1 + 0.9 / n)) for n in workers))))
    served.plan(AskPlan("a", OptimizeStage.RUNNING))
    return [served.plan(AskPlan(name, OptimizeStage.RUNNING, 99)) for name in ("b", "a")]


def test_the_monitor_connects_again_when_its_process_has_ended(monitor: RayClusterMonitor) -> None:
    (first,) = connected()
    first.kill()
    with pytest.raises(HooksError, match="has ended"):
        until(lambda: monitor.collect() is None, "the error")
    assert monitor.collect().capacity["gpu"] == 2
    assert [one.pid for one in connected()] != [first.pid]
    monitor.stop()
    assert connected() == []
    with pytest.raises(HooksError, match="stopped"):
        monitor.collect()


def connected() -> list[psutil.Process]:
    return descendants(os.getpid(), "dlrover_hooks.integrations.ray.cluster_view", children_only=True)


def test_a_brain_samples_a_cluster_and_ends_cleanly(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    path = str(tmp_path / "brain.db")
    brain = BrainProcess(tmp_path, path, "--monitor", "ray")
    database = Database(path)
    try:
        view = until(lambda: newest(database), "a sample", diagnostic=brain.log.read_text)
        assert (view["platform"], view["capacity"]["cpu"]) == ("ray", CORES)
    finally:
        database.close()
        brain.close()
    assert connected() == []


def newest(database: Database) -> Any:
    with database.reading() as connection:
        return connection.execute(sa.select(cluster_sample.c.view)).scalars().first()


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_monitor, "START_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        made = RayClusterMonitor(address)
        with pytest.raises(HooksError, match=f"the Ray cluster at {address}: no answer within 3 s"):
            made.start()
    assert connected() == []
    made.stop()


def test_a_brain_without_ray_or_its_address_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = ["--database", str(tmp_path / "brain.db"), "--monitor", "ray", "--port", "0"]
    ended = CliRunner().invoke(command, options)
    assert (ended.exit_code, "--ray-address" in ended.output) == (78, True)
    monkeypatch.setattr(ray_monitor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="Ray is not installed"):
        RayClusterMonitor("127.0.0.1:1").start()
