"""DL-90: a keeper in a real memory cgroup refuses what its limit does not hold, instead of being killed by it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_hooks import memory
from dlrover_hooks.checkpoint import wire
from dlrover_hooks.errors import KeeperAway
from dlrover_hooks.protocol import Generation
from tests.e2e.kept import RUN, Kept, state, until

LIMIT = 96 << 20


pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup below this process's own, with another one inside that has no limit."""
    folder = None
    with contextlib.suppress(OSError, StopIteration):
        folder = next(mine()) / f"dlrover-hooks-test-{os.getpid()}"
        (folder / "inner").mkdir(parents=True)
        name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
        (folder / name).write_text(str(LIMIT))
        (folder / "inner/cgroup.procs").touch()
    if folder is None or not (folder / "inner/cgroup.procs").exists():
        pytest.skip("cannot make a memory cgroup here")
    yield folder
    for each in (folder / "inner", folder):
        until(lambda each=each: not (each / "cgroup.procs").read_text(), "an empty cgroup")
        each.rmdir()


def mine() -> Iterator[Path]:
    rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for kind, root, mounted in memory._mounts("/proc"):
        for _, names, path in rows:
            if (kind == "cgroup" and "memory" in names.split(",")) or (kind == "cgroup2" and not names):
                yield Path(mounted + path.removeprefix(root.rstrip("/")))


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a cgroup")
def test_a_limit_further_up_the_tree_counts(group: Path, kept: Kept) -> None:
    keeper = kept.keeper()
    (group / "inner/cgroup.procs").write_text(str(keeper.pid))
    trainer = kept.trainer()
    trainer.save(1, state(1, LIMIT // 2 // 4))
    assert isinstance(trainer.error, KeeperAway)
    assert "3 slots of 51 MB need 153 MB" in trainer.error.message
    assert "does not fit" in trainer.error.message
    assert f"cgroup {group} sets the limit" in trainer.error.hint
    trainer.save(2, state(2, LIMIT // 8 // 4))
    assert kept.notice(wire.Hashed).generation.step == 2
    assert keeper.poll() is None
    kept.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a cgroup")
@pytest.mark.parametrize("grown", [LIMIT * 7 // 24, LIMIT * 10 // 24])
def test_a_state_that_grows_gives_old_slots_up_but_the_newest_complete_one(group: Path, kept: Kept, grown: int) -> None:
    """Three new slots do not fit beside three old ones: saves go on, and a kill finds a complete generation always."""
    keeper = kept.keeper()
    (group / "inner/cgroup.procs").write_text(str(keeper.pid))
    trainer = kept.trainer()

    def save(step: int, nbytes: int) -> None:
        until(lambda: trainer.save(step, state(step, nbytes // 4)), f"a save of step {step}")
        assert kept.notice(wire.Hashed).generation.step == step

    for step in (1, 2, 3):
        save(step, LIMIT // 4)
        trainer.complete(Generation(0, step, RUN))
    save(4, grown)
    assert sorted(held.generation.step for held in trainer.held()) == [3, 4]
    trainer.complete(Generation(0, 4, RUN))
    for step in (5, 6, 7):
        save(step, grown)
        trainer.complete(Generation(0, step, RUN))
    assert {6, 7} <= {held.generation.step for held in trainer.held()}
    assert keeper.poll() is None
    kept.close()
