"""A tree as anybody may leave it: nothing in it stops a start, a commit or a look, or passes for whole."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover_hooks.checkpoint.storage import catalog, generations
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
from dlrover_hooks.config import Config
from dlrover_hooks.errors import Corrupt, NoCheckpoint, StorageFailed
from dlrover_hooks.protocol import Generation, Manifest, Retention
from dlrover_hooks.testing import Bucket, FaultyStore, faulty_store
from dlrover_hooks.worker import startup

RUN = "a" * 32
DATA = memoryview(b"x" * 5000)


def save(url: str, step: int, *, run: str = RUN, keep: int | Retention = 99, job: str = "job") -> Manifest:
    which = Generation(0, step, run)
    file = generations.write_shard(url, None, which, 0, 1, [DATA], len(DATA), job=job)
    manifest = Manifest(job, which, 1, (file,), time.time())
    generations.commit(url, None, manifest, keep)
    return manifest


def steps(url: str) -> list[int]:
    return [manifest.generation.step for manifest in generations.scan(url, None, "job").manifests]


def home(url: str, step: int) -> Path:
    return Path(url) / generations.folder(Generation(0, step, RUN))


@pytest.fixture
def tree(tmp_path: Path) -> str:
    """Steps 1 to 3, whole."""
    url = str(tmp_path / "ck")
    for step in (1, 2, 3):
        save(url, step)
    return url


def forge(url: str, step: int, **fields: Any) -> None:
    """A MANIFEST of `step` that says `fields`."""
    home(url, step).mkdir(exist_ok=True)
    manifest = msgspec.structs.replace(Manifest("job", Generation(0, step, RUN), 1, (), time.time()), **fields)
    (home(url, step) / catalog.MANIFEST).write_bytes(msgspec.json.encode(manifest))


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_manifest_of_no_ranks_is_not_whole(tree: str, world_size: int) -> None:
    """It would be the newest, and retention would remove what is whole in its favour."""
    forge(tree, 50, world_size=world_size)
    assert steps(tree) == [3, 2, 1]
    save(tree, 4, keep=2)
    assert steps(tree) == [4, 3]
    with pytest.raises(StorageFailed, match=f"{world_size} ranks"):
        generations.commit(tree, None, Manifest("job", Generation(0, 60, RUN), world_size, (), 1.0), 1)
    assert steps(tree) == [4, 3]


@pytest.mark.parametrize("step", [1 << 63, 10**30])
def test_a_step_that_cannot_be_is_not_whole(tree: str, step: int) -> None:
    """It would stay the newest for ever, and no counter could go on from it."""
    whole = generations.manifest_of(tree, None, Generation(0, 3, RUN))
    home(tree, step).mkdir()
    (home(tree, step) / whole.files[0].name).write_bytes(DATA)
    forge(tree, step, files=whole.files)
    assert steps(tree) == [3, 2, 1]


def test_a_folder_is_not_a_file_of_minus_one_byte(tree: str) -> None:
    whole = generations.manifest_of(tree, None, Generation(0, 3, RUN))
    (home(tree, 9) / whole.files[0].name).mkdir(parents=True)
    forge(tree, 9, files=(msgspec.structs.replace(whole.files[0], nbytes=-1),))
    assert steps(tree) == [3, 2, 1]


def unreadable(bucket: Bucket, step: int, times: int = 1000) -> None:
    """The store does not give the MANIFEST of `step`."""
    left = [times]

    def fail(verb: str, path: str) -> None:
        if verb == "read" and path.endswith(f"{step:010d}-0000/MANIFEST.json") and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")

    bucket.fail = fail


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """Steps 1 to 3, whole, at faulty://ck."""
    with faulty_store() as made:
        for step in (1, 2, 3):
            save("faulty://ck", step)
        yield made


