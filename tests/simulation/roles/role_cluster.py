"""The simulated platform of a job of several roles: nodes that fail, and a service that controls processes.

`RoleCluster` answers the same calls as `dlrover_hooks.job.local.host.ProcessHost`, so that the real platform classes of
a local job run on it, but it has several nodes. It records how every process ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover_hooks.job.local.process_platform import LocalMasters, LocalWorkers
from dlrover_hooks.job.platform import EndedWorker
from dlrover_hooks.job.worker_process import Outcome as WorkerOutcome, WorkerPlace
from dlrover_hooks.protocol import Roles, RoleWorker, WorkerCause
from tests.simulation.loop import Process
from tests.simulation.roles.role_books import Life
from tests.simulation.threadlets import Bell

if TYPE_CHECKING:
    from tests.simulation.roles.role_worker import RoleProcess
    from tests.simulation.roles.roles_world import RolesWorld

PRIME = "prime"


class RoleNode:
    """A machine. `up` False: it is lost. `hung`: its processes are stopped, and it receives no orders."""

    def __init__(self, name: str) -> None:
        self.name, self.up, self.hung = name, True, False
        self.orders: list[PlacedProcess] = []
        """Processes to kill when it answers again."""


class PlacedProcess:
    """A process of the job. `listed`: the platform lists it as running. `ordered`: the platform was told to kill it
    while it ran. `given_up`: its node was declared lost.
    """

    def __init__(self, cluster: RoleCluster, name: str, node: RoleNode) -> None:
        self.cluster, self.name, self.node = cluster, name, node
        world = cluster.world
        self.process = Process(f"{name}#{world.named('')}", world.loop, rate=world.rate())
        self.process.ends.append(lambda: cluster.gone(self))
        self.listed, self.ordered, self.given_up = True, False, False
        self.code = -9
        self.frozen_at = self.ended_at = -1.0
        """When it was stopped, and when it ended; below 0: never."""

    def exit(self, code: int) -> None:
        """End the process by itself, with this exit code."""
        if not self.process.dead:
            self.code = code
            self.process.kill()


class RoleCluster:
    """The platform. `lives`: every started worker process, by life. `outcomes`: what workers wrote, by name."""

    def __init__(self, world: RolesWorld, nodes: int) -> None:
        self.world = world
        self.nodes = [RoleNode(f"n{number}") for number in range(nodes)]
        self.full = False
        """No node has room for a worker."""
        self.listed = dict[str, PlacedProcess]()
        self.everything: list[PlacedProcess] = []
        self.lives = dict[Life, list["RoleProcess"]]()
        self.outcomes = dict[str, WorkerOutcome]()
        self.ends: list[list[Any]] = []
        """Number, name, exit code, and whether `kill` was called, as `ProcessHost` returns them."""
        self.lost_lives = set[str]()
        """Names of processes whose node was declared lost."""
        self._places = dict[str, RoleNode]()
        self._bells: list[Bell] = []

    # ---- what happens to processes -----------------------------------------------------------------------------------

    def begin(self, name: str, kind: Callable[[RoleCluster, str, RoleNode], PlacedProcess]) -> PlacedProcess:
        """Start a process on the node that `room` chose for it, or else on any node."""
        good = [one for one in self.nodes if one.up and not one.hung]
        node = self._places.pop(name, None) or self.world.dice.choice(good or self.nodes)
        placed = self.listed[name] = kind(self, name, node)
        self.everything.append(placed)
        self.world.tell("platform", f"starts {name} on {node.name}")
        if not node.up:
            placed.process.kill()
        elif node.hung:
            self.freeze(placed)
        return placed

    def gone(self, placed: PlacedProcess) -> None:
        """A process has ended. If its node is lost, the platform only notices at `declare`."""
        placed.ended_at = self.world.loop.now
        if placed.node.up:
            self._unlist(placed, placed.code)

    def _unlist(self, placed: PlacedProcess, code: int) -> None:
        if not placed.listed:
            return
        placed.listed = False
        if self.listed.get(placed.name) is placed:
            del self.listed[placed.name]
        self.ends.append([len(self.ends) + 1, placed.name, code, placed.ordered])
        self.world.tell("platform", f"{placed.name} has ended: {'killed' if placed.ordered else code}")
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.ring()
        if placed.name == PRIME:
            self.world.prime_ended(placed)

    def freeze(self, placed: PlacedProcess) -> None:
        placed.process.freeze()
        placed.frozen_at = self.world.loop.now

    def lose(self, node: RoleNode) -> None:
        """A machine is lost with all its processes. The platform notices at `declare`."""
        node.up = False
        for placed in self.on(node):
            placed.process.kill()

    def declare(self, node: RoleNode) -> None:
        """Declare a machine lost: the platform no longer lists its processes."""
        for placed in [one for one in self.listed.values() if one.node is node]:
            placed.given_up = True
            self.lost_lives.add(placed.name)
            self._unlist(placed, -9)

    def return_(self, node: RoleNode) -> None:
        """A machine that hung or was lost works again. About half of its given-up workers are killed soon; the others
        end when the master refuses them."""
        node.up, node.hung = True, False
        orders, node.orders = node.orders, []
        for placed in self.on(node):
            if placed.name == PRIME and placed.given_up:  # the platform has started another one
                placed.process.kill()
            placed.process.thaw()
            late = self.world.dice.random() < 0.5 or not placed.name.startswith("worker/")
            if placed in orders or (placed.given_up and late):
                self.world.loop.deliver(self.world.dice.uniform(0.0, 5.0), placed.process.kill)

    def on(self, node: RoleNode) -> list[PlacedProcess]:
        """The processes of a node that have not ended."""
        return [one for one in self.everything if one.node is node and not one.process.dead]

    # ---- the calls of `ProcessHost` ----------------------------------------------------------------------------------

    def running(self, prefix: str) -> dict[str, int]:
        """The listed processes whose names begin with `prefix`. All have the process id 1."""
        return {name: 1 for name in self.listed if name.startswith(prefix)}

    def room(self, name: str, avoid: Collection[str]) -> str:
        """Choose a node for a worker. Returns what is missing; empty: a node was chosen."""
        good = [one for one in self.nodes if one.up and not one.hung]
        good = [one for one in good if one.name not in avoid] or good
        if self.full or not good:
            return "no node has room"
        self._places[name] = self.world.dice.choice(good)
        return ""

    def start(self, name: str, command: list[str], env: dict[str, str]) -> int:
        """Start a process, unless one of this name runs."""
        del env
        if name not in self.listed and not self.world.ending:
            self.world.started(name, command[-1])
        return 1

    def kill(self, name: str) -> None:
        """Kill a process. If its node does not answer, it is killed later."""
        placed = self.listed.get(name)
        if placed is None:
            return
        placed.ordered = not placed.process.dead
        if placed.node.hung:
            placed.node.orders.append(placed)
            self._unlist(placed, -9)
        elif placed.process.dead:
            self._unlist(placed, placed.code)
        else:
            placed.process.kill()

    def ended(self, prefix: str, after: int, timeout_s: float) -> list[list[Any]]:
        """The ends after number `after`. Waits for the first one."""

        def found() -> list[list[Any]]:
            return [end for end in self.ends[after:] if end[1].startswith(prefix)]

        if timeout_s and not found():
            bell = Bell(self.world.loop)
            self._bells.append(bell)
            bell.wait(timeout_s)
        return found()

    def finish(self) -> None:
        """Kill all processes except the PrimeMaster, because the job is over."""
        self.world.ending = True
        for name in [one for one in self.listed if one != PRIME]:
            self.kill(name)


class HostCalls:
    """Replaces `CallClient` of the host's socket. A call takes virtual time, and its caller may be killed meanwhile."""

    def __init__(self, cluster: RoleCluster) -> None:
        self._cluster = cluster

    def call(self, function: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        """See `CallClient.call`."""
        del timeout_s
        self._pass_time()
        answer = getattr(self._cluster, function)(*arguments)
        self._pass_time()
        return answer

    def _pass_time(self) -> None:
        world = self._cluster.world
        Bell(world.loop).wait(world.dice.expovariate(100.0))


class ClusterWorkers(LocalWorkers):
    """The real `LocalWorkers`, on several nodes."""

    cluster: RoleCluster

    def start(self, worker: RoleWorker, avoid: Collection[str], env: Mapping[str, str]) -> str:
        """See `WorkerPlatform`."""
        name = f"worker/{worker.role}/{worker.rank}/{worker.life}"
        missing: str = self._host.call("room", name, list(avoid))
        return missing or super().start(worker, avoid, env)

    def outcome(self, rank: int, life: int) -> EndedWorker:
        """See `WorkerPlatform`."""
        name = f"worker/{self._role}/{rank}/{life}"
        found = self.cluster.outcomes.get(name)
        if found is not None:
            return EndedWorker(rank, life, found.cause, found.detail)
        if name in self.cluster.lost_lives:
            return EndedWorker(rank, life, WorkerCause.NODE_LOST, "its node is lost")
        return EndedWorker(rank, life, WorkerCause.KILLED, "its process was gone when the SubMaster came back")


class ClusterMasters(LocalMasters):
    """The real `LocalMasters`. The world gets the result."""

    cluster: RoleCluster

    def finish(self, roles: Roles) -> None:
        """See `MasterPlatform`."""
        self.cluster.world.finished(roles)
        self._host.call("finish")


def place_of(argument: str) -> WorkerPlace:
    """The place that is the last argument of a worker's command."""
    return msgspec.json.decode(argument, type=WorkerPlace)
