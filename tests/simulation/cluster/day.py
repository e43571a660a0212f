"""A day of a cluster: jobs are submitted, machines are lost, requests fail, and the operator is restarted.

The real `Operator`, `DIJobController`, `Allocator` and policies work on a simulated API server. The masters of
`ElasticJob`s are simulated: each wants a number of workers, and replaces those that end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes import custom_resources, names, node_pods
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.custom_resources import PodMeta, ScalePlanSpec
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.kubernetes.pod_status import pod_end
from dlrover_hooks.master.di_orchestrator import di_job_resource, replicas
from dlrover_hooks.master.di_orchestrator.allocator import Allocator, Policy
from dlrover_hooks.master.di_orchestrator.controller import DIJobController
from dlrover_hooks.master.operator import job_objects
from dlrover_hooks.master.operator.operator import Operator
from dlrover_hooks.protocol import Node, NodeType
from tests.simulation.cluster.api import Follower, SimulatedApi
from tests.simulation.cluster.events import Timeline
from tests.simulation.cluster.machines import Machines

NAMESPACE = "training"
PODS = node_pods.pods_path(NAMESPACE)
ELASTIC = custom_resources.path(NAMESPACE, custom_resources.ELASTIC_JOBS)
PLANS = custom_resources.path(NAMESPACE, custom_resources.SCALE_PLANS)
DI = f"/apis/{di_job_resource.API_VERSION}/namespaces/{NAMESPACE}/{di_job_resource.DI_JOBS}"
OVER = ("Succeeded", "Failed")
_CHECK_S, _QUIET_S = 600.0, 60.0
"""Between two looks at the ranks; a job counts that was left alone for so long."""
_TURN_S = 0.5
"""What has come within this time is worked on together."""
_HOUR = 3600.0


class DaySize(msgspec.Struct, frozen=True):
    """What there is, and what happens. Jobs are submitted in the first quarter; after `hours` no more faults come."""

    nodes: int = 5000
    jobs: int = 2000
    hours: float = 24.0
    most_replicas: int = 32
    period_s: float = 900.0
    losses_per_hour: float = 4.0
    drains_per_hour: float = 4.0
    restarts_per_hour: float = 1.0
    failure_pct: float = 0.5
    pod_failure_pct: float = 2.0


class DayResult(msgspec.Struct, frozen=True):
    """`broken`: promises that were not kept, with the object."""

    events: int
    requests: int
    faults: dict[str, int]
    phases: dict[str, int]
    ranks_checked: int
    broken: tuple[str, ...]


class ClusterDay:
    """One day, with the faults of `seed`."""

    def __init__(self, seed: int, size: DaySize, policy: Policy) -> None:
        self.size, self._policy = size, policy
        self._dice, self.time = random.Random(seed), Timeline()
        self.api = SimulatedApi(self.time, random.Random(seed + 1), size.failure_pct)
        self.machines = Machines(self.api, self.time, random.Random(seed + 2), self._run)
        self.faults, self.broken = Counter[str](), list[str]()
        self.ranks_checked = 0
        self.tell: Callable[[], object] = lambda: None
        """Called once in an hour."""
        self._quiet = dict[str, float]()
        """Time of the last change of a Pod of a job."""
        self._work = dict[str, float]()
        """Seconds that the Pods of a job run."""
        self._masters = dict[str, _Master]()
        for number in range(size.nodes):
            self.machines.add(f"n{number}", reserved=number % 2 == 0)
        self.api.followers_of_pods.append(self._pod_changed)
        self._followers = list[Follower]()
        self._begin()

    def play(self) -> DayResult:
        """The whole day, and what comes after it until all jobs are over, at most three times as long."""
        self._submit_all()
        self._plan_faults()
        self.time.after(self.size.period_s, self._schedule)
        self.time.after(_CHECK_S + _QUIET_S, self._check_ranks)  # not just when all jobs are placed again
        self.time.after(_HOUR, self._hour)
        end = self.size.hours * _HOUR
        while self.time.now < 4 * end and not (self.time.now > end and self._all_over()):
            self._turn()
        self._check_jobs()
        phases = self._phases()
        self._delete_all()
        return DayResult(
            self.time.happened, self.api.requests, dict(self.faults), dict(phases), self.ranks_checked,
            tuple(self.broken)
        )  # fmt: skip

    def line(self) -> str:
        """Where the day is."""
        phases = ", ".join(f"{count} {name}" for name, count in sorted(self._phases().items()))
        return f"{self.time.now / _HOUR:.0f} h: {len(self.api.objects(PODS))} Pods; {phases}"

    def _hour(self) -> None:
        self.tell()
        self.time.after(_HOUR, self._hour)

    # ---- the operator -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The operator starts, again: what it had in memory is lost."""
        for follower in self._followers:
            self.api.leave(follower)
        self._operator = Operator(self.api, nodes=True, resync_s=1800.0, clock=self.time.clock)
        self._controller = DIJobController(
            self.api, Allocator(self._policy), resync_s=1800.0, clock=self.time.clock, period_s=self.size.period_s
        )
        watches = (*self._operator.watches, *self._controller.watches)
        self._followers = [self.api.follow(watch) for watch in watches]

    def _restart(self) -> None:
        self.faults["operator restarted"] += 1
        self._begin()

    def _schedule(self) -> None:
        self._controller.schedule()
        self.time.after(self.size.period_s, self._schedule)

    def _turn(self) -> None:
        """All events of a moment, then the work that follows from them."""
        due = min(self._operator.work(), self._controller.work())
        until = max(self.time.now + _TURN_S, min(due, self.time.next_at))
        while self.time.step(until):
            pass

    # ---- jobs -------------------------------------------------------------------------------------------------------

    def _submit_all(self) -> None:
        for number in range(self.size.jobs):
            name, elastic = f"job-{number}", number % 2 == 0
            self._work[name] = self._dice.uniform(0.1, 0.6) * self.size.hours * _HOUR
            count = min(self.size.most_replicas, 1 << int(self._dice.triangular(0, 6, 2)))
            at = self._dice.uniform(0, self.size.hours * _HOUR / 4)
            self.time.at(at, lambda name=name, elastic=elastic, count=count: self._submit(name, elastic, count))

    def _submit(self, name: str, elastic: bool, count: int) -> None:
        resources = {"requests": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1"}}
        template = {"spec": {"containers": [{"name": "main", "image": "none", "resources": resources}]}}
        if elastic:
            self._masters[name] = _Master(self, name, count)
            spec: Manifest = {"replicaSpecs": {"worker": {"replicas": count, "maxReplicas": 64, "template": template}}}
            job = {"apiVersion": custom_resources.API_VERSION, "kind": "ElasticJob", "metadata": {"name": name}}
            self.api.carry_out("post", ELASTIC, job | {"spec": spec})
            return
        task = {"type": "learner", "replicas": count, "template": template}
        spec = {"preemptible": self._dice.random() < 0.8, "backoffLimit": 1000, "cleanPodPolicy": "Running",
                "priority": "normal", "tasks": [task]}  # fmt: skip
        job = {"apiVersion": di_job_resource.API_VERSION, "kind": "DIJob", "metadata": {"name": name}, "spec": spec}
        self.api.carry_out("post", DI, job)

    def _run(self, pod: Manifest) -> tuple[float, int] | None:
        if job_objects.is_master(pod):
            self.time.after(5.0, lambda: self._masters[_job_of(pod)].attach())
            return None
        work = self._work[_job_of(pod)]
        if self._dice.random() < self.size.pod_failure_pct / 100:
            self.faults["Pod failed"] += 1
            return work * self._dice.random(), 9
        return work, 0

    def _pod_changed(self, change: ObjectChange) -> None:
        labels = change.manifest["metadata"].get("labels", {})
        self._quiet[_job_of(change.manifest)] = self.time.now
        if labels.get(names.MANAGED_BY) == names.MANAGER:
            self.time.after(1.0, self._masters[_job_of(change.manifest)].look)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _plan_faults(self) -> None:
        hours = self.size.hours
        for rate, what in (
            (self.size.losses_per_hour, self._lose), (self.size.drains_per_hour, self._drain),
            (self.size.restarts_per_hour, self._restart), (4.0, self._lose_a_master),
        ):  # fmt: skip
            for _ in range(round(rate * hours)):
                self.time.at(self._dice.uniform(0.0, hours * _HOUR), what)

    def _lose(self) -> None:
        self.faults["machine lost"] += 1
        self.machines.lose(f"n{self._dice.randrange(self.size.nodes)}")

    def _drain(self) -> None:
        self.faults["machine drained"] += 1
        self.machines.drain(f"n{self._dice.randrange(self.size.nodes)}")

    def _lose_a_master(self) -> None:
        running = sorted(name for name, one in self._masters.items() if one.runs)
        if running:
            self.faults["master lost"] += 1
            self._masters[self._dice.choice(running)].end(70)

    # ---- promises ---------------------------------------------------------------------------------------------------

    def _phases(self) -> Counter[str]:
        return Counter(
            f"{one['kind']} {(one.get('status') or {}).get('phase', 'new')}"
            for one in (*self.api.objects(ELASTIC), *self.api.objects(DI))
        )

    def _all_over(self) -> bool:
        return all(phase.split()[1] in OVER for phase in self._phases())

    def _check_jobs(self) -> None:
        """Every job has succeeded: no fault is the user's. No Pod of a job still runs."""
        for job in (*self.api.objects(ELASTIC), *self.api.objects(DI)):
            name, phase = job["metadata"]["name"], (job.get("status") or {}).get("phase")
            if phase != "Succeeded":
                self.broken.append(f"{job['kind']} {name} is {phase}: {(job.get('status') or {}).get('conditions')}")
        for pod in self.api.objects(PODS):
            if pod_end(pod) is None and not job_objects.is_master(pod):
                self.broken.append(f"Pod {pod['metadata']['name']} runs after the end of its job")

    def _check_ranks(self) -> None:
        """Of a job that runs, and whose Pods have not changed for a while, ranks have no gap."""
        ranks = dict[str, list[int]]()
        for pod in self.api.objects(PODS):
            if (rank := pod["metadata"].get("annotations", {}).get(replicas.RANK_ANNOTATION)) is not None:
                ranks.setdefault(_job_of(pod), []).append(int(rank))
        for job in self.api.objects(DI):
            name, status = job["metadata"]["name"], job.get("status") or {}
            if status.get("phase") != "Running" or self.time.now - self._quiet.get(name, 0.0) < _QUIET_S:
                continue
            self.ranks_checked += 1
            if sorted(ranks.get(name, ())) != list(range(len(status["allocation"]) or status["replicas"])):
                self.broken.append(f"job {name} runs with the ranks {sorted(ranks.get(name, ()))}")
        self.time.after(_CHECK_S, self._check_ranks)

    def _delete_all(self) -> None:
        """Nothing of a job that is deleted is left, an hour later."""
        for collection in (ELASTIC, DI):
            for job in self.api.objects(collection):
                self.api.remove(collection, job["metadata"]["name"], job["metadata"]["uid"])
        end = self.time.now + _HOUR
        while self.time.now < end:
            self._turn()
        for plural in ("pods", "services", "secrets", "scaleplans"):
            left = [one["metadata"]["name"] for one in self.api.every(plural)]
            if left:
                self.broken.append(f"{len(left)} {plural} are left: {left[:4]}")


class _Master:
    """Of an `ElasticJob`: wants so many workers at a time until as many have succeeded. Its state outlives its Pod."""

    def __init__(self, day: ClusterDay, job: str, count: int) -> None:
        self._day, self.job, self._count = day, job, count
        self._wanted = dict[str, PodMeta]()
        """By the name of the Pod."""
        self._done, self._number, self.runs = 0, 0, False

    def attach(self) -> None:
        """Its Pod runs."""
        self.runs = True
        self.look()

    def end(self, code: int) -> None:
        """Its process ends."""
        name = names.master_name(self.job)
        self.runs = False
        pod = self._day.api.carry_out("get", f"{PODS}/{name}")
        self._day.machines.end(pod["metadata"]["uid"], f"{PODS}/{name}", code)

    def look(self) -> None:
        """Compare the workers with what is wanted, and write the plan if it changes."""
        if not self.runs:
            return
        if not self._lives():
            self.runs = False
            return
        before = dict(self._wanted)
        for name, entry in before.items():
            pod = self._pod(name)
            gone = pod is None or node_pods.launch_of(pod) != entry.launch
            if gone and not self._was_tried(entry):
                continue  # the operator has not created it yet
            end = None if pod is None or gone else pod_end(pod)
            if gone or end is not None:
                del self._wanted[name]
                self._done += not gone and end is not None and not end.exit_code
        while len(self._wanted) + self._done < self._count:
            self._number += 1
            node = Node(NodeType.WORKER, self._number)
            launch = f"{self.job}/{self._number}"
            self._wanted[node_pods.pod_name(self.job, node.name)] = PodMeta.of(node, launch, self._number)
        if self._wanted != before:
            self._write()
        if self._done >= self._count:
            self.end(0)

    def _write(self) -> None:
        job = self._day.api.carry_out("get", f"{ELASTIC}/{self.job}")
        spec = ScalePlanSpec(self.job, create_pods=list(self._wanted.values()))
        name = names.object_name(self.job, "nodes")
        plan = {
            "apiVersion": custom_resources.API_VERSION, "kind": "ScalePlan", "spec": msgspec.to_builtins(spec),
            "metadata": {"name": name, "annotations": {names.LIFE_ANNOTATION: self.job},
                         "ownerReferences": [custom_resources.owner_reference(job)]},
        }  # fmt: skip
        try:
            self._day.api.carry_out("put", f"{PLANS}/{name}", plan)
        except KubernetesFailed:
            self._day.api.carry_out("post", PLANS, plan)

    def _was_tried(self, entry: PodMeta) -> bool:
        name = names.object_name(self.job, "nodes")
        status = custom_resources.plan_status(self._day.api.carry_out("get", f"{PLANS}/{name}"))
        return any(one.launch == entry.launch for one in status.tried_pods)

    def _lives(self) -> bool:
        pod = self._pod(names.master_name(self.job))
        return pod is not None and pod_end(pod) is None and "deletionTimestamp" not in pod["metadata"]

    def _pod(self, name: str) -> Manifest | None:
        try:
            return self._day.api.carry_out("get", f"{PODS}/{name}")
        except KubernetesFailed:
            return None


def _job_of(pod: Manifest) -> str:
    owners: list[dict[str, Any]] = pod["metadata"]["ownerReferences"]
    return str(owners[0]["name"])
