"""DL-90, DL-91: real keeper and trainer processes, killed wherever it hurts; what is restored is bit-exact."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path
from typing import NoReturn

import pytest

from dlrover_hooks.checkpoint import storage, wire
from dlrover_hooks.checkpoint.address import address, welcome
from dlrover_hooks.checkpoint.arena import PAGE, Arena
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.link import KeeperLink
from dlrover_hooks.errors import Corrupt, KeeperAway
from dlrover_hooks.protocol import Generation, Held, Manifest, Restore, Source
from tests.e2e.kept import RUN, WAIT_S, Kept, ended, memfds, segment, state, until

pytestmark = pytest.mark.usefixtures("runtime")


def train_for_ever(attempt: int, size: int) -> NoReturn:
    """In a forked child: save as fast as it goes. Numpy only: torch's thread pool does not survive a fork."""
    try:
        trainer = Checkpointer("job", "node", 0, start_keeper=False, deadline_s=WAIT_S)
        trainer.begin(RUN, attempt, 0, 1)
        for step in range(1, 100_000):
            trainer.save(step, state(step, size))
    finally:
        os._exit(1)


def test_trainer_killed_in_the_middle_of_a_copy(kept: Kept) -> None:
    """20 SIGKILLs, each while a slot is being written: another slot is restored, bit-exact."""
    keeper, size, inside, seed = kept.keeper(), 4 << 20, 0, random.randrange(1 << 30)
    reader = kept.trainer(1)
    chance = random.Random(seed)
    for attempt in range(1, 23):
        pid = os.fork()
        if pid == 0:
            train_for_ever(attempt, size)
        kept.kill_at_end(pid)
        arena = until(lambda: segment(keeper.pid), "the arena")

        def newest(attempt: int = attempt, arena: Arena = arena) -> Generation | None:
            found = [slot.generation for slot in arena.slots() if slot.generation and not slot.torn]
            return max((one for one in found if one.attempt == attempt), default=None)

        until(newest, "a first save")
        for _ in range(chance.randrange(4)):
            until(lambda arena=arena: not any(slot.torn for slot in arena.slots()), "a pause")
            until(lambda arena=arena: any(slot.torn for slot in arena.slots()), "a copy")
        torn = until(lambda arena=arena: [slot for slot in arena.slots() if slot.torn], "a copy")[0]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        after, whole = arena.slot(torn.index), newest()
        inside += after.torn or after.generation is None
        held = [one.generation for one in reader.held()]
        assert whole is not None
        assert max(held) == whole, f"seed {seed}, attempt {attempt}"
        for generation in held:
            tree = reader.load(Restore(generation, 1, Source.MEMORY)).tree
            assert tree["state"]["step"] == generation.step
            assert (tree["state"]["w"] == generation.step).all(), f"seed {seed}, attempt {attempt}"
            assert (tree["rank"]["rng"] == generation.step).all()
        assert not any(slot.torn for slot in arena.slots())
        arena.close()
    assert inside >= 20, f"only {inside} of 22 kills landed inside a copy (seed {seed})"


def test_a_restarted_trainer_continues_in_the_same_pages(kept: Kept) -> None:
    """And what the dead one had published but nobody had hashed is found by the next one's first question."""
    keeper = kept.keeper()
    first = kept.trainer()
    assert first.save(1, state(1, 1 << 20)) is not None
    arena = segment(keeper.pid)
    assert os.fstat(arena.fd).st_blocks * 512 >= arena.nbytes
    arena.close()
    first.close()
    second = kept.trainer()
    assert [one.generation.step for one in second.held()] == [1]
    second.save(2, state(2, 1 << 20))
    kept.notice(wire.Hashed)
    assert len(memfds(keeper.pid)) == 1
    assert sorted(one.generation.step for one in second.held()) == [1, 2]


def test_a_grown_state_keeps_the_old_segment_until_complete(kept: Kept) -> None:
    kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1))
    old = kept.notice(wire.Hashed).generation
    trainer.complete(old)
    trainer.save(2, state(2, 1 << 20))
    new = kept.notice(wire.Hashed).generation
    assert {one.generation.step for one in trainer.held()} == {1, 2}
    assert trainer.load(Restore(old, 1, Source.MEMORY)).tree["state"]["step"] == 1
    trainer.complete(new)
    assert {one.generation.step for one in trainer.held()} == {2}


