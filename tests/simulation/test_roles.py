"""Jobs of several roles in virtual time: each end is counted once, no rank has two processes, and every job ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dlrover_hooks.job.local.process_platform import LocalMasters, LocalWorkers
from dlrover_hooks.job.platform import EndedWorker
from dlrover_hooks.master.core import dispatch
from dlrover_hooks.master.core.roles import failure_policies, role_requests, role_state
from dlrover_hooks.master.core.roles.role_state import FailureTimes
from dlrover_hooks.protocol import UNLIMITED, WorkerEnded, WorkerState
from tests.deep import deep
from tests.simulation.roles.role_draw import FAULTS
from tests.simulation.roles.roles_world import simulate_roles

Patch = pytest.MonkeyPatch
SEEDS, AT_ONCE, SOON = 1000, 40, 1


@pytest.mark.parametrize("first", [*range(1, SEEDS, AT_ONCE)[:SOON], *map(deep, range(1, SEEDS, AT_ONCE)[SOON:])])
def test_each_end_counts_once_and_every_job_ends(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + AT_ONCE):
        result = simulate_roles(seed)
        if result.broken is not None:
            pytest.fail(result.report)
        happened.update(result.faults)
    assert happened.keys() >= {*FAULTS, "job done", "job failed"}


@pytest.mark.parametrize("seed", [10309])
def test_seeds_that_found_a_fault(seed: int) -> None:
    """10309: the HTTP master ended while the PrimeMaster waited for its answer, and only restarted after 60 s."""
    assert simulate_roles(seed).broken is None


def test_a_seed_replays() -> None:
    assert [simulate_roles(seed) for seed in (4, 8)] == [simulate_roles(seed) for seed in (4, 8)]


# ---- broken on purpose


def count_twice(patch: Patch) -> None:
    """A failure counts twice in its budget."""
    real = FailureTimes.add

    def add(self: FailureTimes, now: float, window_s: float) -> int:
        real(self, now, window_s)
        return real(self, now, window_s)

    patch.setattr(FailureTimes, "add", add)


def accept_the_past(patch: Patch) -> None:
    """The process of an earlier life can register."""
    real: Any = role_requests._current

    def current(job: Any, roles: Any, role: str, rank: int, life: int) -> Any:
        worker = role_state.find(roles, role, rank)
        return real(job, roles, role, rank, max(life, worker.life) if worker is not None else life)

    patch.setattr(role_requests, "_current", current)


def count_the_past(patch: Patch) -> None:
    """The end of an earlier life counts as that of the current one."""
    real: Any = dispatch._TABLE[WorkerEnded]

    def ended(job: Any, event: WorkerEnded, now: float, effects: Any) -> Any:
        worker = role_state.find(job.roles, event.role, event.rank)
        if worker is not None and event.life == worker.life - 1:
            event = msgspec.structs.replace(event, life=worker.life)
        return real(job, event, now, effects)

    patch.setitem(dispatch._TABLE, WorkerEnded, ended)


def skip_a_life(patch: Patch) -> None:
    """A new life gets a number that is one too high."""
    real: Any = failure_policies.begin_life

    def begin(roles: Any, worker: Any, now: float, reason: str) -> None:
        worker.life += 1
        real(roles, worker, now, reason)

    patch.setattr(failure_policies, "begin_life", begin)


def be_done_too_early(patch: Patch) -> None:
    """The job is done as soon as any worker is done."""

    def done(roles: Any) -> bool:
        return any(one.state is WorkerState.DONE for of in roles.workers.values() for one in of)

    patch.setattr(role_state, "all_drivers_done", done)


def never_give_up(patch: Patch) -> None:
    """No budget is ever used up."""
    real = failure_policies.charge
    patch.setattr(failure_policies, "charge", lambda roles, budget, limit, now: real(roles, budget, UNLIMITED, now))


def hear_no_silence(patch: Patch) -> None:
    """A process that is declared dead keeps its rank."""
    patch.setattr(role_requests, "part", lambda *given, lost: None)


def wait_for_ever(patch: Patch) -> None:
    """The master waits without limit for a worker to register."""
    patch.setattr(role_requests, "tick", lambda job, now, effects: None)


def keep_no_sub_master(patch: Patch) -> None:
    """A SubMaster that has ended is not started again."""

    def restarted(self: LocalMasters, timeout_s: float) -> list[str]:
        self._host.call("ended", "none", 0, timeout_s)
        return []

    patch.setattr(LocalMasters, "restarted", restarted)


def report_the_killed(patch: Patch) -> None:
    """A process that a SubMaster has killed is reported with the number of the next life."""
    real, ends = LocalWorkers.end, dict[LocalWorkers, EndedWorker]()

    def end(self: LocalWorkers, rank: int, life: int) -> None:
        real(self, rank, life)
        ends[self] = self.outcome(rank, life)._replace(life=life + 1)

    ended = LocalWorkers.ended

    def told(self: LocalWorkers, timeout_s: float) -> list[EndedWorker]:
        killed = ends.pop(self, None)
        return [killed] if killed is not None else ended(self, timeout_s)

    patch.setattr(LocalWorkers, "end", end)
    patch.setattr(LocalWorkers, "ended", told)


BROKEN: dict[Callable[[Patch], None], int] = {
    count_twice: 1,
    accept_the_past: 15,
    count_the_past: 1,
    skip_a_life: 1,
    be_done_too_early: 5,
    never_give_up: 5,
    hear_no_silence: 1,
    wait_for_ever: 112,
    keep_no_sub_master: 34,
    report_the_killed: 1,
}
"""By mutant: the seed to try first."""


@pytest.mark.parametrize("mutant", BROKEN, ids=lambda mutant: mutant.__name__)
def test_a_broken_master_is_noticed(mutant: Callable[[Patch], None]) -> None:
    for seed in (BROKEN[mutant], *range(1, SEEDS)):
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            result = simulate_roles(seed)
        if result.broken is not None:
            assert "BROKEN" in result.story
            assert result.report.endswith(f"make simulate-roles SEEDS={seed}:{seed}")
            return
    raise AssertionError(f"{mutant.__name__}: not noticed")
