"""The random parameters of one seed: roles with their policies and budgets, nodes, and kinds of faults."""

from __future__ import annotations

import random

import msgspec

from dlrover_hooks.job.spec import JobSpec, RoleSpec
from dlrover_hooks.protocol import UNLIMITED
from tests.simulation.swarm import Swarm, draw

JOB = "ppo"
FAULTS = (
    "kill worker",
    "raise",
    "preempt",
    "lose node",
    "hang node",
    "kill sub-master",
    "kill master",
    "kill prime",
    "kill all three",
    "no room",
    "restart role",
    "stop job",
    "partition",
    "disk full",
)
_BUDGETS = {"large": (UNLIMITED, UNLIMITED, 50), "small": (0, 1, 2, 3), "mixed": (UNLIMITED, 50, 5, 2, 1)}
_POLICIES = ("replace", "replace", "rejoin", "rejoin", "role", "role", "job", "fail")


class RoleDraw(msgspec.Struct, frozen=True):
    """The parameters of one seed. `_s` are seconds of virtual time."""

    swarm: Swarm
    """Parameters of the network, the clocks and the journal's disk."""
    specs: tuple[JobSpec, ...]
    """The job of each submission. Each begins when the former is over."""
    nodes: int
    work_s: float
    """The function of a worker takes at most this long."""
    returns: float
    """Share of the workers of non-driver roles that return before the job is over."""
    recovers: float
    """Share of the ends after which the other workers of a training role can recover in their processes."""
    faults: tuple[str, ...]
    every_s: float
    """Mean time between two faults."""
    trouble_s: float
    """After this time all faults are over."""

    @property
    def quiet(self) -> bool:
        """No message is lost or late, so no heartbeat of a running process is missed."""
        return not (self.swarm.loss or self.swarm.late or {"partition", "disk full"} & set(self.faults))


def draw_roles(seed: int) -> RoleDraw:
    """The parameters of a seed, the same on every machine."""
    dice = random.Random(f"roles {seed}")
    silent_s = dice.choice((6.0, 10.0))
    swarm = msgspec.structs.replace(draw(seed), lease_s=silent_s, beats_per_s=1000.0, skew=dice.choice((0.0, 0.01)))
    if dice.random() < 0.4:
        swarm = msgspec.structs.replace(swarm, loss=0.0, late=0.0)
    sizes = tuple(dice.randint(1, 3) for _ in range(dice.choice((1, 2, 2, 3))))
    on = dice.choice((1, 3, 6, len(FAULTS)))
    return RoleDraw(
        swarm=swarm,
        specs=tuple(_spec(dice, sizes, silent_s) for _ in range(dice.choice((1, 1, 2, 3)))),
        nodes=dice.randint(1, 4),
        work_s=dice.choice((5.0, 20.0, 60.0)),
        returns=dice.choice((0.0, 0.2)),
        recovers=dice.choice((0.0, 0.5, 1.0)),
        faults=tuple(sorted(dice.sample(FAULTS, on))) if dice.random() < 0.95 else (),
        every_s=dice.choice((1.0, 5.0, 15.0)),
        trouble_s=dice.choice((20.0, 60.0, 150.0)),
    )


def _spec(dice: random.Random, sizes: tuple[int, ...], silent_s: float) -> JobSpec:
    """A job whose roles have these numbers of workers, sometimes one more or one less."""
    limits = _BUDGETS[dice.choice(("large", "large", "mixed", "small"))]
    driver = dice.randrange(len(sizes))
    roles = tuple(
        RoleSpec(
            name=f"role{number}",
            entry="simulated:function",
            trains=dice.random() < 0.5,
            workers=max(1, size + dice.choice((0, 0, 1, -1))),
            driver=number == driver or dice.random() < 0.4,
            on_failure=dice.choice(_POLICIES),
            worker_restarts=dice.choice(limits),
            role_restarts=dice.choice(limits),
        )
        for number, size in enumerate(sizes)
    )
    return JobSpec(
        name=JOB,
        roles=roles,
        job_restarts=dice.choice(limits),
        preemptions=dice.choice(limits),
        node_failures=dice.choice(limits),
        window_s=dice.choice((30.0, 300.0, 3600.0)),
        ready_s=dice.choice((15.0, 30.0, 60.0)),
        silent_s=silent_s,
    )