def test_loaded_tree_does_not_alias_the_segment(kept: Kept) -> None:
    keeper = kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1))
    tree = trainer.load(Restore(kept.notice(wire.Hashed).generation, 1, Source.MEMORY)).tree
    arena = segment(keeper.pid)
    for slot in arena.slots():
        arena.view(slot.index)[:] = bytes(arena.slot_bytes)
    arena.close()
    assert (tree["state"]["w"] == 1).all()


def test_killed_keeper_does_not_stop_training(kept: Kept, runtime: Path) -> None:
    """The next save goes, whole, into a new keeper that the trainer starts."""
    trainer = kept.trainer(start_keeper=True, linger_s=0)
    assert trainer.held() == ()
    for step in (1, 2):
        pid = kept.keeper_pid()
        kept.kill_at_end(pid)
        assert trainer.save(step, state(step)) is not None
        kept.notice(wire.Hashed)
        assert step in {one.generation.step for one in trainer.held()}
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: ended(pid), "the keeper's end")
        until(lambda step=step: saved_anew(trainer, 100 + step), "a save in a new keeper")
        kept.notice(wire.Hashed)
    assert trainer.save(3, state(3)) is not None
    kept.kill_at_end(kept.keeper_pid())
    assert trainer.error is None
    assert 3 in {one.generation.step for one in trainer.held()}


def saved_anew(trainer: Checkpointer, step: int) -> bool:
    """A save may still go into the pages of a keeper whose death was not noticed yet; it must not raise then."""
    saved = trainer.save(step, state(step))
    try:
        return saved is not None and step in {one.generation.step for one in trainer.held()}
    except KeeperAway:
        return False


def test_a_stopped_keeper_costs_a_second_not_the_training(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    """DL-90: SIGSTOP, so nobody reads the socket: saves are skipped and counted, and go on when it is back."""
    keeper, longest = kept.keeper(), 0.0
    trainer = kept.trainer()
    trainer.save(1, state(1))
    kept.notice(wire.Hashed)
    os.kill(keeper.pid, signal.SIGSTOP)
    step = 1
    while trainer.skipped < 20:
        step, began = step + 1, time.monotonic()
        trainer.save(step, state(step))
        longest = max(longest, time.monotonic() - began)
        assert step < 5000, "the socket takes it all"
    assert longest < 5.0
    assert isinstance(trainer.error, KeeperAway)
    os.kill(keeper.pid, signal.SIGCONT)
    until(lambda: trainer.save(9999, state(9999)), "a save")
    while kept.notice(wire.Hashed).generation.step != 9999:
        pass
    assert caplog.text == ""


@pytest.mark.parametrize("how", ["pipe", "SIGTERM"])
def test_launched_keeper_makes_the_last_generation_durable(kept: Kept, runtime: Path, tmp_path: Path, how: str) -> None:
    life, ours = os.pipe()
    keeper = kept.keeper("--life-fd", str(life), pass_fds=(life,))
    os.close(life)
    url = str(tmp_path / "ck")
    ranks = [kept.trainer(rank, rank=rank, world=2, save_to=url) for rank in (0, 1)]
    for step in (1, 2):
        for trainer in ranks:
            trainer.save(step, state(step))
    ranks[0].save(3, state(3))  # not all ranks have it: it is not what can be restored
    for trainer in ranks:
        trainer.close()
    if how == "SIGTERM":
        keeper.terminate()
    else:
        os.close(ours)
    assert keeper.wait(WAIT_S) == 0
    if how == "SIGTERM":
        os.close(ours)
    assert list(runtime.iterdir()) == []
    (manifest,) = storage.scan(url, None, "job").manifests
    assert manifest.generation == Generation(0, 2, RUN)
    assert {file.rank for file in manifest.files} == {0, 1}
    assert manifest.files[1].nbytes < manifest.files[0].nbytes
    for rank in (0, 1):
        reader = Checkpointer("job", "node", 0, save_to=url)
        reader.begin(RUN, 1, rank, 2)
        restored = reader.load(Restore(manifest.generation, 2, Source.STORAGE))
        assert restored.same_world
        assert (restored.tree["state"]["w"] == 2).all()
        assert (restored.tree["rank"]["rng"] == 2).all()
        assert restored.tree["data"] == {"train": 2}


def test_finished_job_leaves_nothing(kept: Kept, runtime: Path, tmp_path: Path) -> None:
    keeper = kept.keeper()
    trainer = kept.trainer(save_to=str(tmp_path))
    trainer.save(1, state(1))
    trainer.close(finished=True)
    assert keeper.wait(WAIT_S) == 0
    assert list(runtime.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_unlaunched_keeper_lingers_then_writes(kept: Kept, runtime: Path, tmp_path: Path) -> None:
    keeper = kept.keeper("--linger-s", "0.2")
    trainer = kept.trainer(save_to=str(tmp_path))
    trainer.save(1, state(1))
    trainer.close()
    assert keeper.wait(WAIT_S) == 0
    assert storage.scan(str(tmp_path), None, "job").manifests[0].generation.step == 1
    assert list(runtime.iterdir()) == []


def test_two_keepers_become_one(kept: Kept) -> None:
    first = kept.keeper()
    assert kept.keeper(ready=False).wait(WAIT_S) == 0
    assert first.poll() is None
    assert kept.keeper_pid() == first.pid


def test_two_jobs_of_one_node_have_a_keeper_each(kept: Kept) -> None:
    """DL-90: neither sees the other's memory, nor ends with it."""
    keepers = [kept.keeper(job=job) for job in ("one", "two")]
    trainers = [kept.trainer(job=job) for job in ("one", "two")]
    for step, trainer in enumerate(trainers, 1):
        trainer.save(step, state(step))
        kept.notice(wire.Hashed)
    assert [[one.generation.step for one in trainer.held()] for trainer in trainers] == [[1], [2]]
    keepers[0].kill()
    keepers[0].wait()
    trainers[1].save(3, state(3))
    assert kept.notice(wire.Hashed).generation.step == 3
    assert [one.generation.step for one in trainers[1].held()] == [2, 3]


def test_launcher_takes_over_a_lingering_keeper(kept: Kept, runtime: Path) -> None:
    first = kept.keeper()
    life, ours = os.pipe()
    assert kept.keeper("--life-fd", str(life), pass_fds=(life,), ready=False).wait(WAIT_S) == 0
    os.close(life)
    assert first.poll() is None
    os.close(ours)
    assert first.wait(WAIT_S) == 0
    assert list(runtime.iterdir()) == []


def test_only_the_same_user_is_welcome(kept: Kept, runtime: Path) -> None:
    assert welcome(os.geteuid())
    assert not welcome(os.geteuid() + 1)
    kept.keeper()
    assert runtime.stat().st_mode & 0o777 == 0o700
    assert os.stat(address("job", "node").socket).st_mode & 0o777 == 0o600


def test_garbage_on_the_socket_ends_that_line_only(kept: Kept) -> None:
    keeper = kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1))
    for garbage in (b"\xff" * 8, b"\x02\0\0\0{}", wire.frame(wire.Allocate(ref=1, slot_bytes=1))):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address("job", "node").socket)
            connection.sendall(garbage)
            assert connection.recv(1) == b""
    assert keeper.poll() is None
    assert len(trainer.held()) == 1


