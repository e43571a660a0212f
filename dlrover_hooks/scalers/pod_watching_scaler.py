"""What the scalers on Kubernetes share: the nodes of a job are Pods, whose ends are watched."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING, TypedDict

import msgspec

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes import names, node_pods
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.kubernetes.pod_status import deleted, pod_end, runs
from dlrover_hooks.protocol import Node
from dlrover_hooks.scalers.node_reconciler import StartRetries
from dlrover_hooks.scalers.reconciling_scaler import ReconcilingScaler

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("dlrover_hooks.scaler")
LIST_S = 60.0
"""Within this time the API server must have listed the Pods of the job."""


class PodSettings(TypedDict, total=False):
    """What all scalers of Pods may be given.

    `user_errors`: exit codes that say that the user's program or a setting is wrong (`NodeExit.USER_ERROR`).
    `grace_s`: seconds between SIGTERM and SIGKILL for a node that a plan removes; None: as its Pod says.
    `starts_at_once`: so many Pods are created at the same time. `retries`: of failed starts.
    """

    user_errors: Collection[int]
    grace_s: float | None
    starts_at_once: int
    retries: StartRetries | None


class PodWatchingScaler(ReconcilingScaler):
    """Follows the Pods of a job. How they are created and deleted is for its subclasses to say.

    Args:
        job: its name.
        api: the cluster.
        namespace: of the Pods.
        owner: the `ownerReference` of the Pods; None: they have none.
        settings: see `PodSettings`.
    """

    killed_s = 60.0
    """The machines of many Pods tell an API server in turn that they are gone."""

    def __init__(
        self, job: str, api: ApiServer, namespace: str, owner: Manifest | None, **settings: Unpack[PodSettings]
    ) -> None:
        super().__init__(job, starts_at_once=settings.get("starts_at_once", 8), retries=settings.get("retries"))
        self._api, self._namespace, self._owner = api, namespace, owner
        self._user_errors, self._usual_grace_s = frozenset(settings.get("user_errors", ())), settings.get("grace_s")
        self._path = node_pods.pods_path(namespace)
        self._life = uuid.uuid4().hex[:12]
        """Of this scaler, in the annotations of its Pods."""
        self._adopted = dict[str, int]()
        """Launches of Pods of earlier scalers, by uid; used by the thread of `_pods` alone."""
        self._bound = set[int]()
        """Launches whose Pod has a machine."""
        self._pods = ListWatch(api, self._path, self._pod_changed, label_selector=node_pods.selector(job))

    def start(self) -> None:
        """See `Scaler`. Finds the Pods that there are. Raises `KubernetesFailed` if the cluster does not list them."""
        if not self._threads[0].started:
            self._pods.start(LIST_S)
        super().start()

    def leave(self) -> None:
        """Instead of `stop`: end the threads, and leave the Pods as they are. Another scaler goes on with them."""
        with self._changed:
            if self._stopped:
                return
            self._stopped = self._over = True
            self._changed.notify_all()
        self._end_threads()

    def pod_name(self, node: Node) -> str:
        """Of the Pod of this node."""
        return node_pods.pod_name(self._job, node.name)

    def _launch_annotation(self, launch: int) -> str:
        return f"{self._life}/{launch}"

    def _grace(self, grace_s: float | None) -> int | None:
        """For an API server: 0 would delete the object at once, whatever becomes of its processes."""
        grace = self._usual_grace_s if grace_s is None else grace_s
        return None if grace is None else max(1, math.ceil(grace))

    def _resize(self, launch: int, node: Node) -> None:
        """Nothing: a Pod that runs keeps its resources."""

    def _check(self) -> None:
        super()._check()
        self._pods.check()

    def _close(self) -> None:
        self._pods.stop()

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
            self._ended(launch, end.exit, end.exit_code, end.detail)
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

    def _launch_of(self, change: ObjectChange) -> int | None:
        """None: it is none of the nodes of this scaler."""
        meta = change.manifest["metadata"]
        life, _, launch = node_pods.launch_of(change.manifest).partition("/")
        if life == self._life:
            return int(launch)
        if change.uid in self._adopted or change.deleted or not node_pods.is_owned(change.manifest, self._owner):
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
