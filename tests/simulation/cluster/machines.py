"""Simulated machines: their Pods are scheduled, start, run, end, and are lost with them."""

from __future__ import annotations

import random
from collections.abc import Callable

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes import cluster_resources
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.kubernetes.pod_status import pod_end
from tests.simulation.cluster.api import SimulatedApi
from tests.simulation.cluster.events import Timeline

CPU, GPUS = 64, 8
PENDING_S, START_S, END_S = 0.3, (2.0, 20.0), (0.0, 5.0)
"""A scheduler's delay; until a Pod's processes run; until they have ended after SIGTERM."""
LOST_S, BACK_S = 300.0, (600.0, 3600.0)
"""The Pods of a lost machine are deleted after so long; until there is another machine of its name."""
AGAIN_S = 15.0
"""A Pod that finds no room is looked at again after so long."""
DRAIN_S = 60.0
"""From the cordon to the evictions."""
RESERVED = "jobs"
"""A taint: the allocator leaves these nodes to Pods that the scheduler places."""


class Machines:
    """Kubelets, a scheduler and a cloud.

    Args:
        run: for how long a Pod runs, and its exit code; None: until something ends it.
    """

    def __init__(
        self,
        api: SimulatedApi,
        time: Timeline,
        dice: random.Random,
        run: Callable[[Manifest], tuple[float, int] | None],
    ) -> None:
        self._api, self._time, self._dice, self._run = api, time, dice, run
        self._free = dict[str, tuple[float, float]]()
        """Cores and GPUs of a node that no Pod has."""
        self._on = dict[str, set[str]]()
        """Uids of Pods by node."""
        self._placed = dict[str, tuple[str, float, float]]()
        self._reserved, self._lost, self._absent = list[str](), set[str](), set[str]()
        """`_absent`: of the lost ones, those without a node object."""
        api.followers_of_pods.append(self._pod_changed)

    def add(self, name: str, *, reserved: bool) -> None:
        """A machine joins. `reserved`: for Pods that the scheduler places, and no others."""
        taints = [{"key": RESERVED, "effect": "NoSchedule"}] if reserved else []
        amounts = {"cpu": str(CPU), "memory": "512Gi", "nvidia.com/gpu": str(GPUS), "pods": "110"}
        ready = [{"type": "Ready", "status": "True"}]
        self._free[name], self._on[name] = (CPU, GPUS), set()
        self._lost.discard(name)
        self._absent.discard(name)
        if reserved and name not in self._reserved:
            self._reserved.append(name)
        node = {"metadata": {"name": name}, "spec": {"taints": taints},
                "status": {"allocatable": amounts, "conditions": ready}}  # fmt: skip
        self._api.carry_out("post", "/api/v1/nodes", node)

    def lose(self, name: str) -> None:
        """A machine fails with all that runs on it. Some minutes later its Pods are deleted, and it is replaced."""
        if name in self._lost:
            return
        self._lost.add(name)
        status = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
        self._api.carry_out("patch", f"/api/v1/nodes/{name}/status", status)
        self._time.after(LOST_S, lambda: self._gone(name))

    def drain(self, name: str) -> None:
        """Cordon it, then evict its Pods, and use it again an hour later."""
        if name in self._lost:
            return
        self._cordon(name, True)
        self._time.after(DRAIN_S, lambda: self._evict(name))
        self._time.after(3600.0, lambda: self._cordon(name, False))

    def _cordon(self, name: str, on: bool) -> None:
        if name not in self._lost:
            self._api.carry_out("patch", f"/api/v1/nodes/{name}", {"spec": {"unschedulable": on}})

    def _evict(self, name: str) -> None:
        for uid in sorted(self._on[name]):
            pod = self._find(uid)
            if pod is not None and pod_end(pod) is None:
                self._api.carry_out("delete", _path(pod), {})

    def _gone(self, name: str) -> None:
        node = self._api.carry_out("get", f"/api/v1/nodes/{name}")
        self._api.remove("/api/v1/nodes", name, node["metadata"]["uid"])
        self._absent.add(name)
        for uid in [uid for uid, (where, *_) in self._placed.items() if where == name]:
            if (pod := self._find(uid)) is not None:
                self._remove(pod)
        reserved = name in self._reserved
        self._time.after(self._dice.uniform(*BACK_S), lambda: self.add(name, reserved=reserved))

    # ---- Pods -------------------------------------------------------------------------------------------------------

    def _pod_changed(self, change: ObjectChange) -> None:
        """At once, of every Pod."""
        pod, uid = change.manifest, change.uid
        if change.deleted:
            self._forget(uid)
        elif "deletionTimestamp" in pod["metadata"]:
            if self._placed[uid][0] not in self._lost:
                self._time.after(self._dice.uniform(*END_S), lambda: self._remove(pod))
        elif uid not in self._placed:
            if pod["spec"].get("nodeName"):
                self._place(pod)
            else:
                self._time.after(PENDING_S, lambda: self._schedule(uid, _path(pod)))

    def _schedule(self, uid: str, path: str) -> None:
        pod = self._current(uid, path)
        if pod is None:
            return
        need, wanted = _need(pod), _required(pod)
        names = [wanted] if wanted else self._dice.sample(self._reserved, min(32, len(self._reserved)))
        for name in names:
            if name in self._free and self._takes(name, need):
                self._api.carry_out("patch", path, {"spec": {"nodeName": name}})
                return
        self._time.after(AGAIN_S, lambda: self._schedule(uid, path))

    def _takes(self, name: str, need: tuple[float, float]) -> bool:
        if name in self._absent or not _fits(need, self._free[name]):
            return False
        node = self._api.carry_out("get", f"/api/v1/nodes/{name}")
        return name not in self._lost and not node["spec"].get("unschedulable")

    def _place(self, pod: Manifest) -> None:
        uid, name, need = pod["metadata"]["uid"], pod["spec"]["nodeName"], _need(pod)
        self._placed[uid] = (name, *need)
        self._free[name] = (self._free[name][0] - need[0], self._free[name][1] - need[1])
        self._on[name].add(uid)
        self._time.after(self._dice.uniform(*START_S), lambda: self._start(uid, _path(pod)))

    def _start(self, uid: str, path: str) -> None:
        pod = self._current(uid, path)
        if pod is None or pod["spec"]["nodeName"] in self._lost:
            return
        self._report(path, "Running", {"running": {}})
        if (found := self._run(pod)) is not None:
            seconds, code = found
            self._time.after(seconds, lambda: self.end(uid, path, code))

    def end(self, uid: str, path: str, code: int) -> None:
        """The processes of a Pod end, if they still run."""
        pod = self._current(uid, path)
        if pod is None or pod["spec"]["nodeName"] in self._lost or pod_end(pod) is not None:
            return
        self._report(path, "Failed" if code else "Succeeded", {"terminated": {"exitCode": code}})
        self._release(uid)

    def _report(self, path: str, phase: str, state: Manifest) -> None:
        ready = str(phase == "Running")
        status = {
            "phase": phase, "podIP": "10.1.0.1", "conditions": [{"type": "Ready", "status": ready}],
            "containerStatuses": [{"name": "main", "state": state}],
        }  # fmt: skip
        self._api.carry_out("patch", f"{path}/status", {"status": status})

    def _remove(self, pod: Manifest) -> None:
        meta = pod["metadata"]
        self._api.remove(_path(pod).rpartition("/")[0], meta["name"], meta["uid"])

    def _release(self, uid: str) -> None:
        if (found := self._placed.get(uid)) is None:
            return
        name, cpu, gpus = found
        if uid in self._on.get(name, ()):
            self._on[name].discard(uid)
            self._free[name] = (self._free[name][0] + cpu, self._free[name][1] + gpus)

    def _forget(self, uid: str) -> None:
        self._release(uid)
        self._placed.pop(uid, None)

    def _current(self, uid: str, path: str) -> Manifest | None:
        """The Pod, unless it is gone or is to go."""
        try:
            pod = self._api.carry_out("get", path)
        except KubernetesFailed:
            return None
        return pod if pod["metadata"]["uid"] == uid and "deletionTimestamp" not in pod["metadata"] else None

    def _find(self, uid: str) -> Manifest | None:
        return self._api.by_uid(uid)


def _path(pod: Manifest) -> str:
    meta = pod["metadata"]
    return f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"


def _need(pod: Manifest) -> tuple[float, float]:
    found = cluster_resources.requested(pod)
    return found["cpu"], found["nvidia.com/gpu"]


def _required(pod: Manifest) -> str:
    """The one node that the Pod may run on; empty: any that the scheduler finds."""
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", ())
    return next((str(field["values"][0]) for term in terms for field in term.get("matchFields", ())), "")


def _fits(need: tuple[float, float], free: tuple[float, float]) -> bool:
    return need[0] <= free[0] + 1e-9 and need[1] <= free[1]