def test_flipped_bit_in_a_slot_is_refused_by_slot_and_chunk(kept: Kept) -> None:
    keeper = kept.keeper()
    trainer = kept.trainer()
    held: dict[int, Held] = {}
    for step in (1, 2):
        trainer.save(step, state(step, 3 << 20))
        kept.notice(wire.Hashed)
    held = {one.generation.step: one for one in trainer.held()}
    arena = segment(keeper.pid)
    arena.view(held[2].slot)[(4 << 20) + 5] ^= 1
    arena.close()
    with pytest.raises(Corrupt, match=rf"slot {held[2].slot} of seat 0, step 2 .*chunk 1 "):
        trainer.load(Restore(held[2].generation, 1, Source.MEMORY))
    assert [one.generation.step for one in trainer.held()] == [1]
    assert trainer.load(Restore(held[1].generation, 1, Source.MEMORY)).tree["state"]["step"] == 1


def test_what_was_not_copied_again_must_be_what_it_was(kept: Kept) -> None:
    """DL-90: a bit that flips in a kept chunk while nobody looks makes the slot worthless, and the trainer hears of it.

    Once everything is copied again the slot counts again; so it does where only other chunks were written.
    """
    keeper = kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1, 4 << 20))
    kept.notice(wire.Hashed)
    ours = trainer._room.take(0)
    slot = next(slot for slot in ours.slots() if slot.generation)
    chunk = 4 << 20
    kept_ranges = ((chunk - 5, 2 * chunk + 5), (3 * chunk, slot.image_bytes))  # chunk 1, and 3 with the short last one

    def again(step: int, *unchanged: tuple[int, int]) -> None:
        ours.begin(slot.index)
        ours.view(slot.index)[100] = 32  # in chunk 0
        ours.publish(slot.index, Generation(0, step, RUN), 0, 1, slot.image_bytes)
        trainer._line.tell(wire.Published(slot=slot.index, seq=ours.seq(slot.index), unchanged=unchanged))

    again(2, *kept_ranges)
    assert kept.notice(wire.Hashed).generation.step == 2
    arena = segment(keeper.pid)
    arena.view(slot.index)[2 * chunk + 7] ^= 1  # nobody has vouched for chunk 2
    again(3, *kept_ranges)
    assert kept.notice(wire.Hashed).generation.step == 3
    arena.view(slot.index)[slot.image_bytes - 1] ^= 1
    arena.close()
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
    assert kept.notice(wire.Hashed).generation.step == 6
    assert [one.generation.step for one in trainer.held()] == [6]