def test_one_manifest_that_cannot_be_read_stops_nothing(bucket: Bucket) -> None:
    """A start, a commit, a look: each goes on, and names it. Nobody knows whose it is, so it stays."""
    unreadable(bucket, 1)
    generations.refuse_others("faulty://ck", None, "job")
    scan = generations.scan("faulty://ck", None, "job")
    assert [manifest.generation.step for manifest in scan.manifests] == [3, 2]
    (line,) = scan.damaged
    assert line.endswith("step-0000000001-0000: MANIFEST.json cannot be read: Input/output error")
    generations.start_anew("faulty://ck", None, "job", "b" * 32)
    save("faulty://ck", 4, run="b" * 32, keep=1)
    assert {one.step for one in catalog.listing(StorageFolder("faulty://ck"))} == {1, 4}
    bucket.fail = lambda verb, path: None
    assert {one.step: one.fault for one in catalog.listing(StorageFolder("faulty://ck"))} == {1: None, 4: None}


def test_the_step_itself_is_not_written_over(bucket: Bucket) -> None:
    unreadable(bucket, 2)
    with pytest.raises(StorageFailed, match=r"step-0000000002-0000/MANIFEST.json: Input/output error"):
        save("faulty://ck", 2, run="b" * 32)


def test_a_glitch_does_not_cost_the_newest(bucket: Bucket) -> None:
    unreadable(bucket, 3, times=1)
    assert steps("faulty://ck") == [3, 2, 1]


