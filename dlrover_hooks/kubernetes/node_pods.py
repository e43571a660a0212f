"""The Pods of a job's nodes: how they are made and deleted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping

import msgspec

from dlrover_hooks.errors import KubernetesFailed, UsageError
from dlrover_hooks.kubernetes import names
from dlrover_hooks.kubernetes.api_server import CONFLICT as CONFLICT, NOT_FOUND as NOT_FOUND, ApiServer, Manifest
from dlrover_hooks.protocol import Node, NodeResource

_GPU = "nvidia.com/gpu"
_NOTHING: Mapping[str, str | int] = {}


def pods_path(namespace: str) -> str:
    """The collection of Pods."""
    return f"/api/v1/namespaces/{namespace}/pods"


def selector(job: str) -> str:
    """The label selector of the Pods of a job's nodes."""
    return f"{names.JOB_LABEL}={names.label_value(job)},{names.MANAGED_BY}={names.MANAGER}"


def pod_name(job: str, node: str) -> str:
    """Of the Pod of the node of this name."""
    return names.object_name(job, node)


def node_pod(job: str, node: Node, template: Manifest, launch: str, owner: Manifest | None) -> Manifest:
    """The Pod of a node, as it is to be created. It is not started again, whatever it ends with: plans decide that.

    Args:
        job: its name.
        template: a Pod: its first container gets requests and limits of the node's `config_resource`, as far as they
            are other ones than its own.
        launch: see `names.LAUNCH_ANNOTATION`.
        owner: an `ownerReference`: with this object the Pod is deleted.

    Raises `UsageError` if the template has no containers, or sizes that cannot be read.
    """
    pod = copy.deepcopy(template)
    if not pod.get("spec", {}).get("containers"):
        raise UsageError(f"job {job}: the template of {node.name} has no containers")
    meta = pod.setdefault("metadata", {})
    meta["name"] = pod_name(job, node.name)
    meta["labels"] = meta.get("labels", {}) | {
        names.JOB_LABEL: names.label_value(job), names.MANAGED_BY: names.MANAGER,
        names.TYPE_LABEL: node.type.value, names.INDEX_LABEL: str(node.id),
    }  # fmt: skip
    meta["annotations"] = meta.get("annotations", {}) | {
        names.NODE_ANNOTATION: msgspec.json.encode(node).decode(), names.LAUNCH_ANNOTATION: launch,
    }  # fmt: skip
    if owner is not None:
        meta["ownerReferences"] = [owner]
    pod["spec"]["restartPolicy"] = "Never"
    if node.config_resource.priority:
        pod["spec"]["priorityClassName"] = node.config_resource.priority
    container = pod["spec"]["containers"][0]
    own = quantities(container_size(container))
    changed = {name: value for name, value in quantities(node.config_resource).items() if own.get(name) != value}
    if changed:
        resources = container.setdefault("resources", {})
        for kind in ("requests", "limits"):
            resources[kind] = resources.get(kind, {}) | changed
    return {"apiVersion": "v1", "kind": "Pod"} | pod


def quantities(resource: NodeResource) -> dict[str, str]:
    """In the units of Kubernetes. What is not limited is left out."""
    found = dict[str, str]()
    if resource.cpu:
        found["cpu"] = f"{round(resource.cpu * 1000)}m"
    if resource.memory:
        found["memory"] = f"{resource.memory}Mi"
    if resource.gpu_num:
        found[resource.gpu_type if "/" in resource.gpu_type else _GPU] = str(resource.gpu_num)
    return found


def owner_reference(api_version: str, kind: str, owner: Manifest) -> Manifest:
    """What makes `owner` the owner of an object, which is deleted with it."""
    meta = owner["metadata"]
    return {
        "apiVersion": api_version, "kind": kind, "name": meta["name"], "uid": meta["uid"], "controller": True,
        "blockOwnerDeletion": True,
    }  # fmt: skip


def add_variables(container: Manifest, variables: Iterable[Manifest]) -> None:
    """Those that the container does not have."""
    own = container.setdefault("env", [])
    known = {one["name"] for one in own}
    own.extend(one for one in variables if one["name"] not in known)


def container_size(container: Manifest, other: Mapping[str, str | int] = _NOTHING) -> NodeResource:
    """What a container may use: its limits, and what it requests where it has no limit; `other` in place of these.

    Raises `UsageError` if it is no size of a node.
    """
    resources = container.get("resources") or {}
    try:
        return node_resource({**(resources.get("requests") or {}), **(resources.get("limits") or {}), **other})
    except ValueError as error:
        raise UsageError(f"container {container.get('name')!r}: {error}") from None


def node_resource(amounts: Mapping[str, str | int], priority: str = "") -> NodeResource:
    """From the units of Kubernetes. The type of a GPU is then the name of its resource. Raises ValueError."""
    numbers = {name: quantity(value) for name, value in amounts.items()}
    devices = {name: value for name, value in numbers.items() if "/" in name}
    if len(devices) > 1:
        raise ValueError(f"{len(devices)} kinds of devices: {', '.join(devices)}")
    device, count = next(iter(devices.items()), ("", 0.0))
    memory = round(numbers.get("memory", 0.0) / (1 << 20))
    return NodeResource(numbers.get("cpu", 0.0), memory, device, round(count), priority)


def quantity(text: str | int) -> float:
    """An amount such as 2, "500m" or "256Mi". Raises ValueError if it is none."""
    from kubernetes.utils import parse_quantity  # imported here: it takes longer than all that plans need

    try:
        return float(parse_quantity(text))
    except ValueError:
        raise ValueError(f"{text!r} is no quantity of Kubernetes, such as 2, 500m or 256Mi") from None


def launch_of(pod: Manifest) -> str:
    """Its `names.LAUNCH_ANNOTATION`; empty: it has none."""
    return pod["metadata"].get("annotations", {}).get(names.LAUNCH_ANNOTATION, "")


def is_owned(pod: Manifest, owner: Manifest | None) -> bool:
    """Its one owner is `owner`, and not one that had the same name before; or it has none, as is said."""
    owners = [one["uid"] for one in pod["metadata"].get("ownerReferences", ())]
    return owners == ([owner["uid"]] if owner is not None else [])


def delete_pod(
    api: ApiServer, path: str, *, bound: bool, grace_s: int | None, over: Callable[[], bool], uid: str | None = None
) -> None:
    """Delete the Pod at `path`, also the processes that a machine starts for it just then. See decision 0031.

    Args:
        bound: it is known to have a machine.
        grace_s: seconds between SIGTERM and SIGKILL; None: as the Pod says.
        over: do not try again any more.
        uid: only this Pod, not a later one of its name.

    Raises `KubernetesFailed`.
    """
    if bound:
        api.delete(path, grace_s=grace_s, uid=uid)
        return
    version = None
    while True:  # an API server deletes a Pod without a machine at once, even if it is bound to one just then
        pod = api.get(path)
        if uid not in (None, pod["metadata"]["uid"]):
            return
        if not pod["spec"].get("nodeName"):
            version = pod["metadata"]["resourceVersion"]
        try:
            api.delete(path, grace_s=grace_s, uid=uid, version=version)
            return
        except KubernetesFailed as error:
            if error.code != CONFLICT or over():
                raise
        version = None
