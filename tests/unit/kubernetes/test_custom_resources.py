"""Nodes as they are written in a `ScalePlan`."""

from __future__ import annotations

import pytest

from dlrover_hooks.kubernetes.custom_resources import PodMeta
from dlrover_hooks.kubernetes.node_pods import quantity
from dlrover_hooks.protocol import Node, NodeResource, NodeType


@pytest.mark.parametrize(
    "resource",
    [
        NodeResource(),
        NodeResource(cpu=0.5, memory=256, priority="high"),
        NodeResource(cpu=16.0, memory=65536, gpu_type="nvidia.com/gpu", gpu_num=8),
    ],
)
def test_a_node_is_the_same_after_it_was_written(resource: NodeResource) -> None:
    node = Node(NodeType.PS, 3, resource, "ps-three")
    assert PodMeta.of(node, "s/1").node() == node


def test_quantities_of_kubernetes() -> None:
    assert [quantity(text) for text in (2, "2", "500m", "1e3", "1k", "1Ki")] == [2.0, 2.0, 0.5, 1000.0, 1000.0, 1024.0]
    for wrong in ("", "much", "1X", "Mi"):
        with pytest.raises(ValueError, match=f"'{wrong}' is no quantity"):
            quantity(wrong)


def test_a_pod_with_two_kinds_of_devices_is_no_node() -> None:
    meta = PodMeta("a", "worker", 0, {"nvidia.com/gpu": 1, "amd.com/gpu": 1})
    with pytest.raises(ValueError, match=r"2 kinds of devices: nvidia\.com/gpu, amd\.com/gpu"):
        meta.node()
