"""A keeper that commits what a dead trainer left stands in no successor's way."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from dlrover_hooks.checkpoint.storage import generations, shard_writer
from dlrover_hooks.checkpoint.storage.master_storage import CommittedStorage
from dlrover_hooks.checkpoint.storage.url_claim import Owner, UrlClaim, read_owner, still_held
from dlrover_hooks.errors import SaveToBusy, StorageFailed
from dlrover_hooks.protocol import Generation, Manifest
from dlrover_hooks.testing import faulty_store
from tests.disks import small_disk

HOLD = (
    "from dlrover_hooks.checkpoint.storage.url_claim import UrlClaim; import sys; "
    "c = UrlClaim.take({!r}, None, 'job', 'keeper, pid 1'); print('held', flush=True); sys.stdin.read(); c.release()"
)


def test_a_keepers_short_claim_is_waited_for_by_its_own_job(tmp_path: Path) -> None:
    """Another job is refused at once, as ever."""
    url = str(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD.format(url)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"held\n"
        with pytest.raises(SaveToBusy, match="keeper, pid 1"):
            UrlClaim.take(url, None, "other", "pid 2")
        release = threading.Timer(0.2, keeper.stdin.close)
        release.start()
        UrlClaim.take(url, None, "job", "pid 3").release()
        release.join()


def test_a_full_disk_leaves_no_lock_behind(tmp_path: Path) -> None:
    """A keeper whose last save finds the disk full lives on; the next start must not be refused because of it."""
    with small_disk(tmp_path / "disk") as disk:
        url = str(disk / "saved")
        UrlClaim.take(url, None, "job", "pid 1").release()
        (disk / "filler").write_bytes(bytes(128 << 10))
        with open(disk / "rest", "wb", buffering=0) as rest, contextlib.suppress(OSError):
            while rest.write(bytes(4096)):
                pass
        with pytest.raises(StorageFailed, match="No space left"):
            UrlClaim.take(url, None, "job", "keeper, pid 1")
        (disk / "rest").unlink()
        assert not _refused(url)


def _refused(url: str) -> bool:
    """Is another process refused?"""
    done = subprocess.run([sys.executable, "-c", HOLD.format(url)], input=b"", capture_output=True, check=False)
    assert b"held" in done.stdout or b"SaveToBusy" in done.stderr, done.stderr
    return b"held" not in done.stdout


def test_a_copy_of_the_tree_costs_no_claim(tmp_path: Path) -> None:
    """A backup by the training process itself opens and closes the lock file."""
    url = str(tmp_path / "saved")
    claim = UrlClaim.take(url, None, "other", "pid 1")
    shutil.copytree(url, tmp_path / "backup")
    assert _refused(url)
    claim.release()
    assert not _refused(url)


def test_a_forked_child_neither_keeps_nor_ends_the_claim(tmp_path: Path) -> None:
    """DataLoader workers outlive a killed process for seconds; its successor must not be refused."""
    url = str(tmp_path)
    claim = UrlClaim.take(url, None, "other", "pid 1")
    (gone, alive), (ready, tell) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(alive)
        claim.release()
        os.write(tell, b"!")
        os.read(gone, 1)  # until the test ends
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"!"
        assert _refused(url)
        os.close(claim._fd)  # as the end of this process would
        assert not _refused(url)
    finally:
        claim._fd = os.open(os.devnull, os.O_RDONLY)
        claim.release()
        for fd in (alive, gone, ready, tell):
            os.close(fd)
        os.waitpid(child, 0)


def test_of_two_that_come_at_once_one_gets_an_object_store() -> None:
    """Both have seen that nobody holds it; the lease is put only if it is still absent."""
    with faulty_store() as bucket:

        def overtake(verb: str, path: str) -> None:
            if verb == "put" and path.endswith("owner.json"):
                bucket.fail = lambda verb, path: None
                note = b'{"job": "quick", "owner": "its master", "expires": 9e12}'
                bucket.objects["bucket/ck/owner.json"] = note

        bucket.fail = overtake
        with pytest.raises(SaveToBusy, match=r"'quick' \(its master\)"):
            UrlClaim.take("faulty://bucket/ck", None, "slow", "us")
        assert b"quick" in bucket.objects["bucket/ck/owner.json"]


def test_a_store_that_hangs_holds_up_no_claim_elsewhere() -> None:
    """One master serves many jobs."""
    with faulty_store() as bucket:
        over, waiting = threading.Event(), threading.Event()

        def hang(verb: str, path: str) -> None:
            if "dead" in path:
                waiting.set()
                over.wait(60)

        bucket.fail = hang
        stuck = threading.Thread(target=lambda: UrlClaim.take("faulty://dead/ck", None, "one", "us").release())
        stuck.start()
        assert waiting.wait(60)
        UrlClaim.take("faulty://alive/ck", None, "two", "us").release()
        assert stuck.is_alive()
        over.set()
        stuck.join(60)


def test_who_slept_through_its_lease_gives_way_to_its_successor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stopped for longer than its lease, it wakes beside another job, or another life of its own."""
    url = "faulty://bucket/ck"
    monkeypatch.setattr("dlrover_hooks.checkpoint.storage.url_claim._REFRESH_S", 0.01)
    for job, owner in (("other", "another master"), ("slept", "its master")):
        with faulty_store() as bucket:
            claim = UrlClaim.take(url, None, "slept", "its master")
            still_held(url)
            note = Owner(job=job, owner=owner, expires=9e12, life="another")
            seen = list[str]()

            def succeed(verb: str, path: str, note: Owner = note, seen: list[str] = seen) -> None:
                if verb != "put" and "note" not in seen:  # before that very look
                    bucket.objects["bucket/ck/owner.json"] = msgspec.json.encode(note)
                    verb = "note"
                seen.append(verb)

            bucket.fail = succeed
            assert claim._thread.join(60)
            assert "nothing is committed to it any more" in caplog.text
            with pytest.raises(SaveToBusy, match=owner):
                still_held(url)
            manifest = Manifest("slept", Generation(1, 1, "a" * 32), 1, (), 0.0)
            with pytest.raises(SaveToBusy, match=owner):
                CommittedStorage().commit(url, None, manifest, 2)
            claim.release()
            assert read_owner(claim.place) == note
            assert "put" not in seen[seen.index("note") :]


