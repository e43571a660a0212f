"""Real keeper and trainer processes, killed wherever it hurts; what is restored is bit-exact."""

from __future__ import annotations

import os
import queue
import random
import shutil
import signal
import socket
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from dlrover_hooks import config
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc import keeper_connection as link, keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.checkpoint.ipc.unix_socket import address, welcome
from dlrover_hooks.checkpoint.memory.segment import PAGE, SharedSegment
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.errors import Corrupt, KeeperAway
from dlrover_hooks.protocol import Generation, KeeperAddress, Restore, Secret, Source
from dlrover_hooks.worker import startup
from tests import keepers
from tests.e2e.kept import RUN, Kept, ended, memfds, segment, state
from tests.waiting import WAIT_S, until

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


def stopped_in_a_copy(pid: int, shared: SharedSegment) -> int:
    """Stop child `pid` while it writes a slot: which one. Seen from here alone, the copy may be over by the kill."""
    while True:
        until(lambda: any(slot.torn for slot in shared.slots()), "a copy")
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # all its threads stand still
        if torn := [slot.index for slot in shared.slots() if slot.torn]:
            return torn[0]
        os.kill(pid, signal.SIGCONT)


def test_trainer_killed_in_the_middle_of_a_copy(kept: Kept) -> None:
    """22 SIGKILLs, each while a slot is being written: another slot is restored, bit-exact."""
    keeper, size, seed = kept.keeper(), 4 << 20, random.randrange(1 << 30)
    reader = kept.trainer(1)
    chance = random.Random(seed)
    for attempt in range(1, 23):
        pid = os.fork()
        if pid == 0:
            train_for_ever(attempt, size)
        kept.kill_at_end(pid)
        shared = until(lambda: segment(keeper.pid), "the shared")

        def newest(attempt: int = attempt, shared: SharedSegment = shared) -> Generation | None:
            found = [slot.generation for slot in shared.slots() if slot.generation and not slot.torn]
            return max((one for one in found if one.attempt == attempt), default=None)

        until(newest, "a first save")
        for _ in range(chance.randrange(4)):
            until(lambda shared=shared: not any(slot.torn for slot in shared.slots()), "a pause")
            until(lambda shared=shared: any(slot.torn for slot in shared.slots()), "a copy")
        torn = stopped_in_a_copy(pid, shared)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        after, whole = shared.slot(torn), newest()
        assert after.torn or after.generation is None, "the keeper frees it as soon as it notices"
        held = [one.generation for one in reader.held()]
        assert whole is not None
        assert max(held) == whole, f"seed {seed}, attempt {attempt}"
        for generation in held:
            tree = reader.load(Restore(generation, 1, Source.MEMORY)).tree
            assert tree["state"]["step"] == generation.step
            assert (tree["state"]["w"] == generation.step).all(), f"seed {seed}, attempt {attempt}"
            assert (tree["rank"]["rng"] == generation.step).all()
        assert not any(slot.torn for slot in shared.slots())
        shared.close()


def test_a_restarted_trainer_continues_in_the_same_pages(kept: Kept) -> None:
    """And what the dead one had published but nobody had hashed is found by the next one's first question."""
    keeper = kept.keeper()
    first = kept.trainer()
    assert first.save(1, state(1, 1 << 20)) is not None
    shared = segment(keeper.pid)
    assert os.fstat(shared.fd).st_blocks * 512 >= shared.nbytes
    shared.close()
    first.close()
    second = kept.trainer()
    assert [one.generation.step for one in second.held()] == [1]
    second.save(2, state(2, 1 << 20))
    kept.notice(keeper_messages.Hashed)
    assert len(memfds(keeper.pid)) == 1
    assert sorted(one.generation.step for one in second.held()) == [1, 2]


def test_a_grown_state_keeps_the_old_segment_until_complete(kept: Kept) -> None:
    kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1))
    old = kept.notice(keeper_messages.Hashed).generation
    trainer.complete(old)
    trainer.save(2, state(2, 1 << 20))
    new = kept.notice(keeper_messages.Hashed).generation
    assert {one.generation.step for one in trainer.held()} == {1, 2}
    assert trainer.load(Restore(old, 1, Source.MEMORY)).tree["state"]["step"] == 1
    trainer.complete(new)
    assert {one.generation.step for one in trainer.held()} == {2}


