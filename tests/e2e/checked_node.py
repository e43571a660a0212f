"""A node of a check under test, without measurements of its own: writes what it does, one JSON line each, to a file."""

from __future__ import annotations

import json
import os
import sys

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.node_check.participation import CheckPlan, ignore, take_part


def main(url: str, token: str, node: str, count: int, transfer_s: float, listen_port: int, port: int) -> None:
    """Take part in a check of `count` nodes. `port`: for the others, as a proxy has it; 0: the listener's."""
    client = MasterClient(url, token, incarnation=f"life of {node}")
    plan = CheckPlan(
        job="check", incarnation=client.incarnation, node=node, host="127.0.0.1", port=port, listen_host="127.0.0.1",
        listen_port=listen_port, least=count, most=count, gather_s=60.0, transfer_s=transfer_s,
    )  # fmt: skip
    report = take_part(
        plan,
        (),
        lambda request: client.call(request, timeout_s=60.0),
        lambda: client.watch(plan.job, ignore, ignore),
        begins=lambda task: note(round=task.round, peer=task.peer.node if task.peer else ""),
    )
    own = next(one for one in report.nodes if one.node == node)
    note(verdicts={one.node: one.verdict.value for one in report.nodes}, reason=own.reason)
    client.close()
    sys.exit(p.BAD_NODE if own.verdict is p.NodeVerdict.BAD else 0)


def note(**what: object) -> None:
    """One line, in one write."""
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main(
        sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]), int(sys.argv[7])
    )
