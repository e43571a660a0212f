"""A `ScalePlan` with `manualScaling`: a request of a user, which the operator writes into the job. Pure."""

from __future__ import annotations

from dlrover_hooks.errors import UsageError
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.custom_resources import ScalePlanSpec, ScalePlanStatus
from dlrover_hooks.kubernetes.elastic_job_spec import ElasticJobSpec


def is_new(status: ScalePlanStatus, generation: int) -> bool:
    """The plan was not carried out yet as it is now."""
    return status.observed_generation != generation


def job_patch(plan: ScalePlanSpec, job: ElasticJobSpec) -> Manifest:
    """What the plan changes of its job: a merge patch. The job alone then says what it is to have.

    Raises `UsageError` if the job has no such nodes, or the plan changes nothing.
    """
    changes = dict[str, Manifest]()
    for kind, wanted in plan.replica_resource_specs.items():
        if kind not in job.replica_specs:
            known = ", ".join(sorted(job.replica_specs))
            raise UsageError(f"spec.replicaResourceSpecs.{kind}: the job has no such nodes", hint=f"it has {known}")
        change: Manifest = {} if wanted.replicas is None else {"replicas": wanted.replicas}
        if wanted.resource:
            change["resource"] = wanted.resource
        if change:
            changes[kind] = change
    if not changes:
        raise UsageError("spec.replicaResourceSpecs is empty", hint="give the replicas of a type, such as worker")
    return {"spec": {"replicaSpecs": changes}}


def status_after(generation: int, now: str, problem: str = "") -> ScalePlanStatus:
    """Of a plan that was carried out, or refused because of `problem`. `now`: RFC 3339."""
    phase = "Failed" if problem else "Succeeded"
    return ScalePlanStatus(phase, now, now, observed_generation=generation, message=problem)
