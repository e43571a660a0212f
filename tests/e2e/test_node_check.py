"""A node check with real processes: one for each node, a real master, real transfers, and one thing that is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import UnknownJob
from tests.disks import small_disk
from tests.e2e.launched import REPOSITORY, Launched
from tests.e2e.master_process import LiveMaster
from tests.e2e.node_processes import AGES_S, CheckedNode
from tests.waiting import WAIT_S, until

Node = Callable[..., CheckedNode]


@pytest.fixture
def node(tmp_path: Path, live_master: LiveMaster) -> Iterator[Node]:
    """Starts a node: its name, the number of nodes, the time for a transfer, and whether it is behind a proxy."""
    nodes: list[CheckedNode] = []

    def start(name: str, count: int, transfer_s: float = 20.0, *, proxied: bool = False) -> CheckedNode:
        nodes.append(CheckedNode(tmp_path, live_master, name, count, transfer_s, proxied))
        return nodes[-1]

    yield start
    for one in nodes:
        one.close()


def shown(master: LiveMaster) -> dict[str, p.NodeReport]:
    """The master's own report."""
    report = master.client("test").call(p.ShowCheck("check"))
    return {one.node: one for one in report.nodes}


def gathering(master: LiveMaster) -> tuple[str, ...]:
    """The nodes that wait for the others."""
    with contextlib.suppress(UnknownJob):  # no node has come yet
        return master.client("test").call(p.ShowCheck("check")).gathering
    return ()


def test_a_node_that_cannot_be_reached_is_bad(node: Node, live_master: LiveMaster) -> None:
    """Of three nodes one refuses connections; its own dials succeed. Every node learns all verdicts."""
    c = node("c", 3, proxied=True)
    assert c.proxy is not None
    c.proxy.cut(AGES_S)
    a, b = node("a", 3), node("b", 3)
    ends = [one.end() for one in (a, b, c)]
    assert [code for code, _ in ends] == [0, 0, p.BAD_NODE]
    assert [said["verdicts"] for _, said in ends] == [{"c": "bad", "a": "ok", "b": "ok"}] * 3
    assert ends[2][1]["reason"].startswith("no transfer with a, b succeeded: c at 127.0.0.1:")
    assert live_master.client("test").call(p.ShowJob("check")).kept_out == (p.KeptOut("c", ends[2][1]["reason"]),)


@pytest.mark.deep
def test_a_slow_network_is_the_slow_nodes(node: Node, live_master: LiveMaster) -> None:
    """Each of its transfers is slow, and those of its peers with each other are not."""
    c = node("c", 3, proxied=True)
    assert c.proxy is not None
    c.proxy.delay(0.01)
    ends = [one.end() for one in (node("a", 3), node("b", 3), c)]
    assert [code for code, _ in ends] == [0, 0, 0]
    assert ends[0][1]["verdicts"] == {"c": "slow", "a": "ok", "b": "ok"}
    assert ends[2][1]["reason"].startswith("network: ")
    assert " at best, with a, b; the median of all nodes is " in shown(live_master)["c"].reason


def test_a_node_that_is_killed_in_a_transfer(node: Node, live_master: LiveMaster) -> None:
    """Its peer is paired with the third node. The transfer hangs, so that the kill comes in the middle of it."""
    c = node("c", 3, proxied=True)
    assert c.proxy is not None
    c.proxy.clog(AGES_S)
    a, b = node("a", 3), node("b", 3)
    c.in_round(1)
    c.process.send_signal(signal.SIGKILL)
    ends = [one.end() for one in (a, b)]
    assert [code for code, _ in ends] == [0, 0]
    assert ends[0][1]["verdicts"] == {"c": "bad", "a": "ok", "b": "ok"}
    assert "its process ended" in shown(live_master)["c"].reason


