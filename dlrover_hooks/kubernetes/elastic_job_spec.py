"""What an `ElasticJob` asks for. Pure."""

from __future__ import annotations

import enum

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.kubernetes import names, node_pods
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.protocol import NodeGroupResource, NodeResource, NodeType, ResourceLimits, ScalingMode

MOST_WORKERS = 60
"""Of a job without `maxReplicas`, as DLRover's optimizer has it."""
RELAUNCHES = 10
"""Nodes that ended by a failure are replaced so often within an hour, without `restartCount`."""
MOST_PS = 15
"""Parameter servers of a job without `maxReplicas`, as DLRover's optimizer has it."""
CERTIFICATE = "DLROVER_HOOKS_MASTER_SSL_CERTFILE"
"""The variable by which a master in a Pod finds its certificate: it serves HTTPS then."""
_CHIEF, _PS, _WORKER = (kind.value for kind in (NodeType.CHIEF, NodeType.PS, NodeType.WORKER))
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

    def replica(self, kind: str) -> ReplicaSpec:
        """What the job says of a type of Pod."""
        return self.replica_specs.get(kind, ReplicaSpec())

    @property
    def master(self) -> ReplicaSpec:
        """Of the Pod of the master."""
        return self.replica(names.MASTER_TYPE)

    @property
    def master_serves_tls(self) -> bool:
        """The template of the master has the variable `CERTIFICATE`."""
        return any(one.get("name") == CERTIFICATE for one in _container(self.master.template or {}).get("env") or ())

    @property
    def has_master(self) -> bool:
        """The operator runs its master; otherwise that is run elsewhere."""
        return self.master.replicas != 0

    @property
    def workers(self) -> ReplicaSpec:
        """Of the workers."""
        return self.replica(_WORKER)

    @property
    def has_ps(self) -> bool:
        """It is a parameter server job: its nodes are the tasks of a TensorFlow cluster."""
        return _PS in self.replica_specs

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of node that have a number: parameter servers, if it has any, and workers."""
        return (_PS, _WORKER) if self.has_ps else (_WORKER,)

    def template(self, kind: str) -> Manifest | None:
        """The Pod of a type of node. None: the job has no such nodes.

        In a parameter server job a type without one has that of the chief, or else that of the workers.
        """
        others = (_CHIEF, _WORKER) if self.has_ps and kind in (_CHIEF, _PS, _WORKER) else ()
        found = (self.replica(name).template for name in (kind, *others))
        return next((one for one in found if one is not None), None)

    def runs_script(self, kind: str) -> bool:
        """Nodes of this type run the command of their template. Others are servers of a TensorFlow cluster, unless
        their own template has a command, beside that of a chief.
        """
        if not self.has_ps or kind == _CHIEF:
            return True
        own = self.replica(kind).template
        return _CHIEF in self.replica_specs and own is not None and bool(_container(own).get("command"))

    @property
    def mode(self) -> ScalingMode:
        """Without `optimizeMode` a job has the numbers of nodes that it says, or is planned if it says none."""
        if self.optimize_mode:
            return ScalingMode(self.optimize_mode)
        given = all(self.replica(kind).replicas is not None for kind in self.kinds)
        return ScalingMode.MANUAL if given else ScalingMode.SINGLE_JOB

    @property
    def relaunches(self) -> int:
        """So many nodes that have failed are replaced within the window of the master."""
        given = [self.replica(kind).restart_count for kind in (_WORKER, *self.kinds)]
        return next((one for one in given if one is not None), RELAUNCHES)

    @property
    def sizes(self) -> dict[str, NodeResource]:
        """By type: what the user gives a node. A type that the template gives nothing has a planned size, unless the
        mode is manual.
        """
        found = dict[str, NodeResource]()
        for kind in (one.value for one in NodeType):
            size = self._size(kind)
            if size != NodeResource() or self.mode is ScalingMode.MANUAL:
                found[kind] = size
        return found

    @property
    def groups(self) -> dict[str, NodeGroupResource]:
        """By type: how many nodes the user wants, of which size."""
        sizes, counts = self.sizes, {kind: self.replica(kind).replicas for kind in self.kinds}
        return {
            kind: NodeGroupResource(count, sizes.get(kind, NodeResource()))
            for kind, count in counts.items()
            if count is not None
        }

    @property
    def limits(self) -> ResourceLimits:
        """Of the whole job. Without `resourceLimits`: enough for `maxReplicas` nodes of each type."""
        bounds = {kind: self._bounds(kind) for kind in self.kinds}
        sizes = {kind: self._size(kind) for kind in bounds}
        try:
            given = {name: node_pods.quantity(value) for name, value in self.resource_limits.items()}
        except ValueError as error:
            raise UsageError(f"spec.resourceLimits: {error}") from None
        cpu = sum(most * max(sizes[kind].cpu, _LEAST_CPU) for kind, (_, most) in bounds.items())
        memory = sum(most * max(sizes[kind].memory, _LEAST_MIB) for kind, (_, most) in bounds.items())
        least_ps, most_ps = bounds.get(_PS, (1, MOST_PS))
        return ResourceLimits(
            given.get("cpu", cpu), round(given["memory"] / (1 << 20)) if "memory" in given else memory,
            *bounds[_WORKER], max_ps=most_ps, min_ps=least_ps,
        )  # fmt: skip

    def check(self) -> None:
        """Raise `UsageError`, with the field, if the operator cannot run a job of this kind."""
        if not self.has_master:
            return
        known = {names.MASTER_TYPE, *self.kinds, *((_CHIEF,) if self.has_ps else ())}
        if others := sorted(set(self.replica_specs) - known):
            raise UsageError(
                f"spec.replicaSpecs.{others[0]}: the operator runs masters of jobs that have workers, or a chief, "
                "parameter servers and workers",
                hint="run the master elsewhere, and say so by spec.replicaSpecs.dlrover-master.replicas: 0",
            )
        if self.has_ps and (self.replica(_CHIEF).replicas or 1) != 1:
            raise UsageError("spec.replicaSpecs.chief.replicas: a job has one chief", hint="leave it out")
        if self.template(_WORKER) is None:
            raise UsageError("spec.replicaSpecs.worker.template is missing", hint="give the Pod of a worker")
        for kind in self.kinds:
            self._check_replicas(kind)
        planned = self.mode is not ScalingMode.MANUAL
        if (self.mode is ScalingMode.CLUSTER) != bool(self.brain_service):
            raise UsageError("optimizeMode cluster and brainService need each other", hint="give both, or none")
        if planned and not self.sizes.keys() >= set(self.kinds) and not self.resource_limits:
            raise UsageError(
                f"the size of the nodes is to be planned (mode {self.mode.value}), but it is not said within what",
                hint="give spec.resourceLimits with cpu and memory, or resources to the container of the template",
            )

    def _check_replicas(self, kind: str) -> None:
        wanted = self.replica(kind).replicas
        limits = self.limits
        least, most = (limits.min_ps, limits.max_ps) if kind == _PS else (limits.min_workers, limits.max_workers)
        if wanted is not None and not least <= wanted <= most:
            what = "workers" if kind == _WORKER else "parameter servers"
            raise UsageError(
                f"spec.replicaSpecs.{kind}.replicas is {wanted}, but {least} to {most} {what} are allowed",
                hint="change it, or minReplicas and maxReplicas",
            )

    def _bounds(self, kind: str) -> tuple[int, int]:
        """How many nodes of a type there may be."""
        replica = self.replica(kind)
        least = 1 if replica.min_replicas is None else replica.min_replicas
        if replica.max_replicas is not None:
            return least, replica.max_replicas
        return least, max(MOST_PS if kind == _PS else MOST_WORKERS, replica.replicas or 0, least)

    def _size(self, kind: str) -> NodeResource:
        replica = self.replica(kind)
        return node_pods.container_size(_container(self.template(kind) or {}), replica.resource)


def job_spec(manifest: Manifest) -> ElasticJobSpec:
    """Raises `msgspec.ValidationError` if it is none."""
    return msgspec.convert(manifest["spec"], ElasticJobSpec)


def _container(template: Manifest) -> Manifest:
    """The first one of a Pod."""
    return (template.get("spec", {}).get("containers") or [{}])[0]
