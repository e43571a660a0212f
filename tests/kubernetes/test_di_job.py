"""The definition of `DIJob` on a real API server: fields, defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.master.di_orchestrator import di_job_resource
from dlrover_hooks.master.di_orchestrator.di_job_resource import (
    CleanUp,
    DIJobPhase,
    DIJobStatus,
    Priority,
    TaskType,
    di_job_spec,
    di_job_status,
)
from tests.kubernetes import operators
from tests.kubernetes.control_plane import ControlPlane, control_plane

pytestmark = pytest.mark.kubernetes
TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "main", "image": "ding"}]}}


class Jobs:
    """The `DIJob`s of a namespace."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane, self.api = plane, plane.api
        self.namespace = plane.namespace()
        operators.install(self.api, di_job_resource.definition())
        self.path = f"/apis/{di_job_resource.API_VERSION}/namespaces/{self.namespace}/{di_job_resource.DI_JOBS}"

    def create(self, name: str = "mine", api: ApiServer | None = None, **spec: Any) -> dict[str, Any]:
        spec = {"tasks": [{"type": "learner", "template": TEMPLATE}]} | spec
        job = {"apiVersion": di_job_resource.API_VERSION, "kind": "DIJob", "metadata": {"name": name}, "spec": spec}
        return (api or self.api).create(self.path, job)


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(control_plane())


@pytest.mark.requirement("DI-5", "DI-6", "DI-7", "DI-8", "DI-9", "DI-12")
def test_fields_have_the_defaults_of_the_design(jobs: Jobs) -> None:
    made = jobs.create()
    assert made["spec"] | {"tasks": []} == {
        "priority": "normal", "cleanPodPolicy": "Running", "preemptible": False, "backoffLimit": 3, "tasks": [],
    }  # fmt: skip
    assert made["spec"]["tasks"] == [{"type": "learner", "replicas": 1, "template": TEMPLATE}]
    spec = di_job_spec(made)
    spec.check()
    assert (spec.priority, spec.clean_pod_policy, spec.preemptible) == (Priority.NORMAL, CleanUp.RUNNING, False)
    assert (spec.backoff_limit, spec.replicas) == (3, 1)


@pytest.mark.requirement("DI-10", "DI-11", "DI-13", "DI-14", "DI-15", "DI-16", "DI-17", "DI-18", "DI-19")
def test_all_fields_are_kept(jobs: Jobs) -> None:
    volumes = [{"name": "work", "hostPath": {"path": "/data"}}]
    tasks = [
        {"type": kind, "name": f"a-{kind}", "replicas": 2, "template": TEMPLATE}
        for kind in ("learner", "collector", "evaluator", "none")
    ]
    given = {"group": "g", "priority": "high", "cleanPodPolicy": "None", "preemptible": True, "backoffLimit": 0,
             "volumes": volumes, "tasks": tasks}  # fmt: skip
    made = jobs.create(**given)
    assert made["spec"] == given
    assert [task.type for task in di_job_spec(made).tasks] == [
        TaskType.LEARNER, TaskType.COLLECTOR, TaskType.EVALUATOR, TaskType.NONE,
    ]  # fmt: skip
    assert di_job_spec(made).volumes == volumes


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("spec.priority", {"priority": "urgent"}),
        ("spec.cleanPodPolicy", {"cleanPodPolicy": "Some"}),
        ("spec.tasks", {"tasks": None}),
        ("spec.tasks", {"tasks": []}),
        ("spec.tasks.replicas", {"tasks": [{"type": "learner", "template": TEMPLATE, "replicas": 0}]}),
        ("spec.tasks.type", {"tasks": [{"type": "teacher", "template": TEMPLATE}]}),
        ("spec.tasks.type", {"tasks": [{"template": TEMPLATE}]}),
        ("spec.tasks.template", {"tasks": [{"type": "learner"}]}),
        ("spec.backoffLimit", {"backoffLimit": -1}),
    ],
)
def test_an_invalid_job_is_refused_with_the_field(jobs: Jobs, field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(KubernetesFailed, match=field.replace(".", r"\.")) as found:
        jobs.create(**spec)
    assert found.value.code == 422


@pytest.mark.requirement("DI-20", "DI-21", "DI-22", "DI-23", "DI-24", "DI-25", "DI-26", "DI-27")
def test_the_phases_are_those_of_the_design(jobs: Jobs) -> None:
    jobs.create()
    phases = ["Pending", "Starting", "Restarting", "Rescheduling", "Running", "Succeeded", "Failed", "Unknown"]
    for phase in phases:
        made = jobs.api.patch(f"{jobs.path}/mine/status", {"status": {"phase": phase}})
        assert di_job_status(made).phase is DIJobPhase(phase)
    assert len(DIJobPhase) == len(phases)
    with pytest.raises(KubernetesFailed, match=r"status\.phase"):
        jobs.api.patch(f"{jobs.path}/mine/status", {"status": {"phase": "Paused"}})


@pytest.mark.requirement("DI-48")
def test_the_status_cannot_be_changed_with_the_job(jobs: Jobs) -> None:
    """As `kubectl apply` and `kubectl edit` do: by PUT, POST and PATCH on the job."""
    made = jobs.create()
    jobs.api.patch(f"{jobs.path}/mine/status", {"status": {"replicas": 2, "profilings": {"speeds": {"2": 3.5}}}})
    jobs.api.patch(f"{jobs.path}/mine", {"status": {"replicas": 9}})
    found = jobs.api.get(f"{jobs.path}/mine")
    assert found["metadata"]["generation"] == made["metadata"]["generation"]
    jobs.api.replace(f"{jobs.path}/mine", found | {"status": {"replicas": 9}})
    done = jobs.plane.kubectl(
        "-n", jobs.namespace, "patch", "dijob", "mine", "--type=merge", "-p", '{"status":{"replicas":9}}'
    )
    assert done.returncode == 0, done.stderr
    status = di_job_status(jobs.api.get(f"{jobs.path}/mine"))
    assert status == DIJobStatus(replicas=2, profilings={"speeds": {"2": 3.5}})


def test_kubectl_shows_a_job(jobs: Jobs) -> None:
    jobs.create()
    jobs.api.patch(f"{jobs.path}/mine/status", {"status": {"phase": "Running", "replicas": 2, "readyReplicas": 1}})
    shown = jobs.plane.kubectl("-n", jobs.namespace, "get", "dijobs").stdout.splitlines()
    assert shown[0].split() == ["NAME", "PHASE", "READYREPLICAS", "REPLICAS", "RESTARTS", "RESCHEDULES", "AGE"]
    assert shown[1].split()[:6] == ["mine", "Running", "1", "2", "0", "0"]
