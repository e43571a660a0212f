"""What the operator does about a plan and the Pods that there are."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from dlrover_hooks.kubernetes.custom_resources import LeavingPod, PodMeta, ScalePlanSpec, ScalePlanStatus, TriedPod
from dlrover_hooks.kubernetes.node_departures import NodeDeparture
from dlrover_hooks.kubernetes.node_pods import node_pod
from dlrover_hooks.master.operator.scale_plan_actions import leaving_pods, next_status, pod_actions, unreported
from dlrover_hooks.protocol import Node, NodeType

TEMPLATE = {"spec": {"containers": [{"name": "main"}]}}
NEW = ScalePlanStatus()


def entry(number: int, launch: str = "", attempt: int = 1, grace: int | None = None) -> PodMeta:
    return PodMeta.of(Node(NodeType.WORKER, number), launch or f"s/{number}", attempt, grace)


def pod(one: PodMeta, phase: str = "Running", **meta: Any) -> dict[str, Any]:
    made = node_pod("job", one.node(), TEMPLATE, one.launch, None)
    made["metadata"] |= meta
    return made | {"status": {"phase": phase}}


def plan(*entries: PodMeta, remove: tuple[PodMeta, ...] = ()) -> ScalePlanSpec:
    return ScalePlanSpec("job", create_pods=list(entries), remove_pods=list(remove))


def did(spec: ScalePlanSpec, pods: list[dict[str, Any]], status: ScalePlanStatus = NEW) -> tuple[list[str], list[Any]]:
    """Names of the Pods to create; names and graces of those to delete."""
    create, delete = pod_actions(spec, status, pods)
    return [one.name for one in create], [(one.pod["metadata"]["name"], one.grace_s) for one in delete]


def test_missing_pods_are_created_and_others_deleted_with_their_grace() -> None:
    spec = plan(entry(0), entry(1), remove=(entry(2, grace=7),))
    assert did(spec, [pod(entry(1)), pod(entry(2)), pod(entry(3))]) == (
        ["job-worker-0"], [("job-worker-2", 7), ("job-worker-3", None)],
    )  # fmt: skip


def test_a_pod_that_ended_stays_until_its_name_is_needed() -> None:
    ended = pod(entry(0, "s/1"), "Failed")
    assert did(plan(), [ended]) == ([], [])
    assert did(plan(entry(0, "s/1")), [ended]) == ([], [])
    assert did(plan(entry(0, "s/2")), [ended]) == ([], [("job-worker-0", None)])


def test_a_node_waits_for_the_pod_of_the_last_one_of_its_name() -> None:
    running = pod(entry(0, "s/1"))
    assert did(plan(entry(0, "s/2")), [running]) == ([], [("job-worker-0", None)])
    assert did(plan(entry(0, "s/2")), [running | {"metadata": running["metadata"] | {"deletionTimestamp": "t"}}]) == (
        [], [],
    )  # fmt: skip


def test_a_pod_is_created_once_in_each_attempt() -> None:
    """Also if it is gone again, and the plan does not know it yet."""
    tried = ScalePlanStatus(tried_pods=[TriedPod("worker-0", "s/0", 3)])
    assert did(plan(entry(0, attempt=3)), [], tried) == ([], [])
    assert did(plan(entry(0, attempt=4)), [], tried) == (["job-worker-0"], [])
    assert did(plan(entry(0, attempt=0)), []) == ([], []), "of a scaler before this one"


def test_a_deletion_is_shortened_but_not_repeated() -> None:
    leaving = pod(entry(0), deletionTimestamp="t", deletionGracePeriodSeconds=30)
    assert did(plan(), [leaving]) == ([], [])
    assert did(plan(remove=(entry(0, grace=30),)), [leaving]) == ([], [])
    assert did(plan(remove=(entry(0, grace=1),)), [leaving]) == ([], [("job-worker-0", 1)])


def test_the_status_tells_what_was_tried_and_when_the_plan_was_carried_out() -> None:
    spec = plan(entry(0), entry(1))
    tried = [TriedPod("worker-0", "s/0", 1), TriedPod("worker-1", "s/1", 1, "no quota"), TriedPod("worker-9", "s/9", 1)]
    first = next_status(spec, NEW, 1, tried, "10:00", over=False)
    assert first == ScalePlanStatus("Scaling", "10:00", None, tried[:2], observed_generation=1)
    assert unreported(spec, NEW, tried) == tried[:2]
    assert unreported(spec, first, [*tried, TriedPod("worker-1", "s/1", 2)]) == [TriedPod("worker-1", "s/1", 2)]
    over = next_status(spec, first, 1, [], "10:01", over=True)
    assert (over.phase, over.create_time, over.finish_time) == ("Succeeded", "10:00", "10:01")
    assert next_status(spec, over, 1, [], "10:02", over=True) == over, "nothing to write"
    later = next_status(plan(entry(1)), over, 2, [], "10:03", over=True)
    assert (later.create_time, later.finish_time) == ("10:03", "10:03")
    assert later.tried_pods == [tried[1]], "bounded by the plan"


@given(
    wanted=st.dictionaries(st.integers(0, 5), st.integers(1, 3), max_size=6),
    present=st.dictionaries(
        st.integers(0, 5), st.tuples(st.integers(1, 3), st.sampled_from(["Running", "Pending", "Failed"])), max_size=6
    ),
)
def test_after_a_few_rounds_the_pods_are_as_planned(
    wanted: dict[int, int], present: dict[int, tuple[int, str]]
) -> None:
    """From any Pods to any plan; then there is nothing to do."""
    spec = plan(*(entry(number, f"s/{number}.{launch}") for number, launch in wanted.items()))
    pods = {
        one["metadata"]["name"]: one
        for one in (pod(entry(number, f"s/{number}.{launch}"), phase) for number, (launch, phase) in present.items())
    }
    for _ in range(3):
        create, delete = pod_actions(spec, NEW, pods.values())
        for gone in delete:
            del pods[gone.pod["metadata"]["name"]]
        for new in create:
            assert new.name not in pods
            pods[new.name] = pod(new.entry)
    assert pod_actions(spec, NEW, pods.values()) == ([], [])
    running = {name for name, one in pods.items() if one["status"]["phase"] != "Failed"}
    ended = {f"job-worker-{number}" for number, (launch, phase) in present.items()
             if phase == "Failed" and wanted.get(number) == launch}  # fmt: skip
    assert running == {f"job-worker-{number}" for number in wanted} - ended


def test_pods_whose_machine_will_go_are_told_unless_they_end_or_may_stay() -> None:
    leaves = NodeDeparture("node n1 is drained")
    there, ended, going, elsewhere = (pod(entry(number)) for number in range(4))
    for one in (there, ended, going):
        one["spec"]["nodeName"] = "n1"
    elsewhere["spec"]["nodeName"] = "n2"
    ended["status"]["phase"] = "Failed"
    going["metadata"]["deletionTimestamp"] = "now"
    found = leaving_pods([there, ended, going, elsewhere], {"n1": leaves})
    assert found == [LeavingPod("job-worker-0", "s/0", "node n1 is drained", 30.0)]
    told = next_status(plan(entry(0)), NEW, 1, [], "10:00", over=True, leaving=found)
    assert told.leaving_pods == found
    assert next_status(plan(entry(0)), told, 1, [], "10:01", over=True).leaving_pods == []
