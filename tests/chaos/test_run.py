"""Chaos runs of real processes: launcher, master, keeper, DDP workers with DataLoader workers of their own.

One meets each kind of fault by chance, and ends as one that nobody touched. Of another one the launcher is killed again
and again, and started with other numbers of workers. They leave nothing behind.

    make chaos SEED=117 ROUNDS=4
"""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from pathlib import Path
from random import Random

import pytest

from dlrover_hooks.rehearsal.comparison import Evidence, judge, saved
from dlrover_hooks.testing.faults import fault_plan
from dlrover_hooks.testing.faults.fault_actions import InjectedFaults
from dlrover_hooks.testing.faults.fault_plan import Fault, Kind, Target
from dlrover_hooks.testing.faults.step_trace import RunTrace
from tests.chaos.run_worker import SAMPLES, STEPS_PER_EPOCH, WORLD
from tests.e2e.launched import Launched, all_gone

EPOCHS = 4
"""For each round of faults."""
SECONDS = 40.0
"""For each fault, where every one of them costs a restart of all workers and other tests run beside."""
SCRIPT = "sys.argv.append('{epochs}')\nfrom tests.chaos.run_worker import main\nmain()\n"


class Drilled:
    """One run of the worker under the launcher, with `schedule`; `told`: what each rank said at its end.

    `worlds`: the number of workers of each launch; all but the last one end with the launcher's death.
    """

    def __init__(
        self,
        folder: Path,
        epochs: int,
        schedule: tuple[Fault, ...],
        temporary: Path,
        worlds: tuple[int, ...] = (WORLD,),
    ) -> None:
        folder.mkdir()
        temporary.mkdir()
        self._file, self.trace = folder / "faults", RunTrace(folder / "trace")
        self._file.write_text(fault_plan.written(schedule))
        job, self.said = f"chaos-{uuid.uuid4().hex[:8]}", ""
        self.codes: list[int] = []
        self.told: list[dict] = []
        self.left: list[str] = []
        for world in worlds:
            launched = Launched(
                folder, SCRIPT.format(epochs=epochs), "-n", str(world), "--max-restarts", str(len(schedule) + 2),
                job=job, DLROVER_HOOKS_FAULTS=str(self._file), DLROVER_HOOKS_TRACE=str(self.trace.folder),
                TMPDIR=str(temporary),
            )  # fmt: skip
            try:
                code, said = launched.end(240 + SECONDS * len(schedule))
            except subprocess.TimeoutExpired:
                launched.process.kill()
                code, said = launched.end()
            finally:
                launched.process.kill()
            self.codes.append(code)
            self.said += said
            self.told, self.left = launched.read(), launched.leftovers()
        self.code = self.codes[-1]
        files = [path for path in temporary.rglob("*") if not path.is_dir() and not _pythons(path)]
        self.left += map(str, files)
        self.trace.read()

    def struck(self) -> list[dict]:
        return [row for path in self._file.parent.glob("faults.*.struck") for row in InjectedFaults(path).rows()]

    def story(self) -> str:
        """What happened, so that it can be repeated."""
        lines = [f"{row['at']:.2f} {row['fault']}" for row in self.struck()]
        lives = [
            f"{life.head.at:.2f} attempt {life.head.attempt} rank {life.head.rank} from step {life.head.begin} to "
            f"{max((row.step for row in life.rows), default=life.head.begin)}" for life in self.trace.lives
        ]  # fmt: skip
        schedule = self._file.read_text()
        return f"{schedule}\n" + "\n".join(sorted(lines + lives)) + f"\nended with {self.codes}\n{self.said[-6000:]}"


