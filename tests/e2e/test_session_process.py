"""Sessions with real masters and keepers: refused, killed or ended, nothing is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks import config
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.errors import Stale, Unauthorized, UsageError
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from dlrover_hooks.protocol import Departure, Exited, Source
from dlrover_hooks.session import Session
from tests.e2e.house import House, everyone, lives, trained
from tests.e2e.session_life import Position
from tests.waiting import WAIT_S, until


def test_a_wrong_token_is_refused_with_a_hint(house: House) -> None:
    with pytest.raises(Unauthorized) as refused:
        house.life(token="wrong")
    assert refused.value.hint
    assert "HINT" in str(refused.value)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_life_declared_dead_stops_and_its_votes_do_not_count(house: House, on_error: str) -> None:
    """Whatever `on_error` says: two lives in one seat would train apart."""
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


def test_training_goes_on_without_the_master_and_votes_follow(house: House) -> None:
    life = trained(house.life(), 2)
    house.master.kill()
    life.step()
    engine = life.session._engine
    assert engine is not None
    until(lambda: engine.generations.away, "a vote that is not answered")
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


@pytest.mark.deep
def test_killed_workers_are_followed_by_worlds_of_any_size(house: House) -> None:
    """kill -9 of both ranks at W=2; then W=2 (bit-equal, random state too), W=1 and W=3 restore it from memory."""
    workers = lives(house, 2)
    told = [worker.hear() for worker in workers]
    assert [one["source"] for one in told] == [None, None]
    at, draws = 0, []
    for world_size in (2, 1, 3):
        for _ in range(3):
            everyone(workers, "step")
            everyone(workers, "whole")
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
    """Decision 0003: a master that stands for long knows that the job has ended, and lets it go on."""
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
    """Whichever its master is. The living one neither stops saving nor loses what it has."""
    life = trained(house.life(), 3)
    second = house.worker(master=None, token=None, fresh=fresh)
    second.process.wait(WAIT_S)
    assert second.process.stderr is not None
    said = second.process.stderr.read()
    assert "UsageError" in said
    assert f"process {os.getpid()} saves for local rank 0" in said
    assert "--job" in said
    trained(life, 3)
    assert life.session.skipped_saves == 0


@pytest.mark.deep
def test_a_life_whose_seat_is_taken_is_told(house: House) -> None:
    """Never silently frozen. Its master is gone, so only the keeper can tell."""
    first = trained(house.life(), 1)
    house.master.kill()
    again = Checkpointer(house.job, "node", 0, master=house.master.url, start_keeper=False)
    again.begin(first.session.run, first.session.attempt + 1, 0, 1)
    again.take_seat()
    with pytest.raises(Stale, match=f"process {os.getpid()} has replaced this one as local rank 0"):
        first.step_until(lambda: False, "the notice", paced=False)
    again.close()


def test_the_end_is_saved_with_the_random_state_of_the_end(house: House, tmp_path: Path) -> None:
    """Not with that of the last batch's fetch."""
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
    """Both are fetched again after a restore, so the random state is that of before the first."""
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
    """`ckpt_path=` wins: neither the place in the data nor the random state is put back."""
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
    """The random state of the end is back for the first batch of the next epoch, whatever iterators draw."""
    assert epochs(tmp_path, 1) + epochs(tmp_path, 2) == epochs(None, 2)
