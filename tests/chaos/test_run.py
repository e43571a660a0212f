"""A chaos run of real processes: launcher, master, keeper, DDP workers with DataLoader workers of their own, and each
kind of fault by chance. The run ends as one that nobody touched, and leaves nothing behind.

    make chaos SEED=117 ROUNDS=4
"""

from __future__ import annotations

import os
import subprocess
import uuid
from pathlib import Path

import pytest

from dlrover_hooks.testing import faults
from dlrover_hooks.testing.faults import Fault
from dlrover_hooks.testing.inject import Struck
from dlrover_hooks.testing.trace import Run
from dlrover_hooks.testing.verdicts import Evidence, judge
from tests.chaos.run_worker import SAMPLES, STEPS_PER_EPOCH, WORLD
from tests.e2e.launched import Launched, all_gone

EPOCHS = 4
"""For each round of faults."""
SECONDS = 40.0
"""For each fault, where every one of them costs a restart of all workers and other tests run beside."""
SCRIPT = "sys.argv.append('{epochs}')\nfrom tests.chaos.run_worker import main\nmain()\n"


class Drilled:
    """One run of the worker under the launcher, with `schedule`; `told`: what each rank said at its end."""

    def __init__(self, folder: Path, epochs: int, schedule: tuple[Fault, ...], temporary: Path) -> None:
        folder.mkdir()
        temporary.mkdir()
        self._file, self.trace = folder / "faults", Run(folder / "trace")
        self._file.write_text(faults.written(schedule))
        launched = Launched(
            folder, SCRIPT.format(epochs=epochs), "-n", str(WORLD), "--max-restarts", str(len(schedule) + 2),
            job=f"chaos-{uuid.uuid4().hex[:8]}", DLROVER_HOOKS_FAULTS=str(self._file),
            DLROVER_HOOKS_TRACE=str(self.trace.folder), TMPDIR=str(temporary),
        )  # fmt: skip
        try:
            self.code, self.said = launched.end(240 + SECONDS * len(schedule))
        except subprocess.TimeoutExpired:
            launched.process.kill()
            self.code, self.said = launched.end()
        finally:
            launched.process.kill()
        files = [path for path in temporary.rglob("*") if not path.is_dir() and not _pythons(path)]
        self.told, self.left = launched.read(), [*launched.leftovers(), *map(str, files)]
        self.trace.read()

    def struck(self) -> list[dict]:
        return [row for path in self._file.parent.glob("faults.*.struck") for row in Struck(path).rows()]

    def story(self) -> str:
        """What happened, for whoever has to repeat it."""
        lines = [f"{row['at']:.2f} {row['fault']}" for row in self.struck()]
        lives = [
            f"{life.head.at:.2f} attempt {life.head.attempt} rank {life.head.rank} from step {life.head.begin} to "
            f"{max((row.step for row in life.rows), default=life.head.begin)}" for life in self.trace.lives
        ]  # fmt: skip
        schedule = self._file.read_text()
        return f"{schedule}\n" + "\n".join(sorted(lines + lives)) + f"\nended with {self.code}\n{self.said[-6000:]}"


def _pythons(path: Path) -> bool:
    """multiprocessing's own socket, which a DataLoader worker cannot remove when it is killed."""
    return path.parent.name.startswith("pymp-")


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_with_every_kind_of_fault_ends_as_if_there_had_been_none(
    pytestconfig: pytest.Config, chaos_seed: int, runtime: Path, tmp_path: Path
) -> None:
    """DL-77, DL-81..84, DL-90..92, ED-25, ED-27: every sample visited once an epoch, counted in the weights; the same
    number of steps, each bit-equal; every fault struck; no process, segment, socket or temporary file is left.
    """
    rounds: int = pytestconfig.getoption("chaos_run_rounds")  # pyright: ignore[reportAssignmentType]
    epochs = EPOCHS * rounds
    steps = epochs * STEPS_PER_EPOCH
    schedule = faults.random(chaos_seed, steps=steps, world=WORLD, count=rounds * len(faults.MENU))
    print(f"seed {chaos_seed}\n{faults.written(schedule)}")
    calm = Drilled(tmp_path / "calm", epochs, (), runtime / "calm")
    hit = Drilled(tmp_path / "hit", epochs, schedule, runtime / "hit")
    for one in (calm, hit):
        assert one.code == 0, one.story()
        assert [(told["steps"], told["visits"]) for told in one.told] == [(steps, [float(epochs)] * SAMPLES)] * WORLD
        assert one.left == []
        assert all_gone([life.head.pid for life in one.trace.lives])
    found = judge(Evidence(calm=calm.trace, hit=hit.trace, bound=steps + 1, code=hit.code, struck=hit.struck(),
                           planned=len(schedule)))  # fmt: skip
    assert [verdict for verdict in found if not verdict.kept] == [], hit.story()
    assert len(hit.struck()) == len(schedule), hit.story()
    assert list((runtime / "dlrover-hooks").iterdir()) == [], "a keeper's lock or socket"
    mine = {str(life.head.pid) for one in (calm, hit) for life in one.trace.lives}
    assert [name for name in os.listdir("/dev/shm") if "dlrover" in name or mine & set(name.split("_"))] == []
