"""The nodes of a job as Pods of a Kubernetes cluster, created and deleted by the operator, as a `ScalePlan` says."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from dlrover_hooks.errors import KubernetesFailed, Stale
from dlrover_hooks.kubernetes import custom_resources, names, node_pods
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.custom_resources import LeavingPod, PodMeta, ReplicaResourceSpec, ScalePlanSpec, TriedPod
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.protocol import Node, NodeExit, ScalePlan
from dlrover_hooks.scalers.pod_watching_scaler import LIST_S, PodSettings, PodWatchingScaler

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("dlrover_hooks.scaler")
CREATED_S = 60.0
"""The operator must have created a Pod, or have said why it cannot, within this time."""
STARTS_AT_ONCE = 64
"""Each start waits for the operator: one `ScalePlan` has so many new Pods at most."""
_AGAIN_S = 1.0
_OPERATOR = "is the operator running? kubectl get pods -A -l app.kubernetes.io/name=dlrover-hooks-operator"


class LeavingNode(msgspec.Struct, frozen=True):
    """A node on a machine that will go: it has `seconds` at least."""

    node: Node
    launch: int
    reason: str
    seconds: float


class ElasticJobScaler(PodWatchingScaler):
    """Writes which Pods are to be into one `ScalePlan` of the job, and lets the operator create and delete them.

    The account of this process needs no right to create or delete Pods. All nodes are in the one object, which is
    changed in place: it does not matter how many plans there are, or which of them the operator has seen. For the rest
    it is as `PodScaler`.

    Args:
        job: the `ElasticJob`, as the API has it.
        api: the cluster.
        created_s: after so many seconds without a Pod a start has failed.
        settings: see `PodSettings`; by default `STARTS_AT_ONCE`.

    A second scaler of the same job, such as that of a master that was replaced and does not know it yet, stops to write
    as soon as the other one has written: it raises `Stale`.
    """

    def __init__(
        self, job: Manifest, api: ApiServer, *, created_s: float = CREATED_S, **settings: Unpack[PodSettings]
    ) -> None:
        meta = job["metadata"]
        settings.setdefault("starts_at_once", STARTS_AT_ONCE)
        owner = custom_resources.owner_reference(job)
        super().__init__(meta["name"], api, meta["namespace"], owner, **settings)
        self._created_s = created_s
        self._plans = custom_resources.path(meta["namespace"], custom_resources.SCALE_PLANS)
        self.plan_name = names.object_name(meta["name"], "nodes")
        """Of the `ScalePlan`."""
        self._wanted, self._removed = dict[int, PodMeta](), dict[int, PodMeta]()
        """By launch."""
        self._exist, self._failed = set[int](), dict[str, TriedPod]()
        """Launches of which there is, or was, a Pod; failures by the annotation of their launch."""
        self._leaving = dict[str, LeavingPod]()
        """By the annotation of their launch."""
        self._attempts = 0
        self._ps_hosts: list[str] = []
        self._edition, self._written, self._began = 0, -1, False
        """Changes of the plan; that of the newest one written. Whether this scaler has written at all."""
        self._status = ListWatch(api, self._plans, self._plan_changed, field_selector=f"metadata.name={self.plan_name}")
        self._stale: Stale | None = None
        self._left = False
        self._threads.append(self._thread("plan", self._write_plans))

    def start(self) -> None:
        """See `Scaler` and `PodScaler.start`."""
        if not self._threads[0].started:
            self._status.start(LIST_S)
        super().start()

    def scale(self, plan: ScalePlan) -> None:
        """See `Scaler`."""
        super().scale(plan)
        if plan.ps_addrs:
            with self._changed:
                self._ps_hosts = list(plan.ps_addrs)
                self._edit()

    def leaving_nodes(self) -> list[LeavingNode]:
        """Nodes that live, and will go with their machine."""
        with self._changed:
            return [
                LeavingNode(one.node(), launch, told.reason, told.seconds)
                for launch, one in self._wanted.items()
                if (told := self._leaving.get(one.launch)) is not None
            ]

    def leave(self) -> None:
        """See `PodWatchingScaler`. The plan stays as it was written last."""
        self._left = True
        super().leave()

    def _check(self) -> None:
        super()._check()
        self._status.check()
        if self._stale is not None:
            raise self._stale

    def _close(self) -> None:
        self._status.stop()
        super()._close()

    # ---- of ReconcilingScaler ---------------------------------------------------------------------------------------

    def _create(self, launch: int, node: Node) -> bool:
        annotation, deadline = self._launch_annotation(launch), time.monotonic() + self._created_s
        with self._changed:
            self._attempts += 1
            attempt = self._attempts
            self._wanted[launch] = PodMeta.of(node, annotation, attempt)
            self._edit()

        def answer() -> bool:
            failed = self._failed.get(annotation)
            return launch in self._exist or self._over or (failed is not None and failed.attempt >= attempt)

        with self._changed:
            self._changed.wait_for(answer, deadline - time.monotonic())
            if launch in self._exist:
                return False
            self._wanted.pop(launch, None)
            self._edit()
            failed = self._failed.get(annotation)
        if failed is not None and failed.attempt >= attempt:
            raise KubernetesFailed(failed.message)
        raise KubernetesFailed(
            f"job {self._job}: the operator has not created Pod {self.pod_name(node)} within {self._created_s:g} s",
            hint=_OPERATOR,
        )

    def _remove(self, launch: int, node: Node, grace_s: float | None) -> None:
        with self._changed:
            entry = self._wanted.pop(launch, None) or self._removed.get(launch)
            annotation = entry.launch if entry is not None else self._launch_annotation(launch)
            if self._nodes.knows(launch):
                self._removed[launch] = PodMeta.of(node, annotation, grace_seconds=self._grace(grace_s))
            self._edit()

    def _ended(self, launch: int, exit_: NodeExit, exit_code: int, detail: str = "") -> None:
        with self._changed:
            self._removed.pop(launch, None)
            if self._wanted.pop(launch, None) is not None:
                self._edit()
        super()._ended(launch, exit_, exit_code, detail)

    def _pod_changed(self, change: ObjectChange) -> None:
        launch = self._launch_of(change)
        if launch is not None:
            with self._changed:
                self._exist.add(launch)
                adopted = not node_pods.launch_of(change.manifest).startswith(f"{self._life}/")
                if adopted and launch not in self._wanted and launch not in self._removed and not change.deleted:
                    self._adopt(launch, change.manifest)
                self._changed.notify_all()
        super()._pod_changed(change)

    def _delete_stray(self, pod: Manifest) -> None:
        """Nothing: it is not in the plan, so the operator deletes it."""

    def _adopt(self, launch: int, pod: Manifest) -> None:
        """It is a Pod of an earlier scaler, which has written it into the plan with its own number of the launch."""
        node = msgspec.json.decode(pod["metadata"]["annotations"][names.NODE_ANNOTATION], type=Node)
        self._wanted[launch] = PodMeta.of(node, node_pods.launch_of(pod))
        self._edit()

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def _edit(self) -> None:
        """The plan has changed. With the lock."""
        self._edition += 1
        self._changed.notify_all()

    def _plan_changed(self, change: ObjectChange) -> None:
        if change.deleted:
            with self._changed:  # a user has deleted it, or its job
                self._edit()
            return
        status = custom_resources.plan_status(change.manifest)
        with self._changed:
            self._failed = {one.launch: one for one in status.tried_pods if one.message}
            self._leaving = {one.launch: one for one in status.leaving_pods}
            self._changed.notify_all()

    def _write_plans(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._edition > self._written or self._over)
                if self._edition <= self._written or self._left:
                    return
                edition, spec = self._edition, self._spec()
            try:
                self._write(spec)
            except Stale as error:
                log.error("%s", error.message)
                self._stale = error
                return
            except KubernetesFailed as error:
                with self._changed:
                    if self._over:
                        return
                    log.warning("job %s: the plan was not written (%s); trying again", self._job, error.message)
                    self._changed.wait(_AGAIN_S)
            else:
                with self._changed:
                    self._written = edition

    def _spec(self) -> ScalePlanSpec:
        wanted = [self._wanted[launch] for launch in sorted(self._wanted)]
        kinds = sorted({one.type for one in wanted})
        counts = {kind: ReplicaResourceSpec(sum(one.type == kind for one in wanted)) for kind in kinds}
        removed = [self._removed[launch] for launch in sorted(self._removed)]
        return ScalePlanSpec(self._job, counts, wanted, removed, ps_hosts=self._ps_hosts)

    def _write(self, spec: ScalePlanSpec) -> None:
        """Raises KubernetesFailed; Stale if another scaler has written since."""
        meta: Manifest = {
            "name": self.plan_name,
            "labels": {names.JOB_LABEL: names.label_value(self._job), names.MANAGED_BY: names.MANAGER},
            "annotations": {names.LIFE_ANNOTATION: self._life}, "ownerReferences": [self._owner],
        }  # fmt: skip
        plan: Manifest = {
            "apiVersion": custom_resources.API_VERSION, "kind": "ScalePlan", "metadata": meta,
            "spec": msgspec.to_builtins(spec),
        }  # fmt: skip
        while True:
            found = self._present()
            try:
                if found is None:
                    self._api.create(self._plans, plan)
                else:
                    meta["resourceVersion"] = found["metadata"]["resourceVersion"]
                    self._api.replace(f"{self._plans}/{self.plan_name}", plan)
                break
            except KubernetesFailed as error:
                if error.code not in (node_pods.CONFLICT, node_pods.NOT_FOUND):
                    raise
                meta.pop("resourceVersion", None)
        self._began = True

    def _present(self) -> Manifest | None:
        try:
            found = self._api.get(f"{self._plans}/{self.plan_name}")
        except KubernetesFailed as error:
            if error.code != node_pods.NOT_FOUND:
                raise
            return None
        life = found["metadata"].get("annotations", {}).get(names.LIFE_ANNOTATION)
        if self._began and life != self._life:
            raise Stale(
                f"job {self._job}: another scaler writes its nodes, so this one has stopped",
                hint="two masters of one job run: stop one of them, or give them a shared journal",
            )
        return found
