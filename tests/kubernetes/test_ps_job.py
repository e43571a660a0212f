"""A parameter server job as an `ElasticJob`: TensorFlow in process-backed Pods of a real control plane."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.kubernetes import custom_resources
from tests.integrations.ps_job import CHIEF, PYTHON, environment, ps_job
from tests.kubernetes.job_cluster import LONG_S, Cluster
from tests.waiting import json_lines, until

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(400)]
SHARDS = 600
WATCHDOG_S = 40.0
"""Longer than a first step, and than the start of the servers, also on a slow machine."""


class PSJob:
    """The job `mine`, whose chief leaves a mark in the model for each shard. `plan`: see `ps_chief`."""

    def __init__(
        self, cluster: Cluster, folder: Path, plan: dict[str, Any], *, ps: int | None = 1, workers: int | None = 1,
        journal: bool = True, **spec: Any,
    ) -> None:  # fmt: skip
        assert PYTHON.exists(), "make test-kubernetes builds the environment that has TensorFlow"
        self.cluster, self.folder, self.lives = cluster, folder, folder / "lives.jsonl"
        self.lives.touch()
        kept = ("PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "KERAS_BACKEND")
        env = {name: value for name, value in environment(folder).items() if name in kept}
        env["PATH"] = f"{PYTHON.parent}:{os.environ['PATH']}"
        container = {
            "name": "main", "image": "none", "env": [{"name": name, "value": value} for name, value in env.items()],
            "command": ["python", str(CHIEF), json.dumps(plan), str(self.lives)],
        }  # fmt: skip
        kept_in = [{"name": "DLROVER_HOOKS_RUN_JOURNAL", "value": str(folder / "master.db")}] if journal else []
        replicas: dict[str, Any] = {
            "ps": {}, "worker": {"template": {"spec": {"containers": [container]}}},
            "dlrover-master": {"template": {"spec": {"containers": [{"env": kept_in}]}}},
        }  # fmt: skip
        for kind, count in (("ps", ps), ("worker", workers)):
            if count is not None:
                replicas[kind]["replicas"] = count
        cluster.apply({
            "apiVersion": custom_resources.API_VERSION, "kind": "ElasticJob", "metadata": {"name": "mine"},
            "spec": {"replicaSpecs": replicas} | spec,
        })  # fmt: skip

    def row(self, key: str, value: Any) -> None:
        """Wait for a row of the chief."""
        until(lambda: any(row.get(key) == value for row in json_lines(self.lives)), f"{key}={value}", LONG_S,
              diagnostic=self.cluster.said)  # fmt: skip

    def release(self, step: int) -> None:
        """Let the chief go on, which waits at `step`."""
        (self.folder / f"go-{step}").touch()

    def scale(self, ps: int) -> None:
        patch = {"spec": {"replicaSpecs": {"ps": {"replicas": ps}}}}
        self.cluster.kubectl("patch", "elasticjob", "mine", "--type=merge", "-p", json.dumps(patch))

    def live(self, kind: str) -> set[str]:
        """Pods of this type that run and are to run."""
        pods = self.cluster.get("pods", "-l", f"replica-type={kind}")["items"]
        return {one["metadata"]["name"] for one in pods
                if one["status"]["phase"] == "Running" and "deletionTimestamp" not in one["metadata"]}  # fmt: skip

    def has(self, kind: str, count: int, without: frozenset[str] = frozenset()) -> set[str]:
        """Wait for so many Pods, none of which is one of `without`."""
        until(lambda: len(self.live(kind)) == count and not self.live(kind) & without, f"{count} {kind}", LONG_S,
              diagnostic=self.cluster.said)  # fmt: skip
        return self.live(kind)

    def announced(self, version: int) -> None:
        """Wait until the master has announced this cluster version: the chief may be held meanwhile."""
        client = self.cluster.master()
        try:
            until(lambda: client.call(p.ShowTasks("mine")).version >= version, f"version {version}", LONG_S,
                  diagnostic=self.cluster.said)  # fmt: skip
        finally:
            client.close()

    def check(self) -> None:
        """It has succeeded, and each shard is in the model once."""
        self.cluster.ends("Succeeded")
        assert last(self.lives)["seen"] == [1] * SHARDS

    def check_steps(self) -> None:
        """Each was made once: nothing was lost and made again."""
        assert [row["step"] for row in json_lines(self.lives) if "step" in row] == list(range(1, SHARDS + 1))

    def versions(self) -> set[int]:
        """Cluster versions that the chief has made steps with."""
        return {row["version"] for row in json_lines(self.lives) if "version" in row}


def last(lives: Path) -> dict[str, Any]:
    """What the model held at the end."""
    return [row for row in json_lines(lives) if "seen" in row][-1]


@pytest.mark.requirement("DL-55")
def test_servers_come_and_go_and_a_master_is_lost_and_each_shard_is_applied_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    """1 -> 2 -> 1 parameter servers; a server is deleted, the master is killed."""
    plan = {"samples": 2 * SHARDS, "size": 2, "holds": [100, 200, 300, 400]}
    job = PSJob(cluster, tmp_path, plan, ps=1, workers=1)
    job.row("holds", 100)
    assert cluster.phase == "Running"
    job.scale(2)
    job.announced(2)
    job.release(100)
    job.row("holds", 200)
    cluster.lose_the_master()
    before = job.has("ps", 2)
    lost = sorted(before)[0]
    cluster.kubectl("delete", "pod", lost, "--wait=false")
    job.announced(3)
    job.release(200)
    job.row("holds", 300)
    job.has("ps", 2, without=frozenset({lost}))
    job.scale(1)
    job.announced(4)
    job.release(300)
    job.row("holds", 400)
    job.has("ps", 1)
    (plan,) = cluster.get("scaleplans")["items"]
    assert sorted(one["type"] for one in plan["spec"]["createPods"]) == ["chief", "ps", "worker"]
    job.release(400)
    job.check()
    assert job.versions() == {1, 2, 3, 4}
    (tmp_path / "alone").mkdir()
    with ps_job(tmp_path / "alone", "alone", {"samples": 2 * SHARDS, "size": 2}, ps=1, workers=1) as alone:
        alone.end()
        assert np.allclose(last(job.lives)["weights"], last(alone.lives)["weights"], rtol=1e-5, atol=1e-7)


@pytest.mark.requirement("DL-52", "DL-53")
def test_a_server_is_replaced_by_one_with_more_cores_and_no_step_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    """By a plan of a user. The new one runs first."""
    job = PSJob(cluster, tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100]})
    job.row("holds", 100)
    (name,) = job.live("ps")
    cluster.apply({
        "apiVersion": custom_resources.API_VERSION, "kind": "ScalePlan", "metadata": {"name": "larger"},
        "spec": {"ownerJob": "mine", "manualScaling": True, "replicaResourceSpecs": {"ps": {"resource": {"cpu": "2"}}}},
    })  # fmt: skip
    job.announced(2)
    job.release(100)
    (larger,) = job.has("ps", 1, without=frozenset({name}))
    assert cluster.get("pod", larger)["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "2"}
    job.check()
    job.check_steps()


def test_a_server_on_a_node_that_is_cordoned_is_migrated_and_no_step_is_lost(
    bare_cluster: Cluster, tmp_path: Path
) -> None:
    cluster = bare_cluster
    cluster.start_operator(nodes=True)
    job = PSJob(cluster, tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100]})
    job.row("holds", 100)
    (name,) = job.live("ps")
    machine = cluster.get("pod", name)["spec"]["nodeName"]
    try:
        cluster.kubectl("cordon", machine)
        job.announced(2)
        job.release(100)
        job.has("ps", 1, without=frozenset({name}))
    finally:
        cluster.kubectl("uncordon", machine)
    job.check()
    job.check_steps()


def test_a_node_is_drained_and_each_shard_is_applied_once(bare_cluster: Cluster, tmp_path: Path) -> None:
    """The evictions come at once, also of the chief and the master if they are there: the training goes back to the
    newest checkpoint where a server is gone before the next one runs. TensorFlow's coordinator, as it is stopped, may
    then wait for ever for a thread of its own (1 of 5 runs): the watchdog of the chief ends that.
    """
    cluster = bare_cluster
    cluster.start_operator(nodes=True)
    job = PSJob(cluster, tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100], "watchdog_s": WATCHDOG_S})
    job.row("holds", 100)
    (name,) = job.live("ps")
    machine = cluster.get("pod", name)["spec"]["nodeName"]
    job.release(100)  # also for a chief that begins again
    try:
        cluster.kubectl("drain", machine, "--force", "--pod-selector=elasticjob-name=mine")
        job.check()
    finally:
        cluster.kubectl("uncordon", machine)
    pods = cluster.get("pods", "-l", "replica-type=ps")["items"]
    assert name not in [one["metadata"]["name"] for one in pods if one["spec"]["nodeName"] == machine]


def test_a_stopped_server_is_killed_and_replaced(cluster: Cluster, tmp_path: Path) -> None:
    """It does not answer, so nothing but its Pod says that it is there."""
    job = PSJob(cluster, tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100, 200]})
    job.row("holds", 100)
    (name,) = job.live("ps")
    os.kill(cluster.plane.kubelet.pid(cluster.namespace, name), signal.SIGSTOP)
    job.release(100)
    job.row("holds", 200)
    job.has("ps", 1, without=frozenset({name}))
    job.release(200)
    job.check()


def test_without_a_journal_the_tasks_of_an_earlier_master_are_replaced(cluster: Cluster, tmp_path: Path) -> None:
    """The next master knows no task. The training goes on from its newest checkpoint."""
    job = PSJob(cluster, tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100, 200]}, journal=False)
    job.row("holds", 100)
    before = frozenset(job.live("chief") | job.live("ps") | job.live("worker"))
    assert len(before) == 3
    cluster.lose_the_master()
    for kind in ("chief", "ps", "worker"):
        job.has(kind, 1, without=before)
    job.release(100)
    job.release(200)
    job.check()


def test_a_chief_that_fails_at_once_ends_the_job_and_is_named(cluster: Cluster, tmp_path: Path) -> None:
    PSJob(cluster, tmp_path, {"samples": 0})
    cluster.ends("Failed")
    assert "the chief (Pod mine-chief-" in cluster.condition("Failed")["message"]
    assert "before it was connected: see what it said" in cluster.condition("Failed")["message"]


def test_a_job_that_says_no_numbers_is_planned(cluster: Cluster, tmp_path: Path) -> None:
    job = PSJob(cluster, tmp_path, {"samples": 2 * SHARDS, "size": 2, "holds": [100]}, ps=None, workers=None,
                resourceLimits={"cpu": "4", "memory": "8Gi"})  # fmt: skip
    job.row("holds", 100)
    (name,) = job.live("ps")
    sizes = cluster.get("pod", name)["spec"]["containers"][0]["resources"]["limits"]
    assert sizes["cpu"] == "1", "a fifth of the limits, and a whole core at least"
    job.scale(2)
    job.has("ps", 2)
    job.release(100)
    job.check()
