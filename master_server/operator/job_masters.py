"""Runs the master of each job, and writes into the job's status how it is."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time

import msgspec

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes import custom_resources, names, node_pods, timestamps
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.elastic_job_spec import CleanPodPolicy, ElasticJobSpec
from dlrover_hooks.kubernetes.pod_status import pod_end, runs
from dlrover_hooks.kubernetes.work_queue import WorkRetries
from dlrover_hooks.master.operator import job_objects
from dlrover_hooks.master.operator.job_objects import MasterOptions
from dlrover_hooks.master.operator.job_status import ElasticJobPhase, JobSituation, MasterEnd, master_end, next_status

log = logging.getLogger("dlrover_hooks.operator")
_HEALTHY_S = 300.0
"""A master that ran for so long is started again at once when it is lost."""
_REFUSED, _REFUSED_S = {400, 403, 422}, 30.0
"""HTTP status of an answer that says what is wrong with an object; so long after it the object is tried again."""
_TOLD = {
    ElasticJobPhase.PENDING: "its master or its workers are being started",
    ElasticJobPhase.RUNNING: "workers run",
    ElasticJobPhase.SUSPENDED: "all Pods are deleted",
    ElasticJobPhase.SUCCEEDED: "its workers are done",
    ElasticJobPhase.FAILED: "its master says no more",
}
"""In Events."""


class JobMasters:
    """Any thread, one at a time for each job. Times are seconds of one clock. Raises `KubernetesFailed` if the API
    server is away, or refuses what this account needs.
    """

    def __init__(self, api: ApiServer, options: MasterOptions, retries: WorkRetries | None = None) -> None:
        self._api, self._options = api, options
        self._retries = retries or WorkRetries(1.0, 60.0)
        self._lock = threading.Lock()
        self._started, self._losses = dict[str, float](), dict[str, tuple[int, float]]()
        """By uid of the job: since when its master runs; masters lost in a row, and when the next one may start."""

    def reconcile(self, found: JobSituation, service: Manifest | None, now: float) -> float:
        """Do what is to be done about the job. Returns when to look again, at the latest.

        `service`: the one that the job's master has; None: none yet.
        """
        again, spec = math.inf, found.spec
        if found.over:
            again = self._clean(found, now)
        elif spec is None or found.problem or not spec.has_master:
            pass
        elif spec.suspend:
            self._suspend(found)
        else:
            try:
                again = self._keep(found, spec, service, now)
            except KubernetesFailed as error:
                if error.code not in _REFUSED:
                    raise
                found, again = msgspec.structs.replace(found, refusal=error.message), now + _REFUSED_S
        self._report(found)
        return again

    def forget(self, uid: str) -> None:
        """The job of this uid was deleted."""
        with self._lock:
            self._started.pop(uid, None)
            self._losses.pop(uid, None)

    def _keep(self, found: JobSituation, spec: ElasticJobSpec, service: Manifest | None, now: float) -> float:
        meta, master = found.job["metadata"], found.master
        if service is None:
            services = f"/api/v1/namespaces/{meta['namespace']}/services"
            self._api.ensure(services, job_objects.master_service(found.job, self._options))
        if master is None:
            token = job_objects.master_secret(found.job, secrets.token_hex(16))
            self._api.ensure(f"/api/v1/namespaces/{meta['namespace']}/secrets", token)
            pod = job_objects.master_pod(found.job, spec, self._options)
            self._api.ensure(node_pods.pods_path(meta["namespace"]), pod)
            return math.inf
        if "deletionTimestamp" in master["metadata"]:  # its end is seen, and then there is none
            return math.inf
        if runs(master):
            with self._lock:
                self._started.setdefault(meta["uid"], now)
            return math.inf
        end = master_end(master)
        if end is None or end.phase is not None:
            return math.inf
        due = self._lost(meta["uid"], now, found, end)
        if due > now:
            return due
        with self._lock:
            count, _ = self._losses[meta["uid"]]
            self._losses[meta["uid"]] = count, -math.inf
        self._delete_pod(master)
        return math.inf

    def _lost(self, uid: str, now: float, found: JobSituation, end: MasterEnd) -> float:
        """When the next master may start."""
        with self._lock:
            count, due = self._losses.get(uid, (0, -math.inf))
            since = self._started.pop(uid, None)
            if due > -math.inf:
                return due
            count = 1 if since is not None and now - since >= _HEALTHY_S else count + 1
            due = now if count == 1 else now + self._retries.pause_s(count - 1)
            self._losses[uid] = count, due
        self._event(found.job, "MasterLost", f"it is started again: {end.message}", warning=True)
        return due

    def _suspend(self, found: JobSituation) -> None:
        if found.master is not None and "deletionTimestamp" not in found.master["metadata"]:
            self._delete_pod(found.master)

    def _clean(self, found: JobSituation, now: float) -> float:
        """What is left of a job that is over. Pods that run are deleted as if a plan removed them."""
        job, spec = found.job, found.spec
        if spec is None:
            return math.inf
        if spec.clean_pod_policy is CleanPodPolicy.ALL:
            pods = found.nodes if found.master is None else (*found.nodes, found.master)
            for pod in pods:
                if pod_end(pod) is not None and "deletionTimestamp" not in pod["metadata"]:
                    self._delete_pod(pod)
        if spec.ttl_seconds_after_finished is None:
            return math.inf
        ended_at = timestamps.seconds_of(job["status"]["completionTime"])
        left_s = spec.ttl_seconds_after_finished - (time.time() - ended_at)
        if left_s > 0:
            return now + left_s
        meta = job["metadata"]
        jobs = custom_resources.path(meta["namespace"], custom_resources.ELASTIC_JOBS)
        self._api.discard(f"{jobs}/{meta['name']}", meta["uid"])
        return math.inf

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _delete_pod(self, pod: Manifest) -> None:
        meta = pod["metadata"]
        self._api.discard(f"{node_pods.pods_path(meta['namespace'])}/{meta['name']}", meta["uid"])

    def _report(self, found: JobSituation) -> None:
        job, now = found.job, timestamps.utc_now()
        status, old = next_status(found, now), job.get("status") or {}
        if status == old:
            return
        meta = job["metadata"]
        path = f"{custom_resources.path(meta['namespace'], custom_resources.ELASTIC_JOBS)}/{meta['name']}/status"
        try:
            self._api.patch(path, {"status": status})
        except KubernetesFailed as error:
            if error.code != node_pods.NOT_FOUND:
                raise
            return
        if (phase := ElasticJobPhase(status["phase"])).value != old.get("phase"):
            holds = next(one for one in status["conditions"] if one["status"] == "True" and one["type"] != "Valid")
            message = holds.get("message") or _TOLD[phase]
            self._event(job, phase.value, message, warning=phase is ElasticJobPhase.FAILED)

    def _event(self, job: Manifest, reason: str, message: str, *, warning: bool = False) -> None:
        """For `kubectl describe`. One that cannot be written is left out."""
        meta, now = job["metadata"], timestamps.utc_now()
        event = {
            "apiVersion": "v1", "kind": "Event", "reason": reason, "message": message,
            "metadata": {"name": names.object_name(meta["name"], secrets.token_hex(6)), "namespace": meta["namespace"]},
            "type": "Warning" if warning else "Normal", "firstTimestamp": now, "lastTimestamp": now, "count": 1,
            "source": {"component": names.OPERATOR},
            "involvedObject": {
                "apiVersion": custom_resources.API_VERSION, "kind": "ElasticJob", "name": meta["name"],
                "namespace": meta["namespace"], "uid": meta["uid"],
            },
        }  # fmt: skip
        try:
            self._api.create(f"/api/v1/namespaces/{meta['namespace']}/events", event)
        except KubernetesFailed as error:
            log.warning("job %s/%s: %s: %s (no Event: %s)", meta["namespace"], meta["name"], reason, message, error)
