"""The Pods of a `DIJob`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.di_orchestrator import replicas as pods
from dlrover_hooks.master.di_orchestrator.di_job_resource import DIJobSpec, DIJobStatus, DITask, TaskType

TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "main", "env": [{"name": "DI_RANK", "value": "own"}]}]}}
SERIAL = DIJobSpec((DITask(TaskType.NONE, TEMPLATE, 2, "serial"),))
PARTS = DIJobSpec(
    (DITask(TaskType.COLLECTOR, TEMPLATE, 3), DITask(TaskType.LEARNER, TEMPLATE), DITask(TaskType.EVALUATOR, TEMPLATE))
)
JOB = {"metadata": {"name": "a.job", "namespace": "here", "uid": "u", "generation": 4}}


def made(
    spec: DIJobSpec, status: DIJobStatus, one: pods.TaskReplica, phase: str = "Running", **meta: Any
) -> dict[str, Any]:
    found = pods.replica_pod(JOB, spec, status, one, "http://di-server")
    found["metadata"] |= meta
    return found | {"status": {"phase": phase, "conditions": [{"type": "Ready", "status": str(phase == "Running")}]}}


@given(st.integers(0, 30), st.integers(1, 5))
def test_ranks_have_no_gap_and_stay_those_of_their_replicas(more: int, collectors: int) -> None:
    spec = DIJobSpec((DITask(TaskType.COLLECTOR, TEMPLATE, collectors), DITask(TaskType.LEARNER, TEMPLATE, 2)))
    small, large = pods.replicas(spec, 3), pods.replicas(spec, 3 + more)
    assert [one.rank for one in large] == list(range(3 + more))
    assert large[:3] == small
    assert len({(one.task, one.task_rank) for one in large}) == 3 + more
    assert [one.task for one in large[:2]] == [1, 1], "the learners"


def test_two_tasks_of_one_type_count_for_themselves() -> None:
    spec = DIJobSpec((DITask(TaskType.NONE, TEMPLATE, 2, "a"), DITask(TaskType.NONE, TEMPLATE, 1, "b")))
    found = pods.replicas(spec, 5)
    assert [(one.task, one.task_rank) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert len({pods.replica_name("job", spec, one) for one in found}) == 5


def test_the_collectors_grow_and_without_them_the_last_task() -> None:
    assert [(one.task, one.task_rank) for one in pods.replicas(PARTS, 5)] == [(1, 0), (2, 0), (0, 0), (0, 1), (0, 2)]
    assert [one.task_rank for one in pods.replicas(SERIAL, 3)] == [0, 1, 2]
    with pytest.raises(UsageError, match="2 replicas are too few: task collector needs one besides the 2 of"):
        pods.replicas(PARTS, 2)


def test_missing_replicas_are_created_and_others_deleted() -> None:
    status = DIJobStatus(replicas=3)
    every = pods.replicas(SERIAL, 4)
    present = [made(SERIAL, DIJobStatus(replicas=4), every[number]) for number in (0, 3)]
    create, delete = pods.pod_changes("a.job", SERIAL, status, present)
    assert create == [every[1], every[2]], "the free ranks, not the next ones"
    assert [pod["metadata"]["name"] for pod in delete] == [present[1]["metadata"]["name"]]


def test_a_replica_is_created_again_only_when_its_pod_has_gone() -> None:
    status = DIJobStatus(replicas=2)
    first, second = (made(SERIAL, status, one) for one in pods.replicas(SERIAL, 2))
    second["metadata"]["deletionTimestamp"] = "now"
    assert pods.pod_changes("a.job", SERIAL, status, [first, second]) == ([], [])
    assert pods.counted("a.job", SERIAL, status, [first, second]).created == 1


def test_pods_from_before_a_restart_are_replaced_and_not_counted() -> None:
    old = [made(SERIAL, DIJobStatus(replicas=2), one, "Failed") for one in pods.replicas(SERIAL, 2)]
    status = DIJobStatus(replicas=2, restarts=1)
    assert pods.pod_changes("a.job", SERIAL, status, old) == ([], old)
    assert pods.counted("a.job", SERIAL, status, old) == pods.ReplicaCounts(2)


def required(pod: dict[str, Any]) -> list[str]:
    """The nodes that the scheduler may bind it to."""
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [field["values"][0] for term in affinity["nodeSelectorTerms"] for field in term["matchFields"]]


def test_what_a_template_asks_of_its_node_is_kept() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    terms = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term, term]}}}
    task = msgspec.structs.replace(SERIAL.tasks[0], template={"spec": {"affinity": terms, "containers": [{}]}})
    spec = DIJobSpec((task,), preemptible=True)
    status = DIJobStatus(replicas=1, allocation=("n1",))
    pod = made(spec, status, pods.wanted_replicas(spec, status)[0])
    assert required(pod) == ["n1", "n1"], "one of the terms has to hold"
    found = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [one["matchExpressions"] for one in found["nodeSelectorTerms"]] == [term["matchExpressions"]] * 2
    assert "matchFields" not in term, "the template is as it was"


def test_replicas_of_a_preemptible_job_are_where_they_are_allocated() -> None:
    spec = DIJobSpec(SERIAL.tasks, preemptible=True)
    status = DIJobStatus(replicas=9, allocation=("n1", "n2"))
    found = [made(spec, status, one) for one in pods.wanted_replicas(spec, status)]
    assert [required(one) for one in found] == [["n1"], ["n2"]]
    assert pods.counted("a.job", spec, status, found).complete
    moved = DIJobStatus(replicas=9, allocation=("n1", "n3"))
    assert not pods.counted("a.job", spec, moved, found).complete
    assert pods.pod_changes("a.job", spec, moved, found) == ([], found[1:]), "the other one goes on"
    assert pods.wanted_replicas(spec, DIJobStatus(replicas=2)) == ()


def test_what_ends_and_what_is_ready_is_counted() -> None:
    status = DIJobStatus(replicas=5)
    every = pods.replicas(SERIAL, 5)
    phases = ("Running", "Pending", "Succeeded", "Failed", "Running")
    found = [made(SERIAL, status, one, phase) for one, phase in zip(every, phases, strict=True)]
    assert pods.counted("a.job", SERIAL, status, found) == pods.ReplicaCounts(5, 5, ready=2, succeeded=1, failed=1)


def test_a_replica_is_told_what_di_engine_asks_for() -> None:
    status = DIJobStatus(replicas=5, restarts=2)
    found = made(PARTS, status, pods.replicas(PARTS, 5)[3])
    meta, (container,) = found["metadata"], found["spec"]["containers"]
    assert meta["name"] == found["spec"]["hostname"]
    assert (meta["labels"]["diengine/task-type"], meta["labels"]["diengine/rank"]) == ("collector", "3")
    assert meta["annotations"] == {
        "diengine/replicas": "5", "diengine/rank": "3", "diengine/task-rank": "1", "diengine/node": "",
        "dlrover-hooks/restarts": "2",
    }  # fmt: skip
    values = {one["name"]: one["value"] for one in container["env"]}
    assert (values["DI_JOB_ID"], values["DI_SERVER_URL"], values["DI_RANK"]) == (
        "here.a.job.4",
        "http://di-server",
        "own",
    )
    nodes = values["DI_NODES"].split(",")
    assert len(nodes) == 5
    assert values["DI_COLLECTOR_NODES"].split(",") == nodes[2:]
    assert nodes[3] == f"{meta['name']}.{found['spec']['subdomain']}.here.svc.cluster.local"
    service = pods.job_service(JOB)
    assert service["spec"]["selector"].items() <= meta["labels"].items()
    assert (service["spec"]["clusterIP"], service["spec"]["ports"][0]["port"]) == ("None", 22270)
    assert "volumes" not in TEMPLATE["spec"], "the template is left alone"


def test_the_volumes_of_a_job_are_those_of_all_its_pods() -> None:
    spec = DIJobSpec(SERIAL.tasks, volumes=[{"name": "shared"}])
    found = made(spec, DIJobStatus(replicas=2), pods.replicas(spec, 2)[0])
    assert found["spec"]["volumes"] == [{"name": "shared"}]


@pytest.mark.requirement("DI-56")
def test_a_job_id_is_namespace_name_and_generation() -> None:
    assert pods.split_job_id(pods.job_id(JOB)) == ("here", "a.job", 4)
    for wrong in ("", "a", "a.b", "a.b.c", ".b.1", "a..1", "a.b.-1"):
        with pytest.raises(UsageError, match="is no id of a job"):
            pods.split_job_id(wrong)
