"""The platforms of a job on Ray. SubMasters and workers are named, detached actors; workers are in placement groups.

Ray itself restarts the actors of masters. It does not restart the actor of a worker: each life of a worker is a new
actor, so every life has exactly one process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from dlrover_hooks.integrations.ray import cluster_state
from dlrover_hooks.integrations.ray.cluster_state import JobMaster, actor_name, actor_options
from dlrover_hooks.job.platform import EndedWorker
from dlrover_hooks.job.prime_master import Submission
from dlrover_hooks.job.spec import JobSpec
from dlrover_hooks.job.worker_process import Outcome
from dlrover_hooks.protocol import Roles, RoleWorker, WorkerCause

_TURN_S, _KILL_S = 0.5, 2.0
_LEAVE_S = 5.0
"""An actor whose function is over may take this many seconds for its exit handlers. Then it is killed."""
_CALLS = 16
"""How many calls of other workers a worker runs at the same time."""


class RayWorkers:
    """The `WorkerPlatform` of one role.

    Args:
        submission: the job.
        role: name of the role.
        worker_class: class of the workers' actors.
    """

    def __init__(self, submission: Submission, role: str, worker_class: type) -> None:
        self._spec, self._role, self._worker_class = submission.spec, role, worker_class
        self._slots = self._spec.plan().slots(self._spec)
        self._lock = threading.Lock()
        self._running = dict[Any, tuple[int, int]]()
        """Rank and life, by the reference to the outcome."""
        self._leaving = dict[str, float]()
        """By name of an actor that was told to end: when it is killed."""
        self._told = set[tuple[int, int]]()
        """Rank and life of the workers whose ends `ended` has returned."""

    def lives(self) -> dict[int, int]:
        """See `WorkerPlatform`."""
        prefix = actor_name(self._spec.name, "worker", self._role, "")
        found = dict[int, int]()
        for name in cluster_state.actor_names(prefix):
            rank, life = map(int, name.split("/")[-2:])
            if (rank, life) not in self._told:
                found[rank] = max(life, found.get(rank, 0))
        with self._lock:
            known = set(self._running.values())
        for place in known:
            found[place[0]] = max(place[1], found.get(place[0], 0))
        for rank, life in found.items():  # workers that a former SubMaster has started
            if (rank, life) not in known:
                with contextlib.suppress(ValueError):
                    self._follow(rank, life, cluster_state.actor(self._name(rank, life)))
        return found

    def start(self, worker: RoleWorker, avoid: Collection[str], env: Mapping[str, str]) -> str:
        """See `WorkerPlatform`.

        The worker is placed in its bundle. Ray moves a bundle only after it has declared its node dead, which takes at
        least 18 s. Until then a worker whose node does not answer is started on another node, outside its group.
        """
        role, slot = self._spec.role(self._role), self._slots[self._role, worker.rank]
        group = cluster_state.group_named(group_name(self._spec, slot.group))
        if group is None:
            return "the placement group of the job is gone"
        where: Any = PlacementGroupSchedulingStrategy(group, slot.bundle)
        node = cluster_state.node_of(group, slot.bundle)
        bad = worker.reason and node is not None and self._is_bad(node, worker)
        if node is not None and (bad or node.id[:12] in avoid):
            other = cluster_state.node_with(slot.resources, but=(node.id, *avoid))
            if other is not None:
                where = NodeAffinitySchedulingStrategy(other, soft=False)
            elif bad:
                return f"node {node.id[:12]} does not answer, and no other node has {_amounts(slot.resources)} free"
        amounts = dict(slot.resources)
        known: dict[str, Any] = {"num_cpus": amounts.pop("CPU", 0), "num_gpus": amounts.pop("GPU", 0)}
        amounts.pop("disk", None)
        if memory := amounts.pop("memory", 0):
            known["memory"] = memory
        options = actor_options(
            self._name(worker.rank, worker.life), **known, resources=amounts or None, max_restarts=0,
            scheduling_strategy=where, runtime_env={"env_vars": {**env, **self._spec.env, **role.env}},
        )  # fmt: skip
        actors: Any = ray.remote(concurrency_groups={"calls": _CALLS, "run": 4})(self._worker_class)  # pyright: ignore[reportCallIssue]
        made = actors.options(**options).remote(self._spec.name, self._role, worker.rank, worker.life)
        self._follow(worker.rank, worker.life, made)
        return ""

    def _is_bad(self, node: cluster_state.RayNode, worker: RoleWorker) -> bool:
        """Whether `node` is lost, or hangs. Whether it hangs is only checked if the worker there was silent."""
        if not cluster_state.answers(node):
            return True
        return worker.reason.startswith(WorkerCause.SILENT.value) and not cluster_state.runs_tasks(node)

    def _follow(self, rank: int, life: int, made: Any) -> None:
        reference = made.run.remote()
        with self._lock:
            self._running[reference] = (rank, life)

    def end(self, rank: int, life: int) -> None:
        """See `WorkerPlatform`."""
        with self._lock:
            references = [one for one, place in self._running.items() if place == (rank, life)]
            for one in references:
                del self._running[one]
        cluster_state.kill(self._name(rank, life))
        if references:
            ray.wait(references, timeout=_KILL_S)

    def outcome(self, rank: int, life: int) -> EndedWorker:
        """See `WorkerPlatform`."""
        return EndedWorker(rank, life, WorkerCause.KILLED, "its actor was gone when the SubMaster came back")

    def ended(self, timeout_s: float) -> list[EndedWorker]:
        """See `WorkerPlatform`."""
        self._kill_late()
        with self._lock:
            references = list(self._running)
        found = list[EndedWorker]()
        for one in _ready(references, timeout_s):
            with self._lock:
                place = self._running.pop(one, None)
            if place is not None:
                self._told.add(place)
                found.append(self._end(one, *place))
        return found

    def _end(self, reference: Any, rank: int, life: int) -> EndedWorker:
        try:
            outcome = msgspec.json.decode(ray.get(reference, timeout=_KILL_S), type=Outcome)
        except RayActorError as error:
            cluster_state.kill(self._name(rank, life))  # it may still run on a node that does not answer
            lost = isinstance(error, ActorDiedError) and cluster_state.NODE_DIED in str(error)
            cause = WorkerCause.NODE_LOST if lost else WorkerCause.KILLED
            return EndedWorker(rank, life, cause, cluster_state.end_of_actor(str(error)))
        except RayError as error:
            return EndedWorker(rank, life, WorkerCause.RAISED, str(error))
        name = self._name(rank, life)
        with contextlib.suppress(ValueError):  # unlike `kill`, this runs the atexit handlers of the actor
            cluster_state.actor(name).__ray_terminate__.remote()
            self._leaving[name] = time.monotonic() + _LEAVE_S
        return EndedWorker(rank, life, outcome.cause, outcome.detail)

    def _kill_late(self) -> None:
        """Kill the actors that were told to end and still run: the next life needs their resources.

        Ray 2.60 does not always end an actor that is told to end soon after its start.
        """
        for name in [one for one, at in self._leaving.items() if time.monotonic() > at]:
            del self._leaving[name]
            cluster_state.kill(name)

    def _name(self, rank: int, life: int) -> str:
        return actor_name(self._spec.name, "worker", self._role, rank, life)


def _ready(references: list[Any], timeout_s: float) -> list[Any]:
    """The references that are ready. Waits at most `_TURN_S` for the first one, because more may be added meanwhile."""
    if not references:
        time.sleep(min(timeout_s, _TURN_S / 5))
        return []
    return ray.wait(references, timeout=min(timeout_s, _TURN_S), fetch_local=False)[0]


def group_name(spec: JobSpec, number: int) -> str:
    """The name of a placement group of the job."""
    return f"{spec.name}/group/{number}"


def remove_job(job: str, *, but: str = "") -> list[str]:
    """Kill all actors of a job except `but`, workers first, and remove its placement groups.

    Returns the names of the actors that were there.
    """
    found = [name for name in cluster_state.actor_names(actor_name(job, "")) if name != but]
    for part in ("worker/", "sub-master/", ""):
        cluster_state.kill_all(actor_name(job, part), but=but)
    cluster_state.remove_groups(f"{job}/group/")
    return found


class RayMasters:
    """The `MasterPlatform` of a job.

    Args:
        submission: the job.
        sub_master_class: class of the SubMasters' actors.
        address: address of the HTTP master.
    """

    def __init__(self, submission: Submission, sub_master_class: type, address: JobMaster) -> None:
        self._submission, self._spec, self._address = submission, submission.spec, address
        self._class = sub_master_class
        self._groups: list[PlacementGroup] = []
        self._lock = threading.Lock()
        self._held = dict[Any, str]()
        """Roles, by the reference that fails when the SubMaster ends."""
        self._back = dict[Any, str]()
        """Roles, by the reference that becomes ready when the restarted SubMaster answers."""
        self._over = False

    def begin(self) -> bool:
        """See `MasterPlatform`. The address is stored first: a job with a stored address has begun."""
        if not self._groups:
            cluster_state.put_address(self._spec.name, self._address)
            self._groups = [self._group(number) for number in range(len(self._spec.plan().groups))]
        if not all(group.wait(0.01) for group in self._groups):
            return False
        for role in self._spec.roles:
            self._hold(role.name)
        return True

    def _group(self, number: int) -> PlacementGroup:
        group, name = self._spec.plan().groups[number], group_name(self._spec, number)
        found = cluster_state.group_named(name)
        if found is not None:
            return found
        bundles = [{one: amount for one, amount in each.resources.items() if one != "disk"} for each in group.bundles]
        strategy = "STRICT_SPREAD" if group.spread else "PACK"
        return placement_group(bundles, strategy=strategy, name=name, lifetime="detached")

    def missing(self) -> str:
        """See `MasterPlatform`."""
        waiting = list[str]()
        for group, planned in zip(self._groups, self._spec.plan().groups, strict=True):
            table: dict[str, Any] = placement_group_table(group)
            if table.get("state") == "CREATED":
                continue
            needs = ", ".join(_amounts(bundle.resources) for bundle in planned.bundles[:4])
            needs += f" and {len(planned.bundles) - 4} more" if len(planned.bundles) > 4 else ""
            where = "each on another node" if planned.spread else "on the nodes of the cluster"
            waiting.append(f"{len(planned.bundles)} places {where}: {needs}")
        if not waiting:
            return ""
        nodes = [one for one in ray.nodes() if one["Alive"]]
        has = "; ".join(_amounts({k: v for k, v in one["Resources"].items() if ":" not in k}) for one in nodes[:4])
        return f"{'; '.join(waiting)}. The cluster has {len(nodes)} nodes: {has}"

    def _hold(self, role: str, *, again: bool = False) -> None:
        """Start the SubMaster of a role unless it runs, and watch for its end. `again`: it has ended before."""
        options = actor_options(
            actor_name(self._spec.name, "sub-master", role), num_cpus=0, max_restarts=-1, max_concurrency=4,
            scheduling_strategy=cluster_state.at_the_head(),
        )  # fmt: skip
        with self._lock:
            if self._over:
                return
            made = ray.remote(self._class).options(**options).remote(msgspec.json.encode(self._submission), role)
            if role not in self._held.values():
                self._held[made.hold.remote()] = role
                if again:
                    self._back[made.ping.remote()] = role

    def restarted(self, timeout_s: float) -> list[str]:
        """See `MasterPlatform`."""
        with self._lock:
            references = [*self._held, *self._back]
        found = list[str]()
        for one in _ready(references, timeout_s):
            with self._lock:
                held, back = self._held.pop(one, None), self._back.pop(one, None)
            try:
                ray.get(one, timeout=_KILL_S)  # `hold` ends with the job
            except RayError:
                if held is not None:
                    self._hold(held, again=True)
            else:
                found += [back] if back is not None else []
        return found

    def finish(self, roles: Roles) -> None:
        """See `MasterPlatform`."""
        with self._lock:
            self._over = True  # a SubMaster that is killed now is not started again
        remove_job(self._spec.name, but=actor_name(self._spec.name, "prime"))
        cluster_state.put_result(self._spec.name, self._submission.id, roles)


def _amounts(resources: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items())) + "}"
