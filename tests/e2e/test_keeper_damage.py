"""Real keepers: damage, full disks and states too large are named, and cost that alone."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation, Held, Manifest, Restore, Source
from tests.e2e.kept import RUN, Kept, segment, state
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("runtime")


def test_flipped_bit_in_a_slot_is_refused_by_slot_and_chunk(kept: Kept) -> None:
    keeper = kept.keeper()
    trainer = kept.trainer()
    held: dict[int, Held] = {}
    for step in (1, 2):
        trainer.save(step, state(step, 3 << 20))
        kept.notice(keeper_messages.Hashed)
    held = {one.generation.step: one for one in trainer.held()}
    shared = segment(keeper.pid)
    shared.view(held[2].slot)[(4 << 20) + 5] ^= 1
    shared.close()
    with pytest.raises(Corrupt, match=rf"slot {held[2].slot} of seat 0, step 2 .*chunk 1 "):
        trainer.load(Restore(held[2].generation, 1, Source.MEMORY))
    assert [one.generation.step for one in trainer.held()] == [1]
    assert trainer.load(Restore(held[1].generation, 1, Source.MEMORY)).tree["state"]["step"] == 1


def test_what_was_not_copied_again_must_be_what_it_was(kept: Kept) -> None:
    """A bit that flips in a kept chunk while nobody looks makes the slot worthless, and the trainer hears of it.

    Once everything is copied again the slot counts again; so it does where only other chunks were written.
    """
    keeper = kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1, 4 << 20))
    kept.notice(keeper_messages.Hashed)
    ours = trainer._segments.take(0)
    slot = next(slot for slot in ours.slots() if slot.generation)
    chunk = 4 << 20
    kept_ranges = ((chunk - 5, 2 * chunk + 5), (3 * chunk, slot.image_bytes))  # chunk 1, and 3 with the short last one

    def again(step: int, *unchanged: tuple[int, int]) -> None:
        ours.begin(slot.index)
        ours.view(slot.index)[100] = 32  # in chunk 0
        ours.publish(slot.index, Generation(0, step, RUN), 0, 1, slot.image_bytes)
        trainer._line.tell(keeper_messages.Published(slot=slot.index, seq=ours.seq(slot.index), unchanged=unchanged))

    again(2, *kept_ranges)
    assert kept.notice(keeper_messages.Hashed).generation.step == 2
    shared = segment(keeper.pid)
    shared.view(slot.index)[2 * chunk + 7] ^= 1  # nobody has vouched for chunk 2
    again(3, *kept_ranges)
    assert kept.notice(keeper_messages.Hashed).generation.step == 3
    shared.view(slot.index)[slot.image_bytes - 1] ^= 1
    shared.close()
    again(4, *kept_ranges)
    until(lambda: trainer.damaged, "the keeper's word")
    assert trainer.damaged is not None
    assert trainer.damaged.generation.step == 4
    assert f"slot {slot.index} of seat 0" in trainer.damaged.reason
    assert "chunk 4, not copied again, changed since it was hashed" in trainer.damaged.reason
    assert trainer.held() == ()
    trainer.damaged = None
    again(5, *kept_ranges)  # before the word came
    until(lambda: trainer.damaged, "the keeper's word")
    again(6)
    assert kept.notice(keeper_messages.Hashed).generation.step == 6
    assert [one.generation.step for one in trainer.held()] == [6]


def test_persist_commit_and_damage(kept: Kept, tmp_path: Path) -> None:
    """A flipped or shortened shard file is refused by name when it is loaded."""
    kept.keeper()
    trainer = kept.trainer(save_to=str(tmp_path))
    trainer.save(7, state(7))
    generation = kept.notice(keeper_messages.Hashed).generation
    trainer.persist(generation)
    file = kept.notice(keeper_messages.Persisted).file
    generations.commit(str(tmp_path), None, Manifest("job", generation, 1, (file,), 1.0), 2)
    restore = Restore(generation, 1, Source.STORAGE, str(tmp_path))
    assert trainer.load(restore).tree["state"]["step"] == 7
    path = tmp_path / generations.folder(generation) / file.name
    good = path.read_bytes()
    for bad, why in ((good[:-1], "bytes"), (good[:-1] + bytes([good[-1] ^ 1]), "chunk 0")):
        path.write_bytes(bad)
        with pytest.raises(Corrupt, match=rf"step-0000000007-.*{file.name}: .*{why}"):
            trainer.load(restore)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_full_disk_fails_the_durable_copy_only(kept: Kept, tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount here")
    try:
        kept.keeper()
        trainer = kept.trainer(save_to=str(tmp_path))
        trainer.save(1, state(1, 1 << 16))
        generation = kept.notice(keeper_messages.Hashed).generation
        trainer.persist(generation)
        for step in range(2, 6):  # memory checkpoints go on meanwhile
            assert trainer.save(step, state(step, 1 << 16)) is not None
            kept.notice(keeper_messages.Hashed)
        assert 1 in {one.generation.step for one in trainer.held()}, "a slot being persisted was written over"
        failed = kept.notice(keeper_messages.PersistFailed)
        assert failed.generation == generation
        assert "No space left" in failed.reason
        assert "free some space" in failed.hint
    finally:
        kept.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_too_large_a_state_is_refused_with_a_reason(kept: Kept) -> None:
    kept.keeper()
    link = KeeperLink.connect("job", "node", notify=lambda _: None, start=False)
    link.call(lambda ref: keeper_messages.Hello(ref=ref, seat=0, job="job"))
    reply, _ = link.call(lambda ref: keeper_messages.Allocate(ref=ref, slot_bytes=1 << 50))
    assert re.match(r"3 slots of 1126 TB need 3378 TB; .* are free: does not fit$", reply.reason)
    assert "fewer workers" in reply.hint
    link.close()
