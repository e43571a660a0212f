"""What the survivors of a broken round hold of its last steps, and what the next round must make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.rounds.rendezvous import Round
from tests.simulation.memory import Keeper
from tests.simulation.model import Model
from tests.simulation.swarm import QUIET, Level

if TYPE_CHECKING:
    from tests.simulation.counted import Counted
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

TOLD_S = 2.0
"""Where nothing but processes fails, a member knows of newcomers after so long."""


class Lone(NamedTuple):
    """A lone image that a survivor has made."""

    generation: p.Generation
    keeper: Keeper


class Progress:
    """Of one job at a time, counted by hand: `stepped`, `saved` and `quiet_point` are the workers' own deeds."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._finished: dict[p.Generation, Model] = {}
        """By its last step, what each attempt has come to."""
        self._lone: dict[str, Lone] = {}
        self._trains: dict[str, tuple[int, float]] = {}
        """By worker, since when it trains, in which attempt."""
        self._quiet = set(world.swarm.faults) <= set(QUIET) and not world.swarm.loss and not world.swarm.late

    def new_job(self) -> None:
        """What is known is of the one before."""
        self._finished, self._lone, self._trains = {}, {}, {}

    # ---- what workers did --------------------------------------------------------------------------------------------

    def quiet_point(self, worker: Worker, generation: p.Generation) -> None:
        """It has finished this step."""
        model = self._finished.setdefault(generation, worker.model)
        self._check(model == worker.model, f"{worker.incarnation} comes to another model at {generation}")
        self._lone.pop(worker.incarnation, None)  # its slot may be used again
        attempt, since = self._trains.get(worker.incarnation, (0, 0.0))
        if attempt != generation.attempt:
            self._trains[worker.incarnation] = generation.attempt, self._world.loop.now
        elif self._quiet and not worker.waiting:
            self._check_told(worker, since)

    def _check_told(self, worker: Worker, since: float) -> None:
        before = self._world.loop.now - TOLD_S
        waiting = self._world.promises.counted.waits_since(worker.job, worker.round)
        ignored = sorted(name for name, at in waiting.items() if max(at, since) < before)
        self._check(not ignored, f"{worker.incarnation} trains on, and was not told that {ignored} wait for a seat")

    def saved(self, worker: Worker, generation: p.Generation) -> None:
        """Its lone image is hashed; now it joins."""
        keeper = worker.engine.keeper
        if keeper is not None and keeper.find(generation, 0, 1) is not None:
            self._lone[worker.incarnation] = Lone(generation, keeper)

    # ---- what the master chose ---------------------------------------------------------------------------------------

    def chosen(self, job: Job, begins: str) -> None:
        """An attempt begins: from nothing older than what all its nodes can reach of a survivor's last step."""
        choice, current = job.plan.restore, job.rounds.round
        assert current is not None
        refused = {one.generation for one in job.refusals}
        for generation in sorted(self._reachable(job, current) - refused):
            older = choice is None or choice.generation < generation
            self._check(not older, f"{begins}, but survivors hold step {generation.step} of attempt "
                                   f"{generation.attempt}")  # fmt: skip
        if choice is not None and choice.source is not p.Source.STORAGE and choice.world_size == 1 < self._size(choice):
            model = self._world.promises.image(choice.generation, 0, 1)
            finished = self._finished.get(choice.generation)
            self._check(
                finished is not None and model == finished,
                f"{begins}, a lone image of a step that nobody finished",
            )

    def _size(self, choice: p.Restore) -> int:
        return self._world.promises.counted.size_of(self._world.promises.job, choice.generation.attempt)

    def _reachable(self, job: Job, current: Round) -> set[p.Generation]:
        """Lone images that every node of the round holds, or any if each can fetch from each."""
        by_node: dict[str, set[p.Generation]] = {member.node: set() for member in current.members.values()}
        for name, member in current.members.items():
            lone = self._lone.get(name)
            if lone is not None and lone.generation.run == job.run and self._stands(lone):
                by_node[member.node].add(lone.generation)
        linked = job.offers.neighbours.keys() >= by_node.keys()
        return set.union(*by_node.values()) if linked else set.intersection(*by_node.values())

    def _stands(self, lone: Lone) -> bool:
        image = lone.keeper.find(lone.generation, 0, 1)
        return not lone.keeper.process.dead and image is not None and not image.damaged

    # ---- who sits where ----------------------------------------------------------------------------------------------

    def formed(self, counted: Counted, job: Job, before: dict[str, int], world: dict[str, int]) -> None:
        """By name, the ranks of the round before and of this one."""
        swarm, number = self._world.swarm, job.rounds.number
        if swarm.level is Level.HOT:
            want = {counted.least[name] for name in world}  # of several launches, if the job was launched again
            self._check(len(world) in want, f"round {number} has {len(world)} of {want} workers, and its level is hot")
        absent = sorted(
            name
            for name in before
            if name not in world and counted.lives(job.name, name) and name not in job.rounds.seats
        )
        self._check(not absent, f"round {number} was formed without {absent}, which live")
        stays = sorted((rank, name) for name, rank in before.items() if name in world)
        taken = {0} if stays else set[int]()
        for place, (rank, name) in enumerate(stays):
            rank = rank if place else 0
            taken.add(rank)
            right = rank >= len(world) or world[name] == rank
            self._check(right, f"{name} lives, and its rank {rank} of the round before is {world[name]} in {number}")
        places = {counted.places[name]: rank for name, rank in before.items() if name not in world}
        for name, rank in world.items():
            heir = places.get(counted.places[name]) if name not in before else None
            if heir is not None and heir not in taken and heir < len(world):
                self._check(rank == heir, f"{name} replaces rank {heir} of the round before, and has rank {rank}")

    def _check(self, good: bool, what: str) -> None:
        self._world.promises.check(good, what)