def test_persist_commit_and_damage(kept: Kept, tmp_path: Path) -> None:
    """A flipped or shortened shard file is refused by name when it is loaded."""
    kept.keeper()
    trainer = kept.trainer(save_to=str(tmp_path))
    trainer.save(7, state(7))
    generation = kept.notice(wire.Hashed).generation
    trainer.persist(generation)
    file = kept.notice(wire.Persisted).file
    storage.commit(str(tmp_path), None, Manifest("job", generation, 1, (file,), 1.0), 2)
    restore = Restore(generation, 1, Source.STORAGE, str(tmp_path))
    assert trainer.load(restore).tree["state"]["step"] == 7
    path = tmp_path / storage.folder(generation) / file.name
    good = path.read_bytes()
    for bad, why in ((good[:-1], "bytes"), (good[:-1] + bytes([good[-1] ^ 1]), "chunk 0")):
        path.write_bytes(bad)
        with pytest.raises(Corrupt, match=rf"{file.name} of step 7.*{why}"):
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
        generation = kept.notice(wire.Hashed).generation
        trainer.persist(generation)
        for step in range(2, 6):  # memory checkpoints go on meanwhile
            assert trainer.save(step, state(step, 1 << 16)) is not None
            kept.notice(wire.Hashed)
        assert 1 in {one.generation.step for one in trainer.held()}, "a slot being persisted was written over"
        failed = kept.notice(wire.PersistFailed)
        assert failed.generation == generation
        assert "No space left" in failed.reason
        assert "free some space" in failed.reason
    finally:
        kept.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_too_large_a_state_is_refused_with_a_reason(kept: Kept) -> None:
    kept.keeper()
    link = KeeperLink.connect("job", "node", notify=lambda _: None, start=False)
    link.call(lambda ref: wire.Hello(ref=ref, seat=0, job="job"))
    reply, _ = link.call(lambda ref: wire.Allocate(ref=ref, slot_bytes=1 << 50))
    assert re.match(r"3 slots of 1126 TB need 3378 TB; .* are free: does not fit$", reply.reason)
    assert "fewer workers" in reply.hint
    link.close()


def test_fresh_run_forgets_and_reuses_the_pages(kept: Kept) -> None:
    kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1))
    generation = kept.notice(wire.Hashed).generation
    trainer.drop()
    assert [one.generation for one in trainer.held()] == [generation], "what this very run has saved stays"
    trainer.begin(uuid.uuid4().hex, 1, 0, 1)
    trainer.drop()
    assert trainer.held() == ()
    with pytest.raises(Corrupt, match="not held"):
        trainer.load(Restore(generation, 1, Source.MEMORY))
    assert trainer.save(2, state(2)) is not None


def test_a_forked_child_does_not_keep_the_line_open(kept: Kept, runtime: Path) -> None:
    """DataLoader workers outlive a killed trainer for seconds; the keeper must see the trainer's death at once."""
    keeper = kept.keeper("--linger-s", "0")
    gone, alive = os.pipe()
    pid = os.fork()
    if pid == 0:
        trainer = Checkpointer("job", "node", 0, start_keeper=False, deadline_s=WAIT_S)
        trainer.held()
        if os.fork() == 0:
            os.close(alive)
            os.read(gone, 1)  # until the test ends
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert keeper.wait(WAIT_S) == 0
    os.close(alive)
    os.close(gone)


def test_no_keeper_is_an_error_with_a_deadline(kept: Kept) -> None:
    trainer = kept.trainer(deadline_s=0.1)
    with pytest.raises(KeeperAway, match="no keeper"):
        trainer.held()
    assert trainer.save(1, state(1)) is None
    assert trainer.skipped == 1
    assert isinstance(trainer.error, KeeperAway)


def test_keeper_never_imports_torch(kept: Kept) -> None:
    keeper = kept.keeper()
    assert "torch" not in Path(f"/proc/{keeper.pid}/maps").read_text()
    assert PAGE == 4096
