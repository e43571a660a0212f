"""Sessions with real masters and keepers: damaged, full, refused or killed, nothing is lost (DL-58, DL-90, DL-91)."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks import config
from dlrover_hooks.checkpoint import wire
from dlrover_hooks.checkpoint.arena import Arena
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.link import KeeperLink
from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.errors import MasterAway, NoCheckpoint, SaveToBusy, Stale, StorageFailed, Unauthorized, UsageError
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from dlrover_hooks.protocol import Departure, Exited, Source
from dlrover_hooks.session import Session
from tests.e2e.life_process import LifeProcess
from tests.e2e.master_process import LiveMaster
from tests.e2e.session_life import WAIT_S, Life, Position, until


class House:
    """Makes lives and workers of one job at one master; leaves no process behind."""

    def __init__(self, master: LiveMaster) -> None:
        self.job, self.master = f"session-{uuid.uuid4().hex[:8]}", master
        self._stack = contextlib.ExitStack()

    def life(self, **given: Any) -> Life:
        life = Life(**{"job": self.job, "master": self.master.url, "token": self.master.token} | given)
        self._stack.callback(life.leave)
        return life

    def worker(self, **given: Any) -> LifeProcess:
        made = LifeProcess(**{"job": self.job, "master": self.master.url, "token": self.master.token} | given)
        self._stack.callback(made.kill)
        return made

    def keeper_pid(self) -> int:
        link = KeeperLink.connect(self.job, "node", notify=lambda _: None, start=False)
        try:
            return link.call(lambda ref: wire.Inventory(ref=ref))[0].pid
        finally:
            link.close()

    def kill_keeper(self) -> int:
        pid = self.keeper_pid()
        process = psutil.Process(pid)
        process.kill()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0)  # nobody may reap it here: a zombie holds nothing any more
        until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the keeper's end")
        return pid

    def arena(self, seat: int = 0) -> Arena:
        """The keeper's own memory, from outside."""
        pid = self.keeper_pid()
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:dlrover-hooks-seat-{seat} "):
                    return Arena.attach(os.open(path, os.O_RDWR))
        raise LookupError(f"no segment of seat {seat}")

    def close(self) -> None:
        self._stack.close()
        for process in psutil.process_iter(["cmdline"]):
            if any(self.job in part for part in process.info["cmdline"] or ()):
                process.kill()


