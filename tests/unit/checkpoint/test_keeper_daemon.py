"""What a keeper's loop promises, on a real socket, in a thread: nobody waits for a slow store."""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc import keeper_client as line, keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.checkpoint.ipc.unix_socket import KeeperSocket, address, lock
from dlrover_hooks.checkpoint.keeper import hasher
from dlrover_hooks.checkpoint.keeper.daemon import Keeper
from dlrover_hooks.checkpoint.keeper.persist_queue import PersistQueue
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.checkpoint.save import progress_log
from dlrover_hooks.checkpoint.save.optimizer_gate import MemoryHold
from dlrover_hooks.checkpoint.save.overlap_policy import EAGER, Mode
from dlrover_hooks.checkpoint.save.overlapped_writer import LazyWriter
from dlrover_hooks.checkpoint.storage import generations as storage, shard_writer
from dlrover_hooks.checkpoint.storage.free_space import free_memory
from dlrover_hooks.checkpoint.storage.stall_guard import StallGuard
from dlrover_hooks.errors import HooksError, KeeperAway, Stale, StorageFailed, UsageError
from dlrover_hooks.protocol import Generation, Manifest, ShardFile
from dlrover_hooks.testing import faulty_store
from tests.images import read_back

RUN, FRESH = uuid.uuid4().hex, uuid.uuid4().hex
WAIT_S = 60.0


@pytest.fixture
def keeper(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("k")))
    at = address("job", "node")
    fd = lock(at.lock)
    assert fd is not None
    made = Keeper(KeeperSocket(at, fd), life_fd=None, linger_s=600.0, grace_s=5.0)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    os.close(fd)


class Rank:
    """A trainer in this process and what it was told."""

    def __init__(
        self,
        seat: int,
        save_to: Path | str | None = None,
        *,
        master: str = "",
        attempt: int = 0,
        world: int = 2,
        deadline_s: float = WAIT_S,
        **more: Any,
    ) -> None:
        self.notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.trainer = Checkpointer(
            "job",
            "node",
            seat,
            master=master,
            save_to=str(save_to) if save_to else None,
            notify=self.notices.put,
            start_keeper=False,
            deadline_s=deadline_s,
            **more,
        )
        self.trainer.begin(RUN, attempt, seat, world)

    def save(self, step: int) -> Any:
        saved = self.trainer.save(step, {"state": {"w": np.full(100, step)}})
        if saved is not None:
            assert isinstance(self.notices.get(timeout=WAIT_S), keeper_messages.Hashed)
            return saved.generation
        return None


