"""A store that fails, fills up, hangs or forgets us: bounded, named, and nothing partial stays."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Iterator

import pytest

from dlrover_hooks.checkpoint.memory.keeper_segments import Found, Segment, prove
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.checkpoint.state.safetensors_layout import Inside, TensorSpec, header_bytes, plan
from dlrover_hooks.checkpoint.storage import generations, shard_writer
from dlrover_hooks.checkpoint.storage.master_storage import CommittedStorage
from dlrover_hooks.checkpoint.storage.stall_guard import STUCK, Attempt, AttemptAbandoned, StallGuard
from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, ShardFile
from dlrover_hooks.testing import Bucket, faulty_store
from tests.images import read_back

URL = "faulty://bucket/ck"
RUN = "a" * 32
NAME = "bucket/ck/step-0000000001-0000/shard-00001-model-00001-of-00001.safetensors"
DATA = os.urandom(20 << 20)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with faulty_store() as made:
        yield made


@pytest.fixture
def found() -> Iterator[Found]:
    """A hashed slot of rank 0 at step 1, 20 MiB: three parts of an upload."""
    which = Generation(0, 1, RUN)
    layout = plan([TensorSpec("state.w", "U8", (len(DATA),), len(DATA))])
    header = header_bytes(layout, Inside(which, 0, 1, {}))
    shared = SharedSegment.create(0, layout.total_bytes)
    shared.begin(0)
    view = shared.view(0, layout.total_bytes)
    view[:] = header + DATA
    shared.publish(0, which, 0, 1, layout.total_bytes)
    proof = prove(shared, 0, shared.seq(0))
    assert proof is not None
    del view
    yield Found(Segment(0, shared), proof)
    shared.close()


def persist(found: Found, patience: StallGuard | None = None) -> ShardFile:
    return shard_writer.persist(found, URL, {}, job="job", patience=patience or StallGuard(), wait=lambda _: None)


def commit(found: Found, file: ShardFile) -> None:
    generation = found.proof.slot.generation
    assert generation is not None
    CommittedStorage().commit(URL, None, Manifest("job", generation, 1, (file,), 1.0), 2)


class Fails:
    """Raises `error` at the first `times` requests of `verb`."""

    def __init__(self, verb: str, times: int, error: Exception) -> None:
        self.verb, self.left, self.error = verb, times, error

    def __call__(self, verb: str, path: str) -> None:
        if verb == self.verb and self.left:
            self.left -= 1
            raise self.error


@pytest.mark.parametrize("verb", ["open", "part", "end", "read", "ls"])
def test_a_failed_upload_is_aborted_and_tried_again(verb: str, bucket: Bucket, found: Found) -> None:
    """Neither a truncated object nor parts of an upload stay; fsspec's `with` block would publish the former."""
    bucket.fail = Fails(verb, 3, ConnectionResetError("the connection broke"))
    file = persist(found)
    assert bucket.uploads == {}
    assert file.nbytes == len(bucket.objects[NAME])
    bucket.objects.clear()
    bucket.fail = Fails(verb, 4, ConnectionResetError("the connection broke"))
    waits: list[float] = []
    with pytest.raises(StorageFailed, match="the connection broke"):
        shard_writer.persist(found, URL, {}, job="job", patience=StallGuard(), wait=waits.append)
    assert waits == list(shard_writer.BACKOFF_S)
    assert (bucket.objects, bucket.uploads) == ({}, {}) or verb == "ls"


def test_a_full_bucket_holds_nothing_partial(bucket: Bucket, found: Found) -> None:
    """What was committed before stays as it is."""
    commit(found, persist(found))
    before = dict(bucket.objects)
    bucket.room_bytes = sum(map(len, before.values())) + (10 << 20)
    with pytest.raises(StorageFailed, match="No space left") as caught:
        generations.write_shard(URL, None, Generation(0, 2, RUN), 0, 1, [memoryview(DATA)], len(DATA), job="job")
    assert "free some space" in caught.value.hint
    assert (bucket.objects, bucket.uploads) == (before, {})


def test_expired_credentials_are_looked_up_again(bucket: Bucket, found: Found) -> None:
    """The keeper and the master open the store again after a refusal, in one and the same process."""
    generations.probe(URL)

    def expire(verb: str, path: str) -> None:
        if verb == "part" and bucket.credentials == 0:
            bucket.credentials = 1
            raise PermissionError("the credentials have expired")

    bucket.fail = expire
    file = persist(found)
    bucket.credentials = 2
    commit(found, file)
    assert generations.scan(URL, None, "job").manifests[0].generation == found.proof.slot.generation


class Hang:
    """The first `times` requests of `verb` wait until `end`."""

    def __init__(self, bucket: Bucket) -> None:
        self.verb, self.times = "", 0
        self._over = threading.Event()
        bucket.fail = self

    def __call__(self, verb: str, path: str) -> None:
        if verb == self.verb and self.times:
            self.times -= 1
            self._over.wait(60)

    def end(self) -> None:
        """All wake up; returns when they have done what they still do."""
        self.times = 0
        self._over.set()
        for thread in threading.enumerate():
            if thread.name == "dlrover-hooks-store":
                thread.join(60)


@pytest.fixture
def hang(bucket: Bucket) -> Iterator[Hang]:
    made = Hang(bucket)
    yield made
    made.end()


