"""A user's `ScalePlan` becomes a part of its job."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.kubernetes.custom_resources import ScalePlanStatus, plan_spec
from dlrover_hooks.kubernetes.elastic_job_spec import job_spec
from dlrover_hooks.master.operator import manual_scaling

JOB = job_spec({"spec": {"replicaSpecs": {"worker": {}, "ps": {}}}})


def patch(**groups: Any) -> dict[str, Any]:
    spec = {"ownerJob": "job", "manualScaling": True, "replicaResourceSpecs": groups}
    return manual_scaling.job_patch(plan_spec({"spec": spec}), JOB)


def test_numbers_and_sizes_are_written_into_the_job() -> None:
    resource = {"cpu": "0.5", "memory": "256Mi"}
    assert patch(worker={"replicas": 2, "resource": resource}, ps={"replicas": 1}) == {
        "spec": {"replicaSpecs": {"worker": {"replicas": 2, "resource": resource}, "ps": {"replicas": 1}}}
    }
    assert patch(worker={"resource": resource}, ps={}) == {"spec": {"replicaSpecs": {"worker": {"resource": resource}}}}
    assert patch(worker={"replicas": 0}) == {"spec": {"replicaSpecs": {"worker": {"replicas": 0}}}}


@pytest.mark.parametrize("groups", [{}, {"worker": {}}])
def test_a_plan_that_changes_nothing_is_refused(groups: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is empty"):
        patch(**groups)


def test_a_plan_for_nodes_that_the_job_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"spec\.replicaResourceSpecs\.chief: the job has no such nodes"):
        patch(chief={"replicas": 1})


def test_a_plan_is_carried_out_once_until_it_changes() -> None:
    assert manual_scaling.is_new(ScalePlanStatus(), 1)
    after = manual_scaling.status_after(1, "now", "no such nodes")
    assert (after.phase, after.message) == ("Failed", "no such nodes")
    assert not manual_scaling.is_new(after, 1)
    assert manual_scaling.is_new(after, 2)
