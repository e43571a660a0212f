"""What runs the tasks of a parameter server job for its `TaskSupervisor`: processes of this machine, or Pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from dlrover_hooks import protocol as p


class EndedTask(NamedTuple):
    """A task that is gone for certain.

    `place`: where it ran, such as `pid 4711`. `exit_code`: negative for a signal. `how`: in words. `out_of_memory`: it
    was killed for want of memory. `preempted`: it was ended because its place was needed, or by a user.
    """

    task: p.Task
    place: str
    exit_code: int
    how: str
    out_of_memory: bool = False
    preempted: bool = False


class TaskRunner(Protocol):
    """Main thread only. It wakes the selector of the supervisor when a task ends."""

    @property
    def tasks(self) -> Mapping[int, p.Task]:
        """By id: those that were started and are not known to be gone."""
        ...

    @property
    def pids(self) -> Mapping[int, int]:
        """By id: processes of this machine. What they use is reported."""
        ...

    @property
    def may_start(self) -> bool:
        """False: a task is started sooner if it waits."""
        ...

    def start(self, task: p.Task) -> str:
        """Start a task; where."""
        ...

    def resize(self, task: p.Task) -> None:
        """A task that runs gets `task.resource`, if that is possible."""
        ...

    def stop(self, number: int) -> None:
        """Have a task killed. `ended` tells when it is gone."""
        ...

    def ended(self) -> list[EndedTask]:
        """Those that are gone since the last call, stopped ones too. They are forgotten."""
        ...


def task_name(task: p.Task) -> str:
    """Its name in messages, such as `ps 1`."""
    return "chief" if task.type is p.NodeType.CHIEF else f"{task.type.value} {task.index}"