def _pythons(path: Path) -> bool:
    """multiprocessing's own socket, which a DataLoader worker cannot remove when it is killed."""
    return path.parent.name.startswith("pymp-")


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_a_run_with_every_kind_of_fault_ends_as_if_there_had_been_none(
    pytestconfig: pytest.Config, chaos_seed: int, runtime: Path, tmp_path: Path
) -> None:
    """Every sample visited once an epoch, counted in the weights; the same number of steps, each bit-equal; every
    fault struck; no process, segment, socket or temporary file is left.
    """
    rounds: int = pytestconfig.getoption("chaos_run_rounds")  # pyright: ignore[reportAssignmentType]
    epochs = EPOCHS * rounds
    steps = epochs * STEPS_PER_EPOCH
    schedule = fault_plan.random(chaos_seed, steps=steps, world=WORLD, count=rounds * len(fault_plan.MENU))
    print(f"seed {chaos_seed}\n{fault_plan.written(schedule)}")
    calm = Drilled(tmp_path / "calm", epochs, (), runtime / "calm")
    hit = Drilled(tmp_path / "hit", epochs, schedule, runtime / "hit")
    for one in (calm, hit):
        ended_well(one, epochs, WORLD)
    found = judge(Evidence(calm=calm.trace, hit=hit.trace, bound=steps + 1, code=hit.code, struck=hit.struck(),
                           planned=len(schedule)))  # fmt: skip
    assert [verdict for verdict in found if not verdict.kept] == [], hit.story()
    assert len(hit.struck()) == len(schedule), hit.story()
    nothing_is_left(runtime, calm, hit)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.timeout(1800)
def test_a_job_launched_again_and_again_at_other_world_sizes_trains_the_same_steps(
    pytestconfig: pytest.Config, chaos_seed: int, runtime: Path, tmp_path: Path
) -> None:
    """Each launcher is killed but the last one. Every sample is counted once an epoch, no launch begins at step 0, and
    what it restores is bit-equal to what the one before had there.
    """
    rounds: int = pytestconfig.getoption("chaos_run_rounds")  # pyright: ignore[reportAssignmentType]
    chance = Random(f"relaunches {chaos_seed}")
    steps = EPOCHS * STEPS_PER_EPOCH
    worlds = [chance.choice((1, 2, 3))]
    for _ in range(rounds):
        worlds.append(chance.choice([world for world in (1, 2, 3) if world != worlds[-1]]))
    schedule = fault_plan.random(
        chaos_seed, steps=steps, world=1, count=rounds, menu=[(Kind.KILL, Target.LAUNCHER)]
    )  # rank 0 is in every world
    print(f"seed {chaos_seed}, workers {worlds}\n{fault_plan.written(schedule)}")
    hit = Drilled(tmp_path / "hit", EPOCHS, schedule, runtime / "hit", tuple(worlds))
    assert hit.codes == [-signal.SIGKILL] * rounds + [0], hit.story()
    ended_well(hit, EPOCHS, worlds[-1])
    kept = saved(Evidence(calm=hit.trace, hit=hit.trace, bound=steps + 1, code=0, struck=hit.struck()))
    assert kept.kept, f"{kept}\n{hit.story()}"
    begins = list(hit.trace.begins().values())
    assert begins == sorted(begins), hit.story()
    assert len(begins) == rounds + 1, hit.story()
    nothing_is_left(runtime, hit)


def ended_well(one: Drilled, epochs: int, world: int) -> None:
    """It came to its end, each rank saw each sample trained once an epoch, and nothing of it lives on."""
    assert one.code == 0, one.story()
    found = [(told["steps"], [round(visits, 9) for visits in told["visits"]]) for told in one.told]
    assert found == [(epochs * STEPS_PER_EPOCH, [float(epochs)] * SAMPLES)] * world, one.story()
    assert one.left == []
    assert all_gone([life.head.pid for life in one.trace.lives])


def nothing_is_left(runtime: Path, *runs: Drilled) -> None:
    assert list((runtime / "dlrover-hooks").iterdir()) == [], "a keeper's lock or socket"
    mine = {str(life.head.pid) for one in runs for life in one.trace.lives}
    assert [name for name in os.listdir("/dev/shm") if "dlrover" in name or mine & set(name.split("_"))] == []
