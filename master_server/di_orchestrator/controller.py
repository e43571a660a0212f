"""Keeps the Pods of every `DIJob` as they are to be, follows its phase, and has the allocator place its replicas."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from dlrover_hooks.errors import KubernetesFailed, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.kubernetes import names, node_pods, timestamps
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.kubernetes.owned_objects import OwnedObjects, OwnerKey, keep, key_of
from dlrover_hooks.kubernetes.pod_status import pod_end
from dlrover_hooks.kubernetes.reconcile_loop import ReconcileLoop
from dlrover_hooks.master.di_orchestrator import cluster_view, di_job_resource, replicas
from dlrover_hooks.master.di_orchestrator.allocator import Allocator
from dlrover_hooks.master.di_orchestrator.di_job_resource import (
    CleanUp,
    DIJobPhase,
    DIJobSpec,
    DIJobStatus,
    di_job_spec,
    di_job_status,
)
from dlrover_hooks.master.di_orchestrator.phases import ReplicaCounts, next_phase

log = logging.getLogger("dlrover_hooks.operator")
WORKERS, REQUESTS = 4, 16
"""Jobs that are compared, and Pods that are created or deleted, at the same time."""
RESYNC_S, LIST_S = 300.0, 60.0
PERIOD_S = 60.0
"""Of the scheduling of all jobs, as AdaptDL has it."""
_OVER = (DIJobPhase.SUCCEEDED, DIJobPhase.FAILED)
_AGAIN_S = 1.0


class DIJobController:
    """Level-triggered, like the operator of `ElasticJob`s. Threads: its own.

    Every write of a status names the version of the job that it was decided from, so what a user or the di-server has
    changed meanwhile is never overwritten.

    Args:
        api: the cluster.
        allocator: places the replicas of preemptible jobs.
        namespace: only its jobs; None: of the whole cluster.
        server_url: of the di-server, for the Pods.
        period_s: all preemptible jobs are scheduled so often.
        clock: seconds.
    """

    def __init__(
        self,
        api: ApiServer,
        allocator: Allocator,
        namespace: str | None = None,
        *,
        server_url: str = "",
        period_s: float = PERIOD_S,
        resync_s: float = RESYNC_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._allocator, self._server_url, self._period_s = api, allocator, server_url, period_s
        self._lock = threading.Lock()
        self._jobs, self._nodes = dict[OwnerKey, Manifest](), dict[str, Manifest]()
        self._pods, self._services = OwnedObjects("DIJob"), OwnedObjects("DIJob")
        self._others = dict[str, Manifest]()
        """Pods that are none of a preemptible job, by uid: what they request is taken."""
        self._loop = ReconcileLoop[OwnerKey](self._reconcile, "DIJob", workers=WORKERS, resync_s=resync_s, clock=clock)
        self._requests = ThreadPoolExecutor(REQUESTS, thread_name_prefix="dlrover-hooks-di-pods")
        self._scheduling = BackgroundThread(
            "dlrover-hooks-scheduling", self._schedule_all, where="DIJobs", again_s=_AGAIN_S
        )
        at = "" if namespace is None else f"/namespaces/{namespace}"
        mine = f"{replicas.OPERATOR_LABEL}={names.OPERATOR}"
        jobs = f"/apis/{di_job_resource.API_VERSION}{at}/{di_job_resource.DI_JOBS}"
        self.watches = [
            ListWatch(api, "/api/v1/nodes", self._node_changed),
            ListWatch(api, jobs, self._job_changed),
            ListWatch(api, "/api/v1/pods", self._pod_changed),
            ListWatch(api, f"/api/v1{at}/services", self._service_changed, label_selector=mine),
        ]

    def start(self) -> None:
        """List everything, and begin. Raises `KubernetesFailed` if the cluster does not list what is needed."""
        try:
            for watch in self.watches:
                watch.start(LIST_S)
        except KubernetesFailed:
            self.stop()
            raise
        self._loop.start()
        self._scheduling.start()

    def check(self) -> None:
        """Raise what a thread met since the last call."""
        for one in (*self.watches, self._loop, self._scheduling):
            one.check()

    def stop(self) -> None:
        """End the threads. Jobs and Pods stay as they are. Idempotent."""
        for one in (*self.watches, self._scheduling, self._loop):
            one.stop()
        self._requests.shutdown(cancel_futures=True)

    # ---- what there is ----------------------------------------------------------------------------------------------

    def _job_changed(self, change: ObjectChange) -> None:
        key = key_of(change.manifest)
        with self._lock:
            keep(self._jobs, key, change)
        self._loop.add(key)

    def _node_changed(self, change: ObjectChange) -> None:
        name = change.manifest["metadata"]["name"]
        with self._lock:
            keep(self._nodes, name, change)

    def _pod_changed(self, change: ObjectChange) -> None:
        labels = change.manifest["metadata"].get("labels", {})
        if labels.get(replicas.OPERATOR_LABEL) == names.OPERATOR:
            self._take(self._pods, change)
            return
        with self._lock:
            keep(self._others, change.uid, change)

    def _service_changed(self, change: ObjectChange) -> None:
        self._take(self._services, change)

    def _take(self, found: OwnedObjects, change: ObjectChange) -> None:
        with self._lock:
            key = found.take(change)
        if key is not None:
            self._loop.add(key)

    # ---- one job ----------------------------------------------------------------------------------------------------

    def _reconcile(self, key: OwnerKey) -> bool:
        with self._lock:
            job = self._jobs.get(key)
            pods, services = self._pods.of(key), self._services.of(key)
        if job is None or "deletionTimestamp" in job["metadata"]:  # what is left is deleted with it
            return job is not None
        owner = replicas.owner(job)
        pods, services = ([one for one in kind if node_pods.is_owned(one, owner)] for kind in (pods, services))
        spec, status = di_job_spec(job), di_job_status(job)
        try:
            spec.check()
            if status.replicas:
                replicas.replicas(spec, status.replicas)
        except UsageError as error:
            self._write(job, status, "Refused", str(error), pods)
            return True
        if status.phase in _OVER:
            self._clean(spec, pods)
            return True
        if not status.replicas:
            self._write(job, msgspec.structs.replace(status, replicas=spec.replicas), "Submitted", "", pods)
            return True
        if spec.preemptible and not status.allocation and self._allocate(job, spec, status, pods):
            return True
        if not services:
            self._api.ensure(f"/api/v1/namespaces/{key[0]}/services", replicas.job_service(job))
        counts = replicas.counted(key[1], spec, status, pods)
        after = next_phase(spec, status, counts)
        if after == status:
            self._change_pods(job, spec, status, pods)
        why = _why(status, after, counts)
        if spec.preemptible and not status.allocation:
            why = "NoNodes", f"{status.replicas} replicas find no nodes; jobs are scheduled every {self._period_s:g} s"
        self._write(job, msgspec.structs.replace(after, ready_replicas=counts.ready), *why, pods)
        return True

    def _change_pods(self, job: Manifest, spec: DIJobSpec, status: DIJobStatus, pods: list[Manifest]) -> None:
        """Raises KubernetesFailed: the first of those that Pods met."""
        namespace, name = key_of(job)
        create, delete = replicas.pod_changes(name, spec, status, pods)
        path = node_pods.pods_path(namespace)
        new = [replicas.replica_pod(job, spec, status, one, self._server_url) for one in create]
        asked = [self._requests.submit(self._api.ensure, path, pod) for pod in new]
        asked += [self._requests.submit(self._delete, pod) for pod in delete]
        errors = [error for one in asked if (error := one.exception()) is not None]
        if errors:
            raise errors[0]

    def _clean(self, spec: DIJobSpec, pods: list[Manifest]) -> None:
        """The Pods of a job that is over."""
        for pod in pods:
            runs = pod_end(pod) is None
            wanted = spec.clean_pod_policy is CleanUp.ALL or (spec.clean_pod_policy is CleanUp.RUNNING and runs)
            if wanted and "deletionTimestamp" not in pod["metadata"]:
                self._delete(pod)

    # ---- the allocator ----------------------------------------------------------------------------------------------

    def _allocate(self, job: Manifest, spec: DIJobSpec, status: DIJobStatus, pods: list[Manifest]) -> bool:
        """Place a job that was submitted, or whose replicas found no nodes yet. False: they find none now."""
        jobs, nodes = self._view()
        info = cluster_view.job_info(job, spec, status)
        others = {name: (one, before) for name, (one, before) in jobs.items() if name != info.key and before}
        found = self._allocator.allocate(info, nodes, others)
        if found:
            self._write(job, msgspec.structs.replace(status, allocation=found), "Allocated", "", pods)
        return bool(found)

    def work(self) -> float:
        """Without `start`: look on this thread at all jobs that are due. Returns when more are, on the clock."""
        return self._loop.work()

    def schedule(self) -> None:
        """Place all preemptible jobs. Called once in each period; without `start`, by the caller."""
        jobs, nodes = self._view()
        before = {name: allocation for name, (_, allocation) in jobs.items()}
        found = self._allocator.allocate_all({name: info for name, (info, _) in jobs.items()}, nodes, before)
        for name, allocation in found.items():
            if allocation != before[name]:
                self._reallocate(name, before[name], allocation)

    def _schedule_all(self) -> None:
        while not self._scheduling.stopping.wait(self._period_s):
            self.schedule()

    def _reallocate(self, name: str, before: tuple[str, ...], allocation: tuple[str, ...]) -> None:
        namespace, _, job_name = name.partition("/")
        with self._lock:
            job, pods = self._jobs.get((namespace, job_name)), self._pods.of((namespace, job_name))
        if job is None or di_job_status(job).allocation != before:
            return  # it has changed meanwhile: the next period sees it
        log.info("DIJob %s: replicas on %s, before on %s", name, ", ".join(allocation) or "none", ", ".join(before))
        status = msgspec.structs.replace(di_job_status(job), allocation=allocation)
        try:
            self._write(job, status, "Rescheduled", "", pods)
        except KubernetesFailed as error:
            log.warning("DIJob %s: %s It is scheduled again in the next period.", name, error)

    def _view(self) -> tuple[dict[str, cluster_view.Placed], dict[str, Any]]:
        """The preemptible jobs that are not over, and what the nodes have for them."""
        with self._lock:
            jobs, nodes, others = list(self._jobs.values()), list(self._nodes.values()), list(self._others.values())
            fixed = self._pods.every()
        return cluster_view.placed_jobs(jobs), cluster_view.free_nodes(nodes, [*others, *fixed], jobs)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _delete(self, pod: Manifest) -> None:
        meta = pod["metadata"]
        self._api.discard(f"{node_pods.pods_path(meta['namespace'])}/{meta['name']}", meta["uid"])

    def _write(self, job: Manifest, status: DIJobStatus, reason: str, message: str, pods: Any) -> None:
        """Only if the job has not changed meanwhile. Raises KubernetesFailed."""
        old, now = job.get("status") or {}, timestamps.utc_now()
        new = old | msgspec.to_builtins(status) | {
            "taskStatus": cluster_view.task_status(pods, old.get("taskStatus") or ()),
            "conditions": cluster_view.conditions(old.get("conditions") or [], status.phase, reason, message, now),
        }  # fmt: skip
        if status.phase in _OVER:
            new.setdefault("completionTimestamp", now)
        if new == old:
            return
        meta = job["metadata"]
        path = f"/apis/{di_job_resource.API_VERSION}/namespaces/{meta['namespace']}/{di_job_resource.DI_JOBS}"
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": new}
        try:
            self._api.patch(f"{path}/{meta['name']}/status", body)
        except KubernetesFailed as error:
            if error.code not in (node_pods.NOT_FOUND, node_pods.CONFLICT):  # the change is told, and is looked at next
                raise


def _why(before: DIJobStatus, after: DIJobStatus, counts: ReplicaCounts) -> tuple[str, str]:
    """Reason and message of the condition of the phase that follows."""
    reason = {
        DIJobPhase.PENDING: "Creating", DIJobPhase.STARTING: "Created", DIJobPhase.RUNNING: "AllReady",
        DIJobPhase.RESTARTING: "ReplicaFailed", DIJobPhase.RESCHEDULING: "ReplicasChanged",
        DIJobPhase.SUCCEEDED: "AllSucceeded", DIJobPhase.FAILED: "BackoffLimitExceeded", DIJobPhase.UNKNOWN: "Unknown",
    }[after.phase]  # fmt: skip
    if after.phase is DIJobPhase.RESTARTING and after.phase is not before.phase:
        return reason, f"{counts.failed} of {counts.wanted} replicas failed; restart {after.restarts}"
    if after.phase is DIJobPhase.FAILED:
        return reason, f"{counts.failed} of {counts.wanted} replicas failed after {after.restarts} restarts"
    return reason, ""
