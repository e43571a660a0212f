"""A generation exists if and only if its MANIFEST does; damage is found and named; one job per URL."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES, digests
from dlrover_hooks.checkpoint.storage import catalog, damage_scan, generations, retention
from dlrover_hooks.checkpoint.storage.url_claim import UrlClaim
from dlrover_hooks.errors import Corrupt, SaveToBusy, Stale, StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, Retention
from dlrover_hooks.testing import faulty_store
from tests.images import image_around, read_back

RUN, FRESH = "a" * 32, "b" * 32
DATA = image_around(os.urandom(CHUNK_BYTES + 1000), Generation(0, 1, RUN))


@pytest.fixture(params=["local", "memory", "faulty"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "ck")
        return
    if request.param == "faulty":
        with faulty_store() as bucket:
            yield f"faulty://{tmp_path.name}"
            assert bucket.uploads == {}
        return
    yield f"memory://{tmp_path.name}"
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def generation(step: int, run: str = RUN, attempt: int = 0) -> Generation:
    return Generation(attempt, step, run)


def save(
    url: str, which: Generation, *, world: int = 2, keep: int | Retention = 2, data: bytes = DATA, job: str = "job"
) -> Manifest:
    view = memoryview(data)
    files = tuple(
        generations.write_shard(url, None, which, rank, world, [view[:7], view[7:]], len(data), job=job)
        for rank in range(world)
    )
    manifest = Manifest(job, which, world, files, float(which.step))
    generations.commit(url, None, manifest, keep)
    return manifest


def steps(url: str) -> list[int]:
    return [manifest.generation.step for manifest in generations.scan(url, None, "job").manifests]


def names(url: str) -> set[str]:
    return set(generations.StorageFolder(url).sizes()) - {".owner.lock"}


def test_write_commit_scan_read(url: str) -> None:
    generations.probe(url)
    assert generations.scan(url, None, "job") == generations.Scan()
    manifest = save(url, generation(5))
    assert manifest.files[0].chunks == digests(memoryview(DATA))
    assert generations.scan(url, None, "job").manifests == (manifest,)
    assert generations.scan(url, None, "other").manifests == ()
    assert read_back(url, manifest, 1) == DATA
    assert generations.manifest_of(url, None, generation(5)) == manifest
    assert names(url) == {"latest.json", "step-0000000005-0000"}


def test_without_manifest_it_does_not_exist_and_is_swept_later(url: str) -> None:
    generations.write_shard(url, None, generation(1), 0, 1, [memoryview(DATA)], len(DATA), job="job")
    generations.write_shard(url, None, generation(9), 0, 1, [memoryview(DATA)], len(DATA), job="job")
    assert steps(url) == []
    save(url, generation(5))
    assert names(url) == {"latest.json", "step-0000000005-0000", "step-0000000009-0000"}


def late(url: str, which: Generation, meanwhile: Callable[[], object] = lambda: None) -> None:
    """`which` is written; `meanwhile` is done after half of it."""

    def pieces() -> Iterator[memoryview]:
        yield memoryview(DATA)[:9]
        meanwhile()
        yield memoryview(DATA)[9:]

    generations.write_shard(url, None, which, 0, 1, pieces(), len(DATA), job="job")


def test_what_is_written_behind_a_newer_commit_leaves_nothing(url: str) -> None:
    """No further commit may come that would sweep it: the run may be over. What is committed is answered for."""
    old = save(url, generation(20), world=1)
    with pytest.raises(Stale, match="too late"):
        late(url, generation(10))
    with pytest.raises(Stale, match="too late"):
        late(url, generation(30), lambda: save(url, generation(40), world=1))
    with pytest.raises(Stale, match="too late"):
        generations.commit(url, None, msgspec.structs.replace(old, generation=generation(30)), 2)
    late(url, generation(20))
    generations.commit(url, None, old, 2)
    assert names(url) == {*(generations.folder(generation(step)) for step in (20, 40)), "latest.json"}


def test_what_is_damaged_outlives_nothing(url: str) -> None:
    """`FlashWriter` goes on from the newest that is whole."""
    save(url, generation(10))
    newest = save(url, generation(40))
    generations.StorageFolder(url).remove(f"{generations.folder(newest.generation)}/{newest.files[0].name}")
    save(url, generation(30))
    assert steps(url) == [30, 10]


def test_a_folder_that_comes_in_the_midst_of_a_commit_is_swept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = generations._point_latest

    def first(place: generations.StorageFolder, manifest: Manifest) -> None:
        late(url, generation(manifest.generation.step - 1))
        point(place, manifest)

    monkeypatch.setattr(generations, "_point_latest", first)
    save(url, generation(20))
    assert names(url) == {generations.folder(generation(20)), "latest.json"}


def test_a_folder_into_which_somebody_writes_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, unlink, left = str(tmp_path / "ck"), os.unlink, [3]
    save(url, generation(10))

    def late_unlink(path: Any, **more: Any) -> None:
        unlink(path, **more)
        if "step-" in str(path) and "shard" in str(path) and left[0]:
            left[0] -= 1
            (Path(path).parent / f"reading-{left[0]}").touch()

    monkeypatch.setattr(os, "unlink", late_unlink)
    retention.remove(generations.StorageFolder(url), generations.folder(generation(10)))
    assert names(url) == {"latest.json"}


def test_retention_keeps_the_newest_of_this_run(url: str) -> None:
    save(url, generation(3, FRESH))
    for step in (1, 2, 4, 8):
        save(url, generation(step))
    assert steps(url) == [8, 4]
    assert "step-0000000003-0000" in names(url)  # another run's: not ours to remove
    save(url, generation(6, attempt=1), keep=1)
    assert steps(url) == [6]


def test_retention_by_steps_and_time(url: str) -> None:
    """The newest two, the first one of each ten steps and of each 40 s; whatever the order of commits."""
    keep = Retention(last=2, every_steps=10, every="40s")  # `save` dates a generation by its step
    for step in (3, 9, 11, 14, 19, 20, 25, 41, 42, 43, 44):
        for _ in range(2):
            generations.commit(url, None, save(url, generation(step), keep=keep), keep)
    assert steps(url) == [44, 43, 41, 20, 11, 3]


def test_what_is_read_is_not_removed(url: str) -> None:
    """A reader's note holds retention off until it is done, or an hour after it died."""
    save(url, generation(1))
    with retention.reading(generations.StorageFolder(url), generation(1)):
        save(url, generation(2), keep=1)
        assert steps(url) == [2, 1]
        assert generations.scan(url, None, "job").damaged == ()
    note = f"{generations.folder(generation(1))}/reading-dead.json"
    generations.StorageFolder(url).put(note, b'{"until": 1.0}')
    save(url, generation(3), keep=1)
    assert steps(url) == [3]


