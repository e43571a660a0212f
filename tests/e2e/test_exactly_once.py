"""Promise 1 with real processes: each sample is in the surviving model once, through kills and worlds of any size."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deep import deep
from tests.e2e.exactly_once_worker import EPOCHS, SAMPLES
from tests.e2e.master_process import LiveMaster
from tests.ranks import environments
from tests.waiting import until
from tests.warm import Forked, warm

WORLDS = (3, 1, 4, 2)
WARM = {
    "leased": ("torch._dynamo", "dlrover_hooks.integrations.torch"),
    "lightning": ("torch._dynamo", "dlrover_hooks.integrations.lightning"),
    "accelerate": ("torch._dynamo", "dlrover_hooks.integrations.accelerate"),
}
KILL_MASTER = (False, True, True, False)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[LiveMaster]:
    """One that soon misses those that died while it was dead itself."""
    made = LiveMaster(tmp_path, "--lease", "3")
    yield made
    made.close()


class Ranks:
    """All ranks of one world; `lines` is what they have said so far."""

    def __init__(self, folder: Path, master: LiveMaster, job: str, world: int, loop: str, *words: object) -> None:
        self.files = [folder / f"{world}.{rank}" for rank in range(world)]
        self.processes: list[Forked] = []
        arguments = ["-m", "tests.e2e.exactly_once_worker", loop, *map(str, words)]
        for rank, (file, env) in enumerate(
            zip(self.files, environments(world, master, DLROVER_HOOKS_JOB=job), strict=True)
        ):
            with file.open("wb") as out, file.with_suffix(f".{rank}.err").open("wb") as err:
                self.processes.append(warm(WARM[loop], env).start(arguments, env, (out, err)))

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        found = self.files[rank].read_text().splitlines()
        return [json.loads(line) for line in found if line.startswith("{") and line.endswith("}")]

    def reached(self, step: int) -> bool:
        return self.over() or any(line.get("step", -1) >= step for line in self.lines())

    def over(self) -> bool:
        """Has one ended?"""
        return any(process.poll() is not None for process in self.processes)

    def errors(self) -> str:
        return "\n".join(path.with_suffix(f".{rank}.err").read_text()[-2000:] for rank, path in enumerate(self.files))

    def kill(self) -> None:
        """As a launcher does when one has died."""
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.requirement("ED-25")
@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("loop", ["leased", deep("lightning"), deep("accelerate")])
def test_the_surviving_model_saw_each_sample_once(loop: str, job: str, tmp_path: Path, master: LiveMaster) -> None:
    """Three workers, one, four and two. In each world but the last a random worker is killed in a random step,
    in two of them the master too.
    """
    rng = random.Random(seed := time.time_ns() % 10_000)
    print(f"seed {seed}")
    begins: list[int] = []
    reached, visits = 0, list[list[float]]()
    for world, kill_master in zip(WORLDS, KILL_MASTER, strict=True):
        at = reached + rng.randrange(4, 9) if world != WORLDS[-1] else -1
        ranks = Ranks(tmp_path, master, job, world, loop, rng.randrange(world), at)
        try:
            if kill_master:
                until(lambda ranks=ranks, at=at: ranks.reached(at - 2), "some steps", timeout_s=100.0)
                master.kill()
                master.restart()
            until(ranks.over if at >= 0 else lambda ranks=ranks: all_over(ranks), "the end", timeout_s=100.0)
            codes = [process.poll() for process in ranks.processes]
            assert codes == [0] * world if at < 0 else -signal.SIGKILL in codes, ranks.errors()
        finally:
            ranks.kill()
        begins.append(next((line["restored"] for line in ranks.lines() if "restored" in line), -1))
        reached = max(line.get("step", 0) for line in ranks.lines())
        visits = [ranks.lines(rank)[-1].get("visits", []) for rank in range(world)]
    assert begins[0] == 0
    assert begins == sorted(begins)
    assert begins[-1] > 3, "something was resumed"
    for counts in visits:
        assert [round(count, 9) for count in counts] == [EPOCHS] * SAMPLES


def all_over(ranks: Ranks) -> bool:
    """Have all ended, or one with an error?"""
    codes = [process.poll() for process in ranks.processes]
    return None not in codes or any(codes)