def test_loaded_tree_does_not_alias_the_segment(kept: Kept) -> None:
    keeper = kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1))
    tree = trainer.load(Restore(kept.notice(keeper_messages.Hashed).generation, 1, Source.MEMORY)).tree
    shared = segment(keeper.pid)
    for slot in shared.slots():
        shared.view(slot.index)[:] = bytes(shared.slot_bytes)
    shared.close()
    assert (tree["state"]["w"] == 1).all()


def test_killed_keeper_does_not_stop_training(kept: Kept, runtime: Path) -> None:
    """The next save goes, whole, into a new keeper that the trainer starts."""
    trainer = kept.trainer(start_keeper=True, linger_s=0)
    assert trainer.held() == ()
    for step in (1, 2):
        pid = kept.keeper_pid()
        kept.kill_at_end(pid)
        assert trainer.save(step, state(step)) is not None
        kept.notice(keeper_messages.Hashed)
        assert step in {one.generation.step for one in trainer.held()}
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: ended(pid), "the keeper's end")
        until(lambda step=step: saved_anew(trainer, 100 + step), "a save in a new keeper")
        kept.notice(keeper_messages.Hashed)
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
    """SIGSTOP, so nobody reads the socket: saves are skipped and counted, and go on when it is back."""
    keeper, longest = kept.keeper(), 0.0
    trainer = kept.trainer()
    trainer.save(1, state(1))
    kept.notice(keeper_messages.Hashed)
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
    while kept.notice(keeper_messages.Hashed).generation.step != 9999:
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
    (manifest,) = generations.scan(url, None, "job").manifests
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
    assert generations.scan(str(tmp_path), None, "job").manifests[0].generation.step == 1
    assert list(runtime.iterdir()) == []


def test_two_keepers_become_one(kept: Kept) -> None:
    first = kept.keeper()
    assert kept.keeper(ready=False).wait(WAIT_S) == 0
    assert first.poll() is None
    assert kept.keeper_pid() == first.pid


def test_two_jobs_of_one_node_have_a_keeper_each(kept: Kept) -> None:
    """Neither sees the other's memory, nor ends with it."""
    keepers = [kept.keeper(job=job) for job in ("one", "two")]
    trainers = [kept.trainer(job=job) for job in ("one", "two")]
    for step, trainer in enumerate(trainers, 1):
        trainer.save(step, state(step))
        kept.notice(keeper_messages.Hashed)
    assert [[one.generation.step for one in trainer.held()] for trainer in trainers] == [[1], [2]]
    keepers[0].kill()
    keepers[0].wait()
    trainers[1].save(3, state(3))
    assert kept.notice(keeper_messages.Hashed).generation.step == 3
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
    for garbage in (b"\xff" * 8, b"\x02\0\0\0{}", keeper_messages.frame(keeper_messages.Allocate(ref=1, slot_bytes=1))):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address("job", "node").socket)
            connection.sendall(garbage)
            assert connection.recv(1) == b""
    assert keeper.poll() is None
    assert len(trainer.held()) == 1


def test_fresh_run_forgets_and_reuses_the_pages(kept: Kept) -> None:
    kept.keeper()
    trainer = kept.trainer()
    trainer.save(1, state(1))
    generation = kept.notice(keeper_messages.Hashed).generation
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