def test_latest_is_pointed_only_at_what_exists(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the MANIFEST cannot be written nothing is committed, and `latest` still names the one before."""
    save(url, generation(1))
    before = generations.StorageFolder(url).read("latest.json")

    def fail(place: generations.StorageFolder, name: str, data: bytes) -> bool:
        raise StorageFailed("the MANIFEST cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(generations.StorageFolder, "put_new", fail)
        with pytest.raises(StorageFailed, match="the MANIFEST"):
            save(url, generation(2))
    assert generations.StorageFolder(url).read("latest.json") == before
    assert steps(url) == [1]
    save(url, generation(2))
    assert steps(url) == [2, 1]


def test_nothing_of_another_job_is_ever_written_over(url: str) -> None:
    """Neither its files nor its MANIFESTs; the refusal names the job, its newest step and the ways out."""
    theirs = [save(url, generation(step)) for step in (20, 40)]
    tree = {name: generations.StorageFolder(url).sizes(name) for name in names(url)}
    generations.refuse_others(url, None, "job")
    with pytest.raises(SaveToBusy, match="holds step 40 of job 'job'") as refused:
        generations.refuse_others(url, None, "other")
    assert "--job job" in refused.value.hint
    with pytest.raises(SaveToBusy, match="step 40 of job 'job'"):
        save(url, generation(40, FRESH), job="other")
    assert {name: generations.StorageFolder(url).sizes(name) for name in names(url)} == tree
    with pytest.raises(SaveToBusy):
        save(url, generation(50, FRESH), job="other")
    assert steps(url) == [40, 20]
    assert read_back(url, theirs[1], 1) == DATA


def test_a_run_that_starts_anew_removes_the_runs_before_with_its_first_commit(url: str) -> None:
    """Not earlier, and not those of a run that was not told to start from step 0."""
    for step in (20, 40):
        save(url, generation(step))
    generations.start_anew(url, None, "job", FRESH)
    assert steps(url) == [40, 20]
    save(url, generation(10, "c" * 32))
    assert "step-0000000040-0000" in names(url)
    save(url, generation(5, FRESH))
    assert names(url) == {"latest.json", "given-up.json", "step-0000000005-0000"}
    generations.start_anew(url, None, "job", FRESH)
    assert "fresh.json" not in names(url), "there is nothing before it"


def test_a_late_commit_of_a_run_that_was_given_up_is_refused(url: str) -> None:
    """The keeper of another node may hold something of it; `latest` would go back, and hide the fresh run."""
    old = save(url, generation(100))
    generations.start_anew(url, None, "job", FRESH)
    late = save(url, generation(110))  # the fresh run has nothing yet
    file = generations.write_shard(url, None, generation(120), 0, 1, [memoryview(DATA)], len(DATA), job="job")
    save(url, generation(10, FRESH))
    for manifest in (Manifest("job", generation(120), 1, (file,), 999.0), old, late):
        with pytest.raises(Stale, match="has started over"):
            generations.commit(url, None, manifest, 2)
    with pytest.raises(Stale, match="has started over"):
        generations.write_shard(url, None, generation(130), 0, 1, [memoryview(DATA)], len(DATA), job="job")
    assert steps(url) == [10]
    save(url, generation(20, FRESH))
    assert steps(url) == [20, 10]


def test_what_was_committed_just_as_its_run_was_given_up_is_passed_over(url: str) -> None:
    save(url, generation(100))
    generations.start_anew(url, None, "job", FRESH)
    save(url, generation(10, FRESH))
    place = generations.StorageFolder(url)
    marker = place.read("given-up.json")
    place.remove("given-up.json")
    save(url, generation(120))
    place.put("given-up.json", marker or b"")
    assert steps(url) == [10]


def test_any_jobs_newest_run_can_be_asked_for(url: str) -> None:
    save(url, generation(7, FRESH), job="theirs")
    save(url, generation(3), job="theirs")
    scan = generations.scan(url, None, None)
    assert [manifest.generation for manifest in scan.manifests] == [generation(3)]
    generations.finish(url, None, "theirs", RUN, 3)
    assert generations.scan(url, None, None).finished_step == 3


def test_commit_is_idempotent_and_latest_never_goes_back(url: str) -> None:
    old, new = save(url, generation(1)), save(url, generation(2))
    generations.commit(url, None, new, 2)
    generations.commit(url, None, old, 2)
    assert steps(url) == [2, 1]
    assert b'"step":2' in (generations.StorageFolder(url).read("latest.json") or b"")


def test_what_is_committed_is_not_written_again(url: str) -> None:
    """Another image of the same step would not match the hashes in the MANIFEST. Damaged, it is."""
    manifest = save(url, generation(1))
    again = generations.write_shard(url, None, generation(1), 0, 2, [memoryview(DATA[::-1])], len(DATA), job="job")
    assert again == manifest.files[0]
    assert read_back(url, manifest, 0) == DATA
    generations.StorageFolder(url).put(f"step-0000000001-0000/{again.name}", b"short")
    assert save(url, generation(1), data=DATA[::-1]).files != manifest.files
    assert steps(url) == [1]


def test_commit_refuses_what_is_not_whole(url: str) -> None:
    file = generations.write_shard(url, None, generation(1), 0, 2, [memoryview(DATA)], len(DATA), job="job")
    with pytest.raises(StorageFailed, match="all 2 ranks"):
        generations.commit(url, None, Manifest("job", generation(1), 2, (file,), 1.0), 2)
    generations.StorageFolder(url).put(f"{generations.folder(generation(1))}/{file.name}", DATA[:-1])
    with pytest.raises(StorageFailed, match=r"expected \d+ bytes, found \d+"):
        generations.commit(url, None, Manifest("job", generation(1), 1, (file,), 1.0), 2)
    assert steps(url) == []


def test_a_fresh_run_hides_the_old_one_and_may_write_over_its_steps(url: str) -> None:
    save(url, generation(1))
    save(url, generation(2), world=3)
    save(url, generation(2, FRESH), data=DATA[::-1])
    scan = generations.scan(url, None, "job")
    assert [manifest.generation for manifest in scan.manifests] == [generation(2, FRESH)]
    assert scan.damaged == ()
    home = generations.folder(generation(2))
    assert (
        len(generations.StorageFolder(url).sizes(home)) == 3
    )  # two ranks and the MANIFEST; the third rank's old file is gone


def test_finished_belongs_to_its_run(url: str) -> None:
    save(url, generation(1))
    generations.finish(url, None, "job", RUN, 1)
    assert generations.scan(url, None, "job").finished_step == 1
    assert generations.scan(url, None, "other").finished_step is None
    save(url, generation(1, FRESH))
    assert generations.scan(url, None, "job").finished_step is None


@pytest.mark.parametrize("damage", [b"", b"{", b'{"job": 1}', b"\xff\xfe"])
def test_damaged_manifest_is_passed_over_and_named(url: str, damage: bytes) -> None:
    save(url, generation(1))
    save(url, generation(2))
    generations.StorageFolder(url).put("step-0000000002-0000/MANIFEST.json", damage)
    scan = generations.scan(url, None, "job")
    assert [manifest.generation.step for manifest in scan.manifests] == [1]
    assert "step-0000000002-0000" in scan.damaged[0]


def test_damaged_latest_is_named_and_the_last_run_taken(url: str) -> None:
    save(url, generation(1))
    generations.StorageFolder(url).put("latest.json", b"{")
    scan = generations.scan(url, None, "job")
    assert len(scan.manifests) == 1
    assert "latest.json" in scan.damaged[0]


def test_a_bit_flip_in_latest_hides_no_generation(tmp_path: Path) -> None:
    """Each flip is found, or changes nothing; the newest whole generation is taken, and the damage is named."""
    url, path = str(tmp_path), tmp_path / "latest.json"
    for step in (1, 2, 3):
        save(url, generation(step), keep=3)
    data = path.read_bytes()
    good = catalog.decode(data, catalog.Latest)
    assert good == catalog.Latest("job", generation(3), generations.folder(generation(3)))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert catalog.decode(bytes(flipped), catalog.Latest) in (good, None)
    path.write_bytes(data.replace(RUN[:4].encode(), b"aaba", 1))
    scan = generations.scan(url, None, "job")
    assert [manifest.generation.step for manifest in scan.manifests] == [3, 2, 1]
    assert "latest.json: cannot be read, or does not match its hash; step 3" in scan.damaged[0]


def test_a_latest_of_an_unknown_run_hides_no_generation(url: str) -> None:
    """Its folder was removed, or it was written by hand; one without a digest is an older release's."""
    save(url, generation(4))
    row = catalog.Latest("job", generation(9, FRESH), generations.folder(generation(9, FRESH)))
    generations.StorageFolder(url).put("latest.json", msgspec.json.encode(row))
    assert steps(url) == [4]
    damaged = generations.scan(url, None, "job").damaged
    assert "names a run of which nothing is there; step 4" in damaged[-1]
    assert [
        *damage_scan.tree_faults(generations.StorageFolder(url), catalog.listing(generations.StorageFolder(url)))
    ] == [f"latest.json: names {row.generation}, which is not there or not whole"]


def test_a_manifest_that_became_another_runs_is_named(url: str) -> None:
    """One bit of the run's name: it is whole by itself, but `latest` knows that it was of this run."""
    save(url, generation(1))
    manifest = save(url, generation(2))
    other = msgspec.structs.replace(manifest, generation=generation(2, run=RUN[:-1] + chr(ord(RUN[-1]) ^ 1)))
    generations.StorageFolder(url).put("step-0000000002-0000/MANIFEST.json", msgspec.json.encode(other))
    assert steps(url) == [1]
    assert "step-0000000002-0000" in generations.scan(url, None, "job").damaged[0]


def test_truncated_file_is_passed_over(url: str) -> None:
    save(url, generation(1))
    manifest = save(url, generation(2))
    name = f"step-0000000002-0000/{manifest.files[1].name}"
    generations.StorageFolder(url).put(name, DATA[:-5])
    assert steps(url) == [1]
    with pytest.raises(Corrupt, match=rf"step-0000000002-0000/{manifest.files[1].name}: expected {len(DATA)} bytes"):
        read_back(url, manifest, 1)


@pytest.mark.parametrize(("at", "chunk"), [(0, 0), (CHUNK_BYTES - 1, 0), (CHUNK_BYTES, 1), (len(DATA) - 1, 1)])
def test_bit_flip_is_named_by_file_chunk_and_generation(url: str, at: int, chunk: int) -> None:
    manifest = save(url, generation(2), world=1)
    flipped = bytearray(DATA)
    flipped[at] ^= 1
    generations.StorageFolder(url).put(f"step-0000000002-0000/{manifest.files[0].name}", bytes(flipped))
    with pytest.raises(Corrupt, match=rf"step-0000000002-0000/{manifest.files[0].name}: chunk {chunk} "):
        read_back(url, manifest, 0)


def test_a_manifest_is_put_once(url: str) -> None:
    """Of two writers the quicker one's stays, and the other hears of it."""
    place = generations.StorageFolder(url)
    place.make()
    assert place.put_new("one.json", b"1")
    assert not place.put_new("one.json", b"2")
    assert place.read("one.json") == b"1"
    mine = save(url, generation(1), world=1)
    other = msgspec.structs.replace(mine, files=(msgspec.structs.replace(mine.files[0], chunks=("0",)),))
    with pytest.raises(StorageFailed, match="is not that of step 1"):
        generations.commit(url, None, other, 2)
    assert names(url) - {"one.json"} == {"latest.json", "step-0000000001-0000"}


def test_what_a_dead_writer_left_is_swept(tmp_path: Path) -> None:
    """Temporary files an hour old, not those that somebody writes now."""
    old, new = tmp_path / "latest.json.1-1.tmp", tmp_path / "latest.json.2-2.tmp"
    old.touch()
    new.touch()
    os.utime(old, (1.0, 1.0))
    save(str(tmp_path), generation(1))
    assert names(str(tmp_path)) == {"latest.json", "step-0000000001-0000", new.name}


def test_temporary_files_of_others_stay_and_stop_no_commit(tmp_path: Path) -> None:
    """A SIGKILL inside Accelerate's save_state leaves a folder `*.tmp`; notes.tmp is the user's."""
    folder, notes, odd = tmp_path / ".mine.7.behind.tmp", tmp_path / "notes.tmp", tmp_path / "latest.json.3-3.tmp"
    for one in (folder, odd):
        one.mkdir()
    notes.touch()
    for one in (folder, notes, odd):
        os.utime(one, (1.0, 1.0))
    save(str(tmp_path), generation(1))
    assert names(str(tmp_path)) == {"latest.json", "step-0000000001-0000", folder.name, notes.name, odd.name}


def test_what_others_put_beside_the_files_stays_and_stops_no_commit(url: str) -> None:
    """File servers put folders into every folder. Of our own files those go that the MANIFEST does not name."""
    place, home = generations.StorageFolder(url), "step-0000000001-0000"
    generations.write_shard(url, None, generation(1), 2, 3, [memoryview(DATA)], len(DATA), job="job")
    place.put(f"{home}/notes.txt", b"mine")
    place.make(f"{home}/@eaDir")
    place.put(f"{home}/@eaDir/thumb", b"theirs")
    manifest = save(url, generation(1))
    assert steps(url) == [1]
    assert set(place.sizes(home)) == {"MANIFEST.json", "notes.txt", "@eaDir", *(file.name for file in manifest.files)}
    save(url, generation(2), keep=1)
    assert names(url) == {"latest.json", "step-0000000002-0000"}


def test_what_cannot_be_removed_stops_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NFS keeps what is open as `.nfs*`: all else is removed, it is said once, and tried again."""
    url, homes = str(tmp_path), [tmp_path / generations.folder(generation(step)) for step in (1, 2)]
    for step in (1, 2):
        save(url, generation(step))
    (homes[0] / ".nfs0001").touch()
    remove = os.unlink

    def busy(path: str, **options: int) -> None:
        if ".nfs" in str(path):
            raise OSError(16, "Device or resource busy")
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", busy)
        for step in (3, 4):
            save(url, generation(step), keep=1)
            assert steps(url) == [step]
    assert os.listdir(homes[0]) == [".nfs0001"]
    assert not homes[1].exists()
    assert caplog.text.count("step-0000000001-0000 is not removed and takes up space") == 1
    save(url, generation(5), keep=1)
    assert not homes[0].exists()


def test_older_runs_that_cannot_be_removed_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `--fresh`, too: the first commit of the new run counts, and a later one removes the rest."""
    url = str(tmp_path)
    save(url, generation(1))
    generations.start_anew(url, None, "job", FRESH)

    def fail(place: generations.StorageFolder, name: str) -> None:
        raise StorageFailed(f"cannot remove {name}: Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(generations.StorageFolder, "remove", fail)
        save(url, generation(1, FRESH, attempt=1))
    assert steps(url) == [1]
    assert (tmp_path / "step-0000000001-0000").exists()
    save(url, generation(2, FRESH, attempt=1))
    assert names(url) == {"given-up.json", "latest.json", "step-0000000001-0001", "step-0000000002-0001"}


def test_a_file_that_is_gone_is_named(url: str) -> None:
    manifest = save(url, generation(2), world=1)
    generations.StorageFolder(url).remove(f"step-0000000002-0000/{manifest.files[0].name}")
    with pytest.raises(Corrupt, match=rf"step-0000000002-0000/{manifest.files[0].name}: there is no such file"):
        read_back(url, manifest, 0)


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="wrote 3, found 3"):
        generations.write_shard(str(tmp_path), None, generation(1), 0, 1, [memoryview(b"abc")], 4, job="job")

    def broken() -> Iterator[memoryview]:
        yield memoryview(b"abc")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageFailed, match="No space left") as caught:
        generations.write_shard(str(tmp_path), None, generation(2), 0, 1, broken(), 4, job="job")
    assert "free some space" in caught.value.hint
    assert os.listdir(tmp_path / "step-0000000002-0000") == []


