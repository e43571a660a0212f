"""Nodes as actors of Ray: what happens to them when actors, machines, room or the scaler's process go away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import Node, NodeExit, NodeResource, NodeType, ScalePlan
from dlrover_hooks.scalers.scaler import NodeState, ScaledNode, Scaler
from tests.integrations.ray_nodes import several_nodes
from tests.waiting import WAIT_S, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

WAITS: tuple[str, ...] = ("sleep", "1000")
NAME = "DLROVER_TEST_NODE"


@pytest.fixture(scope="module", autouse=True)
def no_cluster_left() -> Iterator[None]:
    import ray

    yield
    ray.shutdown()


@pytest.fixture
def two_cores() -> None:
    """A cluster that tests share."""
    import ray

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="dlrover_hooks", log_to_driver=False)


@pytest.fixture
def no_cluster() -> None:
    """This process is connected to none."""
    import ray

    ray.shutdown()


@contextmanager
def scaler_of(command: Sequence[str] = WAITS, **more: Any) -> Iterator[Scaler]:
    """An `ActorScaler` whose nodes all run this command. At the end no actor of it is left."""
    from dlrover_hooks.integrations.ray import cluster_state
    from dlrover_hooks.integrations.ray.actor_scaler import ActorScaler

    def environment_of(node: Node) -> Mapping[str, str]:
        return {NAME: node.name}

    scaler = ActorScaler("job", lambda node: command, environment_of, **more)
    scaler.start()
    try:
        yield scaler
    finally:
        scaler.stop(0.0)
    assert cluster_state.actor_names("job/") == []
    assert processes() == {}


def worker(number: int, **resource: Any) -> Node:
    return Node(NodeType.WORKER, number, NodeResource(**resource))


def processes() -> dict[str, psutil.Process]:
    """The processes of nodes, by name. Those that these have started are left out."""
    found = dict[str, psutil.Process]()
    for one in psutil.process_iter(["environ"]):
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            name = (one.info["environ"] or {}).get(NAME)
            if name and os.getsid(one.pid) == one.pid and alive(one):
                found[name] = one
    return found


def children_of(name: str) -> list[psutil.Process]:
    """The children of the process of a node.

    An empty list if this process ends meanwhile: when an actor is killed while it starts a process, this process ends
    itself a moment later, perhaps during the next test.
    """
    with contextlib.suppress(psutil.Error):
        return found.children() if (found := processes().get(name)) else []
    return []


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def states(scaler: Scaler) -> dict[str, NodeState]:
    return {one.node.name: one.state for one in scaler.list_nodes()}


def runs(scaler: Scaler, *names: str) -> dict[str, psutil.Process]:
    wanted = dict.fromkeys(names, NodeState.RUNNING)
    until(lambda: states(scaler) == wanted, f"{names} run", diagnostic=scaler.list_nodes)
    return processes()


def ended(scaler: Scaler, timeout_s: float = WAIT_S) -> ScaledNode:
    def found() -> ScaledNode | None:
        return next((one for one in scaler.list_nodes() if one.state is NodeState.ENDED), None)

    return until(found, "a node has ended", timeout_s, diagnostic=scaler.list_nodes)


def test_a_scaler_without_a_cluster_says_what_is_missing(no_cluster: None) -> None:
    from dlrover_hooks.integrations.ray.actor_scaler import ActorScaler

    scaler = ActorScaler("job", lambda node: WAITS, lambda node: {})
    with pytest.raises(UsageError, match="not connected to Ray"):
        scaler.start()
    scaler.stop(0.0)


def test_a_node_whose_actor_is_killed_has_ended_and_its_process_is_gone(two_cores: None) -> None:
    with scaler_of() as scaler:
        scaler.scale(ScalePlan(launch_nodes=[worker(0), worker(1)]))
        (first, second) = (runs(scaler, "worker-0", "worker-1")[name] for name in ("worker-0", "worker-1"))
        actor = first.parent()
        assert actor is not None
        assert actor != second.parent()
        actor.kill()
        found = ended(scaler)
        assert (found.node.name, found.exit, found.exit_code) == ("worker-0", NodeExit.KILLED, -signal.SIGKILL)
        assert "actor died" in found.detail
        assert list(processes()) == ["worker-1"]


def test_a_node_without_room_is_starting_and_runs_when_another_one_is_removed(two_cores: None) -> None:
    with scaler_of() as scaler:
        scaler.scale(ScalePlan(launch_nodes=[worker(0, cpu=1.5)]))
        runs(scaler, "worker-0")
        scaler.scale(ScalePlan(launch_nodes=[worker(1, cpu=1.0), worker(2, cpu=9.0), worker(3, cpu=0.5)]))
        waiting = {"worker-1": NodeState.STARTING, "worker-2": NodeState.STARTING}
        running = {"worker-0": NodeState.RUNNING, "worker-3": NodeState.RUNNING}
        until(lambda: states(scaler) == waiting | running, "those with room run", diagnostic=scaler.list_nodes)
        scaler.scale(ScalePlan(remove_nodes=[worker(0), worker(2)]))
        assert set(runs(scaler, "worker-1", "worker-3")) == {"worker-1", "worker-3"}


def test_what_a_node_needs_is_reserved_until_it_ends(two_cores: None) -> None:
    import ray

    def amounts(found: Mapping[str, float]) -> tuple[float, float]:
        return found.get("CPU", 0.0), found["memory"] / 2**20

    def free() -> tuple[float, float]:
        return amounts(ray.available_resources())

    before = amounts(ray.cluster_resources())
    until(lambda: free() == before, "nodes of earlier tests have given back what they had")
    with scaler_of() as scaler:
        scaler.scale(ScalePlan(launch_nodes=[worker(0, cpu=1.5, memory=512)]))
        runs(scaler, "worker-0")
        until(
            lambda: free() == (before[0] - 1.5, before[1] - 512), "1.5 cores and 512 MiB are reserved", diagnostic=free
        )
        scaler.scale(ScalePlan(launch_nodes=[worker(0, cpu=0.5, memory=512)]))
        runs(scaler, "worker-0")
        assert free() == (before[0] - 1.5, before[1] - 512)
    until(lambda: free() == before, "all is free")


@pytest.mark.parametrize(
    ("command", "cause", "code", "detail"),
    [
        (("sh", "-c", "exit 7"), NodeExit.USER_ERROR, 7, "exit code 7"),
        (("sh", "-c", "kill -TERM $$"), NodeExit.KILLED, -signal.SIGTERM, "SIGTERM"),
        (("no-such-program",), NodeExit.NEVER_STARTED, 0, "no-such-program"),
    ],
)
def test_a_node_that_ends_tells_why(
    two_cores: None, command: Sequence[str], cause: NodeExit, code: int, detail: str
) -> None:
    with scaler_of(command, user_errors=[7]) as scaler:
        scaler.scale(ScalePlan(launch_nodes=[worker(0)]))
        found = ended(scaler)
        assert (found.exit, found.exit_code) == (cause, code)
        assert detail in found.detail


def test_a_removed_node_has_its_grace_and_then_its_whole_session_is_killed(two_cores: None, tmp_path: Path) -> None:
    script = 'trap "touch $0/told" TERM; sleep 1000 & while :; do wait; done'
    with scaler_of(("sh", "-c", script, str(tmp_path)), grace_s=1.0) as scaler:
        scaler.scale(ScalePlan(launch_nodes=[worker(0)]))
        session = until(lambda: children_of("worker-0"), "its own process")
        runs(scaler, "worker-0")
        scaler.scale(ScalePlan(remove_nodes=[worker(0)]))
        until(lambda: states(scaler) == {}, "it is gone")
        assert (tmp_path / "told").exists()
        assert not any(map(alive, session))


def test_an_actor_that_does_not_answer_is_killed(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from dlrover_hooks.integrations.ray import actor_scaler

    monkeypatch.setattr(actor_scaler, "_ANSWER_S", 0.5)
    with scaler_of(grace_s=0.0) as scaler:
        scaler.scale(ScalePlan(launch_nodes=[worker(0)]))
        process = runs(scaler, "worker-0")["worker-0"]
        actor = process.parent()
        assert actor is not None
        actor.suspend()
        scaler.scale(ScalePlan(remove_nodes=[worker(0)]))
        until(lambda: states(scaler) == {}, "it is gone")
        until(lambda: processes() == {}, "its process is gone")


ABANDONED = """
import sys, threading, ray
from dlrover_hooks.integrations.ray.actor_scaler import ActorScaler
from dlrover_hooks.protocol import Node, NodeType, ScalePlan
ray.init(address=sys.argv[1], namespace="dlrover_hooks", log_to_driver=False)
scaler = ActorScaler("lost", lambda node: ["sleep", "1000"], lambda node: {"DLROVER_TEST_NODE": node.name})
scaler.start()
scaler.scale(ScalePlan(launch_nodes=[Node(NodeType.WORKER, 0), Node(NodeType.WORKER, 1)]))
threading.Event().wait()
"""


def test_a_scaler_whose_process_ends_leaves_no_actor_and_no_process(two_cores: None) -> None:
    import ray

    from dlrover_hooks.integrations.ray import cluster_state

    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", ABANDONED, address], env={**os.environ, "RAY_AUTH_MODE": "token"})
    try:
        until(lambda: set(processes()) == {"worker-0", "worker-1"}, "two nodes")
        assert len(cluster_state.actor_names("lost/node/")) == 2
    finally:
        driver.kill()
        driver.wait()
    until(lambda: cluster_state.actor_names("lost/") == [], "the actors are gone")
    until(lambda: processes() == {}, "the processes are gone")


def test_a_node_whose_machine_is_lost_says_so(no_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import _raylet

    modes: Any = _raylet
    if modes.get_authentication_mode() == modes.AuthenticationMode.TOKEN:  # since an earlier cluster of this process
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with several_nodes(1) as nodes, scaler_of() as scaler:
        scaler.scale(ScalePlan(launch_nodes=[worker(0, cpu=8.0)]))
        runs(scaler, "worker-0")
        scaler.scale(ScalePlan(launch_nodes=[worker(1, cpu=2.0)]))  # the head has no room left
        runs(scaler, "worker-0", "worker-1")
        nodes.lose(nodes.edges[0])
        found = ended(scaler)
        assert found.node.name == "worker-1"
        assert (found.exit, found.detail) == (NodeExit.KILLED, "its Ray node was lost")
