"""What one seed draws: the shape of the job, and which faults happen how often (swarm testing: never all at once)."""

from __future__ import annotations

import enum
import random
from typing import Any

import msgspec

FAULTS: dict[str, float] = {
    "kill worker": 1.0,
    "worker fails": 0.6,
    "kill keeper": 0.6,
    "kill agent": 0.5,
    "crash node": 0.7,
    "replace node": 0.4,
    "kill master": 1.0,
    "stop worker": 0.8,
    "stop agent": 0.3,
    "stop master": 0.4,
    "stop keeper": 0.3,
    "partition": 0.8,
    "clog": 0.5,
    "disk full": 0.3,
    "slow commit": 0.4,
    "oversized number": 0.3,
    "storage fails": 0.5,
    "set clock": 0.4,
    "damage image": 0.4,
    "preempt": 0.3,
    "slander": 0.3,
}
"""Every fault that a seed may switch on, and how likely it is among those that it has."""
INSTEAD: dict[str, tuple[str, float]] = {
    "kill agent": ("relaunch job", 0.4),
    "kill worker": ("worker exits", 0.5),
}
"""Faults that take the place of another one, with this chance."""


class Recovery(enum.Enum):
    """What becomes of the survivors of a broken round."""

    RESTART = "whole restart"
    """They end, and new processes begin."""
    AGENT = "agents speak"
    """They stay, and their agent joins again for them."""
    WORKER = "workers speak"
    """They stay, and each joins again for itself; the agent replaces those that died."""


class Level(enum.Enum):
    """The fault level: whether the world may change."""

    HOT = "hot"
    SHRINK = "shrink"
    ELASTIC = "elastic"


