"""The nodes of a job as Pods of a Kubernetes cluster, created and deleted by this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes import node_pods
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.pod_status import pod_end, runs
from dlrover_hooks.protocol import Node, NodeExit
from dlrover_hooks.scalers.pod_watching_scaler import PodSettings, PodWatchingScaler

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ASK_S = 1.0


class PodScaler(PodWatchingScaler):
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
        settings: see `PodSettings`.
    """

    def __init__(
        self,
        job: str,
        api: ApiServer,
        namespace: str,
        template: Callable[[Node], Manifest],
        *,
        owner: Manifest | None = None,
        **settings: Unpack[PodSettings],
    ) -> None:
        super().__init__(job, api, namespace, owner, **settings)
        self._template = template

    def _create(self, launch: int, node: Node) -> bool:
        annotation = self._launch_annotation(launch)
        pod = node_pods.node_pod(self._job, node, self._template(node), annotation, self._owner)
        try:
            made = self._api.create(self._path, pod)
        except KubernetesFailed as error:
            if error.code not in (0, node_pods.CONFLICT):
                raise
            made = self._existing(annotation, node, error)
        return runs(made)

    def _remove(self, launch: int, node: Node, grace_s: float | None) -> None:
        try:
            node_pods.delete_pod(
                self._api, f"{self._path}/{self.pod_name(node)}", bound=launch in self._bound,
                grace_s=self._grace(grace_s), over=lambda: self._over,
            )  # fmt: skip
        except KubernetesFailed as error:
            if error.code != node_pods.NOT_FOUND:
                raise
            self._ended(launch, NodeExit.REMOVED, 0)

    def _existing(self, annotation: str, node: Node, error: KubernetesFailed) -> Manifest:
        """The Pod of this launch, which an attempt without an answer has created. Raises `error` if there is none."""
        while True:
            try:
                found = self._api.get(f"{self._path}/{self.pod_name(node)}")
                break
            except KubernetesFailed as unknown:
                if unknown.code == node_pods.NOT_FOUND:
                    raise error from None
                if unknown.code or self._over:
                    raise
                with self._changed:
                    self._changed.wait(_ASK_S)
        if node_pods.launch_of(found) == annotation:
            return found
        if node_pods.is_owned(found, self._owner) and pod_end(found) is not None:
            meta = found["metadata"]
            with contextlib.suppress(KubernetesFailed):
                self._api.delete(f"{self._path}/{meta['name']}", uid=meta["uid"])
        raise error
