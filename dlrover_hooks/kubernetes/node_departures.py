"""Whether a node of a cluster is about to go, by what its object says. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dlrover_hooks.kubernetes.api_server import Manifest

TERMINATION_TAINTS = frozenset({
    "ToBeDeletedByClusterAutoscaler",  # cluster-autoscaler
    "karpenter.sh/disrupted", "karpenter.sh/disruption",
    "aws-node-termination-handler/spot-itn", "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination", "aws-node-termination-handler/rebalance-recommendation",
    "cloud.google.com/impending-node-termination",
    "node.cloudprovider.kubernetes.io/shutdown",
})  # fmt: skip
"""Keys of taints, whatever their effect, by which tools say that a node will be removed."""
_CUT_OFF = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
"""The processes of such a node cannot be told to go."""
_GRACE_S = 30.0
"""Of a Pod that gives no `terminationGracePeriodSeconds`."""


class NodeDeparture(msgspec.Struct, frozen=True):
    """A node will go. `reason`: in words. `taints`: those with the effect NoExecute."""

    reason: str
    taints: tuple[tuple[str, str], ...] = ()


def departure(node: Manifest) -> NodeDeparture | None:
    """None: nothing says that the node will go."""
    name, spec = node["metadata"]["name"], node.get("spec", {})
    taints = spec.get("taints") or []
    ends = next((one["key"] for one in taints if one["key"] in TERMINATION_TAINTS), "")
    if ends:
        return NodeDeparture(f"node {name} has the taint {ends}")
    if spec.get("unschedulable"):
        return NodeDeparture(f"node {name} is drained")
    evicts = [one for one in taints if one.get("effect") == "NoExecute" and one["key"] not in _CUT_OFF]
    if not evicts:
        return None
    return NodeDeparture(
        f"node {name} has the taint {evicts[0]['key']}",
        tuple((one["key"], one.get("value") or "") for one in evicts),
    )


def seconds_left(pod: Manifest, found: NodeDeparture) -> float | None:
    """How long the processes of a Pod on the node have at least, from now on. None: the Pod may stay."""
    spec = pod["spec"]
    grace_s = spec.get("terminationGracePeriodSeconds")
    least_s = 0.0 if not found.taints else math.inf
    for taint in found.taints:
        least_s = min(least_s, _tolerated_s(spec.get("tolerations") or (), taint))
    if least_s == math.inf:
        return None
    return least_s + (_GRACE_S if grace_s is None else float(grace_s))


def _tolerated_s(tolerations: Any, taint: tuple[str, str]) -> float:
    """So long a Pod is left on a node with this taint."""
    matching = [one for one in tolerations if _tolerates(one, *taint)]
    if not matching:
        return 0.0
    limits = [float(one["tolerationSeconds"]) for one in matching if one.get("tolerationSeconds") is not None]
    return max(0.0, min(limits)) if limits else math.inf


def _tolerates(toleration: Mapping[str, Any], key: str, value: str) -> bool:
    if toleration.get("effect") not in (None, "", "NoExecute"):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", key)
    return toleration.get("key") == key and (toleration.get("value") or "") == value