@pytest.mark.parametrize("verb", ["part", "open", "ls", "end"])
def test_a_store_that_hangs_is_given_up_and_tried_again(verb: str, hang: Hang, bucket: Bucket, found: Found) -> None:
    """And what hung does no harm when it wakes up, though the slot has been used again meanwhile."""
    hang.verb, hang.times = verb, 1
    file = persist(found, StallGuard(stall_s=0.5))
    commit(found, file)
    found.segment.shared.view(0, found.proof.slot.image_bytes)[4096:] = bytes(found.proof.slot.image_bytes - 4096)
    hang.end()
    assert bucket.uploads == {}
    manifest = generations.manifest_of(URL, None, Generation(0, 1, RUN))
    assert read_back(URL, manifest, 0)[-len(DATA) :] == DATA


def test_what_was_given_up_during_its_last_piece_is_not_published() -> None:
    """That piece may have been read out of a slot that somebody else fills by now."""
    attempt = Attempt()
    pieces = attempt.through([memoryview(b"only one")])
    assert next(pieces) == b"only one"
    attempt.given_up = True
    with pytest.raises(AttemptAbandoned):
        next(pieces)


def test_a_store_that_never_answers_uses_up_no_threads(hang: Hang, found: Found) -> None:
    """A few calls may hang; while they do, the next ones fail at once."""
    hang.verb, hang.times = "read", 1000
    patience = StallGuard(stall_s=0.05)
    for _ in range(STUCK // 4):
        with pytest.raises(StorageFailed, match=r"nothing moved for 0\.05 s") as caught:
            persist(found, patience)
        assert "does not answer" in caught.value.hint
    before = threading.active_count()
    with pytest.raises(StorageFailed, match=f"{STUCK} calls before it still hang"):
        persist(found, patience)
    assert threading.active_count() == before
    hang.end()
    persist(found, StallGuard())


def test_the_masters_commit_is_bounded(hang: Hang, found: Found) -> None:
    """A commit that hangs has failed, and the next one goes on."""
    file = persist(found)
    hang.verb, hang.times = "put", 2
    folders = CommittedStorage(stall_s=0.2)
    manifest = Manifest("job", Generation(0, 1, RUN), 1, (file,), 1.0)
    with pytest.raises(StorageFailed, match="nothing moved"):
        folders.commit(URL, None, manifest, 2)
    folders.commit(URL, None, manifest, 2)
    hang.end()
    assert generations.scan(URL, None, "job").manifests == (manifest,)


def test_progress_is_reported(found: Found, bucket: Bucket) -> None:
    """While it lasts, not only at its end."""
    seen: list[int] = []
    heard = threading.Event()

    def report(attempt: Attempt) -> None:
        seen.append(attempt.nbytes)
        if attempt.nbytes:  # a slow first write has moved nothing yet
            heard.set()

    def wait(verb: str, path: str) -> None:
        if verb == "end":
            assert heard.wait(60)

    bucket.fail = wait
    patience = StallGuard(report_s=0.05)
    shard_writer.persist(found, URL, {}, job="job", patience=patience, report=report)
    assert seen == sorted(seen)
    assert 0 < max(seen) <= found.proof.slot.image_bytes


def o_direct(folder: str) -> bool:
    """Is a temporary file in `folder` open with O_DIRECT?"""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(folder):
                with open(f"/proc/self/fdinfo/{name}") as info:
                    return bool(int(info.read().split("flags:")[1].split()[0], 8) & os.O_DIRECT)
        except OSError:
            continue
    return False


@pytest.mark.parametrize("cut", [[0], [4096], [1], [4095, 8192], [8 << 20], [(8 << 20) + 1], [100, 4096 + 100], []])
def test_pieces_of_any_size_and_place_make_the_same_file(
    cut: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Page-aligned memory goes to the disk past the page cache, everything else lands right, too."""
    folder = tmp_path_factory.mktemp("direct")
    memory = mmap.mmap(-1, len(DATA))
    memory.write(DATA)
    borders = itertools.pairwise([0, *cut, len(DATA) - 777])
    pieces = [memoryview(memory)[a:b] for a, b in borders]
    direct: list[bool] = []

    def watched() -> Iterator[memoryview]:
        for piece in pieces:
            direct.append(o_direct(str(folder)))
            yield piece

    generations.StorageFolder(str(folder)).write("file", watched(), len(DATA))
    assert (folder / "file").read_bytes() == DATA[:-777]
    assert os.listdir(folder) == ["file"]
    if storage_refuses_odd_writes(str(folder)):
        assert all(direct)


def storage_refuses_odd_writes(folder: str) -> bool:
    """That is how a file system shows that it takes O_DIRECT seriously."""
    path = os.path.join(folder, "odd")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.write(fd, b"odd")
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.mark.parametrize("refusal", ["open", "write"])
def test_a_file_system_without_o_direct_is_written_through_the_cache(
    refusal: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silently; EINVAL at `open` (overlay on tmpfs, old kernels) or at the first write (some network mounts)."""
    folder = tmp_path_factory.mktemp("cached")
    open_, write = os.open, os.write

    def refuse_open(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return open_(path, flags, mode)

    def refuse_write(fd: int, data: memoryview) -> int:
        if o_direct(str(folder)):
            raise OSError(22, "Invalid argument")
        return write(fd, data)

    monkeypatch.setattr(os, refusal, refuse_open if refusal == "open" else refuse_write)
    generations.StorageFolder(str(folder)).write("file", [memoryview(bytearray(DATA))], len(DATA))
    monkeypatch.undo()
    assert (folder / "file").read_bytes() == DATA
