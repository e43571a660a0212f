"""What is read from the `spec` of an `ElasticJob`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.kubernetes.elastic_job_spec import ElasticJobSpec, job_spec
from dlrover_hooks.protocol import NodeResource, ResourceLimits, ScalingMode


def template(**resources: dict[str, str]) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "image": "mine", "resources": resources}]}}


def spec(worker: dict[str, Any], **more: Any) -> ElasticJobSpec:
    worker = {"template": template()} | worker
    return job_spec({"spec": {"replicaSpecs": {"worker": worker} | more.pop("replicas", {}), **more}})


SIZED = template(limits={"cpu": "2", "memory": "3Gi"}, requests={"cpu": "1", "nvidia.com/gpu": "1"})
GIVEN = NodeResource(2.0, 3072, "nvidia.com/gpu", 1)


@pytest.mark.parametrize(
    ("worker", "more", "mode"),
    [
        ({"replicas": 2}, {}, ScalingMode.MANUAL),
        ({}, {}, ScalingMode.SINGLE_JOB),
        ({"replicas": 2}, {"optimizeMode": "single-job"}, ScalingMode.SINGLE_JOB),
        ({}, {"optimizeMode": "manual"}, ScalingMode.MANUAL),
        ({}, {"optimizeMode": "cluster", "brainService": "http://brain"}, ScalingMode.CLUSTER),
    ],
)
def test_the_mode_is_what_is_said_or_follows_from_the_number(
    worker: dict[str, Any], more: dict[str, Any], mode: ScalingMode
) -> None:
    assert spec(worker, **more).mode is mode


def test_the_size_of_a_node_is_that_of_its_template() -> None:
    assert spec({"template": SIZED}).sizes == {"worker": GIVEN}
    assert spec({}).sizes == {}, "planned"
    assert set(spec({"replicas": 1}).sizes.values()) == {NodeResource()}, "not limited: nothing is planned"


def test_the_limits_are_those_of_the_job_or_enough_for_all_workers() -> None:
    assert spec({"template": SIZED, "maxReplicas": 4}).limits == ResourceLimits(8.0, 12288, 1, 4)
    assert spec({"replicas": 70}).limits == ResourceLimits(70.0, 70 * 1024, 1, 70)
    limits = {"cpu": "32", "memory": "64Gi"}
    assert spec({"minReplicas": 2}, resourceLimits=limits).limits == ResourceLimits(32.0, 65536, 2, 60)


def test_a_parameter_server_job_is_planned_unless_it_says_both_numbers() -> None:
    both = spec({"template": SIZED, "replicas": 2}, replicas={"ps": {"replicas": 1}})
    assert both.mode is ScalingMode.MANUAL
    assert spec({"replicas": 2}, replicas={"ps": {}}).mode is ScalingMode.SINGLE_JOB
    assert spec({"replicas": 2}).mode is ScalingMode.MANUAL
    servers = {"minReplicas": 2, "maxReplicas": 3, "resource": {"cpu": "4"}}
    planned = spec({"template": SIZED, "maxReplicas": 4}, replicas={"ps": servers})
    assert planned.limits == ResourceLimits(4 * 2 + 3 * 4, 7 * 3072, 1, 4, max_ps=3, min_ps=2)
    assert planned.sizes == {"chief": GIVEN, "ps": NodeResource(4.0, 3072, "nvidia.com/gpu", 1), "worker": GIVEN}


def test_a_job_that_the_operator_can_run() -> None:
    for one in (
        spec({"replicas": 2}), spec({"template": SIZED}), spec({}, resourceLimits={"cpu": "8", "memory": "8Gi"}),
        spec({}, replicas={"evaluator": {"template": template()}, "dlrover-master": {"replicas": 0}}),
        spec({"replicas": 2}, replicas={"ps": {"replicas": 1}, "chief": {"template": template()}}),
    ):  # fmt: skip
        one.check()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            spec({}, replicas={"evaluator": {}}),
            r"spec\.replicaSpecs\.evaluator: the operator runs masters of jobs that",
        ),
        (spec({}, replicas={"chief": {}}), r"spec\.replicaSpecs\.chief: the operator"),
        (spec({"replicas": 1}, replicas={"ps": {"replicas": 0}}), r"ps\.replicas is 0, but 1 to 15 parameter servers"),
        (spec({}, replicas={"ps": {}, "chief": {"replicas": 2}}), r"chief\.replicas: a job has one chief"),
        (job_spec({"spec": {"replicaSpecs": {}}}), r"spec\.replicaSpecs\.worker\.template is missing"),
        (spec({"replicas": 9, "maxReplicas": 8}), r"replicas is 9, but 1 to 8 workers are allowed"),
        (spec({"replicas": 0}), r"replicas is 0, but 1 to 60"),
        (spec({"minReplicas": 3, "maxReplicas": 2}), r"min_workers 3, max_workers 2"),
        (spec({}), r"(?s)the size of the nodes is to be planned .*resourceLimits"),
        (spec({}, resourceLimits={"cpu": "much"}), r"spec\.resourceLimits: 'much' is no quantity"),
        (spec({"replicas": 1}, optimizeMode="cluster"), r"cluster and brainService need each other"),
        (spec({"template": template(limits={"cpu": "-"})}), r"container 'main': '-' is no quantity"),
    ],
)
def test_a_job_that_it_cannot_run_says_why(found: ElasticJobSpec, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        found.check()


def test_what_is_no_spec_is_refused_with_its_field() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.replicaSpecs\[\.\.\.\]\.replicas"):
        job_spec({"spec": {"replicaSpecs": {"worker": {"replicas": "two"}}}})