def test_a_former_leader_that_writes_late_loses_the_lease() -> None:
    """It was stopped between its look and its write. The leader's claim holds, and the former one is given up."""
    url, masters = "faulty://bucket/ck", "the masters of etcd"
    with faulty_store() as bucket:
        leader = UrlClaim.take(url, None, "job", masters, epoch=7)
        former = msgspec.json.encode(Owner(job="job", owner=masters, expires=9e12, life="former", epoch=3))
        bucket.objects["bucket/ck/owner.json"] = former
        still_held(url)
        written = read_owner(leader.place)
        assert written is not None
        assert (written.epoch, written.life) == (7, leader.owner.life)
        bucket.objects["bucket/ck/owner.json"] = msgspec.json.encode(
            Owner(job="job", owner=masters, expires=9e12, life="next", epoch=8)
        )
        with pytest.raises(SaveToBusy, match="the masters of etcd"):
            still_held(url)
        leader.release()
        with pytest.raises(SaveToBusy):
            UrlClaim.take(url, None, "job", masters, epoch=7)


def test_a_lease_that_is_being_written_is_nobodys_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where writes are not atomic a look in between finds an empty file: the successor's, perhaps."""
    with faulty_store() as bucket:
        claim = UrlClaim.take("faulty://bucket/ck", None, "slept", "its master")
        bucket.objects["bucket/ck/owner.json"] = b""
        note = Owner(job="other", owner="another master", expires=9e12, life="another")
        whole = threading.Timer(0.1, lambda: bucket.store("bucket/ck/owner.json", msgspec.json.encode(note)))
        whole.start()
        with pytest.raises(SaveToBusy, match="another master"):
            claim.check()
        whole.join()
        claim.release()


def test_a_keepers_claim_names_its_host(tmp_path: Path) -> None:
    """A process number alone is that of another process on another machine, too."""
    with shard_writer._claimed(str(tmp_path), {}, "job"):
        held = generations.holder(str(tmp_path), {})
    assert held is not None
    assert held.owner == f"keeper, pid {os.getpid()} on {socket.gethostname()}"


def test_a_refresh_that_fails_unexpectedly_is_raised_before_the_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not end the refreshing: the lease would run out while its owner trains."""
    monkeypatch.setattr("dlrover_hooks.checkpoint.storage.url_claim._REFRESH_S", 0.01)
    refreshed, tries, fresh = threading.Semaphore(0), iter([ZeroDivisionError("unforeseen")]), UrlClaim._fresh

    def fail_once(claim: UrlClaim) -> bytes:
        refreshed.release()
        for error in tries:
            raise error
        return fresh(claim)

    with faulty_store():
        claim = UrlClaim.take("faulty://bucket/ck", None, "job", "its master")
        try:
            monkeypatch.setattr(UrlClaim, "_fresh", fail_once)
            for _ in range(2):
                assert refreshed.acquire(timeout=60)
            with pytest.raises(StorageFailed, match=r"job job, the claim on .*ZeroDivisionError: unforeseen"):
                still_held("faulty://bucket/ck")
            still_held("faulty://bucket/ck")
        finally:
            claim.release()
