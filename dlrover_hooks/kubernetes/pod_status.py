"""What the status of a Pod says of the node in it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection
from typing import Any

import msgspec

from dlrover_hooks.protocol import REQUEUE, NodeExit

_BY_SIGNAL = 128
"""A container's exit code above it: ended by the signal of that number, as in a shell."""
_TAKEN = {"NodeLost", "Preempting", "Shutdown", "NodeShutdown", "Terminated"}
"""Reasons of a failed Pod: its machine is gone, or is needed for another one."""
_EVICTED = "Evicted"
"""The machine lacked memory or disk, which this Pod may have used up."""


class PodEnd(msgspec.Struct, frozen=True):
    """Why the node in a Pod has ended. `exit_code`: negative for a signal."""

    exit: NodeExit
    exit_code: int
    detail: str = ""


def runs(pod: dict[str, Any]) -> bool:
    """Its containers were started."""
    return pod.get("status", {}).get("phase") == "Running"


def pod_end(pod: dict[str, Any], user_errors: Collection[int] = ()) -> PodEnd | None:
    """How it has ended; None: it has not. `user_errors`: exit codes of `NodeExit.USER_ERROR`."""
    status = pod.get("status", {})
    phase, reason = status.get("phase"), status.get("reason", "")
    if phase == "Succeeded":
        return PodEnd(NodeExit.SUCCEEDED, 0)
    if phase != "Failed":
        return None
    ends = [one["state"]["terminated"] for one in status.get("containerStatuses", ()) if "terminated" in one["state"]]
    failed = next((one for one in ends if one["exitCode"]), None)
    detail = ": ".join(text for text in (reason, status.get("message", "")) if text)
    if failed is None:  # never started, or the machine is lost
        cause = NodeExit.PREEMPTED if reason in _TAKEN else NodeExit.KILLED
        return PodEnd(cause, -signal.SIGKILL, detail or "its Pod failed")
    code = int(failed["exitCode"])
    why = failed.get("reason", "")
    detail = detail or (why if why not in ("", "Error") else f"exit code {code}")
    if why == "OOMKilled":
        return PodEnd(NodeExit.OUT_OF_MEMORY, -signal.SIGKILL, detail)
    told_to_go = "deletionTimestamp" in pod.get("metadata", {}) and code > _BY_SIGNAL
    if reason in _TAKEN or code == REQUEUE or told_to_go:
        return PodEnd(NodeExit.PREEMPTED, _BY_SIGNAL - code if code > _BY_SIGNAL else code, detail)
    if code > _BY_SIGNAL or reason == _EVICTED:
        return PodEnd(NodeExit.KILLED, _BY_SIGNAL - code if code > _BY_SIGNAL else code, detail)
    return PodEnd(NodeExit.USER_ERROR if code in user_errors else NodeExit.ERROR, code, detail)


def deleted(pod: dict[str, Any]) -> PodEnd:
    """Its Pod was deleted before it had ended: by a user, a drain, or because its machine is gone."""
    return PodEnd(NodeExit.PREEMPTED, -signal.SIGKILL, f"its Pod {pod['metadata']['name']} was deleted")
