"""How a job is: its phase, its conditions and what has become of its master. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import msgspec

from dlrover_hooks.kubernetes import names
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.elastic_job_spec import ElasticJobSpec
from dlrover_hooks.kubernetes.pod_status import pod_end, runs
from dlrover_hooks.protocol import NodeExit, NodeType

MASTER_FAILED = 70
"""Exit code (EX_SOFTWARE) of a master that another one may replace."""
_LONGEST_MESSAGE = 1000


class ElasticJobPhase(enum.Enum):
    """Of a job."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


OVER = (ElasticJobPhase.SUCCEEDED.value, ElasticJobPhase.FAILED.value)


class MasterEnd(msgspec.Struct, frozen=True):
    """The end of a master. `phase`: of the job; None: the job is not over, and needs another one."""

    phase: ElasticJobPhase | None
    message: str = ""


def master_end(pod: Manifest) -> MasterEnd | None:
    """How it has ended; None: it has not. A master whose job is over ends with the exit code of the job."""
    end = pod_end(pod)
    if end is None:
        return None
    if end.exit is NodeExit.SUCCEEDED:
        return MasterEnd(ElasticJobPhase.SUCCEEDED)
    said = [
        one["state"]["terminated"].get("message", "")
        for one in pod["status"].get("containerStatuses", ())
        if "terminated" in one["state"]
    ]
    message = "".join(said).strip()[-_LONGEST_MESSAGE:] or end.detail
    over = end.exit is NodeExit.ERROR and end.exit_code != MASTER_FAILED
    return MasterEnd(ElasticJobPhase.FAILED if over else None, message)


class JobSituation(msgspec.Struct, frozen=True):
    """What the status of a job depends on.

    `problem`: its spec cannot be carried out, because of this. `master`: its Pod. `nodes`: the Pods of its nodes.
    `refusal`: why the cluster does not accept the master's Pod.
    """

    job: Manifest
    spec: ElasticJobSpec | None
    problem: str
    master: Manifest | None
    nodes: tuple[Manifest, ...]
    refusal: str = ""

    @property
    def over(self) -> bool:
        """The job has ended, and stays so."""
        return (self.job.get("status") or {}).get("phase") in OVER


def next_status(found: JobSituation, now: str) -> Manifest:
    """The status, whole. `now`: RFC 3339."""
    meta, old = found.job["metadata"], dict(found.job.get("status") or {})
    workers = [pod for pod in found.nodes if _type(pod) == NodeType.WORKER.value]
    labels = {names.JOB_LABEL: names.label_value(meta["name"]), names.TYPE_LABEL: NodeType.WORKER.value}
    status = old | {
        "replicas": sum(_active(pod) for pod in workers),
        "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
        "replicaStatuses": _counts(found.nodes, old.get("replicaStatuses") or ()),
        "observedGeneration": meta["generation"],
        "startTime": old.get("startTime") or now,
    }
    if found.over:
        return status
    phase, reason, message = _phase(found)
    status["phase"] = phase.value
    if phase.value in OVER:
        status["completionTime"] = now
    conditions: list[dict[str, Any]] = list(old.get("conditions") or ())
    valid = _condition("Valid", not found.problem, "Refused" if found.problem else "Accepted", found.problem)
    for one in (valid, _condition(_CONDITION[phase], True, reason, message)):
        _set(conditions, one, now, meta["generation"])
    for kind in _CONDITION.values():
        if kind != _CONDITION[phase] and any(one["type"] == kind for one in conditions):
            _set(conditions, _condition(kind, False, reason, ""), now, meta["generation"])
    return status | {"conditions": conditions}


_CONDITION = {
    ElasticJobPhase.PENDING: "Pending",
    ElasticJobPhase.RUNNING: "Running",
    ElasticJobPhase.SUSPENDED: "Suspended",
    ElasticJobPhase.SUCCEEDED: "Complete",
    ElasticJobPhase.FAILED: "Failed",
}


def _phase(found: JobSituation) -> tuple[ElasticJobPhase, str, str]:
    """With reason and message of its condition."""
    if found.spec is None or (found.problem and found.master is None and not found.nodes):
        return ElasticJobPhase.PENDING, "Refused", found.problem
    if found.spec.suspend:
        return ElasticJobPhase.SUSPENDED, "Suspended", "spec.suspend is true"
    end = master_end(found.master) if found.master is not None else None
    if end is not None and end.phase is not None:
        return end.phase, "MasterEnded", end.message
    if any(runs(pod) for pod in found.nodes):
        return ElasticJobPhase.RUNNING, "NodesRun", ""
    if any(_ended_well(pod) for pod in found.nodes) and end is None:
        return ElasticJobPhase.RUNNING, "NodesEnd", ""
    if end is not None:
        return ElasticJobPhase.PENDING, "MasterLost", f"the master is started again: {end.message}"
    if found.refusal:
        return ElasticJobPhase.PENDING, "MasterRefused", found.refusal
    if found.spec.has_master and (found.master is None or not runs(found.master)):
        return ElasticJobPhase.PENDING, "MasterStarts", ""
    return ElasticJobPhase.PENDING, "NodesStart", ""


def _condition(kind: str, holds: bool, reason: str, message: str) -> dict[str, Any]:
    return {"type": kind, "status": str(holds), "reason": reason} | ({"message": message} if message else {})


def _set(conditions: list[dict[str, Any]], new: dict[str, Any], now: str, generation: int) -> None:
    """Replace the condition of its type. The time is that of the last change of `status`."""
    for number, old in enumerate(conditions):
        if old["type"] == new["type"]:
            since = old.get("lastTransitionTime", now) if old["status"] == new["status"] else now
            conditions[number] = {**new, "lastTransitionTime": since, "observedGeneration": generation}
            return
    conditions.append({**new, "lastTransitionTime": now, "observedGeneration": generation})


def _counts(pods: Iterable[Manifest], known: Iterable[str]) -> dict[str, dict[str, int]]:
    """By type of node. Types that were `known` before are there, too: a patch removes nothing."""
    pods = list(pods)
    kinds = sorted({*known, *(_type(pod) for pod in pods)})
    found = {kind: {"active": 0, "failed": 0, "succeeded": 0} for kind in kinds}
    for pod in pods:
        which = "active" if pod_end(pod) is None else "succeeded" if _ended_well(pod) else "failed"
        found[_type(pod)][which] += 1
    return found


def _ended_well(pod: Manifest) -> bool:
    end = pod_end(pod)
    return end is not None and end.exit is NodeExit.SUCCEEDED


def _type(pod: Manifest) -> str:
    return pod["metadata"].get("labels", {}).get(names.TYPE_LABEL, "")


def _active(pod: Manifest) -> bool:
    return pod_end(pod) is None and "deletionTimestamp" not in pod["metadata"]