def test_to_read_nothing_is_not_to_find_nothing(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """A run would silently begin at step 0. A caller that does not ask what there is hears of it all the same."""
    for step in (1, 2):
        StorageFolder("faulty://ck").remove_folder(f"step-{step:010d}-0000")
    unreadable(bucket, 3)
    with pytest.raises(StorageFailed, match=r"step-0000000003-0000: MANIFEST.json cannot be read: Input") as caught:
        generations.scan("faulty://ck", None, "job")
    assert caught.value.hint
    generations.refuse_others("faulty://ck", None, "job")
    assert "Whose it is is not known: it stays" in caplog.text


def test_a_folder_that_cannot_be_listed_is_neither_swept_nor_counted(bucket: Bucket) -> None:
    def fail(verb: str, path: str) -> None:
        if verb == "ls" and "0000000002" in path:
            raise PermissionError(errno.EACCES, "Permission denied")

    bucket.fail = fail
    assert steps("faulty://ck") == [3, 1]
    save("faulty://ck", 4, keep=1)
    bucket.fail = lambda verb, path: None
    assert steps("faulty://ck") == [4, 2]


def test_a_linked_generation_stays_with_whoever_linked_it(tree: str, caplog: pytest.LogCaptureFixture) -> None:
    """Moved to another disk and linked back: it is read, but neither it nor what lies behind the link is removed."""
    elsewhere = Path(tree).parent / "disk"
    home(tree, 1).rename(elsewhere)
    home(tree, 1).symlink_to(elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    assert steps(tree) == [3, 2, 1]
    for step in (4, 5):
        save(tree, step, keep=1)
    assert steps(tree) == [5, 1]
    assert home(tree, 1).is_symlink()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    assert caplog.text.count("step-0000000001-0000 is a link: what retention does not keep is not removed there") == 1
    generations.start_anew(tree, None, "job", "b" * 32)
    save(tree, 1000, run="b" * 32)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_a_linked_folder_that_was_never_committed_is_not_swept(tree: str) -> None:
    elsewhere = Path(tree).parent / "disk"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    home(tree, 0).symlink_to(elsewhere)
    save(tree, 4, keep=1)
    assert list(elsewhere.iterdir()) == [elsewhere / "mine"]
    assert home(tree, 0).is_symlink()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def huge(path: Path) -> None:
    os.truncate(path, 3 << 30)  # sparse


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (pipe, "it is no regular file"),
        (folder, "it is no regular file"),
        (huge, "it has more than the 268435456 bytes"),
    ],
)
def test_what_is_no_small_file_is_named_and_not_read(tree: str, spoil: Callable[[Path], None], why: str) -> None:
    """Neither waited for (a pipe) nor taken into memory: a MANIFEST, `latest`, a reader's note."""
    spoil(home(tree, 1) / catalog.MANIFEST)
    for path in (Path(tree) / catalog.LATEST, home(tree, 2) / "reading-me.json"):
        path.touch()
        spoil(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scan = generations.scan(tree, None, "job")
    assert [manifest.generation.step for manifest in scan.manifests] == [3, 2]
    assert f"step-0000000001-0000: MANIFEST.json cannot be read: {why}" in scan.damaged[0]
    assert "latest.json: cannot be read" in scan.damaged[1]
    if spoil is not folder:  # nothing is put in the place of a folder
        save(tree, 4, keep=1)
        assert steps(tree) == [4]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (400 << 10)


def test_no_more_than_a_small_file_is_read_from_a_store(bucket: Bucket) -> None:
    bucket.objects["ck/latest.json"] = bytes(2 << 20)
    bucket.objects["ck/step-0000000001-0000/MANIFEST.json"] = b""
    scan = generations.scan("faulty://ck", None, "job")
    assert [manifest.generation.step for manifest in scan.manifests] == [3, 2]
    assert len(scan.damaged) == 2
    with pytest.raises(Corrupt, match=r"latest.json: it has more than the 1048576 bytes"):
        StorageFolder("faulty://ck").read("latest.json")


def test_a_store_that_has_no_range_of_nothing(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers 416 then."""
    bucket.objects["ck/latest.json"] = b""
    cat_file = FaultyStore.cat_file

    def refuse(store: FaultyStore, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if not (data := cat_file(store, path, start, end)):
            raise OSError("416 Requested Range Not Satisfiable")
        return data

    monkeypatch.setattr(FaultyStore, "cat_file", refuse)
    assert StorageFolder("faulty://ck").read("latest.json") == b""
    assert steps("faulty://ck") == [3, 2, 1]


def test_a_pipe_is_no_shard(tree: str) -> None:
    """`verify` would wait for it."""
    whole = generations.manifest_of(tree, None, Generation(0, 3, RUN))
    forge(tree, 9, files=(msgspec.structs.replace(whole.files[0], nbytes=0, chunks=()),))
    os.mkfifo(home(tree, 9) / whole.files[0].name)
    assert steps(tree) == [3, 2, 1]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was listed or read."""
    made: list[str] = []
    entries, read = StorageFolder.entries, StorageFolder.read

    def watch_entries(place: StorageFolder, name: str = "") -> dict[str, Any]:
        made.append(name)
        return entries(place, name)

    def watch_read(place: StorageFolder, name: str, *limit: int) -> bytes | None:
        made.append(name)
        return read(place, name, *limit)

    monkeypatch.setattr(StorageFolder, "entries", watch_entries)
    monkeypatch.setattr(StorageFolder, "read", watch_read)
    return made


def test_a_commit_reads_no_old_manifest_again(tree: str, calls: list[str]) -> None:
    """Each folder is listed once, and only the MANIFEST of the commit before is new."""
    for step in range(4, 40):
        save(tree, step)
    calls.clear()
    save(tree, 40)
    assert [name for name in calls if name.endswith(catalog.MANIFEST) and "0040" not in name] == [
        f"{home(tree, 39).name}/{catalog.MANIFEST}"
    ]
    assert len([name for name in calls if "step-" in name and "0040" not in name]) == 39 + 2
    assert len(calls) < 40 + 24


def test_what_is_being_removed_is_not_damaged(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The MANIFEST was listed, and is gone when it is read."""
    read = StorageFolder.read

    def late(place: StorageFolder, name: str, *limit: int) -> bytes | None:
        if name == f"{home(tree, 1).name}/{catalog.MANIFEST}":
            place.remove(name)
        return read(place, name, *limit)

    monkeypatch.setattr(StorageFolder, "read", late)
    found = generations.scan(tree, None, "job")
    assert (found.damaged, found.lost) == ((), ())
    assert steps(tree) == [3, 2]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_commit_in_the_midst_of_a_look_is_no_damage(tree: str, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """`latest` names what comes after the listing; or what goes before it."""
    newer, listing = iter(range(4, 8)), catalog.listing

    def amidst(place: StorageFolder) -> list[catalog.Listed]:
        for step in newer:
            save(tree, step, keep=keep)
            if step % 2:
                break
        rows = listing(place)
        for step in newer:
            save(tree, step, keep=keep)
            break
        return rows

    monkeypatch.setattr(generations, "listing", amidst)
    found = generations.scan(tree, None, "job")
    assert (found.damaged, found.lost) == ((), ())
    assert found.manifests[0].generation.step == 7


def test_what_is_known_is_forgotten_as_soon_as_it_changes(tree: str) -> None:
    """A MANIFEST of the same length, a shard cut short, a folder that is gone."""
    place = StorageFolder(tree)
    assert [one.fault for one in catalog.changes(place)] == [None] * 3
    manifest = generations.manifest_of(tree, None, Generation(0, 1, RUN))
    theirs = msgspec.structs.replace(manifest, generation=Generation(0, 1, "b" * 32))
    place.put(f"{home(tree, 1).name}/{catalog.MANIFEST}", msgspec.json.encode(theirs))
    os.truncate(home(tree, 2) / manifest.files[0].name, 7)
    shutil.rmtree(home(tree, 3))
    first, second = catalog.changes(place)
    assert first.manifest is not None
    assert first.manifest.generation.run == "b" * 32
    assert "expected 5000 bytes, found 7" in (second.fault or "")


@pytest.mark.parametrize("late", ["MANIFEST", "damaged"])
def test_what_was_committed_meanwhile_is_not_swept(tree: str, monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    (home(tree, 1) / catalog.MANIFEST).rename(Path(tree) / "kept")
    sweep = generations.retain

    def first(place: StorageFolder, *args: Any) -> None:
        (Path(tree) / "kept").rename(home(tree, 1) / catalog.MANIFEST)
        if late == "damaged":
            (home(tree, 1) / catalog.MANIFEST).write_text("{")
        sweep(place, *args)

    monkeypatch.setattr(generations, "retain", first)
    save(tree, 4)
    assert {one.step for one in catalog.listing(StorageFolder(tree))} == {1, 2, 3, 4}


def test_what_became_another_ones_meanwhile_is_not_removed(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the beginning of a commit and the removal at its end."""
    manifest = generations.manifest_of(tree, None, Generation(0, 1, RUN))
    theirs = msgspec.structs.replace(manifest, generation=Generation(0, 1, "b" * 32))
    sweep = generations.retain

    def late(place: StorageFolder, *args: Any) -> None:
        place.put(f"{home(tree, 1).name}/{catalog.MANIFEST}", msgspec.json.encode(theirs))
        sweep(place, *args)

    monkeypatch.setattr(generations, "retain", late)
    save(tree, 4, keep=1)
    assert {one.step for one in catalog.listing(StorageFolder(tree))} == {1, 4}


def test_resuming_from_nowhere_says_that_nothing_is_there(tree: str, tmp_path: Path) -> None:
    """A misspelt path, an empty folder and one generation look alike where only what is whole is counted."""
    (tmp_path / "empty").mkdir()
    for one in (1, 2, 3):
        (home(tree, one) / catalog.MANIFEST).write_text("{")
    for url, said in {
        tree: "holds no whole generation",
        str(tmp_path / "nowhere"): "does not exist",
        str(tmp_path / "empty"): "holds nothing",
        str(home(tree, 1)): "is one generation, not a tree of them",
    }.items():
        for given in (url, f"weights:{url}"):
            with pytest.raises(NoCheckpoint, match=said) as refused:
                startup.refuse_nothing(Config(resume=given))
            assert str(url) in str(refused.value)
            assert refused.value.hint


@pytest.mark.parametrize("name", [f"step-0000000001-{2**64 - 1}", f"step-{2**64 - 1}-0000", f"step-{'9' * 200}-0000"])
def test_numbers_that_cannot_be_are_a_foreign_name(tree: str, name: str) -> None:
    """Master row 1: an empty folder with such an attempt made the launcher hang: no attempt could follow it."""
    (Path(tree) / name).mkdir()
    assert name not in {row.folder for row in catalog.listing(StorageFolder(tree))}
    assert generations.scan(tree, None, "job").heard == 0
