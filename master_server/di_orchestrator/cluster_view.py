"""Jobs and nodes as the allocator sees them, and what a status says besides the phase. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dlrover_hooks.errors import UsageError
from dlrover_hooks.kubernetes import cluster_resources, timestamps
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.master.di_orchestrator import replicas
from dlrover_hooks.master.di_orchestrator.allocator import JobInfo, NodeInfo, NodeList
from dlrover_hooks.master.di_orchestrator.di_job_resource import (
    DIJobPhase,
    DIJobSpec,
    DIJobStatus,
    di_job_spec,
    di_job_status,
)
from dlrover_hooks.protocol import NodeResource

Placed = tuple[JobInfo, NodeList]
"""A job, and where its replicas are."""
_NOTHING: Mapping[str, str] = {}


def job_info(job: Manifest, spec: DIJobSpec, status: DIJobStatus) -> JobInfo:
    """Of a job whose spec is valid. It needs all replicas of its fixed tasks, and one of the task that grows."""
    meta = job["metadata"]
    every = replicas.replicas(spec, status.replicas)
    sizes = [_pod_size(spec.tasks[one.task].template, replicas.DEFAULT_RESOURCES) for one in every]
    fixed = len(every) - sum(one.task == every[-1].task for one in every)
    return JobInfo(
        key=f"{meta['namespace']}/{meta['name']}", sizes=tuple(sizes), least=fixed + 1, replicas=status.replicas,
        preemptible=spec.preemptible, priority=spec.priority, profilings=status.profilings,
        submitted_s=timestamps.seconds_of(meta["creationTimestamp"]),
    )  # fmt: skip


def placed_jobs(jobs: Iterable[Manifest]) -> dict[str, Placed]:
    """The preemptible jobs that run or wait, by `namespace/name`. Jobs that make no sense are left out."""
    found = dict[str, Placed]()
    for job in jobs:
        try:
            spec, status = di_job_spec(job), di_job_status(job)
            over = status.phase in (DIJobPhase.SUCCEEDED, DIJobPhase.FAILED) or "deletionTimestamp" in job["metadata"]
            if spec.preemptible and status.replicas and not over:
                info = job_info(job, spec, status)
                found[info.key] = (info, status.allocation)
        except (UsageError, ValueError):  # its own reconciliation says so
            continue
    return found


def free_nodes(nodes: Iterable[Manifest], pods: Iterable[Manifest], jobs: Iterable[Manifest]) -> dict[str, NodeInfo]:
    """What the ready nodes have for preemptible jobs: what no other Pod requests."""
    preemptible = {job["metadata"]["uid"] for job in jobs if job["spec"].get("preemptible")}
    others = (
        pod for pod in pods if not {one["uid"] for one in pod["metadata"].get("ownerReferences", ())} & preemptible
    )
    free = cluster_resources.free(nodes, others)
    return {name: NodeInfo(name, _node_resource(left)) for name, left in free.items()}


def task_status(pods: Iterable[Manifest], known: Iterable[str]) -> dict[str, dict[str, int]]:
    """Pods by task and phase. Tasks that were `known` before are there, too: a patch removes nothing."""
    counts = Counter[tuple[str, str]]()
    for pod in pods:
        task = pod["metadata"].get("labels", {}).get(replicas.TASK_NAME_LABEL, "")
        counts[task, pod.get("status", {}).get("phase", "Pending")] += 1
    phases = ("Pending", "Running", "Succeeded", "Failed")
    tasks = sorted({*known, *(task for task, _ in counts)})
    return {task: {phase: counts[task, phase] for phase in phases} for task in tasks}


def conditions(
    old: list[dict[str, Any]], phase: DIJobPhase, reason: str, message: str, now: str
) -> list[dict[str, Any]]:
    """One for each phase that the job was in; that of `phase` holds. The times are those of the last change."""
    found = list[dict[str, Any]]()
    for one in [*old, *([] if any(each["type"] == phase.value for each in old) else [{"type": phase.value}])]:
        new = {"type": one["type"], "status": str(one["type"] == phase.value)}
        if one["type"] == phase.value:
            goes_on = one.get("status") == "True" and one.get("reason") == reason
            said = message or (one.get("message", "") if goes_on else "")
            new |= {"reason": reason} | ({"message": said} if said else {})
        else:
            new |= {name: one[name] for name in ("reason", "message") if name in one}
        changed = new.get("status") != one.get("status")
        same = all(one.get(name) == value for name, value in new.items())
        new["lastTransitionTime"] = now if changed else one.get("lastTransitionTime", now)
        new["lastUpdateTime"] = one.get("lastUpdateTime", now) if same else now
        found.append(new)
    return found


def _pod_size(pod: Manifest, default: Mapping[str, str] = _NOTHING) -> NodeResource:
    """What its containers request together. `default`: of a container without resources."""
    return _node_resource(cluster_resources.requested(pod, default))


def _node_resource(found: Mapping[str, float]) -> NodeResource:
    """Cores, memory and GPUs; devices of other kinds do not count."""
    gpus = sum(count for name, count in found.items() if name.endswith("/gpu"))
    return NodeResource(found.get("cpu", 0.0), int(found.get("memory", 0)) >> 20, "", round(gpus))
