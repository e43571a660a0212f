"""Which nodes are about to go, and how long their Pods have."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks.kubernetes.node_departures import departure, seconds_left

MAINTENANCE = {"key": "maintenance", "value": "soon", "effect": "NoExecute"}


def node(*taints: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "n1"}, "spec": spec | ({"taints": list(taints)} if taints else {})}


def pod(*tolerations: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"spec": {"tolerations": list(tolerations), **spec}}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (node(), None),
        (node(unschedulable=True), "node n1 is drained"),
        (node({"key": "ToBeDeletedByClusterAutoscaler", "value": "1", "effect": "NoSchedule"}),
         "node n1 has the taint ToBeDeletedByClusterAutoscaler"),
        (node({"key": "DeletionCandidateOfClusterAutoscaler", "effect": "PreferNoSchedule"}), None),
        (node({"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}), None),
        (node(MAINTENANCE), "node n1 has the taint maintenance"),
        (node({"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}), None),
    ],
)  # fmt: skip
def test_what_says_that_a_node_will_go(found: dict[str, Any], reason: str | None) -> None:
    told = departure(found)
    assert (None if told is None else told.reason) == reason


@pytest.mark.parametrize(
    ("tolerations", "left_s"),
    [
        ([], 30.0),
        ([{"key": "maintenance", "operator": "Exists"}], None),
        ([{"operator": "Exists"}], None),
        ([{"key": "maintenance", "value": "soon", "effect": "NoExecute", "tolerationSeconds": 300}], 330.0),
        ([{"key": "maintenance", "value": "other"}], 30.0),
        ([{"key": "maintenance", "operator": "Exists", "effect": "NoSchedule"}], 30.0),
        ([{"key": "maintenance", "operator": "Exists", "tolerationSeconds": -5}], 30.0),
    ],
)
def test_a_pod_has_its_toleration_and_its_grace(tolerations: list[dict[str, Any]], left_s: float | None) -> None:
    found = departure(node(MAINTENANCE))
    assert found is not None
    assert seconds_left(pod(*tolerations), found) == left_s


def test_a_drain_leaves_a_pod_its_grace() -> None:
    found = departure(node(unschedulable=True))
    assert found is not None
    assert seconds_left(pod({"operator": "Exists"}, terminationGracePeriodSeconds=0), found) == 0.0
    assert seconds_left(pod(terminationGracePeriodSeconds=90), found) == 90.0
