"""The table of causes: how each is recognised, what follows, and what a user can do. Pure.

Everything that judges the end of a worker reads it: the launcher's decisions, its last screen, and the manual.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from dlrover_hooks.protocol import AGAIN, BAD_NODE, REQUEUE

if TYPE_CHECKING:
    from dlrover_hooks.launcher.failures.verdict import WorkerExit

USAGE = 78
"""Exit code of a worker whose settings must be corrected."""


class Action(enum.Enum):
    """What follows the end of a worker; as the manual says it."""

    LEAVE = "the node leaves"
    REPLACE_NODE = "replace the node"
    FAIL = "end the job"
    RESTART = "restart"


class FailureCause(msgspec.Struct, frozen=True):
    """A row.

    `seen_as`: how the cause is recognised, for the manual. `in_vain`: what follows instead of a restart that would not
    help. FAIL: at a step no further than the start, or at the same failure again. REPLACE_NODE: after `BadNodes.MOST`
    times in a row without a new step. `hint`: for the user.
    """

    name: str
    seen_as: str
    matches: Callable[[WorkerExit], bool]
    action: Action
    in_vain: Action | None = None
    hint: str = ""


def _code(number: int) -> Callable[[WorkerExit], bool]:
    return lambda end: end.exit_code == number


def _says(*texts: str) -> Callable[[WorkerExit], bool]:
    return lambda end: end.reported is not None and any(text in end.reported.error for text in texts)


def _signal(end: WorkerExit) -> bool:
    return end.exit_code is not None and end.exit_code < 0


def _out_of_memory(end: WorkerExit) -> bool:
    return end.out_of_memory


def _exception(end: WorkerExit) -> bool:
    return end.exit_code is not None and end.exit_code > 0


def _stalled(end: WorkerExit) -> bool:
    return end.exit_code is None and end.stalled


def _slow(end: WorkerExit) -> bool:
    return end.exit_code is None and end.slow


def _silent(end: WorkerExit) -> bool:
    return end.exit_code is None and not end.left


def _any(end: WorkerExit) -> bool:
    del end
    return True


CAUSES = (
    FailureCause("preempted", "exit code 75", _code(REQUEUE), Action.LEAVE),
    FailureCause("bad node", "exit code 76", _code(BAD_NODE), Action.REPLACE_NODE),
    FailureCause("setting", "exit code 78: a `UsageError`", _code(USAGE), Action.FAIL),
    FailureCause(
        "fenced", "exit code 74: declared dead by mistake, or it cannot survive its round", _code(AGAIN), Action.RESTART
    ),
    FailureCause(
        "broken device",
        "a CUDA error about ECC, NVLink, hardware, or a GPU that is lost",
        _says("uncorrectable ECC", "uncorrectable NVLink", "hardware stack error", "GPU is lost", "GPU has fallen off"),
        Action.REPLACE_NODE,
        Action.FAIL,
        "the GPU or its link is broken: look for an Xid in the kernel's log (dmesg)",
    ),
    FailureCause(
        "GPU memory",
        "torch's `OutOfMemoryError`",
        _says("OutOfMemoryError", "CUDA out of memory"),
        Action.RESTART,
        Action.FAIL,
        "smaller micro-batches need less memory: with global_batch_size= the batch of a step stays the same",
    ),
    FailureCause(
        "memory",
        "SIGKILL of it or a process of its DataLoader, and the kernel has counted a kill for want of memory",
        _out_of_memory,
        Action.RESTART,
        Action.FAIL,
        "a higher memory limit, fewer DataLoader workers, or fewer workers on the node",
    ),
    FailureCause(
        "storage",
        "`StorageFailed`, `No space left on device`, `Input/output error`, `Stale file handle`",
        _says("StorageFailed", "No space left on device", "Input/output error", "Stale file handle"),
        Action.RESTART,
        Action.FAIL,
        'look at the disk or mount; on_error="warn" trains on while checkpoints cannot be stored',
    ),
    FailureCause("exception", "any other exit code above 0", _exception, Action.RESTART, Action.FAIL),
    FailureCause("signal", "any other signal", _signal, Action.RESTART, Action.REPLACE_NODE),
    FailureCause("stall", "no steps, see `on_stall`", _stalled, Action.RESTART),
    FailureCause("slow rank", "the others wait for it, see `on_straggler`", _slow, Action.RESTART),
    FailureCause("silence", "no heartbeats for `--hang-timeout`", _silent, Action.RESTART, Action.REPLACE_NODE),
    FailureCause("early end", "exit code 0, or left, before the others were done", _any, Action.RESTART),
)
"""By precedence: the first row that matches counts."""


def cause_of(end: WorkerExit) -> FailureCause:
    """The row of a worker's end."""
    return next(row for row in CAUSES if row.matches(end))