def test_a_slow_store_holds_up_nobody_and_its_slot_is_not_reused(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hello, Allocate and Hash go on; saves alternate between the other two slots and skip rather than overwrite."""
    released = threading.Event()
    real = shard_writer.persist
    monkeypatch.setattr(shard_writer, "persist", lambda *args, **more: released.wait(WAIT_S) and real(*args, **more))
    first = Rank(0, tmp_path)
    generations = {seat: first.save(1) for seat in (0,)}
    first.trainer.complete(generations[0])
    first.trainer.persist(generations[0])
    newest = None
    for step in range(2, 8):
        newest = first.save(step)
        assert newest is not None
    second = Rank(1)
    assert second.save(1) is not None
    assert newest is not None
    first.trainer.complete(newest)
    assert first.save(8) is not None
    assert first.save(9) is None
    assert first.trainer.skipped == 1
    assert "no slot is free" in str(first.trainer.error)
    assert {1, 7, 8} <= {one.generation.step for one in first.trainer.held()}
    released.set()
    assert isinstance(first.notices.get(timeout=WAIT_S), keeper_messages.Persisted)
    assert first.save(10) is not None
    assert first.trainer.error is None
    for rank in (first, second):
        rank.trainer.close(finished=True)


def test_a_restarted_trainer_knows_what_is_still_being_persisted(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    released = threading.Event()
    monkeypatch.setattr(shard_writer, "persist", lambda *_, **__: (released.wait(WAIT_S), _fail())[1])
    first = Rank(0, tmp_path)
    generation = first.save(1)
    first.trainer.persist(generation)
    first.trainer.held()  # an answer: the keeper has seen all that was sent before
    first.trainer.close()
    again = Rank(0, tmp_path)
    for step in range(2, 7):
        again.save(step)
    assert 1 in {one.generation.step for one in again.trainer.held()}
    released.set()
    failed = again.notices.get(timeout=WAIT_S)
    assert isinstance(failed, keeper_messages.PersistFailed)
    assert "broken" in failed.reason
    again.trainer.close(finished=True)


def died(rank: Rank) -> None:
    """Its connection ends without a goodbye."""
    rank.trainer._line.open()._socket.shutdown(socket.SHUT_RDWR)


def test_a_trainers_death_costs_no_second_hash(keeper: Keeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each image is hashed once; its successor, and the last save, go by the hashes that are kept."""
    proved, real = list[int](), hasher.prove
    monkeypatch.setattr(hasher, "prove", lambda shared, index, seq: (proved.append(seq), real(shared, index, seq))[1])
    rank = Rank(0, tmp_path, world=1)
    for step in (1, 2, 3):
        rank.save(step)
    died(rank)
    again = Rank(0, world=1)
    assert {one.generation.step for one in again.trainer.held()} == {1, 2, 3}
    while not storage.scan(str(tmp_path), None, "job").manifests:
        again.trainer.held()
    assert len(proved) == 3
    for one in (rank, again):
        one.trainer.close(finished=True)


def test_a_slot_that_is_damaged_by_now_is_not_what_the_keeper_saves_last(keeper: Keeper, tmp_path: Path) -> None:
    """The newest generation does not match its hash any more; the one before it is made durable."""
    rank = Rank(0, tmp_path, world=1)
    older, newer = rank.save(1), rank.save(2)
    found = keeper.holdings.find(newer, 0, 1)
    assert found is not None
    slot = found.proof.slot
    found.segment.shared.view(slot.index)[slot.image_bytes - 1] ^= 1
    died(rank)
    again = Rank(0, world=1)
    while not (manifests := storage.scan(str(tmp_path), None, "job").manifests):
        again.trainer.held()
    assert [one.generation for one in manifests] == [older]
    assert [one.generation for one in again.trainer.held()] == [older]
    assert f"slot {slot.index} of seat 0" in keeper.holdings.damage[0]
    for one in (rank, again):
        one.trainer.close(finished=True)


def test_the_wait_for_hashes_grows_with_what_is_to_be_hashed(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much lies there, a restore out of memory is not skipped because a fixed time has passed."""
    released, real, call, allowed = threading.Event(), hasher.prove, KeeperLink.call, list[float]()
    monkeypatch.setattr(hasher, "prove", lambda *args: released.wait(WAIT_S) and real(*args))
    monkeypatch.setattr(line, "HASH_BYTES_PER_S", 10.0)

    def watched(self: KeeperLink, request: Any, *, timeout_s: float = 60.0) -> Any:
        allowed.append(timeout_s)
        if timeout_s > 2 * line.ANSWER_S:
            released.set()
        return call(self, request, timeout_s=timeout_s)

    rank = Rank(0)
    saved = rank.trainer.save(1, {"state": {"w": np.full(100, 1)}})
    assert saved is not None
    monkeypatch.setattr(KeeperLink, "call", watched)
    successor = Rank(1, deadline_s=0.1)
    assert [one.generation for one in successor.trainer.held()] == [saved.generation]
    assert max(allowed) >= line.ANSWER_S + 800 / 10
    for one in (rank, successor):
        one.trainer.close(finished=True)


def test_a_breakpoint_save_fights_no_successor(keeper: Keeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While it is written the successor is served, and does not write over its slot; then it is committed."""
    writing, released = threading.Event(), threading.Event()
    real = shard_writer.persist

    def slow(*args: Any, **more: Any) -> Any:
        writing.set()
        assert released.wait(WAIT_S)
        return real(*args, **more)

    monkeypatch.setattr(shard_writer, "persist", slow)
    first = Rank(0, tmp_path, world=1)
    left = first.save(1)
    died(first)
    assert writing.wait(WAIT_S)
    again = Rank(0, tmp_path, world=1, attempt=1)
    assert [one.generation for one in again.trainer.held()] == [left]
    for step in range(2, 7):
        assert again.save(step) is not None
        again.trainer.complete(Generation(1, step, RUN))
    assert left in {one.generation for one in again.trainer.held()}
    released.set()
    while not storage.scan(str(tmp_path), None, "job").manifests:
        again.trainer.held()
    assert storage.scan(str(tmp_path), None, "job").manifests[0].generation == left
    while again.trainer.generations.pending:
        again.trainer.held()
    for step in range(7, 10):
        assert again.save(step) is not None
    assert left not in {one.generation for one in again.trainer.held()}, "its slot is free again"
    for rank in (first, again):
        rank.trainer.close(finished=True)


def test_a_breakpoint_save_of_a_run_that_starts_anew_is_not_committed(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writing, released, over = threading.Event(), threading.Event(), threading.Event()
    real, will = shard_writer.persist, shard_writer.last_will

    def slow(*args: Any, **more: Any) -> Any:
        file = real(*args, **more)  # whole: the slot may be freed from here on
        writing.set()
        assert released.wait(WAIT_S)
        return file

    def watched(*args: Any, **more: Any) -> Any:
        try:
            return will(*args, **more)
        finally:
            over.set()

    monkeypatch.setattr(shard_writer, "persist", slow)
    monkeypatch.setattr(shard_writer, "last_will", watched)
    first = Rank(0, tmp_path, world=1)
    first.save(1)
    died(first)
    assert writing.wait(WAIT_S)
    fresh = Rank(0, tmp_path, world=1)
    fresh.trainer.begin(FRESH, 1, 0, 1)
    fresh.trainer.drop()
    released.set()
    assert over.wait(WAIT_S)
    assert storage.scan(str(tmp_path), None, "job").manifests == ()
    for rank in (first, fresh):
        rank.trainer.close(finished=True)


def _fail() -> None:
    raise StorageFailed("the store is broken")


def test_a_seat_taken_over_gets_memory_of_its_own(keeper: Keeper) -> None:
    """A hung trainer may still write its mapping: its successor must not share it."""
    hung, fresh = Rank(0), Rank(0)
    hung.save(1)
    assert [one.generation.step for one in fresh.trainer.held()] == [1]
    fresh.save(2)
    pages = [os.fstat(rank.trainer._segments.take(0).fd).st_ino for rank in (hung, fresh)]
    assert len(set(pages)) == 2
    hung.trainer.save(3, {"state": {"w": np.full(100, 3)}})  # into the old pages, which nobody hashes any more
    assert {one.generation.step for one in fresh.trainer.held()} == {1, 2}
    for rank in (hung, fresh):
        rank.trainer.close(finished=True)


def test_a_second_launch_gets_nothing_and_disturbs_nobody(keeper: Keeper) -> None:
    """Neither what the living one holds, nor its seat, nor any other; the living one's saves go on."""
    live = Rank(0, master="http://one")
    live.save(1)
    for seat in (0, 1):
        second = Rank(seat, master="http://two", attempt=7)
        for verb in (second.trainer.held, second.trainer.take_seat, second.trainer.drop):
            with pytest.raises(UsageError, match=f"process {os.getpid()} saves for local rank 0") as refused:
                verb()
            assert "--job" in refused.value.hint
        assert second.trainer.save(9, {"state": {"w": np.zeros(100)}}) is None
        assert isinstance(second.trainer.stale, Stale)
        second.trainer.close(finished=True)
    live.save(2)
    assert {one.generation.step for one in live.trainer.held()} == {1, 2}
    assert live.trainer.stale is None
    live.trainer.close()
    assert [one.generation.step for one in Rank(0, master="http://two").trainer.held()] == [1, 2]


def test_asking_takes_no_seat_and_who_loses_it_is_told(keeper: Keeper) -> None:
    """The successor that the master let in takes the seat when it begins, not when it asks what is held."""
    old = Rank(0, master="http://one", attempt=1)
    old.save(1)
    successor = Rank(0, master="http://one", attempt=2)
    successor.trainer.held()
    old.save(2)
    successor.trainer.take_seat()
    old.trainer.held()  # an answer: what the keeper said before it has arrived
    assert isinstance(old.trainer.stale, Stale)
    assert f"process {os.getpid()}" in str(old.trainer.stale)
    successor.save(3)
    again = Rank(0, master="http://one", attempt=1)
    with pytest.raises(UsageError, match="newer incarnation"):
        again.trainer.take_seat()
    assert successor.trainer.stale is None
    for rank in (old, successor, again):
        rank.trainer.close()


def test_a_fresh_run_forgets_the_runs_before_but_no_living_seat(keeper: Keeper) -> None:
    """Each rank drops when it begins; those that have begun, and saved, keep what they have."""
    gone = [Rank(seat) for seat in (0, 1)]
    for rank in gone:
        rank.save(5)
        rank.trainer.close()
    fresh = [Rank(seat) for seat in (0, 1)]
    for rank in fresh:
        rank.trainer.begin(FRESH, 1, rank.trainer.seat, 2)
    fresh[0].trainer.drop()
    assert fresh[0].trainer.held() == ()
    fresh[0].save(1)
    fresh[1].trainer.drop()
    assert [(one.generation.run, one.rank) for one in fresh[1].trainer.held()] == [(FRESH, 0)]
    for rank in fresh:
        rank.trainer.close(finished=True)


def test_a_generation_saved_again_is_made_durable_as_it_is_now(keeper: Keeper, tmp_path: Path) -> None:
    """The last step of a run may have been cut before; its random state is that of the end."""
    rank = Rank(0, tmp_path)
    for value in (1, 2):
        saved = rank.trainer.save(4, {"state": {"w": np.full(100, value)}})
        assert saved is not None
    rank.trainer.persist(saved.generation)
    while not isinstance(notice := rank.notices.get(timeout=WAIT_S), keeper_messages.Persisted):
        pass
    manifest = Manifest("job", saved.generation, 1, (notice.file,), 1.0)
    data = read_back(str(tmp_path), manifest, 0)
    assert bytes(np.full(100, 2)) in data
    assert len(rank.trainer.held()) == 1
    storage.commit(str(tmp_path), None, manifest, 2)
    assert rank.trainer.save(4, {"state": {"w": np.full(100, 3)}}) is not None
    rank.trainer.persist(saved.generation)
    while not isinstance(notice := rank.notices.get(timeout=WAIT_S), keeper_messages.Persisted):
        pass
    assert notice.file == manifest.files[0], "what is committed stays as it is"
    assert read_back(str(tmp_path), manifest, 0) == data
    rank.trainer.close(finished=True)


def test_all_workers_of_a_node_must_fit_before_one_gets_memory(keeper: Keeper) -> None:
    """The first one would fit alone; the refusal says what the node needs, and the second is not half made."""
    ranks = [Rank(seat, master="http://one") for seat in (0, 1)]
    for rank in ranks:
        rank.trainer.take_seat()
    for rank in ranks:
        rank.trainer.prepare(free_memory().nbytes // 5)
        while rank.trainer._segments._helper is not None:
            pass
        error = rank.trainer._segments._error
        assert isinstance(error, KeeperAway)
        assert " for each of 2 workers need " in error.message
        assert "does not fit" in error.message
        assert "fewer workers" in error.hint
    for rank in ranks:
        rank.trainer.close(finished=True)


def test_space_at_save_to_is_warned_about_once(
    keeper: Keeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the trainer's log, before the disk is full; nothing is raised or refused."""
    rank = Rank(0, tmp_path, world=1, keep=10**12)
    generation = rank.save(1)
    for step in range(2, 4):
        rank.trainer.persist(generation)
        while not isinstance(rank.notices.get(timeout=WAIT_S), keeper_messages.Persisted):
            pass
        generation = rank.save(step)
    rank.trainer.held()
    said = [record for record in caplog.records if "more generations of" in record.message]
    assert len(said) == 1
    assert said[0].levelname == "WARNING"
    assert "does not fit HINT: free some space" in said[0].message
    assert rank.trainer.skipped == 0
    rank.trainer.close(finished=True)


def test_memory_for_notes_is_not_worth_a_line(keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked for before anybody knows how large an image is: what is said of it would mislead."""
    caplog.set_level("INFO", "dlrover_hooks")
    rank = Rank(0)
    rank.trainer.prepare(0)
    rank.trainer.notes.leave(0, b"note")
    rank.trainer.held()
    while not rank.trainer.ready:
        os.sched_yield()
    assert rank.trainer.notes.recall() == (b"note",)
    assert rank.trainer.save(1, {"state": {"w": np.ones(100_000)}}) is not None
    (line,) = [record.message for record in caplog.records if "slots of" in record.message]
    assert re.search(r"slots of 8\d\d KB", line), line
    rank.trainer.close(finished=True)


def test_lock_is_one_keepers(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    assert lock(path) is not None
    assert lock(path) is None


def test_a_long_write_is_heard_of_in_rank_0s_log(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Now and then while it lasts, and how fast it was; the votes hear of none of it but the end."""
    caplog.set_level("INFO", "dlrover_hooks")
    monkeypatch.setattr(progress_log, "LARGE_BYTES", 1)
    keeper._shards._patience = StallGuard(report_s=0.05)  # pyright: ignore[reportPrivateUsage]
    say = progress_log.say
    with faulty_store() as bucket:
        heard = threading.Event()
        monkeypatch.setattr(progress_log, "say", lambda *args: (say(*args), heard.set()))
        bucket.fail = lambda verb, path: verb == "end" and heard.wait(WAIT_S)
        rank = Rank(0, save_to="faulty://bucket/ck")
        rank.trainer.persist(rank.save(1))
        assert isinstance(rank.notices.get(timeout=WAIT_S), keeper_messages.Persisted)
        rank.trainer.close(finished=True)
    assert re.search(r"step 1: \S+ KB of \S+ KB written in", caplog.text)
    assert re.search(r"step 1 is written: \S+ KB in", caplog.text)


def test_a_file_of_a_larger_world_gets_into_no_lone_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same generation may be saved again as a lone image, which has another file."""
    posts: queue.SimpleQueue[Any] = queue.SimpleQueue()
    shards, generation, known = PersistQueue(posts.put, lambda *_: None), Generation(0, 1, RUN), list[Any]()
    file = ShardFile("shard", 0, 1, 1, ("0",))

    def will(*_: Any, **given: Any) -> Manifest:
        known.append(dict(given["known"]))
        return Manifest("job", generation, 1, (file,), 0.0)

    monkeypatch.setattr(shard_writer, "persist", lambda *_, **__: file)
    monkeypatch.setattr(shard_writer, "last_will", will)
    found: Any = SimpleNamespace(proof=SimpleNamespace(slot=SimpleNamespace(rank=0)), segment=SimpleNamespace(seat=0))
    hello = keeper_messages.Hello(seat=0, job="job", save_to="somewhere")
    order = keeper_messages.Persist(generation=generation, rank=0, world_size=2, url="somewhere")
    shards.persist(found, hello, order)
    posts.get(timeout=WAIT_S)()
    for ranks in ([found], [found, found]):
        shards.last_will(ranks, generation, hello, lambda _: None, wanted=lambda: True)
        posts.get(timeout=WAIT_S)()
    assert known == [{}, {0: file}]


def test_a_file_that_comes_too_late_says_nothing_against_the_store(keeper: Keeper, tmp_path: Path) -> None:
    """A newer generation is committed: the store is not at fault, and nothing of the older one is left."""
    rank = Rank(0, tmp_path, world=1)
    old, new = rank.save(1), Generation(1, 2, RUN)
    file = storage.write_shard(str(tmp_path), None, new, 0, 1, [memoryview(b"x")], 1, job="job")
    storage.commit(str(tmp_path), None, Manifest("job", new, 1, (file,), 0.0), 2)
    rank.trainer.persist(old)
    failed = rank.notices.get(timeout=WAIT_S)
    assert isinstance(failed, keeper_messages.PersistFailed)
    assert failed.gone
    assert rank.trainer.generations.failed(old)
    assert {path.name for path in tmp_path.glob("step-*")} == {storage.folder(new)}
    rank.trainer.close(finished=True)


def test_a_copy_that_fails_costs_a_save_not_the_run(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "can't start new thread" where the number of processes is limited; behind the step, whatever is raised there."""
    rank = Rank(0, world=1)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(rank.trainer, "_write", fail)
        assert rank.save(1) is None
    assert "can't start new thread" in str(rank.trainer.error)
    assert rank.save(2) is not None
    rank.trainer.close(finished=True)
    dropped = list[HooksError]()
    writer, shot = LazyWriter(Mode(EAGER), dropped.append, tuple), SimpleNamespace(generation=Generation(0, 3, RUN))
    monkeypatch.setattr(writer, "_thawed", fail)
    nothing: Any = SimpleNamespace(left=None)
    writer._finish(shot, nothing, nothing, MemoryHold(lambda: None, ()))  # pyright: ignore[reportArgumentType]
    assert "was not saved: RuntimeError: can't start new thread" in str(dropped[0])
    writer.close()


def test_memory_is_asked_for_again_after_any_failure(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread could be started, or its work failed in an unexpected way: the next save begins another one."""
    rank = Rank(0, world=1)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no luck")

    for owner, name in ((threading.Thread, "start"), (SharedSegment, "attach")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            assert rank.save(1) is None
        assert "no luck" in str(rank.trainer.error)
    assert rank.save(2) is not None
    rank.trainer.close(finished=True)
