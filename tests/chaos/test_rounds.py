"""Torch-free trainers, keepers and the master killed at random in every phase; whatever is restored is
bit-exact with one step that was whole on all ranks, and not older than one interval.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.checkpoint.storage import generations
from tests.chaos.cluster import WAIT_S, Cluster, chosen, left_nothing
from tests.chaos.conftest import WORLDS
from tests.chaos.traps import RESTORING, Phase

VICTIMS = ("trainer", "trainer", "keeper", "both", "master", "master+trainer", "all", "in it", "in it", "stop")
PHASE_S = 2.0
"""So long a round waits for its phase; then it kills wherever they are."""


class Rounds:
    """Rounds of one cluster. `tally`: what was killed in which phase."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self.cluster, self.chance, self.tally = cluster, chance, Counter[str]()
        self._before = ""
        """What the ranks had done when they were killed."""

    def start(self) -> None:
        self.cluster.start_trainers()
        found = self.cluster.restored()
        assert {one["source"] for one in found} == {""}
        assert not any(one["torch"] for one in found), "the engine must be free of torch"

    def round(self) -> None:
        """One kill in one phase, and all that must hold behind it."""
        cluster, phase = self.cluster, self.chance.choice(list(Phase))
        victims = self.chance.choice(VICTIMS)
        if phase in RESTORING:
            cluster.kill(*cluster.ranks)
            floor = cluster.floor()
            cluster.start_trainers()
        else:
            floor = (0, 0)
        notice = self._meet(phase)
        caught = notice.facts["who"] if notice is not None else ""
        names = self._names(victims, caught)
        self.tally[f"{'caught' if caught else 'at random' if not phase else 'missed'} {phase.name}"] += 1
        self.tally[f"kill {victims}"] += 1
        if victims == "stop":
            self._pause(names)
        else:
            cluster.kill(*names)
        if notice is not None:
            notice.let_go()
        self._up(floor if cluster.lost_at < floor else (0, 0), restarted=phase in RESTORING)

    def _meet(self, phase: Phase) -> Any:
        """Wait for the phase; NONE: for a random moment."""
        if phase:
            return self.cluster.catch(phase, PHASE_S)
        self.cluster.hear(lambda _: False, self.chance.random() * 0.03)
        return None

    def _names(self, victims: str, caught: str) -> list[str]:
        cluster, rank = self.cluster, self.chance.randrange(self.cluster.world)
        trainer, keeper = f"rank {rank}", cluster.node_of(rank)
        named = {
            "trainer": [trainer],
            "keeper": [keeper],
            "both": [trainer, keeper],
            "master": ["master"],
            "master+trainer": ["master", trainer],
            "all": [*cluster.ranks, *cluster.nodes, "master"],
            "in it": [caught or trainer],
            "stop": [self.chance.choice([trainer, keeper, "master"])],
        }
        return named[victims]

    def _pause(self, names: list[str]) -> None:
        for name in names:
            self.cluster.processes[name].send(signal.SIGSTOP)
        self.cluster.hear(lambda _: False, self.chance.random() * 0.2)
        for name in names:
            self.cluster.processes[name].send(signal.SIGCONT)

    def _up(self, floor: tuple[int, int], *, restarted: bool) -> None:
        cluster = self.cluster
        if cluster.mend():
            floor = max(floor, cluster.floor())
            self._before = cluster.board.story(cluster.world)
            newest = cluster.board.newest(cluster.world)
            cluster.start_trainers()
            restarted = True
            self._check(cluster.restored(), floor, newest)
        elif restarted:
            self._check(cluster.restored(), floor, cluster.board.newest(cluster.world))
        if self.chance.random() < 0.7:
            cluster.trained_on(self.chance.randrange(1, 6))

    def _check(self, found: list[dict[str, Any]], floor: tuple[int, int], newest: tuple[int, int]) -> None:
        tail = self.cluster.tail
        assert {one["wrong"] for one in found} == {""}, f"{found}\n{tail()}"
        assert len({(tuple(one["restored"]), one["attempt"], one["source"]) for one in found}) == 1, found
        restored, source = tuple(found[0]["restored"]), found[0]["source"]
        assert floor <= restored <= newest, f"{floor} <= {restored} <= {newest}, {source}\n{self._before}\n{tail()}"
        self.tally[f"restored from {source or 'nothing'}"] += 1


