"""The Pods of a job's nodes: how they are made and deleted."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec

from dlrover_hooks.errors import KubernetesFailed, UsageError
from dlrover_hooks.kubernetes import names
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.protocol import Node, NodeResource

CONFLICT, NOT_FOUND = 409, 404
"""HTTP status: the object is of another version, or exists already; there is none."""
_GPU = "nvidia.com/gpu"


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
        template: a Pod: its first container gets requests and limits of the node's `config_resource`.
        launch: see `names.LAUNCH_ANNOTATION`.
        owner: an `ownerReference`: with this object the Pod is deleted.

    Raises `UsageError` if the template has no containers.
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
    resources = pod["spec"]["containers"][0].setdefault("resources", {})
    for kind in ("requests", "limits"):
        resources[kind] = resources.get(kind, {}) | quantities(node.config_resource)
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
