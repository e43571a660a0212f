"""When the administer of a job asks for a plan."""

from __future__ import annotations

import pytest

from dlrover_hooks.master.brain import administer
from dlrover_hooks.master.brain.database.events import EventKind
from dlrover_hooks.master.brain.messages import AskPlan
from dlrover_hooks.master.brain.records import JobRecord
from dlrover_hooks.master.scaling import JobSample, NodeType, OptimizeStage
from dlrover_hooks.protocol import Node
from tests.brain_jobs import sample, told

STARTED = {EventKind.INIT: 0.0, EventKind.WORKER_INITIAL: 0.0, EventKind.PS_INITIAL: 0.0, EventKind.PERIODIC: 900.0}


def kinds(*samples: JobSample, last: dict[EventKind, float] | None = None, now: float = 1000.0) -> list[EventKind]:
    record = JobRecord(told(ps=bool(samples[-1].of(NodeType.PS))), OptimizeStage.RUNNING, samples)
    return [event.kind for event in administer.looked(record, STARTED if last is None else last, now)]


def test_nothing_is_due_before_a_few_samples_agree() -> None:
    assert kinds(sample(1), sample(1), last={}) == []
    assert kinds(sample(1), sample(2), sample(2), last={}) == [], "two of the nodes that it has now"


def test_the_stages_come_once_and_in_order() -> None:
    ps, plain = [sample(2, ps=2)] * 3, [sample(2)] * 3
    assert kinds(*ps, last={EventKind.INIT: 0.0}) == [EventKind.WORKER_INITIAL]
    assert kinds(*ps, last={EventKind.INIT: 0.0, EventKind.WORKER_INITIAL: 1.0}) == [EventKind.PS_INITIAL]
    assert kinds(*plain, last={EventKind.INIT: 0.0, EventKind.WORKER_INITIAL: 990.0}) == [], "no servers, no stage"
    assert kinds(*plain, last={EventKind.PERIODIC: 990.0}) == [], "a job that ran before its history was forgotten"


@pytest.mark.parametrize(("share", "found"), [(0.89, []), (0.95, [EventKind.HOT_PS])])
def test_a_server_is_hot_if_all_samples_say_so(share: float, found: list[EventKind]) -> None:
    hot = sample(2, ps_cpu=[2.0, 4 * share])
    assert kinds(hot, hot, hot) == found
    assert kinds(hot, sample(2, ps_cpu=[2.0, 2.0]), hot) == []


def test_a_job_is_slow_compared_with_its_best_with_the_same_nodes() -> None:
    fast, slow = sample(2, speed=10.0), sample(2, speed=7.0)
    assert kinds(fast, slow, slow, slow) == [EventKind.SLOW]
    assert kinds(fast, *[sample(2, speed=8.5)] * 3) == []
    assert kinds(sample(4, speed=20.0), slow, slow, slow) == [], "it had other nodes"
    assert kinds(fast, *[sample(2, speed=0.0)] * 3) == [], "that it stands still is its master's affair"


def test_servers_with_too_many_cores_are_looked_for_once_an_hour() -> None:
    idle = [sample(2, ps_cpu=[0.5, 1.0])] * 3
    assert kinds(*idle) == [EventKind.LOW_USE]
    assert kinds(*idle, last={**STARTED, EventKind.LOW_USE: 0.0}) == []


def test_an_issue_makes_no_second_event_within_its_cool_down() -> None:
    hot = [sample(2, ps_cpu=[3.9, 3.9])] * 3
    last = {**STARTED, EventKind.HOT_PS: 800.0}
    assert kinds(*hot, last=last, now=1000.0) == []
    assert kinds(*hot, last=last, now=1101.0) == [EventKind.HOT_PS]


def test_a_running_job_is_planned_anew_after_the_period() -> None:
    steady = [sample(2)] * 3
    assert kinds(*steady, now=1079.0) == []
    assert kinds(*steady, now=1080.0) == [EventKind.PERIODIC]


def test_what_a_master_asks_for() -> None:
    asked = {stage: administer.asked(AskPlan("job", stage)).kind for stage in OptimizeStage}
    assert asked == {
        OptimizeStage.CREATE: EventKind.INIT,
        OptimizeStage.WORKER_INITIAL: EventKind.WORKER_INITIAL,
        OptimizeStage.PS_INITIAL: EventKind.PS_INITIAL,
        OptimizeStage.RUNNING: EventKind.PERIODIC,
    }
    assert administer.asked(AskPlan("job", OptimizeStage.RUNNING, model_only=True)).kind is EventKind.MODEL
    killed = administer.asked(AskPlan("job", OptimizeStage.CREATE, oom_nodes=(Node(NodeType.PS, 3),)))
    assert (killed.kind, killed.reason) == (EventKind.OUT_OF_MEMORY, "killed for memory: ps-3")
