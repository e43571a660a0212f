"""Injects faults into a job of several roles, at random times, of the kinds that the seed has selected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover_hooks import protocol as p
from dlrover_hooks.protocol import WorkerCause
from tests.simulation.fault_schedule import FaultSchedule
from tests.simulation.roles.role_cluster import PRIME, PlacedProcess, RoleNode
from tests.simulation.roles.role_draw import JOB
from tests.simulation.roles.role_worker import RoleProcess

if TYPE_CHECKING:
    from tests.simulation.roles.roles_world import RolesWorld


class RoleChaos(FaultSchedule):
    """The faults of jobs of several roles."""

    def __init__(self, world: RolesWorld) -> None:
        super().__init__(world, world.drawn)
        self.world = world
        self._kinds = {
            "kill worker": self._kill_worker,
            "raise": lambda: self._end_function(WorkerCause.RAISED),
            "preempt": lambda: self._end_function(WorkerCause.PREEMPTED),
            "lose node": self._lose_node,
            "hang node": self._hang_node,
            "kill sub-master": self._kill_sub_master,
            "kill master": self._kill_master,
            "kill prime": self._kill_prime,
            "kill all three": self._kill_all_three,
            "no room": self._fill,
            "restart role": self._restart_role,
            "stop job": self._stop_job,
            "partition": self._partition,
            "disk full": self._fill_disk,
        }

    def _fault(self) -> None:
        kind = self.world.chance.choice(self.world.drawn.faults)
        if whom := self._kinds[kind]():
            self.world.story.fault(self.world.loop.now, kind, whom)

    def _mend(self) -> None:
        """See `FaultSchedule`."""
        world = self.world
        world.network.heal()
        world.host.disk.full = world.cluster.full = False
        for node in world.cluster.nodes:
            if node.hung or not node.up:
                self._back(node)
        world.tell("world", "all faults are over")

    # ---- targets -----------------------------------------------------------------------------------------------------

    def _worker(self) -> RoleProcess | None:
        found = self.world.workers()
        return self.world.chance.choice(found) if found else None

    def _node(self) -> RoleNode | None:
        node = self.world.chance.choice(self.world.cluster.nodes)
        return node if node.up and not node.hung else None

    def _sub_master(self) -> PlacedProcess | None:
        found = [one for name, one in self.world.cluster.listed.items() if name.startswith("sub-master/")]
        return self.world.chance.choice(found) if found else None

    # ---- faults ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _kill(placed: PlacedProcess | None) -> str:
        if placed is None or placed.process.dead:
            return ""
        placed.process.kill()
        return placed.process.name

    def _kill_worker(self) -> str:
        return self._kill(self._worker())

    def _end_function(self, cause: WorkerCause) -> str:
        worker = self._worker()
        if worker is None or not worker.registered:
            return ""
        self.world.ends(worker, cause)
        return worker.process.name

    def _lose_node(self) -> str:
        """Lose a node. If it hosts the PrimeMaster, the HTTP master runs on until the loss is noticed; the fault `kill
        prime` ends both at once."""
        node, cluster = self._node(), self.world.cluster
        if node is None:
            return ""
        cluster.lose(node)
        noticed = self._later(0.1, 20.0, self._notice, node)
        self.world.loop.deliver(noticed + self.world.chance.uniform(0.1, 60.0), self._back, node)
        return node.name

    def _notice(self, node: RoleNode) -> None:
        if not node.up:
            self.world.cluster.declare(node)

    def _hang_node(self) -> str:
        """Stop a node for some time. It may be declared lost before it is back."""
        node, cluster = self._node(), self.world.cluster
        if node is None:
            return ""
        node.hung = True
        for placed in cluster.on(node):
            cluster.freeze(placed)
        seconds = self._later(0.5, 60.0, self._back, node)
        self._later(5.0, 25.0, self._give_up, node, seconds + self.world.loop.now)
        return f"{node.name} for {seconds:.1f} s"

    def _give_up(self, node: RoleNode, back_at: float) -> None:
        if node.hung and self.world.loop.now < back_at:
            self.world.cluster.declare(node)

    def _back(self, node: RoleNode) -> None:
        if node.up and not node.hung:
            return
        if not node.up:
            self.world.cluster.declare(node)
        self.world.tell("platform", f"{node.name} is back")
        self.world.cluster.return_(node)

    def _kill_sub_master(self) -> str:
        return self._kill(self._sub_master())

    def _kill_master(self) -> str:
        host = self.world.host
        return f"{host.process.name} {host.kill()}" if host.process is not None else ""

    def _kill_prime(self) -> str:
        return self._kill(self.world.cluster.listed.get(PRIME))

    def _kill_all_three(self) -> str:
        killed = [self._kill_prime(), self._kill_sub_master(), self._kill_worker()]
        return ", ".join(filter(None, killed))

    def _fill(self) -> str:
        self.world.cluster.full = True
        return f"for {self._later(0.5, 30.0, self._empty):.1f} s"

    def _empty(self) -> None:
        self.world.cluster.full = False

    def _restart_role(self) -> str:
        role = self.world.chance.choice(self.world.spec.roles).name
        name = self.world.named("user")
        return self.world.ask(name, p.RestartRole(JOB, name, role))

    def _stop_job(self) -> str:
        """Stops the job in one of ten calls, so that most seeds run on."""
        if self.world.chance.random() > 0.1:
            return ""
        name, failed = self.world.named("user"), self.world.chance.random() < 0.3
        return self.world.ask(name, p.StopRoles(JOB, name, "a user stops it", failed))

    def _partition(self) -> str:
        node = self.world.chance.choice(self.world.cluster.nodes).name
        return f"{node} for {self._cut(node, 30.0):.1f} s"