@pytest.fixture
def house(live_master: LiveMaster, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    """With a runtime folder of its own, short enough for a socket's path."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        made = House(live_master)
        yield made
        made.close()


def trained(life: Life, steps: int, *, durable: bool = False) -> Life:
    for _ in range(steps):
        life.step()
        life.durable() if durable else life.whole()
    return life


def test_a_flipped_bit_in_memory_falls_back_to_the_generation_before(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Still from memory, and the log names slot and chunk of what was given up."""
    first = trained(house.life(), 3)
    first.leave()
    arena = house.arena()
    slot = max((one for one in arena.slots() if one.generation), key=lambda one: one.generation or first.generation)
    assert slot.generation == first.generation
    arena.view(slot.index)[slot.image_bytes - 5] ^= 8
    arena.close()
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        second = house.life()
    assert second.restored is not None
    assert (second.at, second.restored.source, second.data.committed) == (2, Source.MEMORY, 2)
    assert (second.w == 1.5 * 1 + 2).all()
    assert f"slot {slot.index} of seat 0, step 3" in caplog.text
    assert "chunk 0" in caplog.text
    assert "fell back" in caplog.text
    trained(second, 1)


def test_a_truncated_file_falls_back_to_the_older_durable_generation(
    house: House, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory is gone with its keeper and the newest file is too short: storage has one more."""
    save_to = tmp_path / "ckpt"
    options: dict[str, Any] = {"save_to": str(save_to), "persist_every": 1, "keep": 3}
    first = trained(house.life(**options), 3, durable=True)
    first.leave()
    house.kill_keeper()
    (file,) = max(save_to.glob("step-*")).glob("shard-*")
    os.truncate(file, file.stat().st_size // 2)
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        second = house.life(**options)
    assert second.restored is not None
    assert (second.at, second.restored.source, second.data.committed) == (2, Source.STORAGE, 2)
    assert file.name in caplog.text
    trained(second, 1, durable=True)


def test_a_wrong_token_is_refused_with_a_hint(house: House) -> None:
    with pytest.raises(Unauthorized) as refused:
        house.life(token="wrong")
    assert refused.value.hint
    assert "HINT" in str(refused.value)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_life_declared_dead_stops_and_its_votes_do_not_count(house: House, on_error: str) -> None:
    """Whatever `on_error` says: two lives in one seat would train apart (ED-36)."""
    zombie = house.worker(on_error=on_error)
    me = zombie.hear()["incarnation"]
    zombie.tell("step")
    zombie.tell("whole")
    house.master.client(me).call(Exited(house.job, me, me, -9), channel="agent")
    successor = trained(house.life(), 2)
    assert successor.restored is not None
    complete = successor.view().newest_complete
    answer: dict[str, Any] = {}

    def refused() -> bool:
        answer.update(zombie.tell("step"))
        return "error" in answer

    until(refused, "the refusal")
    assert answer["error"] == "Stale"
    assert "HINT" in answer["text"]
    assert successor.view().newest_complete == complete == successor.generation
    trained(successor, 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2 MB, full but for what an owner's note needs; delete `filler` to make room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount here")
    (folder / "filler").write_bytes(bytes((2 << 20) - (128 << 10)))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_stops_or_warns(house: House, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """on_error="raise": the next verb says why. "warn": said, and memory checkpoints go on."""
    options: dict[str, Any] = {"save_to": str(small_disk / "ckpt"), "persist_every": 1, "size": 1 << 15}
    first = house.life(**options)
    with pytest.raises(StorageFailed) as failed:
        first.step_until(lambda: False, "the failure")
    assert "No space left" in str(failed.value)
    assert "rank 0 could not make step 1" in str(failed.value)
    assert failed.value.hint
    first.leave()
    second = house.life(**options, on_error="warn")
    assert second.restored is not None
    assert second.restored.source is Source.MEMORY
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        second.step_until(lambda: "No space left" in caplog.text, "a warning")
    trained(second, 2)
    assert second.view().newest_committed is None


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
    second = house.life(save_to=save_to, persist_every="1h", size=1 << 15)
    (small_disk / "filler").unlink()
    until(lambda: list(small_disk.glob("ckpt/step-*/shard-*.safetensors")), "the file")
    trained(second, 20)
    assert second.session.skipped_saves == 0


def test_save_to_that_cannot_be_written_is_refused_before_training(house: House, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageFailed) as failed:
        house.life(save_to=str(tmp_path / "file" / "below"))
    assert str(tmp_path / "file") in str(failed.value)


def test_training_goes_on_without_the_master_and_votes_follow(house: House) -> None:
    life = trained(house.life(), 2)
    house.master.kill()
    for _ in range(4):
        life.step()
    assert life.session.skipped_saves == 0
    house.master.restart()
    life.whole()
    trained(life, 2)
    assert life.session.skipped_saves == 0


def test_training_goes_on_without_the_keeper_and_a_new_one_is_used(house: House) -> None:
    """What the dead one held is lost; the saves after it are whole again."""
    life = trained(house.life(), 2)
    old = house.kill_keeper()
    life.step_until(lambda: life.view().newest_complete == life.generation, "a whole save in a new keeper", paced=False)
    assert house.keeper_pid() != old
    life.leave()
    second = house.life()
    assert second.restored is not None
    assert (second.restored.source, second.at) == (Source.MEMORY, life.at)


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


def lives(house: House, world_size: int) -> list[LifeProcess]:
    return [house.worker(rank=rank, world_size=world_size) for rank in range(world_size)]


def everyone(workers: list[LifeProcess], verb: str) -> list[dict[str, Any]]:
    return [worker.tell(verb) for worker in workers]


def test_killed_workers_are_followed_by_worlds_of_any_size(house: House) -> None:
    """kill -9 of both ranks at W=2; then W=2 (bit-equal, random state too), W=1 and W=3 restore it from memory."""
    workers = lives(house, 2)
    told = [worker.hear() for worker in workers]
    assert [one["source"] for one in told] == [None, None]
    at, draws = 0, []
    for world_size in (2, 1, 3):
        for _ in range(3):
            everyone(workers, "step")
        state = everyone(workers, "whole")[0]
        assert state["at"] == at + 3
        draws = [one["answer"] for one in everyone(workers, "draw")]
        same, at = len(workers) == world_size, state["at"]
        for worker in workers:
            worker.kill()
        workers = lives(house, world_size)
        told = [worker.hear() for worker in workers]
        for one in told:
            assert {key: one[key] for key in ("at", "w", "place")} == {key: state[key] for key in ("at", "w", "place")}
            assert one["source"] == "memory"
            assert one["own_rng"] is same
        again = [one["answer"] for one in everyone(workers, "draw")]
        assert (again == draws) is same
        seeded = [float(np.random.RandomState(1000 + rank).random()) for rank in range(world_size)]
        assert same or not set(again) & set(seeded), "a new world is reseeded from its generation, not by its scripts"
        assert len(set(again)) == world_size
    assert {one["attempt"] for one in told} == {4}


def test_a_finished_life_leaves_no_keeper(house: House, tmp_path: Path) -> None:
    life = trained(house.life(save_to=str(tmp_path)), 2)
    pid = house.keeper_pid()
    life.session.finish(life.at, {"step": life.at, "w": life.w})
    life.leave(Departure.DONE)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")


def test_a_finished_job_is_trained_on_at_the_same_master(house: House, tmp_path: Path) -> None:
    """DL-57, and decision 0003: a master that stands for long knows that the job has ended, and lets it go on."""
    first = trained(house.life(save_to=str(tmp_path)), 2)
    first.finish()
    first.leave(Departure.DONE)
    second = house.life(save_to=str(tmp_path))
    assert (second.at, second.told()["source"]) == (2, "storage")
    trained(second, 1)
    assert second.generation.attempt == 2


def test_a_job_that_ended_in_memory_is_not_trained_again_unasked(house: House) -> None:
    first = trained(house.life(), 2)
    first.leave(Departure.DONE)
    with pytest.raises(UsageError, match=r"was finished at step 2; no checkpoint outlived it"):
        house.life()
    assert house.life(fresh=True).at == 0


@pytest.mark.parametrize("fresh", [False, True])
def test_a_second_launch_of_a_living_job_is_refused(house: House, fresh: bool) -> None:
    """DL-90: whoever its master is. The living one neither stops saving nor loses what it has."""
    life = trained(house.life(), 3)
    second = house.worker(master=None, token=None, fresh=fresh)
    second.process.wait(WAIT_S)
    assert second.process.stderr is not None
    said = second.process.stderr.read()
    assert "UsageError" in said
    assert f"process {os.getpid()} saves for seat 0" in said
    assert "--job" in said
    trained(life, 3)
    assert life.session.skipped_saves == 0


def test_a_life_whose_seat_is_taken_is_told(house: House) -> None:
    """DL-90: never silently frozen. Its master is gone, so only the keeper can tell."""
    first = trained(house.life(), 1)
    house.master.kill()
    again = Checkpointer(house.job, "node", 0, master=house.master.url, start_keeper=False)
    again.begin(first.session.run, first.session.attempt + 1, 0, 1)
    again.take_seat()
    with pytest.raises(Stale, match=f"process {os.getpid()} has taken over seat 0"):
        first.step_until(lambda: False, "the notice", paced=False)
    again.close()


def test_the_tree_of_another_job_is_refused_before_training(house: House, tmp_path: Path) -> None:
    """DL-91: an unfinished job's checkpoints outlive any other job, and it goes on from them."""
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
    """DL-91: until then the old ones are there, in memory's place only."""
    alone: dict[str, Any] = {"save_to": str(tmp_path), "persist_every": 3, "master": None, "token": None}
    first = trained(house.life(**alone), 3)
    first.durable()
    first.leave()
    anew = house.life(**alone | {"persist_every": 2}, resume="never")
    assert anew.restored is None
    trained(anew, 1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000003-0001"]
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
    """DL-91: and one that holds nothing is no fresh start."""
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


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_storage_that_takes_nothing_at_the_end(
    house: House, small_disk: Path, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """DL-90: known in seconds, not after all the patience for slow storage; "warn" says it once and ends normally."""
    life = house.life(save_to=str(small_disk / "ckpt"), persist_every="1h", size=1 << 15, on_error=on_error)
    trained(life, 2)
    with caplog.at_level(logging.WARNING, "dlrover_hooks"):
        if on_error == "raise":
            with pytest.raises(StorageFailed, match="No space left"):
                life.finish()
        else:
            life.finish()
            assert caplog.text.count("No space left") == 1
    life.leave(Departure.DONE)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_disk_with_room_for_a_note_only_is_refused_before_training(house: House, small_disk: Path) -> None:
    """DL-91: that the claim could be written proves nothing."""
    with (small_disk / "filler").open("ab") as filler, contextlib.suppress(OSError):
        filler.write(bytes(1 << 20))
    os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - 4096)
    with pytest.raises(StorageFailed, match="No space left"):
        house.life(save_to=str(small_disk))


def test_the_end_is_saved_with_the_random_state_of_the_end(house: House, tmp_path: Path) -> None:
    """ED-25: not with that of the last batch's fetch."""
    alone: dict[str, Any] = {"master": None, "token": None, "save_to": str(tmp_path), "persist_every": "1h"}
    first = trained(house.life(**alone), 2)
    first.draw()
    first.finish()
    expected = first.draw()
    first.leave()
    np.random.seed(5)
    second = house.life(**alone)
    assert second.at == 2
    assert second.draw() == expected


def test_of_two_loaders_the_first_fetch_counts(house: House) -> None:
    """ED-25: both are fetched again after a restore, so the random state is that of before the first."""
    first = house.life(master=None, token=None)
    first.at += 1
    first.session.stepped()
    first.session.before_fetch(1)
    expected = first.draw()  # what fetching the first batch draws
    first.session.before_fetch(1)
    assert first.session.batch_requested(1)
    first.session.cut(1, {"step": 1, "w": first.w})
    first.whole()
    first.leave()
    second = house.life(master=None, token=None)
    assert second.at == 1
    assert second.draw() == expected


def test_a_restore_the_adapter_does_not_want_is_forgotten(house: House) -> None:
    """DL-57: `ckpt_path=` wins: neither the place in the data nor the random state is put back."""
    trained(house.life(master=None, token=None), 2).leave()
    place = config.place({"DLROVER_HOOKS_NODE": "node"})
    session = Session(config.load({}, job=house.job, save_every=1), place)
    try:
        session.join()
        assert session.restore_plan() is not None
        session.forget_restored()
        source = Position()
        session.watch("train", source)
        assert session.restored_data("train") is None
        assert source.committed == 0
        np.random.seed(5)
        session.before_fetch(0)
        assert np.random.random() == np.random.RandomState(5).random()
    finally:
        session.leave(Departure.FAILED)


def epochs(save_to: Path | None, count: int) -> list[float]:
    """Train a real loop for `count` epochs that draws at each step; what it drew."""
    torch.manual_seed(3)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.arange(8.0)[:, None]), batch_size=2, shuffle=True)
    loader = elastic_loader(data, optimizer=optimizer)
    drawn = list[float]()
    saving = str(save_to) if save_to is not None else None
    with AsyncCheckpointer(saving, model=model, optimizer=optimizer, loader=loader, job="epochs", save_every=1):
        for _ in loader.epochs(count):
            for (batch,) in loader:
                drawn.append(float(torch.rand(())))
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
    return drawn


def test_more_epochs_after_the_end_are_those_of_a_longer_run(house: House, tmp_path: Path) -> None:
    """ED-25: the random state of the end is back for the first batch of the next epoch, whatever iterators draw."""
    assert epochs(tmp_path, 1) + epochs(tmp_path, 2) == epochs(None, 2)
