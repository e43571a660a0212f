"""What a cluster has for jobs."""

from __future__ import annotations

from typing import Any

from dlrover_hooks.master.brain.kubernetes_monitor import cluster_sample_of
from dlrover_hooks.protocol.samples import ClusterJob

READY = [{"type": "Ready", "status": "True"}]


def node(name: str, *, ready: bool = True, **spec: Any) -> dict[str, Any]:
    allocatable = {"cpu": "7500m", "memory": "8Gi", "nvidia.com/gpu": "4", "pods": "110"}
    return {"metadata": {"name": name}, "spec": spec,
            "status": {"allocatable": allocatable, "conditions": READY if ready else []}}  # fmt: skip


def pod(on: str | None, cpu: str, job: str = "", phase: str = "Running", by: str = "dlrover-hooks") -> dict[str, Any]:
    labels = {"elasticjob-name": job, "app.kubernetes.io/managed-by": by} if job else {}
    requests = {"cpu": cpu, "memory": "1Gi", "nvidia.com/gpu": "1"}
    spec = {"containers": [{"resources": {"requests": requests}}]} | ({"nodeName": on} if on else {})
    return {"metadata": {"labels": labels}, "status": {"phase": phase}, "spec": spec}


def test_the_capacity_is_what_other_pods_leave_of_usable_nodes() -> None:
    taint = [{"key": "gone", "effect": "NoSchedule"}]
    nodes = [node("a"), node("b", unschedulable=True), node("c", taints=taint), node("d", ready=False), node("e")]
    pods = [pod("a", "2"), pod("a", "1", phase="Succeeded"), pod("e", "100"), pod(None, "3"), pod("b", "1")]
    found = cluster_sample_of(nodes, pods)
    assert found.capacity == {"cpu": 5, "nvidia.com/gpu": 3 + 3}, "of a whole cores; e has none left"
    assert found.memory == 7 * 1024 * 2
    assert (found.platform, found.source, found.jobs, found.used_cpu) == ("kubernetes", "", (), 0.0)


def test_the_pods_of_jobs_are_told_by_job_and_take_no_capacity() -> None:
    pods = [
        pod("a", "1500m", "one"), pod("e", "1500m", "one"), pod("a", "1", "two", by="dlrover-hooks-operator"),
        pod(None, "1", "two"), pod("a", "1", "two", phase="Failed"),
    ]  # fmt: skip
    found = cluster_sample_of([node("a"), node("e")], pods)
    assert found.capacity == {"cpu": 14, "nvidia.com/gpu": 8}
    assert (found.used_cpu, found.used_memory) == (4.0, 3 * 1024)
    assert found.jobs == (ClusterJob("one", 2, 3.0, 2048), ClusterJob("two", 1, 1.0, 1024))
