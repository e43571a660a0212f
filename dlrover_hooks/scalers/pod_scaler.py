"""The nodes of a job as Pods of a Kubernetes cluster."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
import uuid
from collections.abc import Callable, Collection

import msgspec

from dlrover_hooks.errors import KubernetesFailed, UsageError
from dlrover_hooks.kubernetes import names
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.kubernetes.pod_status import PodEnd, deleted, pod_end, runs
from dlrover_hooks.protocol import Node, NodeExit, NodeResource
from dlrover_hooks.scalers.node_reconciler import StartRetries
from dlrover_hooks.scalers.reconciling_scaler import ReconcilingScaler

log = logging.getLogger("dlrover_hooks.scaler")
LIST_S = 60.0
"""Within this time the API server must have listed the Pods of the job."""
_NOT_FOUND, _CONFLICT = 404, 409
_GPU = "nvidia.com/gpu"
_ASK_S = 1.0


class PodScaler(ReconcilingScaler):
    """Each node is a Pod, made of a template, with requests and limits of the node's `config_resource`.

    A node runs when the containers of its Pod do, and has gone when the Pod is deleted for certain: on a machine that
    does not answer it is REMOVING until then. The Pod of a node that has ended by itself stays, with its log, until
    its owner is deleted, or another node of its name is started. Pods of the job that exist when the scaler is
    started, because the master was started again, are its first nodes. A Pod that runs keeps its resources, whatever a
    plan says: replace its node by a new one.

    Args:
        job: its name.
        api: the cluster.
        namespace: of the Pods.
        template: a Pod for a node. Called on several threads; what it raises is a failed start.
        owner: an `ownerReference`: with this object the Pods are deleted.
        user_errors: exit codes that say that the user's program or a setting is wrong (`NodeExit.USER_ERROR`).
        grace_s: seconds between SIGTERM and SIGKILL for a node that a plan removes; None: as its Pod says.
        starts_at_once: so many Pods are created at the same time.
        retries: of failed starts.
    """

    def __init__(
        self,
        job: str,
        api: ApiServer,
        namespace: str,
        template: Callable[[Node], Manifest],
        *,
        owner: Manifest | None = None,
        user_errors: Collection[int] = (),
        grace_s: float | None = None,
        starts_at_once: int = 8,
        retries: StartRetries | None = None,
    ) -> None:
        super().__init__(job, starts_at_once=starts_at_once, retries=retries)
        self._api, self._namespace, self._template, self._owner = api, namespace, template, owner
        self._user_errors, self._usual_grace_s = frozenset(user_errors), grace_s
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._life = uuid.uuid4().hex[:12]
        """Of this scaler, in the annotations of its Pods."""
        self._adopted = dict[str, int]()
        """Launches of Pods of earlier scalers, by uid; used by the thread of `_pods` alone."""
        self._bound = set[int]()
        """Launches whose Pod has a machine."""
        selector = f"{names.JOB_LABEL}={names.label_value(job)},{names.MANAGED_BY}={names.MANAGER}"
        self._pods = ListWatch(api, self._path, self._pod_changed, label_selector=selector)

    def start(self) -> None:
        """See `Scaler`. Finds the Pods that there are. Raises `KubernetesFailed` if the cluster does not list them."""
        if not self._threads[0].started:
            self._pods.start(LIST_S)
        super().start()

    def pod_name(self, node: Node) -> str:
        """Of the Pod of this node."""
        return names.object_name(self._job, node.name)

    # ---- of ReconcilingScaler ---------------------------------------------------------------------------------------

    def _create(self, launch: int, node: Node) -> bool:
        pod = self._pod(launch, node)
        try:
            made = self._api.create(self._path, pod)
        except KubernetesFailed as error:
            if error.code not in (0, _CONFLICT):
                raise
            made = self._existing(launch, node, error)
        return runs(made)

    def _remove(self, launch: int, node: Node, grace_s: float | None) -> None:
        grace = self._usual_grace_s if grace_s is None else grace_s
        # 0 would delete the object at once, whatever becomes of its processes
        seconds = None if grace is None else max(1, math.ceil(grace))
        path = f"{self._path}/{self.pod_name(node)}"
        try:
            if launch in self._bound:
                self._api.delete(path, grace_s=seconds)
            else:
                self._delete_unbound(path, seconds)
        except KubernetesFailed as error:
            if error.code != _NOT_FOUND:
                raise
            self._ended(launch, NodeExit.REMOVED, 0)

    def _delete_unbound(self, path: str, seconds: int | None) -> None:
        """An API server deletes a Pod without a machine at once, even if it is bound to one just then, and started."""
        version = None
        while True:
            pod = self._api.get(path)
            if not pod["spec"].get("nodeName"):
                version = pod["metadata"]["resourceVersion"]
            try:
                self._api.delete(path, grace_s=seconds, version=version)
                return
            except KubernetesFailed as error:
                if error.code != _CONFLICT or self._over:
                    raise
            version = None

    def _resize(self, launch: int, node: Node) -> None:
        """Nothing: see the class."""

    def _check(self) -> None:
        super()._check()
        self._pods.check()

    def _close(self) -> None:
        self._pods.stop()

    # ---- a Pod ------------------------------------------------------------------------------------------------------

    def _pod(self, launch: int, node: Node) -> Manifest:
        pod = copy.deepcopy(self._template(node))
        if not pod.get("spec", {}).get("containers"):
            raise UsageError(f"job {self._job}: the template of {node.name} has no containers")
        meta = pod.setdefault("metadata", {})
        meta |= {"name": self.pod_name(node), "namespace": self._namespace}
        meta["labels"] = meta.get("labels", {}) | {
            names.JOB_LABEL: names.label_value(self._job), names.MANAGED_BY: names.MANAGER,
            names.TYPE_LABEL: node.type.value, names.INDEX_LABEL: str(node.id),
        }  # fmt: skip
        meta["annotations"] = meta.get("annotations", {}) | {
            names.NODE_ANNOTATION: msgspec.json.encode(node).decode(),
            names.LAUNCH_ANNOTATION: f"{self._life}/{launch}",
        }
        if self._owner is not None:
            meta["ownerReferences"] = [self._owner]
        pod["spec"]["restartPolicy"] = "Never"  # whether it is replaced, and by what, is decided by plans
        if node.config_resource.priority:
            pod["spec"]["priorityClassName"] = node.config_resource.priority
        resources = pod["spec"]["containers"][0].setdefault("resources", {})
        for kind in ("requests", "limits"):
            resources[kind] = resources.get(kind, {}) | _amounts(node.config_resource)
        return {"apiVersion": "v1", "kind": "Pod"} | pod

    def _existing(self, launch: int, node: Node, error: KubernetesFailed) -> Manifest:
        """The Pod of this launch, which an attempt without an answer has created. Raises `error` if there is none."""
        while True:
            try:
                found = self._api.get(f"{self._path}/{self.pod_name(node)}")
                break
            except KubernetesFailed as unknown:
                if unknown.code == _NOT_FOUND:
                    raise error from None
                if unknown.code or self._over:
                    raise
                with self._changed:
                    self._changed.wait(_ASK_S)
        meta = found["metadata"]
        if meta.get("annotations", {}).get(names.LAUNCH_ANNOTATION) == f"{self._life}/{launch}":
            return found
        if self._is_own(found) and pod_end(found) is not None:
            with contextlib.suppress(KubernetesFailed):
                self._api.delete(f"{self._path}/{meta['name']}", uid=meta["uid"])
        raise error

    def _is_own(self, pod: Manifest) -> bool:
        """It is of this job, and of no other one that had its name."""
        owners = [one["uid"] for one in pod["metadata"].get("ownerReferences", ())]
        return owners == ([self._owner["uid"]] if self._owner is not None else [])

    # ---- the thread of `_pods` --------------------------------------------------------------------------------------

    def _pod_changed(self, change: ObjectChange) -> None:
        launch = self._launch_of(change)
        if launch is None:
            return
        end = pod_end(change.manifest, self._user_errors)
        if change.deleted:
            end = end or deleted(change.manifest)
            self._adopted.pop(change.uid, None)
            self._bound.discard(launch)
        elif change.manifest["spec"].get("nodeName"):
            self._bound.add(launch)
        if end is not None:
            self._report(launch, end)
        elif not self._knows(launch):
            self._delete_stray(change.manifest)
        elif runs(change.manifest):
            self._runs(launch)

    def _knows(self, launch: int) -> bool:
        with self._changed:
            return self._nodes.knows(launch)

    def _delete_stray(self, pod: Manifest) -> None:
        """A request to create it was carried out after its node had been given up."""
        meta = pod["metadata"]
        if "deletionTimestamp" not in meta:
            log.warning("job %s: Pod %s was created too late; it is deleted", self._job, meta["name"])
            with contextlib.suppress(KubernetesFailed):  # the next change, or the next list, tries it again
                self._api.delete(f"{self._path}/{meta['name']}", grace_s=1, uid=meta["uid"])

    def _report(self, launch: int, end: PodEnd) -> None:
        self._ended(launch, end.exit, end.exit_code, end.detail)

    def _launch_of(self, change: ObjectChange) -> int | None:
        """None: it is none of the nodes of this scaler."""
        meta = change.manifest["metadata"]
        life, _, launch = meta.get("annotations", {}).get(names.LAUNCH_ANNOTATION, "").partition("/")
        if life == self._life:
            return int(launch)
        if change.uid in self._adopted or change.deleted or not self._is_own(change.manifest):
            return self._adopted.get(change.uid)
        try:
            node = msgspec.json.decode(meta["annotations"][names.NODE_ANNOTATION], type=Node)
        except (KeyError, msgspec.DecodeError) as error:
            log.warning("job %s: Pod %s is left alone: it is no node (%s)", self._job, meta["name"], error)
            return None
        with self._changed:
            self._adopted[change.uid] = self._nodes.adopt(node, time.monotonic())
            self._changed.notify_all()
        return self._adopted[change.uid]


def _amounts(resource: NodeResource) -> dict[str, str]:
    """In the units of Kubernetes. What is not limited is left out."""
    found = dict[str, str]()
    if resource.cpu:
        found["cpu"] = f"{round(resource.cpu * 1000)}m"
    if resource.memory:
        found["memory"] = f"{resource.memory}Mi"
    if resource.gpu_num:
        found[resource.gpu_type if "/" in resource.gpu_type else _GPU] = str(resource.gpu_num)
    return found
