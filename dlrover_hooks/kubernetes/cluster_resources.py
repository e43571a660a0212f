"""What the nodes of a cluster have, and what Pods take of it. Pure.

Amounts are by the name of the resource, such as "cpu" (cores), "memory" (bytes) or "nvidia.com/gpu".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dlrover_hooks.kubernetes import node_pods
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.pod_status import pod_end

_TAINTS = ("NoSchedule", "NoExecute")
_NOTHING: Mapping[str, str] = {}


def amounts(quantities: Mapping[str, Any]) -> dict[str, float]:
    """In numbers. Raises ValueError."""
    return {name: node_pods.quantity(value) for name, value in quantities.items()}


def allocatable(node: Manifest) -> dict[str, float]:
    """What a node has for Pods."""
    return amounts(node.get("status", {}).get("allocatable") or {})


def usable(node: Manifest) -> bool:
    """The node is ready, and takes new Pods without a toleration."""
    spec, ready = node.get("spec", {}), node.get("status", {}).get("conditions", ())
    tainted = any(one.get("effect") in _TAINTS for one in spec.get("taints") or ())
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in ready)
    return is_ready and not tainted and not spec.get("unschedulable")


def requested(pod: Manifest, default: Mapping[str, str] = _NOTHING) -> Counter[str]:
    """What its containers request together: their limits, where they request nothing. `default`: of a container without
    resources.
    """
    total = Counter[str]()
    for container in pod.get("spec", {}).get("containers", ()):
        resources = container.get("resources") or {"requests": default}
        total.update(amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})}))
    return total


def free(nodes: Iterable[Manifest], pods: Iterable[Manifest]) -> dict[str, dict[str, float]]:
    """By the name of a usable node: what these Pods leave of it; nothing is less than 0."""
    used, found = taken(pods), dict[str, dict[str, float]]()
    for node in nodes:
        if usable(node):
            name = node["metadata"]["name"]
            mine = used.get(name, Counter[str]())
            found[name] = {kind: max(0.0, count - mine[kind]) for kind, count in allocatable(node).items()}
    return found


def taken(pods: Iterable[Manifest]) -> dict[str, Counter[str]]:
    """By the name of a node: what the Pods on it request that have not ended."""
    found = dict[str, Counter[str]]()
    for pod in pods:
        if (name := pod["spec"].get("nodeName")) and pod_end(pod) is None:
            found.setdefault(name, Counter()).update(requested(pod))
    return found
