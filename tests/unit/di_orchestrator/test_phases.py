"""The phases of a `DIJob`."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.master.di_orchestrator.di_job_resource import DIJobPhase as Phase, DIJobSpec, DIJobStatus
from dlrover_hooks.master.di_orchestrator.phases import ReplicaCounts, next_phase

SPEC = DIJobSpec((), backoff_limit=2)
ALL, NONE = ReplicaCounts(3, 3), ReplicaCounts(3)
READY, DONE, ONE_FAILED = (
    ReplicaCounts(3, 3, ready=3),
    ReplicaCounts(3, 3, succeeded=3),
    ReplicaCounts(3, 3, ready=2, failed=1),
)
LESS, MOVED = ReplicaCounts(3, 2, ready=2), ReplicaCounts(3, 3, ready=3, placed=False)

TABLE = [
    (Phase.PENDING, NONE, Phase.PENDING),
    (Phase.PENDING, ReplicaCounts(0), Phase.PENDING),
    (Phase.PENDING, ALL, Phase.STARTING),
    (Phase.STARTING, ALL, Phase.STARTING),
    (Phase.STARTING, READY, Phase.RUNNING),
    (Phase.STARTING, ReplicaCounts(3, 3, ready=1, succeeded=2), Phase.RUNNING),
    (Phase.STARTING, DONE, Phase.SUCCEEDED),
    (Phase.STARTING, ONE_FAILED, Phase.RESTARTING),
    (Phase.STARTING, LESS, Phase.RESCHEDULING),
    (Phase.RUNNING, READY, Phase.RUNNING),
    (Phase.RUNNING, ReplicaCounts(3, 3, ready=2), Phase.RUNNING),
    (Phase.RUNNING, DONE, Phase.SUCCEEDED),
    (Phase.RUNNING, ONE_FAILED, Phase.RESTARTING),
    (Phase.RUNNING, LESS, Phase.RESCHEDULING),
    (Phase.RUNNING, ReplicaCounts(2, 3, ready=3), Phase.RESCHEDULING),
    (Phase.RUNNING, MOVED, Phase.RESCHEDULING),
    (Phase.RESTARTING, NONE, Phase.RESTARTING),
    (Phase.RESTARTING, ALL, Phase.STARTING),
    (Phase.RESCHEDULING, LESS, Phase.RESCHEDULING),
    (Phase.RESCHEDULING, MOVED, Phase.RESCHEDULING),
    (Phase.RESCHEDULING, ALL, Phase.STARTING),
    (Phase.RESCHEDULING, ReplicaCounts(0), Phase.PENDING),
    (Phase.SUCCEEDED, ONE_FAILED, Phase.SUCCEEDED),
    (Phase.FAILED, READY, Phase.FAILED),
    (Phase.UNKNOWN, READY, Phase.UNKNOWN),
]


@pytest.mark.parametrize(("phase", "pods", "expected"), TABLE)
def test_what_follows(phase: Phase, pods: ReplicaCounts, expected: Phase) -> None:
    assert next_phase(SPEC, DIJobStatus(phase), pods).phase is expected


def test_restarts_are_counted_up_to_the_limit() -> None:
    status = DIJobStatus(Phase.RUNNING)
    for restarts in (1, 2):
        status = next_phase(SPEC, status, ONE_FAILED)
        assert (status.phase, status.restarts, status.reschedules) == (Phase.RESTARTING, restarts, 0)
        status = next_phase(SPEC, status, ALL)
    assert next_phase(SPEC, status, ONE_FAILED).phase is Phase.FAILED
    without = msgspec.structs.replace(SPEC, backoff_limit=None)
    assert next_phase(without, msgspec.structs.replace(status, restarts=99), ONE_FAILED).restarts == 100


def test_reschedules_are_counted() -> None:
    status = next_phase(SPEC, DIJobStatus(Phase.RUNNING), LESS)
    assert (status.phase, status.restarts, status.reschedules) == (Phase.RESCHEDULING, 0, 1)
    assert next_phase(SPEC, status, LESS) == status, "it is counted once"


COUNTS = st.integers(0, 4)
PODS = st.builds(ReplicaCounts, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.booleans())
ALLOWED = {(phase, after) for phase, _, after in TABLE} | {
    (Phase.STARTING, Phase.FAILED),
    (Phase.RUNNING, Phase.FAILED),
}


@given(st.lists(PODS, max_size=40))
def test_only_transitions_of_the_diagram_are_made(seen: list[ReplicaCounts]) -> None:
    statuses = [DIJobStatus()]
    for pods in seen:
        statuses.append(next_phase(SPEC, statuses[-1], pods))
    for before, after in itertools.pairwise(statuses):
        assert (before.phase, after.phase) in ALLOWED
        assert after.restarts - before.restarts == (after.phase is Phase.RESTARTING and before.phase is not after.phase)
        assert 0 <= after.restarts <= 2
    over = [status.phase for status in statuses if status.phase in (Phase.SUCCEEDED, Phase.FAILED)]
    assert len(set(over)) <= 1
