"""Nodes that are processes: how they end, with what limits, and that none outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dlrover_hooks.protocol import Node, NodeExit, NodeResource, NodeType, ScalePlan
from dlrover_hooks.scalers.process_scaler import ProcessScaler
from dlrover_hooks.scalers.resource_limits import LimitMethods
from dlrover_hooks.scalers.scaler import NodeState, ScaledNode
from tests.waiting import until

OWNER = """
import sys, threading
from dlrover_hooks.protocol import NodeGroupResource, NodeResource, ScalePlan
from dlrover_hooks.scalers.process_scaler import ProcessScaler

scaler = ProcessScaler("owner", lambda node: ["sleep", "1000"], lambda node: {})
scaler.start()
scaler.scale(ScalePlan({"worker": NodeGroupResource(3, NodeResource(cpu=0.5, memory=64))}))
while len(scaler.pids()) < 3:
    scaler.watch_nodes(scaler.watch_nodes(0, 0).number, 1.0)
print(*scaler.pids().values(), flush=True)
threading.Event().wait()
"""
IGNORES = (
    "import signal, subprocess, sys, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "child = subprocess.Popen(['sleep', '1000']); open(sys.argv[1], 'w').write(str(child.pid)); "
    "threading.Event().wait()"
)
Make = Callable[..., ProcessScaler]


@pytest.fixture
def make() -> Iterator[Make]:
    made = list[ProcessScaler]()

    def scaler(*command: str, **more: object) -> ProcessScaler:
        one = ProcessScaler("test", lambda node: command, lambda node: {}, **more)  # type: ignore[arg-type]
        made.append(one)
        one.start()
        return one

    yield scaler
    for one in made:
        one.stop(0.0)


def start(scaler: ProcessScaler, resource: NodeResource | None = None) -> Node:
    node = Node(NodeType.WORKER, 0, resource or NodeResource())
    scaler.scale(ScalePlan(launch_nodes=[node]))
    return node


def ended(scaler: ProcessScaler) -> ScaledNode:
    """The one node, once it has ended, also if it was removed."""
    over = (NodeState.ENDED, NodeState.GONE)
    return until(lambda: [one for one in scaler.watch_nodes(0, 0.0).nodes if one.state in over], "an end")[0]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_all_nodes_end_with_an_owner_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 3
        assert not any(map(gone, pids))
        owner.send_signal(signal.SIGKILL)
        until(lambda: all(map(gone, pids)), "the end of the nodes")
    LimitMethods("after").close()  # removes the groups that the owner could not


def test_a_node_that_ends_in_its_grace_is_not_killed(make: Make, tmp_path: Path) -> None:
    saves = 'trap \'echo saved > "$1"; exit 0\' TERM; echo up > "$2"; while :; do sleep 0.05; done'
    scaler = make("sh", "-c", saves, "sh", str(tmp_path / "saved"), str(tmp_path / "up"), grace_s=60.0)
    node = start(scaler)
    until((tmp_path / "up").exists, "it is up")
    scaler.scale(ScalePlan(remove_nodes=[node]))
    end = ended(scaler)
    assert (end.exit, end.exit_code, (tmp_path / "saved").exists()) == (NodeExit.REMOVED, 0, True)


def test_a_node_that_ignores_the_signal_is_killed_with_its_session(make: Make, tmp_path: Path) -> None:
    scaler = make(sys.executable, "-c", IGNORES, str(tmp_path / "child"), grace_s=0.2)
    node = start(scaler)
    child = int(until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "its child"))
    scaler.scale(ScalePlan(remove_nodes=[node]))
    end = ended(scaler)
    assert (end.exit, end.exit_code) == (NodeExit.REMOVED, -signal.SIGKILL)
    until(lambda: gone(child), "the end of its child")


def test_stop_shortens_a_grace_that_is_under_way(make: Make, tmp_path: Path) -> None:
    scaler = make(sys.executable, "-c", IGNORES, str(tmp_path / "child"), grace_s=1000.0)
    node = start(scaler)
    until((tmp_path / "child").exists, "it is up")
    scaler.scale(ScalePlan(remove_nodes=[node]))
    until(lambda: scaler.list_nodes()[0].state is NodeState.REMOVING, "its removal")
    began = time.monotonic()
    scaler.stop(0.1)
    assert scaler.list_nodes() == ()
    assert time.monotonic() - began < 30


def test_what_a_node_has_started_ends_with_it(make: Make, tmp_path: Path) -> None:
    scaler = make("sh", "-c", 'sleep 1000 & echo $! > "$1"', "sh", str(tmp_path / "child"))
    start(scaler)
    assert ended(scaler).exit is NodeExit.SUCCEEDED
    until(lambda: gone(int((tmp_path / "child").read_text())), "the end of its child")


@pytest.mark.parametrize(("code", "cause"), [(1, NodeExit.USER_ERROR), (77, NodeExit.ERROR), (0, NodeExit.SUCCEEDED)])
def test_exit_codes_that_the_owner_knows_as_errors_of_the_user(make: Make, code: int, cause: NodeExit) -> None:
    scaler = make("sh", "-c", f"exit {code}", user_errors=(1,))
    start(scaler)
    assert (ended(scaler).exit, ended(scaler).exit_code) == (cause, code)


def test_a_node_that_is_killed_for_its_memory_says_so(make: Make) -> None:
    hungry = "x = bytearray(300 << 20); x[::4096] = b'1' * len(x[::4096])"
    methods = LimitMethods("test")
    if not methods.counts_kills:
        pytest.skip("this user can make no control groups")
    scaler = make(sys.executable, "-c", hungry, methods=methods)
    start(scaler, NodeResource(memory=96))
    assert ended(scaler).exit is NodeExit.OUT_OF_MEMORY


def test_without_control_groups_a_node_that_wants_more_memory_fails_and_the_limit_is_named(make: Make) -> None:
    scaler = make(sys.executable, "-c", "bytearray(300 << 20)", methods=LimitMethods("test", control_groups=False))
    start(scaler, NodeResource(memory=96))
    end = ended(scaler)
    assert (end.exit, end.exit_code) == (NodeExit.ERROR, 1)
    assert "96 MiB" in end.detail


def test_a_plan_changes_the_cores_of_a_running_node(make: Make) -> None:
    scaler = make("sleep", "1000")
    node = start(scaler, NodeResource(cpu=1.0))
    pid = until(lambda: scaler.pids()["worker-0"], "a process")
    assert len(os.sched_getaffinity(pid)) == 1
    every = len(os.sched_getaffinity(0))
    scaler.scale(ScalePlan(launch_nodes=[Node(node.type, node.id, NodeResource(cpu=float(every)))]))
    until(lambda: len(os.sched_getaffinity(pid)) == every, "more cores")
    assert scaler.pids() == {"worker-0": pid}


def test_a_command_that_does_not_exist_is_a_failed_start(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    scaler = make("/no/such/program")
    start(scaler)
    until(lambda: "No such file" in scaler.list_nodes()[0].detail, "the reason")
    assert scaler.list_nodes()[0].state in (NodeState.WAITING, NodeState.STARTING)
    assert "it is tried again" in caplog.text
