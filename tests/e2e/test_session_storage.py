"""Sessions with real masters and keepers: storage that is full, refused or another job's."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.errors import MasterAway, NoCheckpoint, SaveToBusy, StorageFailed
from dlrover_hooks.protocol import Departure, Source
from tests.deep import deep
from tests.e2e.house import House, everyone, trained
from tests.e2e.session_life import Life, work
from tests.waiting import WAIT_S, until


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_stops_or_warns(house: House, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """on_error="raise": the next verb says why. "warn": said, and memory checkpoints go on."""
    options: dict[str, Any] = {"save_to": str(small_disk / "ckpt"), "persist_every": 1, "size": 1 << 15}
    first = house.life(**options)
    with pytest.raises(StorageFailed) as failed:
        first.step_until(lambda: False, "the failure")
    assert "No space left" in str(failed.value)
    assert "rank 0 could not make step 1" in str(failed.value)
    assert str(failed.value).count("HINT") == 1
    assert "free some space" in failed.value.hint
    assert "go on" not in failed.value.hint, "this run does not"
    first.leave()
    second = house.life(**options, on_error="warn")
    assert second.restored is not None
    assert second.restored.source is Source.MEMORY
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        second.step_until(lambda: "No space left" in caplog.text, "a warning")
    trained(second, 2)
    assert second.view().newest_committed is None


@pytest.mark.deep
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_room_on_a_full_disk_makes_a_later_generation_durable(
    house: House, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = house.life(save_to=str(small_disk / "ckpt"), persist_every=1, size=1 << 15, on_error="warn")
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        life.step_until(lambda: "No space left" in caplog.text, "a warning")
    (small_disk / "filler").unlink()
    life.step_until(lambda: life.view().newest_committed, "a durable generation")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_file_begun_by_the_life_before_is_no_news_to_this_one(house: House, small_disk: Path) -> None:
    """The keeper tells the seat how it went; a vote for it would be stale, and stop a healthy life."""
    save_to = str(small_disk / "ckpt")
    first = house.life(save_to=save_to, persist_every=1, size=1 << 15)
    first.step()
    first.whole()
    until(lambda: list(small_disk.glob("ckpt/step-*")), "a begun file")  # full: the keeper tries for 3.5 s
    first.leave()

    def started() -> Life | None:
        with contextlib.suppress(StorageFailed):  # the keeper tries again just now, and no room is left for the probe
            return house.life(save_to=save_to, persist_every="1h", size=1 << 15)
        return None

    second = until(started, "a start between two tries of the keeper")
    (small_disk / "filler").unlink()
    until(lambda: list(small_disk.glob("ckpt/step-*/shard-*.safetensors")), "the file")
    trained(second, 20)
    assert second.session.skipped_saves == 0


def test_save_to_that_cannot_be_written_is_refused_before_training(house: House, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed) as failed:
        house.life(save_to=str(tmp_path / "file" / "below"))
    assert str(tmp_path / "file") in str(failed.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("ending", [False, True])
def test_a_keeper_killed_while_it_writes_a_file(house: House, small_disk: Path, ending: bool) -> None:
    """Nobody answers for that file any more; another generation becomes durable, or the last one once again."""
    life = house.life(save_to=str(small_disk / "ckpt"), persist_every="1h" if ending else 1, size=1 << 15)
    life.step()
    life.whole()

    def finish() -> None:
        with contextlib.suppress(MasterAway):  # this test failed, and its master is over
            life.session.finish(life.at, {"step": life.at, "w": life.w})

    end = threading.Thread(target=finish, daemon=True)
    if ending:
        end.start()
    until(lambda: list(small_disk.glob("ckpt/step-*")), "a begun file")  # full: the keeper tries for 3.5 s
    house.kill_keeper()
    (small_disk / "filler").unlink()
    if ending:
        end.join(WAIT_S)
        assert not end.is_alive()
        assert life.view().newest_committed == life.generation
    else:
        life.step_until(lambda: life.view().newest_committed, "a durable generation", paced=False)


def test_the_tree_of_another_job_is_refused_before_training(house: House, tmp_path: Path) -> None:
    """An unfinished job's checkpoints outlive any other job, and it goes on from them."""
    first = trained(house.life(save_to=str(tmp_path), persist_every=1), 2, durable=True)
    first.leave()
    for other in ({"job": f"{house.job}-other"}, {"job": None, "master": None, "token": None}):
        for fresh in (False, True):
            with pytest.raises(SaveToBusy, match=f"holds step 2 of job '{house.job}'") as refused:
                house.life(save_to=str(tmp_path), fresh=fresh, **other)
            assert f"--job {house.job}" in refused.value.hint
    house.kill_keeper()
    again = house.life(save_to=str(tmp_path))
    assert again.restored is not None
    assert (again.at, again.restored.source) == (2, Source.STORAGE)


