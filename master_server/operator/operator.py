"""Watches jobs, plans and Pods, and does what `pod_actions` says, for every job of a cluster or of a namespace."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from dlrover_hooks.errors import KubernetesFailed, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.kubernetes import custom_resources, names, node_pods, timestamps
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.custom_resources import PodMeta, ScalePlanSpec, ScalePlanStatus, TriedPod
from dlrover_hooks.kubernetes.elastic_job_spec import job_spec
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.node_departures import NodeDeparture, departure
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.kubernetes.owned_objects import OwnedObjects, OwnerKey, keep, key_of
from dlrover_hooks.kubernetes.pod_status import pod_end
from dlrover_hooks.kubernetes.reconcile_loop import ReconcileLoop
from dlrover_hooks.master.operator import job_objects, manual_scaling
from dlrover_hooks.master.operator.job_masters import JobMasters
from dlrover_hooks.master.operator.job_objects import MasterOptions
from dlrover_hooks.master.operator.job_status import JobSituation
from dlrover_hooks.master.operator.scale_plan_actions import (
    CreatePod,
    DeletePod,
    leaving_pods,
    next_status,
    pod_actions,
    unreported,
)

log = logging.getLogger("dlrover_hooks.operator")
WORKERS, REQUESTS = 4, 16
"""Jobs that are compared, and Pods that are created or deleted, at the same time."""
RESYNC_S = 300.0
LIST_S = 60.0
"""Within this time the API server must have listed jobs, plans and Pods."""
_AGAIN_S = 1.0
"""Pause after a request that the API server did not answer."""
_OURS = f"{names.MANAGED_BY} in ({names.MANAGER},{names.OPERATOR})"
_MASTERS = f"{names.MANAGED_BY}={names.OPERATOR}"


class _Request(msgspec.Struct, frozen=True):
    """Something to do about the Pod `name` of a job. `url`: see `node_template`."""

    job: Manifest
    owner: Manifest
    url: str | None
    name: str
    action: CreatePod | DeletePod


class Operator:
    """Level-triggered: each job is compared with what there is, whenever one of its objects changes and every
    `resync_s` seconds, so it does not matter which changes were seen.

    Args:
        api: the cluster.
        namespace: only its jobs; None: of the whole cluster.
        masters: how the Pods of masters are made.
        nodes: follow the nodes of the cluster, and tell masters which of their Pods will go with one.
        clock: seconds.

    Threads: its own. `start` raises `KubernetesFailed` if the cluster does not list what is needed: its definitions
    are not installed, or this account may not.
    """

    def __init__(
        self,
        api: ApiServer,
        namespace: str | None = None,
        masters: MasterOptions | None = None,
        *,
        nodes: bool = False,
        resync_s: float = RESYNC_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._clock = api, clock
        self._masters = JobMasters(api, masters or MasterOptions())
        self._changed = threading.Condition()
        self._loop = ReconcileLoop[OwnerKey](self._reconcile, "job", workers=WORKERS, resync_s=resync_s, clock=clock)
        self._jobs = dict[OwnerKey, Manifest]()
        self._plans, self._pods, self._services = (OwnedObjects("ElasticJob") for _ in range(3))
        self._manual = OwnedObjects("ElasticJob")
        """Plans of users."""
        self._departures = dict[str, NodeDeparture]()
        """By the name of the node."""
        custom = f"/apis/{custom_resources.API_VERSION}"
        at = "" if namespace is None else f"/namespaces/{namespace}"
        self.watches = [
            ListWatch(api, f"{custom}{at}/{custom_resources.ELASTIC_JOBS}", self._job_changed),
            ListWatch(api, f"{custom}{at}/{custom_resources.SCALE_PLANS}", self._plan_changed),
            ListWatch(api, f"/api/v1{at}/pods", self._pod_changed, label_selector=_OURS),
            ListWatch(api, f"/api/v1{at}/services", self._service_changed, label_selector=_MASTERS),
        ]  # fmt: skip
        if nodes:
            self.watches.insert(0, ListWatch(api, "/api/v1/nodes", self._node_changed))
        self._requests, self._busy = deque[_Request](), dict[OwnerKey, set[str]]()
        """Not begun yet; names of Pods for which there is one, or one is under way."""
        self._tried = dict[OwnerKey, list[TriedPod]]()
        """Not seen in a status yet."""
        self._deleted = dict[OwnerKey, set[tuple[str, int | None]]]()
        """Uids of Pods, with the grace, whose deletion has begun: the watch may not have told it yet."""
        self._over = False
        self._threads = [
            BackgroundThread(f"dlrover-hooks-pod-{number}", self._change_pods, where="operator", again_s=_AGAIN_S)
            for number in range(REQUESTS)
        ]

    def start(self) -> None:
        """List everything, and begin."""
        try:
            for watch in self.watches:
                watch.start(LIST_S)
        except KubernetesFailed:
            self.stop()
            raise
        self._loop.start()
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise what a thread met since the last call."""
        for one in (*self.watches, self._loop, *self._threads):
            one.check()

    def stop(self) -> None:
        """End the threads. Pods and plans stay as they are. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for one in (*self.watches, self._loop, *self._threads):
            one.stop()

    # ---- what there is ----------------------------------------------------------------------------------------------

    def _job_changed(self, change: ObjectChange) -> None:
        key = key_of(change.manifest)
        with self._changed:
            keep(self._jobs, key, change)
        self._loop.add(key)
        if change.deleted:
            self._masters.forget(change.uid)

    def _plan_changed(self, change: ObjectChange) -> None:
        spec = change.manifest["spec"]
        if spec.get("manualScaling"):
            self._take(self._manual, change, spec["ownerJob"])
        else:
            self._take(self._plans, change)

    def _pod_changed(self, change: ObjectChange) -> None:
        self._take(self._pods, change)

    def _node_changed(self, change: ObjectChange) -> None:
        name, found = change.manifest["metadata"]["name"], None if change.deleted else departure(change.manifest)
        with self._changed:
            if self._departures.get(name) == found:
                return
            if found is None:
                del self._departures[name]
            else:
                self._departures[name] = found
            jobs = self._pods.owners(lambda pod: pod["spec"].get("nodeName") == name)
        for key in jobs:
            self._loop.add(key)

    def _service_changed(self, change: ObjectChange) -> None:
        self._take(self._services, change)

    def _take(self, found: OwnedObjects, change: ObjectChange, job: str | None = None) -> None:
        """`job`: its name; None: that of the owner."""
        with self._changed:
            key = found.take(change, job)
        if key is not None:
            self._loop.add(key)

    # ---- work -------------------------------------------------------------------------------------------------------

    def _reconcile(self, key: OwnerKey) -> bool:
        """Of `ReconcileLoop`."""
        with self._changed:
            job = self._jobs.get(key)
            manual = self._manual.of(key)
            plans, pods, services = (one.of(key) for one in (self._plans, self._pods, self._services))
        if job is None or "deletionTimestamp" in job["metadata"]:  # what is left is deleted with it
            with self._changed:
                self._tried.pop(key, None)
                self._deleted.pop(key, None)
            return job is not None
        owner = custom_resources.owner_reference(job)
        plans, pods, services = (
            [one for one in kind if node_pods.is_owned(one, owner)] for kind in (plans, pods, services)
        )
        found = _situation(job, pods)
        again = self._masters.reconcile(found, next(iter(services), None), self._clock())
        if again < math.inf:
            self._loop.add(key, again)
        for plan in manual:
            self._change_job(found, plan)
        self._carry_out(key, found, plans, services)
        return True

    def _change_job(self, found: JobSituation, plan: Manifest) -> None:
        """As a user's plan says. Raises KubernetesFailed."""
        meta, job = plan["metadata"], found.job["metadata"]
        generation = meta["generation"]
        if found.spec is None or not manual_scaling.is_new(custom_resources.plan_status(plan), generation):
            return
        problem, now = "", timestamps.utc_now()
        jobs, plans = (
            custom_resources.path(meta["namespace"], kind)
            for kind in (custom_resources.ELASTIC_JOBS, custom_resources.SCALE_PLANS)
        )
        try:
            self._api.patch(
                f"{jobs}/{job['name']}", manual_scaling.job_patch(custom_resources.plan_spec(plan), found.spec)
            )
        except UsageError as error:
            problem = str(error)
        status = msgspec.to_builtins(manual_scaling.status_after(generation, now, problem))
        self._patch_plan_status(f"{plans}/{meta['name']}", {"message": None} | status)

    def _carry_out(self, key: OwnerKey, found: JobSituation, plans: list[Manifest], services: list[Manifest]) -> None:
        """Raises KubernetesFailed if the API server is away, or refuses what this account needs."""
        kept = [plan for plan in plans if names.LIFE_ANNOTATION in plan["metadata"].get("annotations", {})]
        spec, name = found.spec, key[1]
        if found.over or (spec is not None and spec.suspend):
            self._follow(key, found, ScalePlanSpec(name), ScalePlanStatus(), None)
            for plan in kept if not found.over else ():  # the master writes another one when the job goes on
                self._delete_plan(plan)
            return
        if spec is None:
            return
        if not spec.has_master:
            url = None
        elif services:
            url = job_objects.master_url(services[0], tls=spec.master_serves_tls)
        else:
            return  # its Service is made; that is told
        for plan in kept:
            plan_spec, status = custom_resources.plan_spec(plan), custom_resources.plan_status(plan)
            with self._changed:
                tried = self._tried[key] = unreported(plan_spec, status, self._tried.get(key, ()))
            known = msgspec.structs.replace(status, tried_pods=status.tried_pods + tried)
            over = self._follow(key, found, plan_spec, known, url)
            self._report(plan, plan_spec, status, tried, found.nodes, over=over)

    def _follow(
        self, key: OwnerKey, found: JobSituation, spec: ScalePlanSpec, status: ScalePlanStatus, url: str | None
    ) -> bool:
        """Have the Pods of nodes created and deleted. True: they are as planned."""
        create, delete = pod_actions(spec, status, found.nodes)
        present = {pod["metadata"]["uid"] for pod in found.nodes}
        with self._changed:
            begun = {one for one in self._deleted.pop(key, ()) if one[0] in present}
            if begun:
                self._deleted[key] = begun
        asked: list[tuple[str, CreatePod | DeletePod]] = [(one.name, one) for one in create]
        asked += [(one.pod["metadata"]["name"], one) for one in delete if _deletion(one) not in begun]
        owner = custom_resources.owner_reference(found.job)
        with self._changed:
            busy = self._busy.get(key, set())
            new = [_Request(found.job, owner, url, name, one) for name, one in asked if name not in busy]
            if new:
                self._requests += new
                self._busy[key] = busy | {one.name for one in new}
                self._changed.notify_all()
        return not create and not delete

    def _delete_plan(self, plan: Manifest) -> None:
        meta = plan["metadata"]
        plans = custom_resources.path(meta["namespace"], custom_resources.SCALE_PLANS)
        self._api.discard(f"{plans}/{meta['name']}", meta["uid"])

    # ---- Pods -------------------------------------------------------------------------------------------------------

    def work(self) -> float:
        """Without `start`: do on this thread all that is due. Returns when more is, on the clock."""
        due = self._loop.work()
        while self._requests:
            while self._requests:
                self._change_pod(self._requests.popleft())
            due = self._loop.work()
        return due

    def _change_pods(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._over)
                if self._over:
                    return
                request = self._requests.popleft()
            self._change_pod(request)

    def _change_pod(self, request: _Request) -> None:
        key = request.job["metadata"]["namespace"], request.job["metadata"]["name"]
        tried, at = None, self._clock()
        try:
            if isinstance(request.action, CreatePod):
                tried = self._create(request, request.action)
            else:
                self._delete(request.action)
                with self._changed:
                    self._deleted.setdefault(key, set()).add(_deletion(request.action))
        except KubernetesFailed as error:
            log.warning("job %s/%s: Pod %s: %s Trying again.", *key, request.name, error.message)
            at += _AGAIN_S
        finally:
            with self._changed:
                self._busy[key].discard(request.name)
                if not self._busy[key]:
                    del self._busy[key]
                if tried is not None:
                    self._tried.setdefault(key, []).append(tried)
            self._loop.add(key, at)

    def _create(self, request: _Request, action: CreatePod) -> TriedPod:
        """Raises KubernetesFailed if it is not known whether it was created, or it may be later."""
        job, entry = request.job, action.entry
        namespace, message = job["metadata"]["namespace"], ""
        try:
            template = _template(job, entry, request.url)
            pod = node_pods.node_pod(job["metadata"]["name"], entry.node(), template, entry.launch, request.owner)
            self._api.create(node_pods.pods_path(namespace), pod)
        except (UsageError, ValueError) as error:
            message = str(error)
        except KubernetesFailed as error:
            if not error.code:
                raise
            message = error.message if error.code != node_pods.CONFLICT else self._taken(namespace, action, error)
        return TriedPod(entry.name, entry.launch, entry.attempt, message)

    def _taken(self, namespace: str, action: CreatePod, error: KubernetesFailed) -> str:
        """Why a Pod that exists already is not this one; empty: it is. Raises `error` if it will soon be gone."""
        try:
            found = self._api.get(f"{node_pods.pods_path(namespace)}/{action.name}")
        except KubernetesFailed as gone:
            if gone.code == node_pods.NOT_FOUND:
                raise error from None
            raise
        if node_pods.launch_of(found) == action.entry.launch:
            return ""
        if names.LAUNCH_ANNOTATION in found["metadata"].get("annotations", {}):
            raise error  # the watch has not told it yet
        return error.message

    def _delete(self, action: DeletePod) -> None:
        pod = action.pod
        meta = pod["metadata"]
        path = f"{node_pods.pods_path(meta['namespace'])}/{meta['name']}"
        try:
            if pod_end(pod) is not None:
                self._api.delete(path, uid=meta["uid"])
                return
            bound = bool(pod["spec"].get("nodeName"))
            node_pods.delete_pod(
                self._api, path, bound=bound, grace_s=action.grace_s, over=lambda: self._over, uid=meta["uid"]
            )
        except KubernetesFailed as error:
            if error.code not in (node_pods.NOT_FOUND, node_pods.CONFLICT):
                raise

    def _report(
        self, plan: Manifest, spec: ScalePlanSpec, status: ScalePlanStatus, tried: list[TriedPod],
        pods: Sequence[Manifest], *, over: bool,
    ) -> None:  # fmt: skip
        meta = plan["metadata"]
        now = timestamps.utc_now()
        with self._changed:
            departures = dict(self._departures)
        leaving = leaving_pods(pods, departures)
        found = next_status(spec, status, meta["generation"], tried, now, over=over, leaving=leaving)
        if found == status:
            return
        path = f"{custom_resources.path(meta['namespace'], custom_resources.SCALE_PLANS)}/{meta['name']}"
        self._patch_plan_status(
            path, {"triedPods": [], "leavingPods": [], "finishTime": None} | msgspec.to_builtins(found)
        )

    def _patch_plan_status(self, path: str, status: Manifest) -> None:
        """Raises KubernetesFailed."""
        try:
            self._api.patch(f"{path}/status", {"status": status})
        except KubernetesFailed as error:
            if error.code != node_pods.NOT_FOUND:
                raise


def _deletion(action: DeletePod) -> tuple[str, int | None]:
    return action.pod["metadata"]["uid"], action.grace_s


def _situation(job: Manifest, pods: list[Manifest]) -> JobSituation:
    """Of a job whose Pods are `pods`."""
    spec, problem = None, ""
    try:
        spec = job_spec(job)
        spec.check()
    except (UsageError, msgspec.ValidationError) as error:
        problem = str(error)
    masters = [pod for pod in pods if job_objects.is_master(pod)]
    nodes = tuple(pod for pod in pods if not job_objects.is_master(pod))
    return JobSituation(job, spec, problem, next(iter(masters), None), nodes)


def _template(job: Manifest, entry: PodMeta, url: str | None) -> Manifest:
    """The Pod of this type. Raises UsageError if the job has none."""
    template = job_objects.node_template(job, job_spec(job), entry.node(), url)
    if template is None:
        name = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
        raise UsageError(
            f"job {name} has no template of a {entry.type}",
            hint=f"add spec.replicaSpecs.{entry.type}.template to the ElasticJob",
        )
    return template
