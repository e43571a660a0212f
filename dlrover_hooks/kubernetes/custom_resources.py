"""`ElasticJob` and `ScalePlan`, DLRover's objects: their definitions, and how nodes are written in plans. Pure.

Fields and names are those of DLRover's `elastic.iml.github.io/v1alpha1`, so that its objects can be applied as they
are. More fields here: of a job `minReplicas`, `maxReplicas`, `cleanPodPolicy` and `ttlSecondsAfterFinished`; of
`createPods` `launch`, `attempt` and `priority`; of `removePods` `launch` and `graceSeconds`; of the status of a plan
`triedPods`, `leavingPods` and `observedGeneration`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dlrover_hooks.kubernetes import names, node_pods
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.elastic_job_spec import CleanPodPolicy
from dlrover_hooks.kubernetes.node_pods import node_resource, quantities
from dlrover_hooks.protocol import Node, NodeType, ScalingMode

GROUP, VERSION = "elastic.iml.github.io", "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
ELASTIC_JOBS, SCALE_PLANS = "elasticjobs", "scaleplans"
"""In paths."""
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
"""The collection of definitions."""


def path(namespace: str, plural: str) -> str:
    """The collection of these objects."""
    return f"/apis/{API_VERSION}/namespaces/{namespace}/{plural}"


def owner_reference(manifest: Manifest) -> Manifest:
    """What makes an `ElasticJob` the owner of an object, which is deleted with it."""
    return node_pods.owner_reference(API_VERSION, "ElasticJob", manifest)


# ---- what is in a plan ----------------------------------------------------------------------------------------------


class PodMeta(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One Pod in a plan. `resource`: by the names and in the units of Kubernetes."""

    name: str
    type: str
    id: int
    resource: dict[str, str | int] = {}
    rank_index: int = 0
    priority: str = ""
    launch: str = ""
    """See `names.LAUNCH_ANNOTATION`: no Pod of another launch is this one."""
    attempt: int = 0
    """It is created, once, if this is greater than every attempt before; 0: it was created by an earlier scaler."""
    grace_seconds: int | None = None
    """Of a Pod to remove, between SIGTERM and SIGKILL; None: as the Pod says."""

    @classmethod
    def of(cls, node: Node, launch: str, attempt: int = 0, grace_seconds: int | None = None) -> PodMeta:
        """The Pod of a node."""
        return cls(
            node.name, node.type.value, node.id, dict(quantities(node.config_resource)), node.index or 0,
            priority=node.config_resource.priority, launch=launch, attempt=attempt, grace_seconds=grace_seconds,
        )  # fmt: skip

    def node(self) -> Node:
        """The node. The type of a GPU is then the name of its resource. Raises ValueError for what is no node."""
        try:
            resource = node_resource(self.resource, self.priority)
        except ValueError as error:
            raise ValueError(f"Pod {self.name}: {error}") from None
        return Node(NodeType(self.type), self.id, resource, self.name, index=self.rank_index)


class ReplicaResourceSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """How many Pods of a type there are to be; None: as many as before. `resource`: of each; empty: as before."""

    replicas: int | None = None
    resource: dict[str, str | int] = {}


class ScalePlanSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `spec` of a `ScalePlan`.

    In the one that a master keeps, `create_pods` are all Pods that are to be; a Pod that is not listed there is
    removed, with the grace of its entry in `remove_pods`.
    """

    owner_job: str
    replica_resource_specs: dict[str, ReplicaResourceSpec] = {}
    create_pods: list[PodMeta] = []
    remove_pods: list[PodMeta] = []
    ps_hosts: list[str] = []


class TriedPod(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A Pod that was created, or could not be: `message` says why. It is not created again in this attempt."""

    name: str
    launch: str
    attempt: int
    message: str = ""


class LeavingPod(msgspec.Struct, frozen=True, rename="camel"):
    """A Pod on a machine that will go: its processes have `seconds` at least."""

    name: str
    launch: str
    reason: str
    seconds: float


