"""Days of small simulated clusters. `make simulate-cluster` plays one of 5,000 nodes and 2,000 jobs."""

from __future__ import annotations

import logging

import pytest

from dlrover_hooks.master.di_orchestrator import replicas
from dlrover_hooks.master.di_orchestrator.allocator import Policy
from dlrover_hooks.master.di_orchestrator.policies import FitPolicy, GoodputPolicy, Placement
from tests.deep import deep
from tests.simulation.cluster.day import ClusterDay, DayResult, DaySize

SMALL = DaySize(nodes=60, jobs=40, hours=6.0)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Thousands of requests fail, and each is logged."""
    logging.disable(logging.ERROR)


def played(seed: int, policy: Policy, size: DaySize = SMALL) -> DayResult:
    try:
        return ClusterDay(seed, size, policy).play()
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", [1, *map(deep, range(2, 5))])
def test_every_job_ends_and_nothing_is_left_of_it(seed: int) -> None:
    """Under machines that are lost and drained, lost answers, late watches, and an operator that starts again."""
    policy: Policy = GoodputPolicy() if seed % 2 else FitPolicy(Placement.SPREAD)
    found = played(seed, policy)
    assert found.broken == ()
    assert found.phases == {"ElasticJob Succeeded": 20, "DIJob Succeeded": 20}
    assert min(found.faults.values()) > 0
    assert found.ranks_checked > 20
    assert found.requests < found.events, "what was done is not asked for again and again"


@pytest.mark.deep
def test_a_day_can_be_played_again() -> None:
    first, second = (played(7, FitPolicy()) for _ in range(2))
    assert first == second


def test_a_controller_that_never_replaces_a_replica_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are missing in a job that runs, and jobs that do not end, are seen."""
    asked = replicas.pod_changes
    monkeypatch.setattr(replicas, "pod_changes", lambda *of: (asked(*of)[0] if not of[3] else [], asked(*of)[1]))
    broken = played(3, FitPolicy()).broken
    assert any(one.startswith("DIJob") for one in broken)