def test_probe_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match=r"Not a directory|File exists") as caught:
        generations.probe(str(tmp_path / "file" / "ck"))
    assert "folder" in caught.value.hint
    with pytest.raises(StorageFailed, match="nosuch"):
        generations.probe("nosuch://bucket/ck")


def test_probe_of_an_unwritable_folder() -> None:
    with pytest.raises(StorageFailed, match="cannot") as caught:
        generations.probe("/proc/self/ck")  # refuses root too
    assert caught.value.hint


def test_claim_is_one_jobs_and_may_be_taken_twice_by_it(url: str) -> None:
    first, second = (UrlClaim.take(url, None, "job", "pid 1") for _ in range(2))
    with pytest.raises(SaveToBusy, match=r"'job' \(pid 1\)"):
        UrlClaim.take(url, None, "other", "pid 2")
    first.release()
    with pytest.raises(SaveToBusy):
        UrlClaim.take(url, None, "other", "pid 2")
    second.release()
    UrlClaim.take(url, None, "other", "pid 2").release()


HOLD = (
    "from dlrover_hooks.checkpoint.storage.url_claim import UrlClaim; import sys; "
    "c = UrlClaim.take({!r}, None, {!r}, 'other process'); print('held', flush=True); sys.stdin.read()"
)


def test_claim_ends_with_its_process(tmp_path: Path) -> None:
    """Two live jobs on one URL are refused; a killed one does not stand in the way. Not even the same job's twice."""
    url = str(tmp_path)
    code = HOLD.format(url, "theirs")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SaveToBusy, match=r"'theirs' \(other process\)"):
            UrlClaim.take(url, None, "ours", "us")
        holder = generations.holder(url)
        assert holder is not None
        assert holder.job == "theirs"
        other.kill()
        other.wait()
    UrlClaim.take(url, None, "ours", "us").release()


def test_storage_is_torch_free() -> None:
    modules = "dlrover_hooks.checkpoint.storage.generations, dlrover_hooks.checkpoint.keeper.daemon"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


rules = st.builds(
    Retention,
    last=st.integers(1, 4),
    every_steps=st.none() | st.integers(1, 30),
    every=st.none() | st.integers(1, 50).map(lambda s: f"{s}s"),
)


@given(rules, st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100)), min_size=1, unique=True))
def test_retention_step_by_step_is_retention_at_once(keep: Retention, saved: list[tuple[int, int]]) -> None:
    """Whatever earlier commits removed, the same stays; the newest and the first of each span among it."""
    left: list[Manifest] = []
    for attempt, step in sorted(saved):
        left.append(Manifest("job", generation(step, attempt=attempt), 1, (), float(step + 1000 * attempt)))
        stays = retention.kept(left, keep)
        assert left[-1].generation in stays
        left = [one for one in left if one.generation in stays]
    everything = [Manifest("job", generation(s, attempt=a), 1, (), float(s + 1000 * a)) for a, s in saved]
    assert {one.generation for one in left} == retention.kept(everything, keep)