def test_the_same_job_anew_replaces_its_runs_once_it_has_a_generation(house: House, tmp_path: Path) -> None:
    """Until then the old ones are there, in memory's place only."""
    alone: dict[str, Any] = {"save_to": str(tmp_path), "persist_every": 3, "master": None, "token": None}
    first = trained(house.life(**alone), 3)
    first.durable()
    first.leave()
    anew = house.life(**alone | {"persist_every": 2}, resume="never")
    assert anew.restored is None
    trained(anew, 1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000003-0001"]
    anew.unhindered()
    trained(anew, 1)
    anew.durable()
    (manifest,) = tmp_path.glob("step-*/MANIFEST.json")
    assert anew.session.run in manifest.read_text()
    assert not (tmp_path / "fresh.json").exists()
    anew.leave()
    again = house.life(**alone, resume="never")
    assert again.restored is None
    assert again.session.run not in {first.session.run, anew.session.run}


def test_a_tree_named_to_start_from_is_taken_whatever_its_job(house: House, tmp_path: Path) -> None:
    """And one that holds nothing is no fresh start."""
    alone: dict[str, Any] = {"master": None, "token": None}
    old = trained(house.life(save_to=str(tmp_path / "old"), persist_every=1, **alone), 2, durable=True)
    old.leave()
    alone["job"] = f"{house.job}-new"
    new = house.life(save_to=str(tmp_path / "new"), resume=str(tmp_path / "old"), **alone)
    assert new.restored is not None
    assert (new.at, new.restored.source) == (2, Source.STORAGE)
    trained(new, 1)
    new.leave()
    alone["job"] += "er"
    with pytest.raises(NoCheckpoint, match=str(tmp_path / "nothing")):
        house.life(resume=str(tmp_path / "nothing"), **alone)
    for file in (tmp_path / "old").glob("step-*/shard-*"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(NoCheckpoint, match=str(tmp_path / "old")):
        house.life(resume=str(tmp_path / "old"), **alone)


@pytest.mark.deep
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize(("on_error", "alone"), [("raise", False), ("warn", True), ("raise", True), ("warn", False)])
def test_storage_that_takes_nothing_at_the_end(
    house: House, small_disk: Path, on_error: str, alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Known in seconds, not after all the patience for slow storage; "warn" says it once and ends normally.

    The run does not count as finished: the same start goes on from memory, and ends once there is room.
    """
    save_to = small_disk / "ckpt"
    options: dict[str, Any] = {"save_to": str(save_to), "persist_every": "1h", "size": 1 << 15, "on_error": on_error}
    options |= {"master": None, "token": None} if alone else {}
    life = house.life(**options)
    trained(life, 2)
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        if on_error == "raise":
            life.session._reporter.error = StorageFailed("an older one")
            with pytest.raises(StorageFailed, match=r"step 2 .*No space left") as failed:
                life.finish()
            assert str(failed.value).count("HINT") == 1
        else:
            life.finish()
            assert caplog.text.count("No space left") == 1
    life.leave(Departure.DONE)
    assert not (save_to / "finished.json").exists()
    (small_disk / "filler").unlink()
    again = house.life(**options)
    assert again.restored is not None
    assert (again.at, again.restored.source, again.session.run) == (2, Source.MEMORY, life.session.run)
    again.finish()
    again.leave(Departure.DONE)
    until((save_to / "finished.json").exists, "the end")


@pytest.mark.deep
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_no_rank_waits_for_another_whose_storage_is_full(house: House, small_disk: Path) -> None:
    """Only rank 0's file is large; rank 1's is written, and its MANIFEST will never come."""
    options: dict[str, Any] = {"save_to": str(small_disk / "ckpt"), "persist_every": "1h", "size": 1 << 15}
    workers = [house.worker(rank=rank, world_size=2, **options) for rank in range(2)]
    for worker in workers:
        worker.hear()
    for verb in ("step", "whole"):
        everyone(workers, verb)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda worker: worker.tell("finish"), workers))
    assert [end["error"] for end in ends] == ["StorageFailed"] * 2
    assert all("rank 0 could not make step 1" in end["text"] and "No space left" in end["text"] for end in ends)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_disk_with_room_for_a_note_only_is_refused_before_training(house: House, small_disk: Path) -> None:
    """That the claim could be written proves nothing."""
    with (small_disk / "filler").open("ab") as filler, contextlib.suppress(OSError):
        filler.write(bytes(1 << 20))
    os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - 4096)
    with pytest.raises(StorageFailed, match="No space left"):
        house.life(save_to=str(small_disk))


@pytest.mark.parametrize("save_every", ["auto", deep("0.2s")])
def test_every_launch_saves_soon_whatever_step_it_begins_at(house: House, tmp_path: Path, save_every: str) -> None:
    """In memory and in storage; the next power of two is 448,575 steps away."""
    first = house.life(save_to=str(tmp_path), persist_every=1)
    first.at = 600_000
    trained(first, 1, durable=True)
    first.leave()
    for source in (Source.STORAGE, Source.MEMORY, Source.STORAGE):
        if source is Source.STORAGE:
            house.kill_keeper()
        life = house.life(save_to=str(tmp_path), save_every=save_every, persist_every="0.5s")
        assert life.restored is not None
        assert life.restored.source is source
        assert life.at > 600_000
        begun = life.at
        work()  # the first step takes as long as the others
        life.step_until(functools.partial(has_saved, life), "new generations in memory and in storage", paced=False)
        assert life.at < begun + 100_000
        life.leave()


def has_saved(life: Life) -> bool:
    """This life has a generation in memory and one in storage."""
    view = life.view()
    newest = (view.newest_complete, view.newest_committed)
    return all(one is not None and one.attempt == life.session.attempt for one in newest)