@pytest.mark.chaos
@pytest.mark.deep
def test_killed_in_every_phase(
    batch: int, chaos_rounds: int, chaos_seed: int, tmp_path: Path, runtime: Path, record_property: Any
) -> None:
    chance = random.Random(chaos_seed)
    world = 1 + batch % WORLDS
    shape, persist = chosen(chance, world), chance.choice([3, 6, 12])
    print(f"seed {chaos_seed}: world {world}, {shape}, persist every {persist}")
    began = time.monotonic()
    cluster = Cluster(tmp_path, runtime, world=world, save_to=str(tmp_path / "ck"), save_every=1,
                      persist_every=persist, **shape)  # fmt: skip
    with cluster, left_nothing(cluster):
        rounds = Rounds(cluster, chance)
        rounds.start()
        for number in range(chaos_rounds):
            print(f"round {number}", dict(rounds.tally))
            rounds.round()
        calm(cluster, persist)
    seconds = time.monotonic() - began
    print(f"{chaos_rounds} rounds in {seconds:.1f} s: {dict(sorted(rounds.tally.items()))}")
    record_property("chaos", dict(rounds.tally) | {"rounds": chaos_rounds, "seconds": seconds})


@pytest.mark.chaos
@pytest.mark.deep
def test_killed_in_a_save_that_knows_nothing_of_others(chaos_seed: int, tmp_path: Path, runtime: Path) -> None:
    """While the master is away what it has not heard of is written over: what it had said is complete stays."""
    print(f"seed {chaos_seed}")
    cluster = Cluster(tmp_path, runtime, world=3, nodes=1, nbytes=9 << 20, save_to=str(tmp_path / "ck"), save_every=1,
                      persist_every=3)  # fmt: skip
    with cluster, left_nothing(cluster):
        rounds = Rounds(cluster, random.Random(chaos_seed))
        rounds.start()
        for saves in range(4):
            cluster.trained_on(2)
            cluster.kill("master")
            for last in (*[False] * saves, True):
                caught = cluster.catch(Phase.COPYING, PHASE_S, "rank 1")  # None: it has no slot, and saves no more
                if last:
                    cluster.kill("rank 0", "rank 1")
                if caught is not None:
                    caught.let_go()
            rounds._up((0, 0), restarted=False)
        assert rounds.tally["restored from memory"] > 0


@pytest.mark.chaos
@pytest.mark.parametrize("world", [1, 2])
def test_a_file_that_is_still_being_written_at_the_end(tmp_path: Path, runtime: Path, world: int) -> None:
    """The last generation is committed before an older one is written; of that one nothing is left."""
    cluster = Cluster(tmp_path, runtime, world=world, nodes=1, nbytes=9 << 20, save_to=str(tmp_path / "ck"),
                      save_every=1, persist_every=3)  # fmt: skip
    with cluster, left_nothing(cluster):
        cluster.start_trainers()
        cluster.trained_on(8)
        writing = cluster.catch(Phase.PERSISTING, WAIT_S)
        assert writing is not None
        cluster.board.finish(cluster.board.newest(world)[1] + 5)
        for name in cluster.ranks:
            cluster.until(lambda name=name: cluster.processes[name].ended(), f"the end of {name}")
        writing.let_go()


def calm(cluster: Cluster, persist: int) -> None:
    """After all that, what is durable keeps up: the newest is at most one interval old when it is committed."""
    goal = cluster.board.newest(cluster.world)
    cluster.until(lambda: cluster.committed() >= goal, f"{goal} committed, {cluster.committed()} is")
    cluster.until(lambda: cluster.committed() >= (goal[0], goal[1] + persist), "one more interval")
    found = generations.scan(str(cluster.settings["save_to"]), None, cluster.job)
    assert found.damaged == ()