@pytest.mark.deep
def test_the_check_goes_on_after_a_restart_of_the_master(node: Node, live_master: LiveMaster) -> None:
    """Killed while a node waits for the other one, and again while both wait for each other's data."""
    a = node("a", 2, 3.0)
    until(lambda: gathering(live_master) == ("a",), "the first node")
    live_master.kill()
    live_master.restart()
    b = node("b", 2, 3.0, proxied=True)
    assert b.proxy is not None
    b.proxy.clog(AGES_S)
    for one in (a, b):
        one.in_round(1)
    live_master.kill()
    live_master.restart()
    ends = [one.end() for one in (a, b)]
    assert ends[0][1]["verdicts"] == ends[1][1]["verdicts"]
    assert ends[0][1]["verdicts"]["b"] != "ok"


# ---- the commands ----------------------------------------------------------------------------------------------------


def checks(node: str, *flags: str) -> subprocess.Popen[str]:
    """`dlrover-hooks check` of a node of that name."""
    command = [sys.executable, "-m", "dlrover_hooks", "check", *flags]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "DLROVER_HOOKS_NODE": node, "COLUMNS": "200"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.deep
def test_two_nodes_and_a_full_disk(tmp_path: Path, live_master: LiveMaster) -> None:
    """The command on both nodes: the node with the full disk ends with 76 and the reason, and both show it."""
    flags = ("--master", live_master.url, "--token", live_master.token or "", "--nnodes", "2")
    with small_disk(tmp_path / "disk") as disk:
        a, b = checks("a", *flags, "--json"), checks("b", *flags, "--save-to", str(disk))
        (out_a, errors_a), (out_b, errors_b) = a.communicate(timeout=WAIT_S), b.communicate(timeout=WAIT_S)
    assert (a.returncode, b.returncode) == (0, p.BAD_NODE), errors_a + errors_b
    found = json.loads(out_a)
    verdicts = {one["node"]: one["verdict"] for one in found["check"]["nodes"]}
    assert verdicts in ({"b": "bad", "a": "ok"}, {"b": "bad", "a": "slow"})  # they share this machine with others
    assert found["own"]["node"] == "a"
    assert {"compute", "memory", "disk write", "disk read", "loopback network"} == {
        one["kind"] for one in found["own"]["measures"]
    }
    assert "failed: No space left on device" in out_b
    assert out_b.splitlines()[-1] == f"node b: bad: disk write on {disk}: No space left on device"
    assert "waiting for 2 nodes" in errors_b


@pytest.mark.deep
def test_a_bad_node_does_not_join(
    tmp_path: Path, live_master: LiveMaster, launch: Callable[..., Launched], job: str
) -> None:
    """Its launcher ends with 76 and the reason. The other one names it and trains; the master keeps the reason."""
    token = {"DLROVER_HOOKS_TOKEN": live_master.token or ""}
    flags = ("--node-check", "--rdzv-endpoint", live_master.url, "--nnodes", "1:2", "--replace-timeout", "2s")
    script = "note(node=os.environ['DLROVER_HOOKS_NODE'], world=os.environ['WORLD_SIZE'])"

    def start(name: str, **more: str) -> Launched:
        place = {"DLROVER_HOOKS_NODE": name} | token | more
        return launch(script, *flags, "--fault-level", "shrink", job=job, **place)  # waits for both nodes

    with small_disk(tmp_path / "disk") as disk:
        a, b = start("a"), start("b", DLROVER_HOOKS_SAVE_TO=str(disk))
        (code_a, said_a), (code_b, said_b) = a.end(), b.end()
    assert (code_a, code_b) == (0, p.BAD_NODE), said_a + said_b
    reason = f"disk write on {disk}: No space left on device"
    assert f"this node is bad; replace it: {reason}" in said_b
    assert f"node check: node b is bad: {reason}" in said_a
    assert [(life["node"], life["world"]) for life in a.read()] == [("a", "1")]
    assert live_master.client("test").call(p.ShowJob(job)).kept_out == (p.KeptOut("b", reason),)
    assert a.leftovers() == []
