"""Takes part in a check of several nodes: joins, makes the transfers that the master requests, returns its report."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.node_check.pair_transfer import TransferListener, TransferOutcome, exchange
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


class CheckPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a node takes part: see `protocol.JoinCheck`.

    `host`, `port`: for the other nodes; port 0: that of the listener. `listen_host`: where it listens; empty: on all
    addresses.
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
    last_call_s: float = 2.0
    transfer_s: float


def _nothing(*_: object) -> None:
    pass


def take_part(
    plan: CheckPlan,
    measures: tuple[Measure, ...],
    ask: Ask,
    *,
    begins: Callable[[CheckStep], object] = _nothing,
    turn: Callable[[], object] = _nothing,
) -> CheckReport:
    """The report of the next check, once it is over: the master's deadlines end it.

    Args:
        plan: of this node.
        measures: what it has measured by itself.
        ask: calls the master.
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
        after = 0
        while True:
            task: CheckStep = ask(AwaitCheck(plan.job, plan.incarnation, plan.node, after, _POLL_S))
            if task.report is not None:
                return task.report
            if task.peer is not None:
                after = task.step
                begins(task)
                outcome = _exchanged(listener, plan.incarnation, task, turn)
                ask(_reported(plan, task, outcome))


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


def _exchanged(
    listener: TransferListener, incarnation: str, task: CheckStep, turn: Callable[[], object]
) -> TransferOutcome:
    """`exchange` on a thread of its own, so that `turn` is called meanwhile. Raises what either of them raises."""
    outcomes: list[TransferOutcome] = []

    def run() -> None:
        outcomes.append(exchange(listener, incarnation, task))

    thread = BackgroundThread("dlrover-hooks-transfer", run, where=f"transfer of node check step {task.step}")
    thread.start()
    while not thread.join(_TURN_S):
        turn()
    thread.check()
    return outcomes[0]


def _reported(plan: CheckPlan, task: CheckStep, outcome: TransferOutcome) -> ReportTransfer:
    transfer = outcome.transfer
    return ReportTransfer(
        job=plan.job,
        incarnation=plan.incarnation,
        step=task.step,
        reached=outcome.reached,
        heard=outcome.heard,
        speed=transfer.speed if transfer is not None else None,
        round_trip_s=transfer.round_trip_s if transfer is not None else None,
        failed=outcome.failed[:_LONGEST],
    )
