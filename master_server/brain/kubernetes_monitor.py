"""The cluster monitor of Kubernetes: what the nodes of a cluster have for jobs, and which jobs run on it."""

from __future__ import annotations

import math
import threading
from collections import Counter

from dlrover_hooks.kubernetes import cluster_resources, names
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.kubernetes.owned_objects import keep
from dlrover_hooks.kubernetes.pod_status import pod_end
from dlrover_hooks.master.brain.cluster_monitor import ClusterMonitor
from dlrover_hooks.protocol.samples import ClusterJob, ClusterSample

LIST_S = 60.0
_OF_JOBS = (names.MANAGER, names.OPERATOR)


class KubernetesClusterMonitor(ClusterMonitor):
    """The capacity for jobs is what the usable nodes have, less what other Pods request there.

    What a job uses is what its Pods request: what its nodes really use is in the reports of its master. Two threads
    follow nodes and Pods. Its account may list and watch both, in the whole cluster.
    """

    def __init__(self, api: ApiServer) -> None:
        self._nodes, self._pods = dict[str, Manifest](), dict[str, Manifest]()
        """By uid."""
        self._lock = threading.Lock()
        self._watches = [
            ListWatch(api, "/api/v1/nodes", lambda change: self._take(self._nodes, change)),
            ListWatch(api, "/api/v1/pods", lambda change: self._take(self._pods, change)),
        ]

    def start(self) -> None:
        """List both. Raises `KubernetesFailed` if the cluster refuses that."""
        for watch in self._watches:
            watch.start(LIST_S)

    def stop(self) -> None:
        """End the threads. Idempotent."""
        for watch in self._watches:
            watch.stop()

    def collect(self) -> ClusterSample:
        """See the base class."""
        for watch in self._watches:
            watch.check()
        with self._lock:
            nodes, pods = list(self._nodes.values()), list(self._pods.values())
        return cluster_sample_of(nodes, pods)

    def _take(self, found: dict[str, Manifest], change: ObjectChange) -> None:
        with self._lock:
            keep(found, change.uid, change)


def cluster_sample_of(nodes: list[Manifest], pods: list[Manifest]) -> ClusterSample:
    """Of a whole cluster. Pure."""
    own = [pod for pod in pods if _label(pod, names.MANAGED_BY) in _OF_JOBS]
    others = [pod for pod in pods if _label(pod, names.MANAGED_BY) not in _OF_JOBS]
    capacity, memory = Counter[str](), 0.0
    for free in cluster_resources.free(nodes, others).values():
        memory += free.get("memory", 0.0)
        capacity.update({kind: math.floor(count) for kind, count in free.items() if kind == "cpu" or "/" in kind})
    used = sum(cluster_resources.taken(own).values(), Counter[str]())
    return ClusterSample(
        "kubernetes", "", {kind: count for kind, count in capacity.items() if count}, round(used["cpu"], 2),
        int(memory) >> 20, int(used["memory"]) >> 20, _jobs(own),
    )  # fmt: skip


def _jobs(pods: list[Manifest]) -> tuple[ClusterJob, ...]:
    count, used = Counter[str](), dict[str, Counter[str]]()
    for pod in pods:
        job = _label(pod, names.JOB_LABEL)
        if pod["spec"].get("nodeName") and pod_end(pod) is None:
            count[job] += 1
            used.setdefault(job, Counter()).update(cluster_resources.requested(pod))
    return tuple(
        ClusterJob(job, count[job], round(one["cpu"], 2), int(one["memory"]) >> 20) for job, one in sorted(used.items())
    )


def _label(pod: Manifest, name: str) -> str:
    return pod["metadata"].get("labels", {}).get(name, "")
