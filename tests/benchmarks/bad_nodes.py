"""Node checks of three real processes, one of which has a fault in its network: is that one found?

Part of `make bench-health`. The faults: the others cannot reach it, each of its transfers is slow, and it is killed in
a transfer. They and the node are drawn with a seed.
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
from pathlib import Path

from tests.benchmarks.hang_world import Blame
from tests.e2e.master_process import LiveMaster
from tests.e2e.node_processes import AGES_S, CheckedNode

NAMES = ("a", "b", "c")
VERDICTS = {"unreachable": "bad", "slow": "slow", "killed": "bad"}


def bad_nodes(rounds: int, seed: int) -> list[Blame]:
    """`seconds` from the start of the nodes to the verdict. A blame is right if no other node is blamed, too."""
    chance = random.Random(seed)
    return [_round(chance.choice(NAMES), kind) for kind in VERDICTS for _ in range(rounds)]


def _round(faulty: str, kind: str) -> Blame:
    with tempfile.TemporaryDirectory() as name:
        master = LiveMaster(Path(name))
        began = time.monotonic()
        nodes = {one: CheckedNode(Path(name), master, one, len(NAMES), 20.0, one == faulty) for one in NAMES}
        try:
            _harm(nodes[faulty], kind)
            verdicts = [nodes[one].end()[1].get("verdicts") for one in NAMES if one != faulty]
        finally:
            for one in nodes.values():
                one.close()
            master.close()
    expected = dict.fromkeys(NAMES, "ok") | {faulty: VERDICTS[kind]}
    if verdicts != [expected] * len(verdicts):
        print(f"node {faulty}, {kind}: {verdicts}")
    return Blame(verdicts == [expected] * len(verdicts), time.monotonic() - began)


def _harm(node: CheckedNode, kind: str) -> None:
    """Before its first transfer, which takes its process some seconds to come to."""
    assert node.proxy is not None
    if kind == "unreachable":
        node.proxy.cut(AGES_S)
    elif kind == "slow":
        node.proxy.delay(0.01)
    else:
        node.proxy.clog(AGES_S)
        node.in_round(1)
        node.process.send_signal(signal.SIGKILL)
