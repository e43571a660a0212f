"""`DIJob`, the object of DI-engine's jobs: its definition, and what is read from it. Pure.

Fields, defaults and names are those of DI Orchestrator's `diengine.opendilab.org/v2alpha1`. `profilings` keeps whatever
a job reports.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.kubernetes.api_server import Manifest

GROUP, VERSION = "diengine.opendilab.org", "v2alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
DI_JOBS = "dijobs"
"""In paths."""


class TaskType(enum.Enum):
    """What the replicas of a task do."""

    LEARNER = "learner"
    COLLECTOR = "collector"
    EVALUATOR = "evaluator"
    NONE = "none"


class Priority(enum.Enum):
    """Of a job among others."""

    NORMAL = "normal"
    HIGH = "high"


class CleanUp(enum.Enum):
    """Which Pods are deleted when a job is over."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class DIJobPhase(enum.Enum):
    """Of a job. UNKNOWN is declared, and never reached."""

    PENDING = "Pending"
    STARTING = "Starting"
    RESTARTING = "Restarting"
    RESCHEDULING = "Rescheduling"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class DITask(msgspec.Struct, frozen=True, rename="camel"):
    """Replicas of one kind. `template`: the Pod of each."""

    type: TaskType
    template: Manifest
    replicas: int = 1
    name: str = ""

    @property
    def title(self) -> str:
        """Its name; without one its type."""
        return self.name or self.type.value


class DIJobSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The `spec` of a `DIJob`. `volumes`: of the Pods of all tasks. `backoff_limit` None: any number of restarts."""

    tasks: tuple[DITask, ...]
    priority: Priority = Priority.NORMAL
    clean_pod_policy: CleanUp = CleanUp.RUNNING
    preemptible: bool = False
    backoff_limit: int | None = 3
    volumes: list[Manifest] = []

    @property
    def replicas(self) -> int:
        """Of all tasks together."""
        return sum(task.replicas for task in self.tasks)

    def check(self) -> None:
        """Raise `UsageError`, with the field, for what the definition cannot say."""
        if not self.tasks:
            raise UsageError("spec.tasks is empty", hint="give a task")
        titles = list[str]()
        for number, task in enumerate(self.tasks):
            if task.type is TaskType.NONE and not task.name:
                raise UsageError(f"spec.tasks[{number}].name is missing", hint="a task of the type none needs a name")
            if task.title in titles:
                raise UsageError(f"spec.tasks[{number}]: there is a task {task.title} already", hint="rename one")
            if task.type is not TaskType.NONE and task.type in [one.type for one in self.tasks[:number]]:
                raise UsageError(f"spec.tasks[{number}].type: a second {task.type.value}", hint="use more replicas")
            titles.append(task.title)


class DIJobStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The `status` of a `DIJob`, as far as decisions need it.

    `replicas`: so many are wanted. `allocation`: the node of each replica of a preemptible job, by rank.
    """

    phase: DIJobPhase = DIJobPhase.PENDING
    replicas: int = 0
    ready_replicas: int = 0
    restarts: int = 0
    reschedules: int = 0
    allocation: tuple[str, ...] = ()
    profilings: dict[str, Any] = {}


def di_job_spec(manifest: Manifest) -> DIJobSpec:
    """Raises `msgspec.ValidationError` if it is none."""
    return msgspec.convert(manifest["spec"], DIJobSpec)


def di_job_status(manifest: Manifest) -> DIJobStatus:
    """Raises `msgspec.ValidationError` if it is none."""
    return msgspec.convert(manifest.get("status") or {}, DIJobStatus)


# ---- the definition -------------------------------------------------------------------------------------------------

_TEXT: Manifest = {"type": "string"}
_COUNT: Manifest = {"type": "integer", "format": "int32", "minimum": 0, "default": 0}
_TIME: Manifest = {"type": "string", "format": "date-time"}
_ANYTHING: Manifest = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _choice(kind: type[enum.Enum], **more: Any) -> Manifest:
    return {**_TEXT, "enum": [one.value for one in kind], **more}


_TASK: Manifest = {
    "type": "object", "required": ["type", "template"],
    "properties": {
        "replicas": {"type": "integer", "format": "int32", "minimum": 1, "default": 1},
        "type": _choice(TaskType), "name": _TEXT, "template": _ANYTHING,
    },
}  # fmt: skip
_SPEC: Manifest = {
    "type": "object", "required": ["tasks"],
    "properties": {
        "group": _TEXT, "priority": _choice(Priority, default="normal"),
        "cleanPodPolicy": _choice(CleanUp, default="Running"), "preemptible": {"type": "boolean", "default": False},
        "backoffLimit": {"type": "integer", "format": "int32", "minimum": 0, "default": 3},
        "volumes": {"type": "array", "items": _ANYTHING}, "tasks": {"type": "array", "minItems": 1, "items": _TASK},
    },
}  # fmt: skip
_CONDITION: Manifest = {
    "type": "object", "required": ["type", "status"],
    "properties": {
        "type": _TEXT, "status": {**_TEXT, "enum": ["True", "False", "Unknown"]}, "reason": _TEXT, "message": _TEXT,
        "lastUpdateTime": _TIME, "lastTransitionTime": _TIME,
    },
}  # fmt: skip
_STATUS: Manifest = {
    "type": "object",
    "properties": {
        "phase": _choice(DIJobPhase, default="Pending"), "replicas": _COUNT, "readyReplicas": _COUNT,
        "restarts": _COUNT, "reschedules": _COUNT, "allocation": {"type": "array", "items": _TEXT},
        "profilings": _ANYTHING, "completionTimestamp": _TIME, "conditions": {"type": "array", "items": _CONDITION},
        "taskStatus": {"type": "object", "additionalProperties": {
            "type": "object", "additionalProperties": {"type": "integer", "format": "int32"},
        }},
    },
}  # fmt: skip
_COLUMNS = [
    {"name": name, "type": kind, "jsonPath": path}
    for name, kind, path in (
        ("Phase", "string", ".status.phase"),
        ("ReadyReplicas", "integer", ".status.readyReplicas"),
        ("Replicas", "integer", ".status.replicas"),
        ("Restarts", "integer", ".status.restarts"),
        ("Reschedules", "integer", ".status.reschedules"),
        ("Age", "date", ".metadata.creationTimestamp"),
    )
]


def definition() -> Manifest:
    """The `CustomResourceDefinition`. The status is a subresource, so `kubectl edit` cannot change it."""
    version = {
        "name": VERSION, "served": True, "storage": True, "subresources": {"status": {}},
        "additionalPrinterColumns": _COLUMNS,
        "schema": {"openAPIV3Schema": {
            "type": "object", "required": ["spec"], "properties": {"spec": _SPEC, "status": _STATUS},
        }},
    }  # fmt: skip
    named = {"kind": "DIJob", "listKind": "DIJobList", "plural": DI_JOBS, "singular": "dijob", "shortNames": ["dijob"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{DI_JOBS}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": named, "versions": [version]},
    }  # fmt: skip
