"""Leased shards with real processes: workers and the master are killed, and every sample is acknowledged once."""

from __future__ import annotations

import collections
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.protocol import LedgerView, ShowLedger
from tests.deep import deep
from tests.e2e.master_process import LiveMaster
from tests.ranks import environments
from tests.waiting import json_lines, until
from tests.warm import Forked, warm

WARM = ("torch._dynamo", "dlrover_hooks.integrations.torch", "tests.e2e.shards_worker")
JOB = "shards"


class Crew:
    """Workers of one job; all end with the test."""

    def __init__(self, folder: Path, master: LiveMaster) -> None:
        self.folder, self.master = folder, master
        self._own = {"MASTER": master.url, "TOKEN": master.token or "", "JOB": JOB}
        self.processes: list[Forked] = []

    def start(self, **options: Any) -> Forked:
        number = len(self.processes)
        arguments = ["-m", "tests.e2e.shards_worker", str(self.folder / f"log{number}")]
        arguments += [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        (env,) = environments(1, None, **{f"DLROVER_HOOKS_{name}": value for name, value in self._own.items()})
        with (self.folder / f"out{number}").open("wb") as out, (self.folder / f"err{number}").open("wb") as errors:
            self.processes.append(warm(WARM, env).start(arguments, env, (out, errors)))
        return self.processes[-1]

    def log(self, number: int) -> list[Any]:
        path = self.folder / f"log{number}"
        return json_lines(path) if path.exists() else []

    def seen(self) -> list[tuple[int, int]]:
        logs = [self.log(number) for number in range(len(self.processes))]
        return [(epoch, sample) for log in logs for epoch, batch, _ in log for sample in batch]

    def trained(self, number: int, batches: int) -> None:
        until(lambda: len(self.log(number)) >= batches or self.processes[number].poll() is not None, f"{batches} steps")

    def ended(self, process: Forked, within_s: float = 150.0) -> None:
        number = self.processes.index(process)
        assert process.wait(within_s) == 0, (self.folder / f"err{number}").read_text()[-3000:]

    def ledger(self) -> LedgerView:
        return self.master.client("onlooker").call(ShowLedger(JOB, "train"))

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(60)


@pytest.fixture
def crew(tmp_path: Path, live_master: LiveMaster) -> Iterator[Crew]:
    made = Crew(tmp_path, live_master)
    yield made
    made.close()


@pytest.mark.requirement("DL-57", "DL-62", "DL-63", "DL-71", "EZ-11", "EZ-12", "EZ-15")
@pytest.mark.chaos
@pytest.mark.slow
def test_every_sample_is_acknowledged_once(crew: Crew, pytestconfig: pytest.Config) -> None:
    """Three workers of different speed, killed and replaced at random times, and the master too; every
    sample of both epochs is in the books once, and was trained on at least once.
    """
    n, epochs = 1500, 2
    rng = random.Random(seed := time.time_ns() % 10_000)
    print(f"seed {seed}")
    speeds = [0.001, 0.004, 0.012]
    live = [crew.start(n=n, epochs=epochs, step_s=s, workers=k) for s, k in zip(speeds, (0, 2, 0), strict=True)]
    crew.trained(0, 3)
    for kill in range(6):
        crew.trained(rng.randrange(3), 5)
        select.select([], [], [], rng.uniform(0.1, 0.5))
        if kill % 3 == 2:
            crew.master.kill()
            crew.master.restart()
            continue
        which = rng.randrange(3)
        if live[which].poll() is None:
            os.killpg(live[which].pid, signal.SIGKILL)
            live[which].wait(60)
            live[which] = crew.start(n=n, epochs=epochs, step_s=speeds[which])
    for process in live:
        crew.ended(process)
    view = crew.ledger()
    assert (view.done, view.todo, view.leases, view.quarantined) == (n * epochs, 0, 0, ())
    assert set(crew.seen()) == {(epoch, sample) for epoch in range(epochs) for sample in range(n)}


@pytest.mark.deep
@pytest.mark.requirement("DL-73", "EZ-15")
def test_a_worker_that_is_alone_in_killing_itself_loses_nothing(crew: Crew) -> None:
    """What was acknowledged is not handed out again, what was not is."""
    first = crew.start(n=400, step_s=0.005)
    crew.trained(0, 20)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(60)
    crew.ended(crew.start(n=400))
    counts = collections.Counter(sample for _, sample in crew.seen())
    assert sorted(counts) == list(range(400))
    twice = sum(counts.values()) - 400
    assert twice <= 32 + 4, "at most one shard and the batch in work is trained again"
    assert crew.ledger().done == 400


@pytest.mark.parametrize("workers", [0, deep(2)])
def test_ranks_of_different_speed_train_in_step(crew: Crew, tmp_path: Path, workers: int) -> None:
    """Leased data too: as many steps on each rank, each sample once, weights that add up to one exactly."""
    ranks = [
        crew.start(n=501, rank=rank, store=tmp_path / "store", step_s=step_s, workers=workers, epochs=2, shard=24)
        for rank, step_s in enumerate((0.0, 0.004))
    ]
    for process in ranks:
        crew.ended(process)
    logs = [crew.log(rank) for rank in range(2)]
    assert len(logs[0]) == len(logs[1]) > 0
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    ghosts = 0
    for step in zip(*logs, strict=True):
        assert len({epoch for epoch, _, _ in step}) == 1
        real = [len(batch) if weight else 0 for _, batch, weight in step]
        assert [weight for _, _, weight in step] == [size / sum(real) for size in real]
        ghosts += real.count(0)
        seen.update((epoch, sample) for epoch, batch, weight in step if weight for sample in batch)
    assert seen == collections.Counter((epoch, sample) for epoch in range(2) for sample in range(501))
    assert ghosts <= 12, "at most a lease in each epoch"
    view = crew.ledger()
    assert (view.done, view.todo, view.leases) == (2 * 501, 0, 0)


@pytest.mark.deep
def test_an_error_leaves_no_rank_waiting(crew: Crew, tmp_path: Path) -> None:
    """One rank cannot go on: the others hear of it at the next step instead of hanging in a collective."""
    ranks = [crew.start(n=200, rank=rank, store=tmp_path / "store", good=40 if rank else 0) for rank in range(2)]
    for process in ranks:
        assert process.wait(60) == 1
    words = [(tmp_path / f"err{number}").read_text() for number in range(2)]
    assert "another rank failed to read its data" in words[0]
    assert "changed since it was split" in words[1]
