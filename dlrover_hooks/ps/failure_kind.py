"""Whether an error of TensorFlow means that a server was lost. Pure: it reads the class name and the text."""

from __future__ import annotations

import enum
import re

_LOST = {
    "UnavailableError",
    "AbortedError",
    "CancelledError",
    "InvalidArgumentError",
    "FailedPreconditionError",
    "NotFoundError",
    "DeadlineExceededError",
    "InternalError",
    "PSUnavailableError",
    "WorkerPreemptionError",
}
"""Errors of `tf.errors` that TensorFlow 2.21 raises when a server is gone, besides their use for errors of the user."""
_SIGNS = re.compile(
    r"failed to connect|connection re(fused|set)|reset by peer|socket closed|context_id|remote context|"
    r"was cancelled|is cancelled|recvmsg|end of (file|tcp stream)|too many pings|keepalive|unavailable|"
    r"unable to parse request|worker .*(restart|preempt)",
    re.IGNORECASE,
)
"""Words of gRPC and of the remote context, in the texts of such errors."""
_TASK = re.compile(r"/job:(ps|worker)(?:/replica:\d+)?/task:(\d+)")


class FailureKind(enum.Enum):
    """A parameter server is gone (the model's state with it), a worker, or the user's code is wrong."""

    PS = "ps"
    WORKER = "worker"
    USER = "user"


def failure_kind(error: str, text: str) -> FailureKind:
    """The kind of an error.

    Args:
        error: the name of its class.
        text: its message.
    """
    if error not in _LOST or not _SIGNS.search(text):
        return FailureKind.USER
    named = {job for job, _ in _TASK.findall(text)}
    return FailureKind.WORKER if named == {"worker"} else FailureKind.PS


def named_tasks(text: str) -> list[tuple[str, int]]:
    """The tasks that the message names: (`"ps"` or `"worker"`, index), each once."""
    return sorted({(job, int(index)) for job, index in _TASK.findall(text)})
