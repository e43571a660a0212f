"""Bits flipped in slots, files and MANIFESTs at random places: all is found, named, passed over."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.storage.catalog import MANIFEST, folder
from dlrover_hooks.errors import Corrupt, SaveToBusy
from dlrover_hooks.protocol import Generation, Held, Manifest
from tests.chaos.board import Age, age
from tests.chaos.cluster import Cluster, left_nothing
from tests.chaos.traps import Phase
from tests.deep import deep
from tests.e2e.kept import segment
from tests.images import image_around, read_back

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
SEAT_OF = {0: ("n0", 0), 1: ("n1", 0), 2: ("n0", 1)}
NBYTES = CHUNK_BYTES + (1 << 20)


def held(cluster: Cluster) -> list[Held]:
    """What all keepers hold, once they have hashed what the dead left."""
    found: list[Held] = []
    for node in cluster.nodes:
        link = KeeperLink.connect(cluster.job, node, notify=lambda _: None, start=False)
        with contextlib.closing(link):
            found += link.call(lambda ref: keeper_messages.Inventory(ref=ref))[0].held
    return found


def whole(slots: list[Held], world: int) -> list[Generation]:
    """Oldest first, what all ranks hold."""
    ranks: dict[Generation, set[int]] = {}
    for slot in slots:
        ranks.setdefault(slot.generation, set()).add(slot.rank)
    return sorted(generation for generation, them in ranks.items() if them == set(range(world)))


def flip(path: Path, chance: random.Random, *, behind: bytes = b"") -> int:
    """One bit of a file, somewhere behind the first such bytes; the byte's place."""
    data = path.read_bytes()
    at = chance.randrange(data.index(behind), len(data))
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return at


def up(cluster: Cluster) -> Age:
    """Start the trainers; the generation that all of them restored, bit-exact."""
    cluster.start_trainers()
    found = cluster.restored()
    assert {one["wrong"] for one in found} == {""}, found
    (restored,) = {tuple(one["restored"]) for one in found}
    return restored


def of(cluster: Cluster, mark: int) -> str:
    """What was logged since."""
    return cluster.log.read_text(errors="replace")[mark:]


@pytest.mark.deep
def test_bits_flipped_in_memory(chaos_seed: int, runtime: Path, tmp_path: Path) -> None:
    """Three ranks on two nodes: whichever slot of the newest generation is damaged, all go back to the one before."""
    chance = random.Random(chaos_seed)
    print(f"seed {chaos_seed}")
    cluster = Cluster(tmp_path, runtime, world=3, nodes=2, nbytes=NBYTES, save_every=1)
    with cluster, left_nothing(cluster):
        assert up(cluster) == (0, 0)
        for _ in range(8):
            cluster.trained_on(4)
            cluster.kill(*cluster.ranks)
            slots = held(cluster)
            before, newest = whole(slots, 3)[-2:]
            slot = chance.choice([one for one in slots if one.generation == newest])
            node, seat = SEAT_OF[slot.rank]
            shared = segment(cluster.processes[node].pid, seat)
            at = chance.randrange(shared.slot(slot.slot).image_bytes)
            shared.view(slot.slot)[at] ^= 1 << chance.randrange(8)
            shared.close()
            mark = len(cluster.log.read_text(errors="replace"))
            assert up(cluster) == age(before), f"{newest} was damaged at {at} of rank {slot.rank}\n{cluster.tail()}"
            named = f"slot {slot.slot} of seat {seat}, {newest}, rank {slot.rank}: chunk {at // CHUNK_BYTES} "
            assert named in of(cluster, mark), f"{named}\n{cluster.tail()}"


@pytest.mark.parametrize("how", ["a bit of a file", "a bit of MANIFEST", deep("the end of a file"), deep("a file")])
def test_damaged_in_storage(how: str, chaos_seed: int, runtime: Path, tmp_path: Path) -> None:
    """The keepers are gone, too: an older durable generation is restored, and the log names the file."""
    chance = random.Random(chaos_seed)
    print(f"seed {chaos_seed}")
    url = tmp_path / "ck"
    cluster = Cluster(tmp_path, runtime, world=2, nodes=1, nbytes=NBYTES, save_every=1, save_to=str(url),
                      persist_every=3, keep=3)  # fmt: skip
    with cluster, left_nothing(cluster, damaged=True):
        assert up(cluster) == (0, 0)
        for _ in range(2):
            start = cluster.board.newest(2)
            cluster.until(lambda start=start: len(newer(cluster, start)) > 1, "two durable generations")
            cluster.kill(*cluster.ranks, *cluster.nodes)
            cluster.kill("master")
            cluster.mend()
            newest, before = newer(cluster, start)[:2]
            mark = len(cluster.log.read_text(errors="replace"))
            path, named = harm(how, url / folder(newest), chance)
            restored = up(cluster)
            if "MANIFEST" in how and restored == age(newest):
                continue  # such as its date: nothing depends on it
            assert restored == age(before), f"{path}\n{cluster.tail()}"
            for word in named:
                assert word in of(cluster, mark), f"{word}\n{cluster.tail()}"


