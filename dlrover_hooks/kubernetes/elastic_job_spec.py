"""What an `ElasticJob` asks for. Pure."""

from __future__ import annotations

import enum

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.kubernetes import names, node_pods
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.protocol import NodeResource, NodeType, ResourceLimits, ScalingMode

MOST_WORKERS = 60
"""Of a job without `maxReplicas`, as DLRover's optimizer has it."""
RELAUNCHES = 10
"""Nodes that ended by a failure are replaced so often within an hour, without `restartCount`."""
_LEAST_CPU, _LEAST_MIB = 1.0, 1024
"""Of a node whose size is not known, for the limits of its job."""


class CleanPodPolicy(enum.Enum):
    """Which Pods are deleted when the job is over: those that run, or all. The logs of a Pod go with it."""

    RUNNING = "Running"
    ALL = "All"


class ReplicaSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The Pods of one type. `replicas` None: plans say how many there are."""

    replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    template: Manifest | None = None
    restart_count: int | None = None
    resource: dict[str, str | int] = {}
    """Of each Pod, in place of what the first container of the template has."""


class ElasticJobSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The `spec` of an `ElasticJob`, as far as it is used. The methods raise `UsageError` if it makes no sense."""

    replica_specs: dict[str, ReplicaSpec]
    optimize_mode: str = ""
    brain_service: str = ""
    suspend: bool = False
    resource_limits: dict[str, str | int] = {}
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    ttl_seconds_after_finished: int | None = None

    @property
    def master(self) -> ReplicaSpec:
        """Of the Pod of the master."""
        return self.replica_specs.get(names.MASTER_TYPE, ReplicaSpec())

    @property
    def has_master(self) -> bool:
        """The operator runs its master; otherwise that is run elsewhere."""
        return self.master.replicas != 0

    @property
    def workers(self) -> ReplicaSpec:
        """Of the workers."""
        return self.replica_specs.get(NodeType.WORKER.value, ReplicaSpec())

    @property
    def mode(self) -> ScalingMode:
        """Without `optimizeMode` a job has the number of workers that it says, or is planned if it says none."""
        if self.optimize_mode:
            return ScalingMode(self.optimize_mode)
        return ScalingMode.SINGLE_JOB if self.workers.replicas is None else ScalingMode.MANUAL

    @property
    def sizes(self) -> dict[str, NodeResource]:
        """By type: what the user gives a node. A type that the template gives nothing has a planned size, unless the
        mode is manual.
        """
        found = dict[str, NodeResource]()
        for kind in NodeType:
            size = _size(self.replica_specs.get(kind.value))
            if size != NodeResource() or self.mode is ScalingMode.MANUAL:
                found[kind.value] = size
        return found

    @property
    def limits(self) -> ResourceLimits:
        """Of the whole job. Without `resourceLimits`: enough for `maxReplicas` workers."""
        workers, size = self.workers, _size(self.workers)
        least = 1 if workers.min_replicas is None else workers.min_replicas
        most = max(MOST_WORKERS, workers.replicas or 0, least) if workers.max_replicas is None else workers.max_replicas
        try:
            given = {name: node_pods.quantity(value) for name, value in self.resource_limits.items()}
        except ValueError as error:
            raise UsageError(f"spec.resourceLimits: {error}") from None
        return ResourceLimits(
            given.get("cpu", most * max(size.cpu, _LEAST_CPU)),
            round(given["memory"] / (1 << 20)) if "memory" in given else most * max(size.memory, _LEAST_MIB),
            min_workers=least, max_workers=most,
        )  # fmt: skip

    def check(self) -> None:
        """Raise `UsageError`, with the field, if the operator cannot run a job of this kind."""
        others = sorted(set(self.replica_specs) - {NodeType.WORKER.value, names.MASTER_TYPE})
        if not self.has_master:
            return
        if others:
            raise UsageError(
                f"spec.replicaSpecs.{others[0]}: the operator runs masters of jobs that have only workers",
                hint="run the master elsewhere, and say so by spec.replicaSpecs.dlrover-master.replicas: 0",
            )
        if self.workers.template is None:
            raise UsageError("spec.replicaSpecs.worker.template is missing", hint="give the Pod of a worker")
        limits, wanted, planned = self.limits, self.workers.replicas, self.mode is not ScalingMode.MANUAL
        if wanted is not None and not limits.min_workers <= wanted <= limits.max_workers:
            raise UsageError(
                f"spec.replicaSpecs.worker.replicas is {wanted}, but {limits.min_workers} to {limits.max_workers} "
                "workers are allowed", hint="change it, or minReplicas and maxReplicas",
            )  # fmt: skip
        if (self.mode is ScalingMode.CLUSTER) != bool(self.brain_service):
            raise UsageError("optimizeMode cluster and brainService need each other", hint="give both, or none")
        if planned and NodeType.WORKER.value not in self.sizes and not self.resource_limits:
            raise UsageError(
                f"the size of the workers is to be planned (mode {self.mode.value}), but it is not said within what",
                hint="give spec.resourceLimits with cpu and memory, or resources to the container of the worker",
            )


def job_spec(manifest: Manifest) -> ElasticJobSpec:
    """Raises `msgspec.ValidationError` if it is none."""
    return msgspec.convert(manifest["spec"], ElasticJobSpec)


def _size(replica: ReplicaSpec | None) -> NodeResource:
    replica = replica or ReplicaSpec()
    containers = (replica.template or {}).get("spec", {}).get("containers") or [{}]
    return node_pods.container_size(containers[0], replica.resource)
