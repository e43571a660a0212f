"""What the di-server and `update-replicas` do to a `DIJob`. Any thread."""

from __future__ import annotations

from typing import Any

import msgspec

from dlrover_hooks.errors import BadRequest, Conflict, KubernetesFailed, UnknownJob, UsageError
from dlrover_hooks.kubernetes import node_pods
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.master.di_orchestrator import di_job_resource, policies, replicas
from dlrover_hooks.master.di_orchestrator.di_job_resource import DIJobPhase, di_job_spec, di_job_status

_TRIES = 10
"""Of a change that other ones overtake."""
_OVER = (DIJobPhase.SUCCEEDED, DIJobPhase.FAILED)


class JobRequests:
    """Each call reads the job and changes its status only if it has not changed meanwhile.

    All raise `BadRequest`, `UnknownJob`, `Conflict` (the id is that of an earlier generation, or others change the job
    all the time) and `KubernetesFailed`.

    Args:
        api: the cluster.
    """

    def __init__(self, api: ApiServer) -> None:
        self._api = api

    def addresses(self, job_id: str) -> tuple[list[str], str]:
        """`ip:port` of each replica that has an address, by rank; the version of the job."""
        job = self._job(job_id)
        meta = job["metadata"]
        labels = ",".join(f"{key}={value}" for key, value in replicas.job_labels(meta["name"]).items())
        pods = self._api.get(node_pods.pods_path(meta["namespace"]), label_selector=labels)["items"]
        found = dict[int, str]()
        for pod in pods:
            address = pod.get("status", {}).get("podIP")
            if address and node_pods.is_owned(pod, replicas.owner(job)) and "deletionTimestamp" not in pod["metadata"]:
                rank = int(pod["metadata"]["annotations"][replicas.RANK_ANNOTATION])
                found[rank] = f"{address}:{_port(pod)}"
        return [found[rank] for rank in sorted(found)], meta["resourceVersion"]

    def add(self, job_id: str, count: int, version: str | None = None) -> int:
        """So many replicas more, or fewer if `count` is negative; how many are wanted then.

        `version`: only if the job is still of this version.
        """
        return self._change_replicas(job_id, count, version)

    def report(self, job_id: str, data: dict[str, Any]) -> None:
        """Keep what the job has measured: `data` is merged into `status.profilings`."""
        if not data:
            raise BadRequest("The body has no data.", hint='Give {"data": {...}}.')
        try:
            policies.speeds(data)
        except UsageError as error:
            raise BadRequest(f"{error.message}.", hint=error.hint) from None
        job = self._job(job_id)
        self._api.patch(f"{_path(job)}/status", {"status": {"profilings": data}})

    def set_replicas(self, namespace: str, name: str, wanted: int) -> None:
        """So many replicas; also of a job that is not preemptible. For users."""
        for _ in range(_TRIES):
            job = self._get(namespace, name)
            _check(job, wanted)
            if self._write(job, wanted):
                return
        raise Conflict(f"DIJob {namespace}/{name} is changed by others all the time.", hint="Try again.")

    def _change_replicas(self, job_id: str, count: int, version: str | None) -> int:
        for _ in range(_TRIES):
            job = self._job(job_id)
            meta, spec, status = job["metadata"], di_job_spec(job), di_job_status(job)
            if version is not None and version != meta["resourceVersion"]:
                raise Conflict(
                    f"DIJob {job_id} has changed: its version is {meta['resourceVersion']}.", hint="Read it again."
                )
            if not spec.preemptible:
                raise BadRequest(
                    f"DIJob {job_id} is not preemptible, so its replicas are not changed here.",
                    hint="Set spec.preemptible, or use update-replicas.",
                )
            wanted = (status.replicas or spec.replicas) + count
            _check(job, wanted)
            if self._write(job, wanted):
                return wanted
            if version is not None:
                break
        raise Conflict(f"DIJob {job_id} is changed by others at the same time.", hint="Read it, and try again.")

    def _write(self, job: Manifest, wanted: int) -> bool:
        """False: the job has changed meanwhile."""
        body = {"metadata": {"resourceVersion": job["metadata"]["resourceVersion"]}, "status": {"replicas": wanted}}
        try:
            self._api.patch(f"{_path(job)}/status", body)
        except KubernetesFailed as error:
            if error.code != node_pods.CONFLICT:
                raise
            return False
        return True

    def _job(self, job_id: str) -> Manifest:
        try:
            namespace, name, generation = replicas.split_job_id(job_id)
        except UsageError as error:
            raise BadRequest(f"{error.message}.", hint=error.hint) from None
        job = self._get(namespace, name)
        if (newest := job["metadata"]["generation"]) != generation:
            raise Conflict(
                f"DIJob {namespace}/{name} is of generation {newest}, not {generation}.", hint="Its spec has changed."
            )
        return job

    def _get(self, namespace: str, name: str) -> Manifest:
        path = f"/apis/{di_job_resource.API_VERSION}/namespaces/{namespace}/{di_job_resource.DI_JOBS}/{name}"
        try:
            return self._api.get(path)
        except KubernetesFailed as error:
            if error.code == node_pods.NOT_FOUND:
                raise UnknownJob(f"There is no DIJob {namespace}/{name}.", hint="kubectl get dijobs -A") from None
            raise


def _check(job: Manifest, wanted: int) -> None:
    """Raises BadRequest if the job cannot have so many replicas."""
    name = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
    if di_job_status(job).phase in _OVER:
        raise BadRequest(f"DIJob {name} is over.", hint="Create it again.")
    try:
        spec = di_job_spec(job)
        spec.check()
        replicas.replicas(spec, wanted)
    except UsageError as error:
        raise BadRequest(f"DIJob {name}: {error.message}.", hint=error.hint) from None
    except msgspec.ValidationError as error:
        raise BadRequest(f"DIJob {name}: {error}.", hint="Mend its spec.") from None


def _path(job: Manifest) -> str:
    meta = job["metadata"]
    return (
        f"/apis/{di_job_resource.API_VERSION}/namespaces/{meta['namespace']}/{di_job_resource.DI_JOBS}/{meta['name']}"
    )


def _port(pod: Manifest) -> int:
    """The port of the name `di-port`, or the usual one."""
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            if port.get("name") == replicas.PORT_NAME:
                return int(port["containerPort"])
    return replicas.PORT
