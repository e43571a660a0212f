"""Tasks as nodes of a scaler: what is told of their ends, and when a task is gone."""

from __future__ import annotations

import selectors
import signal
from collections.abc import Iterator

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import LaunchError
from dlrover_hooks.launcher.tasks.task_pods import TaskPods
from dlrover_hooks.scalers.node_reconciler import StartRetries
from dlrover_hooks.testing import FakeScaler
from tests.waiting import until

CHIEF = p.Task(1, p.NodeType.CHIEF, 0, p.NodeStatus.INITIAL)
SERVER = p.Task(7, p.NodeType.PS, 1, p.NodeStatus.INITIAL, resource=p.NodeResource(cpu=2.0))


class Slow(FakeScaler):
    """A node that is to be removed ends when it is let go, as a Pod whose machine does not answer."""

    held = False

    def _remove(self, launch: int, node: p.Node, grace_s: float | None) -> None:
        if not self.held:
            super()._remove(launch, node, grace_s)


@pytest.fixture
def scaler() -> Iterator[Slow]:
    made = Slow(retries=StartRetries(attempts=1))
    made.start()
    yield made
    made.held = False
    made.stop(0.0)


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


@pytest.fixture
def pods(scaler: Slow, selector: selectors.BaseSelector) -> Iterator[TaskPods]:
    made = TaskPods("job", scaler, lambda node: f"job-{node.name}", selector)
    yield made
    made.close()


def runs(scaler: Slow, name: str) -> None:
    until(lambda: any(node.name == name for node in scaler.running.values()), name)


def test_a_task_is_a_node_of_its_number_and_its_size(pods: TaskPods, scaler: Slow) -> None:
    assert pods.start(SERVER) == "Pod job-ps-7"
    runs(scaler, "ps-7")
    (node,) = scaler.running.values()
    assert (node.id, node.index, node.config_resource) == (7, 1, p.NodeResource(cpu=2.0))


def test_a_task_that_is_stopped_is_gone_only_when_its_node_is(
    pods: TaskPods, scaler: Slow, selector: selectors.BaseSelector
) -> None:
    """An old server must not meet the new one: that it was asked to end is not enough."""
    pods.start(SERVER)
    runs(scaler, "ps-7")
    pods.ended()
    scaler.held = True
    pods.stop(7)
    until(lambda: scaler.list_nodes()[0].state.value == "removing", "the removal")
    assert pods.ended() == []
    assert set(pods.tasks) == {7}
    scaler.end("ps-7", -signal.SIGKILL)
    assert selector.select(60), "the main thread is woken"
    (ended,) = until(pods.ended, "its end")
    assert (ended.task.id, ended.exit_code, ended.preempted) == (7, -9, True)
    assert pods.tasks == {}
    assert pods.ended() == []


def test_ends_are_told_in_words_and_leave_the_scaler(pods: TaskPods, scaler: Slow) -> None:
    pods.start(CHIEF)
    runs(scaler, "chief-1")
    scaler.end("chief-1", 3)
    (ended,) = until(pods.ended, "its end")
    assert (ended.exit_code, ended.place, ended.how) == (3, "Pod job-chief-1", "ended with exit code 3")
    until(lambda: not scaler.list_nodes(), "the scaler to forget it")


def test_a_task_that_cannot_be_started_says_why(pods: TaskPods, scaler: Slow) -> None:
    def refuse(node: p.Node) -> None:
        raise LaunchError("exceeded quota")

    scaler.before_start = refuse
    pods.start(SERVER)
    (ended,) = until(pods.ended, "its end")
    assert (ended.exit_code, ended.how) == (-9, "could not be started: LaunchError: exceeded quota")


def test_nodes_of_an_earlier_runner_are_tasks(scaler: Slow, selector: selectors.BaseSelector) -> None:
    scaler.scale(p.ScalePlan(launch_nodes=[p.Node(p.NodeType.PS, 7, index=1)]))
    runs(scaler, "ps-7")
    found = TaskPods("job", scaler, lambda node: node.name, selector)
    try:
        (task,) = found.tasks.values()
        assert (task.id, task.type, task.index) == (7, p.NodeType.PS, 1)
        found.stop(7)
        (ended,) = until(found.ended, "its end")
        assert (ended.task.id, ended.preempted) == (7, True), "as it was asked to"
    finally:
        found.close()
