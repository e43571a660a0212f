"""Resource plans and scale plans: the forms in which they are written, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.master.scaling import (
    Node,
    NodeGroupResource,
    NodeResource,
    NodeStatus,
    NodeType,
    ResourceLimits,
    ResourcePlan,
    ScalePlan,
)

GPU = NodeResource(cpu=8, memory=10240, gpu_type="v100", gpu_num=1, priority="high")


@pytest.mark.requirement("SC-11")
def test_an_empty_resource_plan() -> None:
    plan = ResourcePlan()
    assert plan.empty
    assert plan == ResourcePlan({}, {})
    plan.node_group_resources["ps"] = NodeGroupResource()
    assert ResourcePlan().empty, "two plans share a dictionary"


@pytest.mark.requirement("SC-12", "SC-13", "SC-15", "SC-16")
def test_groups_of_a_resource_plan() -> None:
    resource_plan = ResourcePlan()
    resource_plan.node_group_resources["ps"] = NodeGroupResource(
        count=3, node_resource=NodeResource(cpu=8, memory=10240)
    )
    resource_plan.node_group_resources["worker"] = NodeGroupResource(
        count=3, node_resource=NodeResource(cpu=8, memory=10240, gpu_type="v100", gpu_num=1, priority="high")
    )
    resource_plan.check([])
    workers = resource_plan.node_group_resources["worker"]
    assert workers == NodeGroupResource(3, GPU)
    resource = workers.node_resource
    found = resource.cpu, resource.memory, resource.gpu_type, resource.gpu_num, resource.priority
    assert found == (8, 10240, "v100", 1, "high")
    assert resource_plan.node_group_resources["ps"].node_resource.gpu_num == 0


@pytest.mark.requirement("SC-14")
def test_single_nodes_of_a_resource_plan() -> None:
    resource_plan = ResourcePlan()
    resource_plan.node_resources["training-edljob-worker-0"] = NodeResource(cpu=8, memory=10240)
    resource_plan.check(["training-edljob-worker-0"])
    with pytest.raises(UsageError, match="unknown node training-edljob-worker-0"):
        resource_plan.check(["training-edljob-worker-1"])


@pytest.mark.requirement("SC-32")
def test_nodes_are_workers_servers_chiefs_evaluators_and_masters() -> None:
    names = {NodeType.WORKER, NodeType.PS, NodeType.CHIEF, NodeType.EVALUATOR, NodeType.MASTER}
    assert names == set(NodeType)
    assert {kind.value for kind in names} == {"worker", "ps", "chief", "evaluator", "master"}


@pytest.mark.requirement("SC-27")
def test_the_group_of_a_scale_plan_is_that_of_the_workers() -> None:
    scale_plan = ScalePlan()
    assert scale_plan.node_group_resource is None
    scale_plan.node_group_resource = NodeGroupResource(3, GPU)
    assert scale_plan.node_group_resources == {"worker": NodeGroupResource(3, GPU)}
    scale_plan.node_group_resources["worker"] = NodeGroupResource(4, GPU)
    assert scale_plan.node_group_resource == NodeGroupResource(4, GPU)


@pytest.mark.requirement("SC-26", "SC-28", "SC-29", "SC-30")
def test_nodes_of_a_scale_plan() -> None:
    scale_plan = ScalePlan()
    scale_plan.launch_nodes = [Node(NodeType.WORKER, 0, NodeResource(cpu=9, memory=10240))]
    scale_plan.remove_nodes = [Node(NodeType.WORKER, 1, NodeResource(cpu=8, memory=10240), name="worker-one")]
    scale_plan.ps_addrs = ["ps-0:2222", "ps-1:2222"]
    scale_plan.check(["worker-one"])
    (launched,) = scale_plan.launch_nodes
    assert (launched.type, launched.id, launched.name) == (NodeType.WORKER, 0, "worker-0")
    assert launched.config_resource.cpu == 9
    assert launched.status is NodeStatus.INITIAL
    assert scale_plan.remove_nodes[0].name == "worker-one"
    with pytest.raises(UsageError, match="unknown node worker-one"):
        scale_plan.check([])
    scale_plan.launch_nodes.append(scale_plan.remove_nodes[0])
    with pytest.raises(UsageError, match="both launched and removed"):
        scale_plan.check(["worker-one"])


@pytest.mark.parametrize("plan", [ResourcePlan({"pss": NodeGroupResource()}), ScalePlan({"pss": NodeGroupResource()})])
def test_an_unknown_type_is_refused(plan: ResourcePlan | ScalePlan) -> None:
    with pytest.raises(UsageError, match="unknown type of node pss"):
        plan.check([])


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cpu", "memory", "gpu_num"])
def test_an_impossible_amount_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} is"):
        NodeResource(**{name: value})


@pytest.mark.parametrize(
    ("message", "limits"),
    [
        ("min_workers 3, max_workers 2", {"min_workers": 3, "max_workers": 2}),
        ("min_workers 0", {"min_workers": 0}),
        ("min_ps 1, max_ps 0", {"max_ps": 0}),
        ("0 cores", {"cpu": 0}),
        ("too little for 9 workers", {"min_workers": 9}),
        ("too little for 5 workers", {"min_workers": 5, "memory": 4096}),
    ],
)
def test_impossible_limits_are_refused(message: str, limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=message):
        ResourceLimits(**{"cpu": 8, "memory": 65536, **limits})


def test_negative_numbers_of_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="count is -1"):
        NodeGroupResource(-1)
    with pytest.raises(UsageError, match="id is -1"):
        Node(NodeType.PS, -1)


def test_what_crosses_a_boundary_is_frozen() -> None:
    for value in (GPU, NodeGroupResource(3, GPU), Node(NodeType.PS, 0), ResourceLimits(8, 8192), ResourcePlan()):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(value, value.__struct_fields__[0], None)
