"""Runs one seed: submits a job of several roles, one submission after the other, until no process is left."""

from __future__ import annotations

import random
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError
from dlrover_hooks.job.spec import JobSpec
from dlrover_hooks.job.worker_process import Outcome
from dlrover_hooks.protocol import JobPhase, Roles, WorkerCause
from tests.simulation.client import Client
from tests.simulation.host import Host, Witnessed
from tests.simulation.loop import Loop, Process
from tests.simulation.network import Network
from tests.simulation.promises import Data
from tests.simulation.roles.role_books import RoleBooks
from tests.simulation.roles.role_chaos import RoleChaos
from tests.simulation.roles.role_cluster import PRIME, PlacedProcess, RoleCluster, place_of
from tests.simulation.roles.role_draw import RoleDraw, draw_roles
from tests.simulation.roles.role_masters import MasterProcess, virtual_masters
from tests.simulation.roles.role_promises import RolePromises
from tests.simulation.roles.role_worker import RoleProcess
from tests.simulation.story import Broken, Story
from tests.simulation.world import Result

PATIENCE_S = 200.0
"""After the last fault a job must be over within this many seconds plus twice `work_s`."""
LEFT_S = 150.0
"""This many seconds after the end of the last job and of all faults no process may run."""
UNSEEN_S = 30.0
"""After the last fault the end of a process must be counted within this many seconds."""
_STEP_S = 5.0


class RolesHost(Host):
    """The HTTP master as a PrimeMaster starts it: an open connection does not prolong a lease."""

    def _life(self, clock: Any) -> Witnessed:
        runtime = super()._life(clock)
        runtime.nodes.open_lease_s = runtime.nodes.lease_s
        return runtime