@pytest.mark.parametrize("wrong", [{"port": 99999}, {"host": "a" * 300}], ids=["port", "host"])
def test_an_order_that_cannot_be_done_costs_no_memory(
    kept: Kept, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The keeper says why and lives on, with all that it holds; so does an address where nobody can be."""
    kept.keeper()
    trainer = kept.trainer()
    saved = trainer.save(1, state(1))
    assert saved is not None
    kept.notice(keeper_messages.Hashed)
    link = KeeperLink.connect("job", "node", notify=lambda _: None, start=False)
    order: dict[str, Any] = {"node": "n", "host": "127.0.0.1"}
    answer, _ = link.call(lambda ref: keeper_messages.Replicate(ref=ref, **order | wrong))
    assert isinstance(answer, keeper_messages.Refused)
    assert "cannot listen on" in answer.reason
    away: dict[str, Any] = (
        {"host": "127.0.0.1"} | wrong | {"port": 1}
    )  # a message with a port that cannot be is refused
    there = KeeperAddress("m", **away)
    answer, _ = link.call(lambda ref: keeper_messages.Replicate(ref=ref, secret=Secret("a" * 64), to=there, **order))
    assert isinstance(answer, keeper_messages.Replicating)
    until(lambda: "cannot be reached" in caplog.text, "the trainer hears that its image has no replica")
    link.close()
    assert [one.generation for one in trainer.held()] == [saved.generation]


def test_a_removed_runtime_folder_costs_no_memory(kept: Kept, runtime: Path) -> None:
    """Logging out removes /run/user/UID under a run that goes on: the next life finds what the last one left."""
    kept.keeper()
    trainer = kept.trainer()
    saved = trainer.save(1, state(1))
    assert saved is not None
    kept.notice(keeper_messages.Hashed)
    shutil.rmtree(runtime)
    trainer.close()
    second = kept.trainer()
    assert [one.generation for one in second.held()] == [saved.generation]


def test_a_launched_worker_without_a_keeper_goes_on_from_storage(tmp_path: Path) -> None:
    """It has no keeper to start: that is the launcher's. Another worker starts its own, or says why it cannot."""
    given, launched = config.load({}, job="job", save_to=str(tmp_path)), {"DLROVER_HOOKS_INCARNATION": "one"}
    trainer = Checkpointer("job", "node", 0, start_keeper=False, deadline_s=0.1)
    assert startup.attach(given, config.place(launched), "one", trainer).held == ()
    trainer.begin(RUN, 0, 0, 1)
    assert trainer.save(1, state(1)) is None
    assert trainer.skipped == 1
    with pytest.raises(KeeperAway):
        startup.attach(given, config.place({}), "one", trainer)
    trainer.close()


def test_a_keeper_that_nobody_finds_removes_nothing_of_its_successor(kept: Kept, runtime: Path) -> None:
    first = kept.keeper("--linger-s", "0")
    trainer = kept.trainer()
    trainer.held()
    until(lambda: not first.send_signal(signal.SIGSTOP), "it does not look")
    shutil.rmtree(runtime)
    second = kept.keeper()
    first.send_signal(signal.SIGCONT)
    trainer.close()
    assert first.wait(WAIT_S) == 0
    assert kept.keeper_pid() == second.pid


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


def test_what_storage_holds_is_read_while_the_keeper_starts(kept: Kept) -> None:
    """The first worker of a job asks nothing of the keeper that it starts; it waits where it takes its seat."""
    first = kept.trainer(start_keeper=True, linger_s=0.0)
    assert first.held() == ()
    assert not first._line.opened
    first.take_seat()
    assert first._line.opened
    second = kept.trainer(1, start_keeper=True, linger_s=0.0)
    assert second.held() == ()
    assert second._line.opened


def test_a_descriptor_that_comes_too_late_is_closed(kept: Kept) -> None:
    kept.keeper()
    line = KeeperLink.connect("job", "node", notify=lambda _: None, start=False)
    late: queue.SimpleQueue[Any] = queue.SimpleQueue()
    read, write = os.pipe()
    late.put((keeper_messages.Acknowledged(ref=7), write))  # between the end of the wait and its being given up
    line._give_up(7, late)
    assert os.read(read, 1) == b""
    os.close(read)
    line.close()


@pytest.mark.parametrize("fails", [True, False])
def test_a_keeper_that_a_worker_started_leaves_its_log_if_it_failed(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A last save that failed while no worker lived would leave no trace else."""
    monkeypatch.setattr(link, "_spawned", keepers._start)
    save_to = tmp_path / "saved"
    trainer = kept.trainer(start_keeper=True, linger_s=0.0, save_to=str(save_to))
    trainer.take_seat()
    if fails:
        save_to.write_text("a file, where a folder should be")
    keeper, at = psutil.Process(kept.keeper_pid()), address("job", "node")
    assert trainer.save(1, state(1)) is not None
    kept.notice(keeper_messages.Hashed)
    trainer.complete(Generation(0, 1, RUN))
    trainer.close()
    keeper.wait(WAIT_S)
    log = Path(at.log)
    assert ("was not made durable" in log.read_text()) if fails else not log.exists()
