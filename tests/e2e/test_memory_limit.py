"""A keeper refuses what its memory does not hold, also in a real cgroup; a worker that the kernel kills is named."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.errors import KeeperAway
from dlrover_hooks.protocol import Generation
from tests.control_groups import memory_group, set_limit
from tests.e2e.kept import RUN, Kept, state
from tests.e2e.launched import Launched
from tests.waiting import until

LIMIT = 96 << 20


pytestmark = pytest.mark.usefixtures("runtime")


class Limited(NamedTuple):
    keeper: subprocess.Popen[bytes]
    where: str
    """What sets the limit, as the keeper names it."""


@pytest.fixture
def limited(kept: Kept) -> Limited:
    """A keeper that has 96 MB: it is told so. What a kernel that counts says is `in_cgroup`'s."""
    return Limited(kept.keeper(before=("-m", "tests.e2e.limited_keeper"), KEEPER_LIMIT=str(LIMIT)), "the test")


@pytest.fixture
def group() -> Iterator[Path]:
    """Of 96 MB, with another group inside."""
    with memory_group(LIMIT) as folder:
        yield folder


@pytest.fixture
def in_cgroup(group: Path, kept: Kept) -> Limited:
    """A keeper in a real cgroup of 96 MB."""
    keeper = kept.keeper()
    (group / "inner/cgroup.procs").write_text(str(keeper.pid))
    return Limited(keeper, f"cgroup {group}")


@pytest.fixture(params=["limited", "in_cgroup"])
def small(request: pytest.FixtureRequest) -> Limited:
    return request.getfixturevalue(request.param)


def test_what_does_not_fit_is_refused(small: Limited, kept: Kept) -> None:
    """In a cgroup, where the limit is further up the tree, too."""
    trainer = kept.trainer()
    trainer.save(1, state(1, LIMIT // 2 // 4))
    assert isinstance(trainer.error, KeeperAway)
    assert "3 slots of 51 MB need 153 MB" in trainer.error.message
    assert "does not fit" in trainer.error.message
    assert f"{small.where} sets the limit" in trainer.error.hint
    trainer.save(2, state(2, LIMIT // 8 // 4))
    assert kept.notice(keeper_messages.Hashed).generation.step == 2
    assert small.keeper.poll() is None
    kept.close()


@pytest.mark.parametrize("grown", [LIMIT * 7 // 24, LIMIT * 10 // 24])
def test_a_state_that_grows_gives_old_slots_up_but_the_newest_complete_one(
    small: Limited, kept: Kept, grown: int
) -> None:
    """Three new slots do not fit beside three old ones: saves go on, and a kill finds a complete generation always."""
    trainer = kept.trainer()

    def save(step: int, nbytes: int) -> None:
        until(lambda: trainer.save(step, state(step, nbytes // 4)), f"a save of step {step}")
        assert kept.notice(keeper_messages.Hashed).generation.step == step

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
    assert small.keeper.poll() is None
    kept.close()


def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_named(
    launch: Callable[..., Launched], group: Path
) -> None:
    """It allocates more than its group's limit; a restart before any progress would not help."""
    set_limit(group, 600 << 20)
    script = """
        taken = []
        while True:
            taken.append(bytearray(os.urandom(1)) * (16 << 20))
        """
    enter = ("sh", "-c", f'echo $$ > {group}/inner/cgroup.procs && exec "$@"', "sh")
    code, said = launch(script, "--nproc-per-node", "1", "--standby", "0", before=enter).end()
    assert code == 1, said
    died = "worker 0 died (SIGKILL: out of memory) at step 0, before any progress: not restarted, a higher memory limit"
    assert died in said
    assert "why    SIGKILL: out of memory\n" in said
