"""Decides which process may save for a worker (`seat`: its local rank); one launch per job. Loop thread only."""

from __future__ import annotations

from collections.abc import Iterable

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.server_connection import Peer

_HINT = "end that process first, or give this run another job name (--job, DLROVER_HOOKS_JOB)"


def refused(
    asking: Peer, message: keeper_messages.Hello | keeper_messages.Inventory, peers: Iterable[Peer]
) -> keeper_messages.Refused | None:
    """The refusal for `asking`, if any: another launch is active, or a newer attempt of the run has that seat."""
    text = _other_launch(asking, message.master, peers)
    if text is None and isinstance(message, keeper_messages.Hello):
        text = _newer_life(asking, message, peers)
    return keeper_messages.Refused(ref=message.ref, reason=text, hint=_HINT) if text is not None else None


def _other_launch(asking: Peer, named: str | None, peers: Iterable[Peer]) -> str | None:
    if named is None:
        return None
    master = asking.master(named)
    for other in peers:
        if other is not asking and other.saves_for(other_than=master) and other.hello is not None:
            return (
                f"job {other.hello.job!r} runs on this node already: process {other.pid} saves for local rank "
                f"{other.hello.seat} (let in by {other.master(other.hello.master)}, not by {master})"
            )
    return None


def _newer_life(asking: Peer, hello: keeper_messages.Hello, peers: Iterable[Peer]) -> str | None:
    for other in holders(asking, hello.seat, peers):
        if other.hello is not None and other.hello.run == hello.run and other.hello.attempt > hello.attempt:
            return f"process {other.pid}, a newer incarnation of job {hello.job!r}, saves for local rank {hello.seat}"
    return f"local rank {hello.seat} of job {hello.job!r} is saved by another process" if asking.replaced else None


def holders(asking: Peer, seat: int, peers: Iterable[Peer]) -> list[Peer]:
    """All other connections that save for `seat` now."""
    return [other for other in peers if other is not asking and other.hello and other.hello.seat == seat
            and not other.replaced]  # fmt: skip


def taken(asking: Peer, peers: Iterable[Peer]) -> set[int]:
    """The local ranks that living processes other than `asking` save for."""
    return {other.hello.seat for other in peers if other is not asking and other.hello and not other.replaced}