class Swarm(msgspec.Struct, frozen=True):
    """One seed's draw. `_s` are seconds of virtual time."""

    seed: int
    free: bool
    """Workers without seats, that lease a dataset asynchronously."""
    nodes: int
    workers: int
    """Per node."""
    min_workers: int
    last_call_s: float
    recovery: Recovery
    level: Level
    leased: bool
    """Data is leased; otherwise a sampler deals it out, and any rank can go on with the state of any other."""
    epochs: int
    samples: int
    partitions: int
    """More than 0: an endless stream of so many partitions, whose ends the workers find out."""
    batch: int
    shard: int
    step_s: float
    save_every: int | str
    persist_every: int | str
    save_to: str | None
    replicas: bool
    unreadable: int
    """A position that nobody can read, -1 for none."""
    latency_s: float
    loss: float
    twice: float
    late: float
    """Shares of messages that are lost, come twice, or come much later than the next ones."""
    disk_s: float
    torn: bool
    snapshot_every: int
    lease_s: float
    beat_s: float
    beats_per_s: float
    """Of all senders together, as the master wants it. Few: it asks for longer intervals, as in a job of thousands."""
    skew: float
    faults: tuple[str, ...]
    every_s: float
    """Mean time between two faults."""
    trouble_s: float
    """Faults stop after so long."""
    grace_s: float
    """From a SIGTERM to a SIGKILL."""

    @property
    def masterly(self) -> bool:
        """Whatever goes wrong, all workers can speak all the time."""
        return {*self.faults} <= {*MASTERLY} and not self.loss and not self.late

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most workers of a round, as every join says."""
        return self.min_workers, self.nodes * self.workers

    @property
    def longest_beat_s(self) -> float:
        """Between two heartbeats of one worker, while each process has two more, dead ones, that are not missed yet."""
        processes = 3 * self.nodes * (self.workers + 1)
        return max(self.beat_s, processes / self.beats_per_s + 1.0)


def draw(seed: int) -> Swarm:
    """The same for the same seed, everywhere."""
    dice = random.Random(f"swarm {seed}")
    nodes = dice.choice((1, 1, 2, 2, 3, 4))
    workers = dice.choice((1, 1, 2, 2, 3)) if nodes < 3 else dice.choice((1, 1, 2))
    world = nodes * workers
    free = dice.random() < 0.15
    recovery = Recovery.RESTART if free else dice.choice(_RECOVERIES)
    level = dice.choice(tuple(Level)) if recovery is Recovery.WORKER else Level.ELASTIC
    quiet = recovery is Recovery.WORKER and dice.random() < 0.4
    masterly = not quiet and dice.random() < 0.15
    leased = recovery is not Recovery.WORKER or dice.random() < 0.4
    step_s = dice.choice((0.1, 0.3, 1.0, 2.0))
    return Swarm(
        seed=seed,
        free=free,
        nodes=nodes,
        workers=workers,
        min_workers={Level.HOT: world, Level.SHRINK: 1}.get(level)
        or dice.choice((world, dice.randint(workers, world))),
        last_call_s=dice.choice((0.0, 0.3, 3.0)),
        recovery=recovery,
        level=level,
        leased=leased,
        step_s=step_s,
        lease_s=(lease_s := dice.choice((3.0, 10.0, 10.0))),
        beat_s=lease_s * dice.choice((0.1, 0.3, 0.3, 0.3)),
        beats_per_s=random.Random(f"beats {seed}").choice((1000.0, 1000.0, 1000.0, 1000.0, 0.5)),
        skew=dice.choice((0.0, 0.001, 0.05)),
        **(_data(dice) if leased else _sampled(dice, world)),
        **_saves(dice),
        **_machines(dice, quiet=quiet or masterly),
        **_trouble(
            dice,
            step_s,
            kinds=QUIET if quiet else MASTERLY if masterly else tuple(sorted(FAULTS)),
            always=_always(recovery, quiet=quiet, masterly=masterly),
        ),
    )


_RECOVERIES = (Recovery.RESTART, Recovery.RESTART, Recovery.AGENT, Recovery.WORKER, Recovery.WORKER)


def _always(recovery: Recovery, *, quiet: bool, masterly: bool) -> tuple[str, ...]:
    """One of these faults is on: without the dead there are no survivors."""
    if masterly:
        return ("stop master", "slow commit")
    if recovery is not Recovery.WORKER:
        return ()
    return _DEADLY[:3] if quiet else _DEADLY


def _fewest(dice: random.Random, recovery: Recovery, level: Level, sizes: tuple[int, int]) -> int:
    """Workers of a round; `sizes`: of a node, and of all. A join for a whole node needs as many at least."""
    workers, world = sizes
    if recovery is not Recovery.WORKER:
        return dice.choice((world, dice.randint(workers, world)))
    return {Level.HOT: world, Level.SHRINK: 1}.get(level) or dice.randint(1, world)


def _sampled(dice: random.Random, world: int) -> dict[str, Any]:
    batch = dice.choice((1, 2))
    samples = world * batch * dice.randint(4, 12)
    return {"epochs": 1, "samples": samples, "partitions": 0, "batch": batch, "shard": 0, "unreadable": -1}


def _data(dice: random.Random) -> dict[str, Any]:
    stream = dice.random() < 0.25
    samples = dice.randint(8, 24)
    return {
        "epochs": 1 if stream else dice.choice((1, 1, 1, 2)),
        "samples": samples,
        "partitions": dice.randint(1, 3) if stream else 0,
        "batch": dice.choice((1, 1, 2, 4)),
        "shard": dice.choice((0, 0, 4, 8)),
        "unreadable": dice.randrange(samples) if dice.random() < 0.1 else -1,
    }


def _saves(dice: random.Random) -> dict[str, Any]:
    stored = dice.random() < 0.7
    return {
        "save_every": dice.choice((1, 1, 2, 5, "auto")),
        "persist_every": dice.choice((1, 3, 8, "5s", "60s")),
        "save_to": "memory://" if stored else None,
        "replicas": dice.random() < 0.4,
    }


def _machines(dice: random.Random, *, quiet: bool) -> dict[str, Any]:
    return {
        "latency_s": dice.choice((0.001, 0.01, 0.1)),
        "loss": 0.0 if quiet else dice.choice((0.0, 0.0, 0.01, 0.1)),
        "twice": dice.choice((0.0, 0.0, 0.02, 0.2)),
        "late": 0.0 if quiet else dice.choice((0.0, 0.0, 0.02, 0.2)),
        "disk_s": dice.choice((0.0005, 0.005, 0.05)),
        "torn": dice.random() < 0.2,
        "snapshot_every": dice.choice((7, 50, 10_000)),
    }


QUIET = (
    "damage image",
    "kill agent",
    "kill keeper",
    "kill worker",
    "preempt",
    "slander",
    "worker fails",
)
"""Faults that keep no message from anybody."""
MASTERLY = ("disk full", "kill master", "oversized number", "set clock", "slow commit", "stop master", "storage fails")
"""Faults of the master alone: no worker dies of them, and none is lost."""
_DEADLY = ("kill worker", "worker fails", "preempt", "stop worker", "crash node")


def _trouble(dice: random.Random, step_s: float, *, kinds: tuple[str, ...], always: tuple[str, ...]) -> dict[str, Any]:
    on = dice.choice((1, 2, 3, 5, 8))
    faults = set(dice.sample(kinds, min(on, len(kinds)))) if dice.random() < 0.95 else set[str]()
    if always and faults:
        faults.add(dice.choice(always))
    return {
        "faults": tuple(sorted(faults)),
        "every_s": step_s * dice.choice((3.0, 8.0, 20.0)) + dice.choice((0.0, 3.0)),
        "trouble_s": step_s * dice.choice((15.0, 30.0, 60.0)) + 5.0,
        "grace_s": dice.choice((2.0, 10.0, 60.0)),
    }
