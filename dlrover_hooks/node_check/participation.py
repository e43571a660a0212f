"""Takes part in a check of several nodes: joins, makes the transfers that the master requests, returns its report."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.node_check.pair_transfer import Transfer, TransferListener, exchange, reason_of
from dlrover_hooks.protocol import (
    AwaitCheck,
    CheckReport,
    CheckStep,
    JoinCheck,
    Measure,
    Message,
    ReportTransfer,
    Secret,
)

_POLL_S = 10.0
_LONGEST = 500
_TURN_S = 0.2
Ask = Callable[[Message], Any]
"""Sends a request to the master until it is answered. Raises MasterAway, MasterError."""


class Watching(Protocol):
    """An open liveness connection, see `MasterClient.watch`."""

    def close(self) -> None:
        """End it."""
        ...


class CheckPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a node takes part: see `protocol.JoinCheck`.

    `host`, `port`: for the other nodes; port 0: that of the listener. `listen_host`: where it listens; empty: on all
    addresses. `last_call_s`: nodes that are launched together end their measurements some seconds apart.
    """

    job: str
    incarnation: str
    node: str
    host: str
    port: int = 0
    listen_host: str = ""
    listen_port: int = 0
    least: int
    most: int
    gather_s: float
    last_call_s: float = 10.0
    transfer_s: float


def ignore(*_: object) -> None:
    """Callback of what is of no interest here."""


def take_part(
    plan: CheckPlan,
    measures: tuple[Measure, ...],
    ask: Ask,
    watch: Callable[[], Watching],
    *,
    begins: Callable[[CheckStep], object] = ignore,
    turn: Callable[[], object] = ignore,
) -> CheckReport:
    """The report of the next check, once it is over: the master's deadlines end it.

    Args:
        plan: of this node.
        measures: what it has measured by itself.
        ask: calls the master.
        watch: opens a liveness connection, by which the master learns at once that this process has ended.
        begins: called before each transfer.
        turn: called several times a second during a transfer. What it raises ends this node's part, and is raised here.

    Raises:
        OSError: the listener's port cannot be used.
        MasterAway, MasterError: from `ask`.
    """
    secret = Secret(secrets.token_hex(16))
    listener = TransferListener(plan.listen_host, plan.listen_port, secret, within_s=plan.transfer_s)
    with listener:
        ask(_join(plan, measures, secret, plan.port or listener.port))
        with contextlib.closing(watch()):
            after = 0
            while True:
                task: CheckStep = ask(AwaitCheck(plan.job, plan.incarnation, after, _POLL_S))
                if task.report is not None:
                    return task.report
                if task.peer is not None:
                    after = task.step
                    begins(task)
                    ask(_dialled(listener, plan, task, turn))


def _join(plan: CheckPlan, measures: tuple[Measure, ...], secret: Secret, port: int) -> JoinCheck:
    return JoinCheck(
        job=plan.job,
        incarnation=plan.incarnation,
        node=plan.node,
        host=plan.host,
        port=port,
        secret=secret,
        least=plan.least,
        most=plan.most,
        gather_s=plan.gather_s,
        last_call_s=plan.last_call_s,
        transfer_s=plan.transfer_s,
        measures=measures,
    )


def _dialled(
    listener: TransferListener, plan: CheckPlan, task: CheckStep, turn: Callable[[], object]
) -> ReportTransfer:
    """`exchange` on a thread of its own, so that `turn` is called meanwhile. Raises what `turn` raises.

    The thread then ends by the deadline of the transfer.
    """
    found: list[Transfer | OSError | EOFError] = []

    def run() -> None:
        try:
            found.append(exchange(listener, plan.incarnation, task))
        except (OSError, EOFError) as error:  # the result, too
            found.append(error)

    thread = BackgroundThread("dlrover-hooks-transfer", run, where=f"transfer of step {task.step} of a node check")
    thread.start()
    while not thread.join(_TURN_S):
        turn()
    thread.check()
    report = ReportTransfer(job=plan.job, incarnation=plan.incarnation, step=task.step)
    if isinstance(found[0], Transfer):
        return msgspec.structs.replace(report, speed=found[0].speed, round_trip_s=found[0].round_trip_s)
    assert task.peer is not None
    why = f"{task.peer.node} at {task.peer.host}:{task.peer.port}: {reason_of(found[0])}"
    return msgspec.structs.replace(report, failed=why[:_LONGEST])