class RolesWorld:
    """`dice` decides what processes do, `chance` what goes wrong. `ending`: the PrimeMaster ends the processes."""

    def __init__(self, drawn: RoleDraw) -> None:
        self.drawn, self.swarm = drawn, drawn.swarm
        seed = self.swarm.seed
        self.dice, self.chance = random.Random(f"roles dice {seed}"), random.Random(f"roles chaos {seed}")
        self.loop, self.story = Loop(), Story()
        self.promises = RolePromises(self.swarm, self.loop, self.story, Data(self.swarm, self.dice))
        self.promises.world = self
        self.network = Network(self.swarm, self.loop, random.Random(f"roles network {seed}"), self.story)
        dice = random.Random(f"roles master {seed}")
        self.host = RolesHost(self.swarm, self.loop, dice, self.story, self.network, self.promises)
        self.network.host = self.host
        self.cluster = RoleCluster(self, drawn.nodes)
        self.chaos = RoleChaos(self)
        self.jobs = 0
        self.submission = ""
        self.spec: JobSpec = drawn.specs[0]
        self.result: Roles | None = None
        self.ending = self._starting = False
        self._up_at = 0.0
        self._names = 0

    @property
    def books(self) -> RoleBooks:
        """See `RolePromises`."""
        return self.promises.books

    # ---- used by the parts of the world ------------------------------------------------------------------------------

    def named(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def rate(self) -> float:
        return 1.0 + self.swarm.skew * self.dice.uniform(-1.0, 1.0)

    def tell(self, what: str, text: str) -> None:
        self.story.tell(self.loop.now, what, text)

    def boot_s(self) -> float:
        """How long a worker takes until it registers."""
        return self.dice.uniform(0.1, 3.0)

    def works_s(self, role: str) -> float | None:
        """How long the function of a worker takes; None: until the job is over."""
        if self.drives(role) or self.dice.random() < self.drawn.returns:
            return self.dice.uniform(0.5, 1.0) * self.drawn.work_s
        return None

    def drives(self, role: str) -> bool:
        return self.spec.role(role).driver

    def recovers(self) -> bool:
        return self.dice.random() < self.drawn.recovers

    def master_up_s(self) -> float:
        """For how long the HTTP master has run."""
        return self.loop.now - self._up_at

    # ---- masters -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """`look` of the PrimeMaster: start the HTTP master if it does not run."""
        if self.host.process is None and not self._starting:
            self._starting = True
            self.loop.deliver(self.dice.uniform(0.1, 1.0), self._start_http, self.cluster.listed.get(PRIME))

    def _start_http(self, prime: PlacedProcess | None) -> None:
        self._starting = False
        if prime is not None and not prime.process.dead:
            self._up_at = self.loop.now
            self.host.start()

    def prime_ended(self, prime: PlacedProcess) -> None:
        """The PrimeMaster has ended, and the HTTP master with it. It is started again, unless the job is over."""
        if self.host.process is not None:
            self.tell("master", f"ends with its PrimeMaster {self.host.kill()}")
        self._starting = False
        if prime.code != 0:
            self.loop.deliver(self.dice.uniform(0.1, 2.0), self._start_prime)

    def _start_prime(self) -> None:
        self.cluster.begin(PRIME, MasterProcess)

    def started(self, name: str, argument: str) -> None:
        """Start the process that a call to the platform asks for."""
        if not name.startswith("worker/"):
            self.cluster.begin(name, MasterProcess)
            return
        place = place_of(argument)
        placed = self.cluster.begin(name, lambda cluster, name, node: RoleProcess(cluster, name, node, place))
        assert isinstance(placed, RoleProcess)
        self.cluster.lives.setdefault(placed.life, []).append(placed)

    def finished(self, roles: Roles) -> None:
        """Store the result of the PrimeMaster."""
        self.promises.check(roles.phase is self.books.phase, f"the result is {roles.phase}")
        self.result = roles

    def ask(self, name: str, request: p.Message) -> str:
        """Send a request as a user with this name."""
        process = Process(name, self.loop)
        client = Client(self.network, process, "user", name, 1e6)

        async def call() -> None:
            try:
                await client.call(request)
            except HooksError as error:
                self.tell(name, f"{type(error).__name__}: {error.message}")

        process.spawn(call())
        return str(request)

    # ---- targets of faults -------------------------------------------------------------------------------------------

    def workers(self) -> list[RoleProcess]:
        """The workers that the platform lists and that run."""
        found = [one for one in self.cluster.listed.values() if isinstance(one, RoleProcess)]
        return [one for one in found if one.process.runs]

    def ends(self, worker: RoleProcess, cause: WorkerCause) -> None:
        """End the function of a worker with this cause."""
        worker.ends(Outcome(cause, "simulated"))

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all submissions. Raises Broken if a check fails."""
        self.chaos.begin()
        for spec in self.drawn.specs:
            self.jobs += 1
            self._submit(spec)
            self._until(self._over, self._patience_s())
        self._until(self._left, max(self.loop.now, self.drawn.trouble_s) + LEFT_S)

    def _submit(self, spec: JobSpec) -> None:
        self.spec, self.submission, self.result, self.ending = spec, f"submission{self.jobs}", None, False
        self.tell("user", f"submits {self.submission}: {_brief(spec)}")
        self._start_prime()

    def _patience_s(self) -> float:
        return max(self.loop.now, self.drawn.trouble_s) + PATIENCE_S + 2 * self.drawn.work_s

    def _over(self) -> str:
        """Why the job is not over; empty: it is."""
        if self.books.runs and self.loop.now > max(self.drawn.trouble_s, self._up_at) + UNSEEN_S:
            unseen = self.promises.unseen(UNSEEN_S)
            self.promises.check(not unseen, f"the end of {unseen} is not counted")
        if self.result is None or PRIME in self.cluster.listed:
            return f"the job is {self.books.phase}, and the result is {self.result and self.result.phase}"
        return ""

    def _left(self) -> str:
        left = [one.process.name for one in self.cluster.everything if not one.process.dead]
        return f"{left} still run" if left else ""

    def _until(self, missing: Any, limit: float) -> None:
        while self.story.broken is None and (what := missing()):
            self.promises.check(self.loop.now < limit, f"{what}, though nothing fails any more")
            self.loop.run(until := self.loop.now + _STEP_S)
            self.loop.now = max(self.loop.now, until)
        if self.story.broken is not None:
            raise Broken(self.story.broken)

    def outcome(self) -> str:
        """The phase of the last submission, for the summary."""
        phase = self.result.phase if self.result is not None else None
        return f"job {(phase or JobPhase.RUNNING).value}"

    def end(self) -> None:
        self.loop.end()
        self.host.disk.end()


def _brief(spec: JobSpec) -> str:
    """The job in one line."""
    roles = [
        f"{one.workers} {one.name} ({one.on_failure}{', driver' * one.driver}, restarts {one.worker_restarts}, "
        f"of the role {one.role_restarts})"
        for one in spec.roles
    ]
    return (
        f"{'; '.join(roles)}; restarts of the job {spec.job_restarts}, preemptions {spec.preemptions}, failures of a "
        f"node {spec.node_failures}, within {spec.window_s:g} s; up within {spec.ready_s:g} s"
    )


def _told(drawn: RoleDraw) -> str:
    swarm = drawn.swarm
    return (
        f"{drawn.nodes} nodes; faults {', '.join(drawn.faults)} every {drawn.every_s:g} s for {drawn.trouble_s:g} s; "
        f"messages lost {swarm.loss:g}, twice {swarm.twice:g}, late {swarm.late:g}; lease {swarm.lease_s:g} s"
    )


def simulate_roles(seed: int) -> Result:
    """Run one seed and return its result."""
    with virtual_masters():
        world = RolesWorld(draw_roles(seed))
        try:
            world.run()
        except Broken:
            pass
        except Exception as error:
            world.promises.bug(error)
        finally:
            world.end()
    story = world.story
    faults = story.faults | {world.outcome(): 1}
    text = f"{_told(world.drawn)}\n{story.text()}\n"
    return Result(
        seed, story.events, world.loop.now / 3600, faults, story.trace, world.jobs, story.broken, text,
        command="make simulate-roles",
    )  # fmt: skip