def newer(cluster: Cluster, than: Age) -> list[Generation]:
    """Durable ones, newest first."""
    found = generations.scan(str(cluster.settings["save_to"]), None, cluster.job).manifests
    return [one.generation for one in found if age(one.generation) > than]


def harm(how: str, home: Path, chance: random.Random) -> tuple[Path, list[str]]:
    """Damage something in a generation's folder: what, and what must be said of it."""
    file = chance.choice(sorted(home.glob("shard-*")))
    if how == "a bit of a file":
        file = max(home.glob("shard-*"), key=lambda one: one.stat().st_size)
        return file, [str(file), f"chunk {flip(file, chance) // CHUNK_BYTES} does not match"]
    if how == "the end of a file":
        os.truncate(file, chance.randrange(file.stat().st_size))
    elif how == "a file":
        file.unlink()
    else:
        file = home / MANIFEST
        flip(file, chance, behind=b'"generation"')  # before it stands the job's name: another one's tree is refused
        return file, [home.name]
    return file, [home.name, file.name]


def test_every_bit_of_a_manifest(tmp_path: Path) -> None:
    """Whatever is flipped: the generation is passed over or refused, or what is read is what was written."""
    url, run, data = str(tmp_path), "0" * 32, image_around(os.urandom(5000), Generation(1, 2, "0" * 32))
    for step in (1, 2):
        generation = Generation(1, step, run)
        file = generations.write_shard(url, None, generation, 0, 1, [memoryview(data)], len(data), job="job")
        generations.commit(url, None, Manifest("job", generation, 1, (file,), 1.0), 2)
    path = tmp_path / folder(generation) / MANIFEST
    good, harmless = path.read_bytes(), 0
    for at in range(len(good)):
        for bit in range(8):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            harmless += seen_through(url, generation, data)
    assert harmless < 8 * len(good) // 5, "what is not needed to read it: its date, and the trainer"


def seen_through(url: str, generation: Generation, data: bytes) -> bool:
    """True if the flip changes nothing of what is read."""
    found = generations.scan(url, None, "job")
    assert generation.step - 1 in {one.generation.step for one in found.manifests}, "the one before stays"
    flipped = [one for one in found.manifests if one.generation.step != generation.step - 1]
    if not flipped:
        assert folder(generation) in str(found.damaged) or refused(url), "it is named"
        return False
    assert flipped[0].generation == generation, flipped
    try:
        same = read_back(url, flipped[0], 0) == data
    except Corrupt as damage:
        named = folder(generation) in damage.message
    else:
        assert same
        return True
    assert named
    return False


def refused(url: str) -> bool:
    """The job's name was hit: nobody may write there."""
    try:
        generations.refuse_others(url, None, "job")
    except SaveToBusy:
        return True
    return False


def test_one_rank_says_no_before_the_other_says_yes(runtime: Path, tmp_path: Path) -> None:
    """The healthy one must not die of it: it drops what it has loaded and asks again."""
    cluster = Cluster(tmp_path, runtime, world=2, nodes=2, nbytes=1 << 16, save_every=1)
    with cluster, left_nothing(cluster):
        assert up(cluster) == (0, 0)
        cluster.trained_on(4)
        cluster.kill(*cluster.ranks)
        slots = held(cluster)
        before, newest = whole(slots, 2)[-2:]
        (slot,) = [one for one in slots if (one.generation, one.rank) == (newest, 1)]
        shared = segment(cluster.processes["n1"].pid)
        shared.view(slot.slot)[100] ^= 1
        shared.close()
        cluster.start_trainers()
        number = cluster.view().round
        healthy = cluster.catch(Phase.LOADED, 20.0, who="rank 0")
        assert healthy is not None
        cluster.until(lambda: cluster.view().round > number, "the other's no")
        healthy.let_go()
        found = cluster.restored()
        assert {tuple(one["restored"]) for one in found} == {age(before)}
        assert {one["wrong"] for one in found} == {""}
