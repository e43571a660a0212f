"""What the launcher makes of the end of a task, with what it and the master know of the task."""

from __future__ import annotations

import selectors
from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.launcher.failures.restart_budget import Over
from dlrover_hooks.launcher.failures.verdict import GAVE_UP
from dlrover_hooks.launcher.tasks.task_runner import EndedTask
from dlrover_hooks.launcher.tasks.task_supervisor import TaskSupervisor


def tasks(status: p.NodeStatus, **more: Any) -> p.Tasks:
    return p.Tasks(2, (p.Task(7, p.NodeType.PS, 1, status, "ps-1"),), **more)


class Master:
    """Answers with the list that it has now."""

    incarnation = "launcher"

    def __init__(self, now: p.Tasks) -> None:
        self.now, self.fenced = now, list[int]()

    def call(self, message: Any) -> Any:
        if isinstance(message, p.Fenced):
            self.fenced.append(message.task)
            return None
        assert isinstance(message, p.ShowTasks)
        assert not self.fenced, "afterwards it may list the task no more"
        return self.now


class Runner:
    def ended(self) -> list[EndedTask]:
        task = tasks(p.NodeStatus.RUNNING).tasks[0]
        return [EndedTask(task, "pid 4711", 0, "ended with exit code 0")]


def judged(master: Master, listed: p.Tasks) -> None:
    with selectors.DefaultSelector() as selector:
        supervisor = TaskSupervisor(
            "job", p.ScaleTasks("job", 1, 1), master, Runner(), selector, lambda: None, lambda _: None,  # type: ignore[arg-type]
            max_restarts=0, restart_window_s=3600.0,
        )  # fmt: skip
        supervisor._list = listed
        try:
            supervisor._judge_all()
        finally:
            supervisor._wake.close()


@pytest.mark.parametrize("now", [tasks(p.NodeStatus.RELEASED), tasks(p.NodeStatus.RUNNING, finished=True)])
def test_a_task_that_ends_since_it_is_released_is_no_failure(now: p.Tasks) -> None:
    """Also if the launcher has not received the list yet that says so."""
    master = Master(now)
    judged(master, tasks(p.NodeStatus.RUNNING))
    assert master.fenced == [7]


def test_a_task_that_ends_by_itself_is_a_failure() -> None:
    master = Master(tasks(p.NodeStatus.RUNNING))
    with pytest.raises(Over) as over:
        judged(master, tasks(p.NodeStatus.RUNNING))
    assert over.value.code == GAVE_UP
    assert master.fenced == [7]