class ScalePlanStatus(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The `status` of a `ScalePlan`. `phase`: Scaling, Succeeded, or Failed (`message` says why). Times: RFC 3339."""

    phase: str = ""
    create_time: str | None = None
    finish_time: str | None = None
    tried_pods: list[TriedPod] = []
    leaving_pods: list[LeavingPod] = []
    observed_generation: int = 0
    message: str = ""


def plan_spec(manifest: Manifest) -> ScalePlanSpec:
    """Raises `msgspec.ValidationError` if it is none."""
    return msgspec.convert(manifest.get("spec", {}), ScalePlanSpec)


def plan_status(manifest: Manifest) -> ScalePlanStatus:
    """Raises `msgspec.ValidationError` if it is none."""
    return msgspec.convert(manifest.get("status") or {}, ScalePlanStatus)


# ---- definitions ----------------------------------------------------------------------------------------------------

_TEXT: Manifest = {"type": "string"}
_COUNT: Manifest = {"type": "integer", "minimum": 0}
_FLAG: Manifest = {"type": "boolean"}
_TIME: Manifest = {"type": "string", "format": "date-time"}
_ANYTHING: Manifest = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_TYPES = [kind.value for kind in NodeType]
_QUANTITY: Manifest = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]+)?$",
    "x-kubernetes-int-or-string": True,
}  # fmt: skip


def _object(properties: Manifest, *required: str, more: Manifest | None = None) -> Manifest:
    return (
        {"type": "object", "properties": properties} | ({"required": list(required)} if required else {}) | (more or {})
    )


def _list(items: Manifest) -> Manifest:
    return {"type": "array", "items": items}


def _map(values: Manifest) -> Manifest:
    return {"type": "object", "additionalProperties": values}


_RESOURCE = _map(_QUANTITY)
_POD = _object(
    {
        "name": {**_TEXT, "minLength": 1, "maxLength": 253}, "type": {**_TEXT, "enum": _TYPES}, "id": _COUNT,
        "rankIndex": _COUNT, "resource": _RESOURCE, "service": _TEXT, "priority": _TEXT, "launch": _TEXT,
        "attempt": _COUNT, "graceSeconds": {"type": "integer", "minimum": 1},
    },
    "name", "type", "id",
)  # fmt: skip
_REPLICAS: Manifest = {
    "type": "object",
    "properties": {kind: _object({"replicas": _COUNT, "resource": _RESOURCE}) for kind in _TYPES},
}
_PLAN_SPEC = _object(
    {
        "ownerJob": {**_TEXT, "minLength": 1}, "replicaResourceSpecs": _REPLICAS, "createPods": _list(_POD),
        "removePods": _list(_POD), "migratePods": _list(_POD), "psHosts": _list(_TEXT), "manualScaling": _FLAG,
    },
    "ownerJob",
)  # fmt: skip
_TRIED = _object({"name": _TEXT, "launch": _TEXT, "attempt": _COUNT, "message": _TEXT})
_LEAVING = _object({"name": _TEXT, "launch": _TEXT, "reason": _TEXT, "seconds": {"type": "number"}})
_PLAN_STATUS = _object(
    {
        "phase": _TEXT, "message": _TEXT, "createTime": _TIME, "finishTime": _TIME, "triedPods": _list(_TRIED),
        "leavingPods": _list(_LEAVING),
        "observedGeneration": {"type": "integer"},
    }
)  # fmt: skip
_REPLICA = _object(
    {
        "replicas": _COUNT, "minReplicas": _COUNT, "maxReplicas": _COUNT, "template": _ANYTHING, "autoScale": _FLAG,
        "restartCount": _COUNT, "restartTimeout": _COUNT,
        "priority": _TEXT, "restartPolicy": _TEXT, "resource": _RESOURCE,
    }
)  # fmt: skip
_CONDITION = _object(
    {
        "type": _TEXT, "status": {**_TEXT, "enum": ["True", "False", "Unknown"]}, "reason": _TEXT, "message": _TEXT,
        "lastTransitionTime": _TIME, "observedGeneration": {"type": "integer"},
    },
    "type", "status",
)  # fmt: skip
_JOB_SPEC = _object(
    {
        "distributionStrategy": _TEXT, "optimizeMode": {**_TEXT, "enum": ["", *(mode.value for mode in ScalingMode)]},
        "brainService": _TEXT, "enableElasticScheduling": _FLAG, "enableDynamicSharding": _FLAG, "suspend": _FLAG,
        "resourceLimits": _RESOURCE, "envs": _map(_ANYTHING),
        "cleanPodPolicy": {**_TEXT, "enum": [policy.value for policy in CleanPodPolicy]},
        "ttlSecondsAfterFinished": _COUNT,
        "replicaSpecs": {"type": "object", "properties": dict.fromkeys((*_TYPES, names.MASTER_TYPE), _REPLICA)},
    },
    "replicaSpecs",
)  # fmt: skip
_JOB_STATUS = _object(
    {
        "phase": _TEXT, "replicas": _COUNT, "selector": _TEXT, "startTime": _TIME, "completionTime": _TIME,
        "replicaStatuses": _map(_ANYTHING), "conditions": _list(_CONDITION), "scalePlan": _TEXT,
        "observedGeneration": {"type": "integer"},
    }
)  # fmt: skip
_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
_PHASE = {"name": "Phase", "type": "string", "jsonPath": ".status.phase"}


def definitions() -> list[Manifest]:
    """The `CustomResourceDefinition`s. `kubectl scale elasticjob` changes the number of workers."""
    workers = {
        "specReplicasPath": ".spec.replicaSpecs.worker.replicas", "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }  # fmt: skip
    replicas = {"name": "Workers", "type": "integer", "jsonPath": ".status.replicas"}
    owner = {"name": "Job", "type": "string", "jsonPath": ".spec.ownerJob"}
    return [
        _definition("ElasticJob", ELASTIC_JOBS, _JOB_SPEC, _JOB_STATUS, [_PHASE, replicas, _AGE], scale=workers),
        _definition("ScalePlan", SCALE_PLANS, _PLAN_SPEC, _PLAN_STATUS, [owner, _PHASE, _AGE]),
    ]


def _definition(
    kind: str, plural: str, spec: Manifest, status: Manifest, columns: list[Manifest], *, scale: Manifest | None = None
) -> Manifest:
    subresources: dict[str, Any] = {"status": {}} | ({"scale": scale} if scale else {})
    version = {
        "name": VERSION, "served": True, "storage": True, "subresources": subresources,
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": _object({"spec": spec, "status": status}, "spec")},
    }  # fmt: skip
    named = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": named, "versions": [version]},
    }  # fmt: skip
