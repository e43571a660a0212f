"""The Brain and its cluster monitor beside real jobs: the first plan, and what the monitor sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.master.brain.database.database import Database
from dlrover_hooks.master.brain.database.tables import cluster_sample, resource_plan
from dlrover_hooks.master.operator import manifests
from tests.e2e.brain_process import BrainProcess
from tests.kubernetes.job_cluster import LONG_S, Cluster, waiting
from tests.waiting import until

pytestmark = pytest.mark.kubernetes


def account(cluster: Cluster) -> str:
    """The kubeconfig file of the account that `dlrover-hooks manifest --brain` prints."""
    cluster.apply(*manifests.brain_objects(cluster.namespace))
    return cluster.plane.account_kubeconfig(cluster.namespace, manifests.BRAIN)


@pytest.mark.requirement("DL-40", "DL-43", "DL-47", "DL-48")
def test_the_brain_plans_a_job_and_sees_it_in_the_cluster(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job, master, Brain and monitor. The monitor's account may list nodes and Pods, and nothing else."""
    monkeypatch.setenv("KUBECONFIG", account(cluster))
    database = str(tmp_path / "brain.db")
    brain = BrainProcess(tmp_path, database, "--monitor", "kubernetes")
    try:
        spec = {"optimizeMode": "cluster", "brainService": brain.url, "resourceLimits": {"cpu": "4", "memory": "8Gi"}}
        cluster.job(waiting(tmp_path), spec=spec, maxReplicas=3)
        cluster.ends("Running")
        (worker, *_) = cluster.get("pods", "-l", "replica-type=worker")["items"]
        planned = _values(database, sa.select(resource_plan.c.plan))
        assert len(planned) == 1, "the first plan is the Brain's"
        size = worker["spec"]["containers"][0]["resources"]["requests"]
        assert size["cpu"] == str(planned[0]["node_group_resources"]["worker"]["node_resource"]["cpu"]).removesuffix(
            ".0"
        )
        newest = sa.select(cluster_sample.c.view).order_by(cluster_sample.c.at.desc(), cluster_sample.c.id.desc())
        view = until(lambda: next((one for one in _values(database, newest) if _seen(one)), None), "the next sample",
                     LONG_S, diagnostic=lambda: _values(database, newest))  # fmt: skip
        assert len(_values(database, newest)) > 1, "one as it began, and one later"
        assert (view["platform"], view["source"]) == ("kubernetes", "")
        assert view["capacity"]["cpu"] >= 1000, "two nodes of 1000 cores, less what other Pods have"
        (tmp_path / "done").touch()
        cluster.ends("Succeeded")
    finally:
        brain.close()


HUNGRY = """
import os, sys, threading
folder = sys.argv[1]
while not os.path.exists(folder + "/done"):
    if os.path.exists(folder + "/mib"):
        held = b"x" * (int(open(folder + "/mib").read()) << 20)
    threading.Event().wait(0.05)
"""


@pytest.mark.requirement("DL-49")
def test_a_worker_that_was_killed_for_memory_gets_what_the_brain_plans(cluster: Cluster, tmp_path: Path) -> None:
    """The Brain has an algorithm for it, and the master carries its plan out."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    database = str(tmp_path / "brain.db")
    brain = BrainProcess(tmp_path, database)
    try:
        spec = {"optimizeMode": "cluster", "brainService": brain.url, "resourceLimits": {"cpu": "1", "memory": "4Gi"}}
        command = ["dlrover-hooks", "run", "--standby", "0", str(tmp_path / "hungry.py"), str(tmp_path)]
        cluster.job(command, spec=spec, maxReplicas=1)
        cluster.ends("Running")

        def memory() -> dict[str, int]:
            pods = cluster.get("pods", "-l", "replica-type=worker")["items"]
            limits = {one["metadata"]["name"]: one["spec"]["containers"][0]["resources"]["limits"] for one in pods}
            return {name: int(one["memory"].removesuffix("Mi")) for name, one in limits.items()}

        ((first, before),) = memory().items()
        (tmp_path / "draft").write_text(str(before + 64))
        (tmp_path / "draft").rename(tmp_path / "mib")
        until(lambda: len(memory()) == 2, "another worker", LONG_S, diagnostic=cluster.said)
        assert (
            cluster.get("pod", first)["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"
        )
        (after,) = [size for name, size in memory().items() if name != first]
        plans = sa.select(resource_plan.c.algorithm, resource_plan.c.plan).order_by(resource_plan.c.number.desc())
        assert _values(database, plans)[0] == "oom_worker"
        planned = _values(database, sa.select(resource_plan.c.plan).order_by(resource_plan.c.number.desc()))[0]
        assert after == planned["node_group_resources"]["worker"]["node_resource"]["memory"] > before
        (tmp_path / "done").touch()
        cluster.ends("Succeeded")
    finally:
        brain.close()


def test_a_brain_that_may_not_list_nodes_does_not_start(
    bare_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "without-roles"
    bare_cluster.plane.account(bare_cluster.namespace, name).close()
    monkeypatch.setenv("KUBECONFIG", bare_cluster.plane.account_kubeconfig(bare_cluster.namespace, name))
    command = [sys.executable, "-m", "dlrover_hooks.master.brain", "--database", str(tmp_path / "brain.db"),
               "--monitor", "kubernetes", "--port", "0"]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert ended.returncode == 70
    assert "nodes is forbidden" in ended.stderr
    api = ApiServer(kubeconfig=account(bare_cluster))
    try:
        with pytest.raises(KubernetesFailed, match="forbidden"):
            api.delete("/api/v1/nodes/n1")
    finally:
        api.close()


def _seen(view: dict[str, object]) -> bool:
    jobs = {one["job"]: one["processes"] for one in view["jobs"]}  # type: ignore[attr-defined, index]
    return jobs.get("mine", 0) >= 2  # master and worker


def _values(database: str, query: sa.Select) -> list:  # type: ignore[type-arg]
    opened = Database(database)
    try:
        with opened.reading() as connection:
            return list(connection.execute(query).scalars())
    finally:
        opened.close()
