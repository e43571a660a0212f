"""Storage that fails, is full, hangs or is slower than the saves; and ranks that die a step apart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.storage.catalog import LATEST, Latest
from tests.chaos.board import Age, age
from tests.chaos.cluster import WAIT_S, Cluster, Notice, left_nothing
from tests.chaos.test_damage import held, up, whole
from tests.chaos.traps import Phase, Store
from tests.deep import deep
from tests.images import read_back

pytestmark = [pytest.mark.chaos, pytest.mark.slow]


@pytest.mark.deep
@pytest.mark.parametrize("mode", [Store.FULL, Store.HANGS, Store.FAILS, Store.SLOW])
def test_bad_storage_costs_no_memory_save(mode: Store, chaos_seed: int, runtime: Path, tmp_path: Path) -> None:
    """Memory saves go on, and restores from them; what is durable stays whole, and catches up when storage is well."""
    chance = random.Random(chaos_seed)
    print(f"seed {chaos_seed}")
    url = str(tmp_path / "ck")
    cluster = Cluster(tmp_path, runtime, world=2, nodes=chance.choice([1, 2]), nbytes=1 << 20, save_every=1,
                      save_to=url, persist_every=5)  # fmt: skip
    with cluster, left_nothing(cluster):
        assert up(cluster) == (0, 0)
        cluster.until((Path(url) / LATEST).exists, "a durable generation")
        cluster.board.store(mode)
        cluster.trained_on(40)
        counted(cluster)
        assert latest_is_whole(url, cluster.job)
        for names in (cluster.ranks[:1], ["n0", *cluster.ranks]):
            cluster.kill(*names)
            cluster.mend()
            floor = cluster.floor()
            assert up(cluster) >= floor
            cluster.trained_on(5)
            assert latest_is_whole(url, cluster.job)
        if mode in (Store.FAILS, Store.FULL):
            durable = cluster.committed()
            cluster.trained_on(20)
            assert cluster.committed() == durable, "nothing is committed that storage did not take"
            counted(cluster)
        cluster.board.store(Store.WELL)
        goal = cluster.board.newest(2)
        cluster.until(lambda: cluster.committed() >= goal, f"{goal} durable, {cluster.committed()} is")


def counted(cluster: Cluster) -> None:
    """Saves are left out, and counted, where no slot is free; how many is a matter of speed. `trained_on` proves that
    they never stop.
    """
    for rank in range(cluster.world):
        steps = cluster.board.steps(rank)
        made, skipped = cluster.board.saves(rank)
        assert made > 0
        assert steps - 1 <= made + skipped <= cluster.board.steps(rank), f"rank {rank}: {made} made, {skipped} skipped"


def latest_is_whole(url: str, job: str) -> Any:
    """What `latest` names, read to the last byte."""
    latest = msgspec.json.decode((Path(url) / LATEST).read_bytes(), type=Latest)
    manifest = generations.manifest_of(url, None, latest.generation)
    for rank in range(manifest.world_size):
        read_back(url, manifest, rank)
    return manifest.job == job


def behind_rank_0(cluster: Cluster, phase: Phase) -> tuple[Notice, Age]:
    """Catch rank 1 in a save that rank 0 has made, as both made the one before: either may leave one out."""
    while True:
        behind = cluster.catch(phase, WAIT_S, who="rank 1")
        assert behind is not None
        attempt, step = cluster.board.reached(1)
        cluster.until(lambda now=(attempt, step): cluster.board.reached(0) > now, "the step of rank 0")
        before = attempt, step - 1
        if cluster.board.made(0, (attempt, step)) and cluster.board.made(0, before) and cluster.board.made(1, before):
            return behind, (attempt, step)
        behind.let_go()


@pytest.mark.parametrize("phase", [Phase.COPIED, deep(Phase.COPYING), deep(Phase.PUBLISHED)])
def test_one_rank_dies_a_step_ahead_of_the_other(phase: Phase, runtime: Path, tmp_path: Path) -> None:
    """Rank 0 has published a step that rank 1 has not: both go back to the one before, which is one interval."""
    cluster = Cluster(tmp_path, runtime, world=2, nodes=2, nbytes=1 << 20, save_every=1)
    with cluster, left_nothing(cluster):
        assert up(cluster) == (0, 0)
        for _ in range(3):
            cluster.trained_on(3)
            behind, now = behind_rank_0(cluster, phase)
            cluster.kill(*cluster.ranks)
            behind.let_go()
            slots = held(cluster)
            ahead = max(slot.generation for slot in slots if slot.rank == 0)
            assert age(ahead) == now
            told = phase == Phase.PUBLISHED  # its seat was closed, so the keeper looked
            restored = up(cluster)
            assert restored == (now if told else (now[0], now[1] - 1)) == age(whole(slots, 2)[-1])
