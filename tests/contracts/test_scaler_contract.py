"""What every scaler does: one suite for all of them. `tests.contracts.scalers` says how each is made."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.protocol import Node, NodeExit, NodeGroupResource, NodeResource, NodeType, ScalePlan
from dlrover_hooks.scalers.scaler import NodeState, ScaledNode, Scaler
from tests.contracts.scalers import AT_ONCE, PARAMETERS, PLATFORMS, SOON, STARTING_HERE, Platform, end_ray, started
from tests.waiting import until


@pytest.fixture(scope="module", autouse=True)
def one_cluster() -> Iterator[None]:
    """All tests share one Ray cluster, started by the first one that needs it."""
    yield
    end_ray()


@pytest.fixture(params=PARAMETERS)
def platform(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Platform]:
    with started(request.param, tmp_path) as found:
        yield found
    assert found.alive() == []


def worker(number: int, cpu: float = 0.0) -> Node:
    return Node(NodeType.WORKER, number, NodeResource(cpu=cpu))


def group(count: int, cpu: float = 0.0) -> ScalePlan:
    plan = ScalePlan({})
    plan.node_group_resource = NodeGroupResource(count, NodeResource(cpu=cpu))
    return plan


def launch(*nodes: Node) -> ScalePlan:
    return ScalePlan(launch_nodes=list(nodes))


def remove(*nodes: Node) -> ScalePlan:
    return ScalePlan(remove_nodes=list(nodes))


def states(scaler: Scaler) -> dict[str, NodeState]:
    return {one.node.name: one.state for one in scaler.list_nodes()}


def found(scaler: Scaler, name: str) -> ScaledNode:
    return next(one for one in scaler.list_nodes() if one.node.name == name)


def assert_running(platform: Platform, *names: str) -> None:
    """Wait until exactly these nodes run."""
    wanted = dict.fromkeys(names, NodeState.RUNNING)
    until(lambda: states(platform.scaler) == wanted, f"{names} run", diagnostic=platform.scaler.list_nodes)
    assert platform.alive() == sorted(names)


@pytest.mark.requirement("SC-46")
def test_nodes_are_created_updated_and_deleted_by_plans(platform: Platform) -> None:
    scaler = platform.scaler
    scaler.scale(group(2))
    assert_running(platform, "worker-0", "worker-1")
    scaler.scale(launch(worker(0, cpu=1.0)))
    until(lambda: found(scaler, "worker-0").node.config_resource.cpu == 1.0, "an update")
    assert_running(platform, "worker-0", "worker-1")
    scaler.scale(remove(worker(0)))
    assert_running(platform, "worker-1")


@pytest.mark.requirement("SC-47")
def test_every_scaler_is_used_by_the_same_base_class(platform: Platform) -> None:
    scaler = platform.scaler
    assert isinstance(scaler, Scaler)
    assert scaler.list_nodes() == ()
    scaler.scale(launch(worker(0)))
    assert_running(platform, "worker-0")


def test_a_group_grows_with_the_lowest_free_ids_and_shrinks_by_the_highest(platform: Platform) -> None:
    scaler = platform.scaler
    scaler.scale(launch(worker(1), worker(4)))
    scaler.scale(group(4, cpu=0.5))
    assert_running(platform, "worker-0", "worker-1", "worker-2", "worker-4")
    assert {one.node.config_resource.cpu for one in scaler.list_nodes()} == {0.5}
    scaler.scale(group(2))
    assert_running(platform, "worker-0", "worker-1")
    scaler.scale(group(0))
    assert_running(platform)


def test_the_same_plan_twice_changes_nothing(platform: Platform) -> None:
    scaler = platform.scaler
    plan = ScalePlan({"ps": NodeGroupResource(1)}, [worker(0), worker(1)], [worker(7)])
    scaler.scale(plan)
    assert_running(platform, "ps-0", "worker-0", "worker-1")
    before, number = scaler.list_nodes(), scaler.watch_nodes(0, 0.0).number
    scaler.scale(plan)
    assert scaler.list_nodes() == before
    assert scaler.watch_nodes(number, 0.0).nodes == ()


def test_replacing_a_node_adds_the_new_one_and_removes_the_old_one(platform: Platform) -> None:
    scaler = platform.scaler
    scaler.scale(group(2))
    assert_running(platform, "worker-0", "worker-1")
    scaler.scale(ScalePlan({"worker": NodeGroupResource(2)}, [worker(2)], [worker(0)]))
    assert_running(platform, "worker-1", "worker-2")


def test_a_new_node_of_the_same_name_waits_for_the_old_one(platform: Platform) -> None:
    scaler = platform.scaler
    scaler.scale(launch(worker(0)))
    assert_running(platform, "worker-0")
    old = found(scaler, "worker-0").launch
    scaler.scale(remove(worker(0)))
    scaler.scale(launch(worker(0)))
    until(lambda: found(scaler, "worker-0").launch != old, "another node")
    assert_running(platform, "worker-0")


def test_a_node_that_is_removed_while_it_starts_does_not_survive(platform: Platform) -> None:
    scaler, entered, go = platform.scaler, threading.Event(), threading.Event()

    def hold(node: Node) -> None:
        entered.set()
        assert go.wait(60)

    platform.before_start = hold
    scaler.scale(launch(worker(0)))
    assert entered.wait(60)
    scaler.scale(remove(worker(0)))
    assert states(scaler) == {"worker-0": NodeState.REMOVING}
    go.set()
    assert_running(platform)
    assert [one.exit for one in scaler.watch_nodes(0, 0.0).nodes] == [NodeExit.REMOVED]


def test_a_failed_start_is_tried_again(platform: Platform) -> None:
    failures = iter([OSError("no place"), SystemExit(3)])

    def fail(node: Node) -> None:
        if (error := next(failures, None)) is not None:
            raise error

    platform.before_start = fail
    platform.scaler.scale(launch(worker(0)))
    assert until(lambda: platform.alive() == ["worker-0"], "a node in the end")


@pytest.mark.parametrize("platform", STARTING_HERE, indirect=True)
def test_what_no_start_should_raise_is_raised_by_the_next_call_and_the_scaler_goes_on(platform: Platform) -> None:
    errors = iter([SystemExit(3)])

    def fail(node: Node) -> None:
        if (error := next(errors, None)) is not None:
            raise error

    platform.before_start = fail
    platform.scaler.scale(launch(worker(0)))
    assert until(lambda: platform.alive() == ["worker-0"], "a node in the end")
    with pytest.raises(HooksError, match="SystemExit"):
        until(lambda: platform.scaler.list_nodes() is None, "the error")
    assert_running(platform, "worker-0")


def test_a_start_that_fails_for_good_is_given_up_and_listed(platform: Platform) -> None:
    tries = list[str]()

    def fail(node: Node) -> None:
        tries.append(node.name)
        raise OSError("no place")

    platform.before_start = fail
    platform.scaler.scale(launch(worker(0)))
    until(lambda: states(platform.scaler) == {"worker-0": NodeState.ENDED}, "the end of the tries")
    ended = found(platform.scaler, "worker-0")
    assert (ended.exit, "no place" in ended.detail, len(tries)) == (NodeExit.NEVER_STARTED, True, SOON.attempts)
    platform.scaler.scale(remove(worker(0)))
    assert_running(platform)


@pytest.mark.parametrize(
    ("code", "cause"), [(0, NodeExit.SUCCEEDED), (3, NodeExit.ERROR), (-signal.SIGKILL, NodeExit.KILLED)]
)
def test_a_node_that_ends_is_reported_once_with_its_reason_and_not_restarted(
    platform: Platform, code: int, cause: NodeExit
) -> None:
    scaler = platform.scaler
    scaler.scale(group(2))
    assert_running(platform, "worker-0", "worker-1")
    number = scaler.watch_nodes(0, 0.0).number
    platform.end("worker-1", code)
    changes = scaler.watch_nodes(number, 60.0)
    assert [(one.node.name, one.state, one.exit, one.exit_code) for one in changes.nodes] == [
        ("worker-1", NodeState.ENDED, cause, code)
    ]
    assert scaler.watch_nodes(changes.number, 0.05).nodes == ()
    assert platform.alive() == ["worker-0"]
    scaler.scale(group(2))  # one that succeeded counts, one that failed is missing
    run_again = {"worker-0", "worker-1"} if code == 0 else {"worker-0", "worker-1", "worker-2"}
    until(lambda: set(states(scaler)) == run_again, "the group")
    scaler.scale(remove(worker(1)))
    until(lambda: "worker-1" not in states(scaler), "it is not listed any more")


def test_no_change_is_lost_to_a_watcher_that_comes_late(platform: Platform) -> None:
    scaler = platform.scaler
    scaler.scale(group(2))
    assert_running(platform, "worker-0", "worker-1")
    scaler.scale(remove(worker(0), worker(1)))
    assert_running(platform)
    changes = scaler.watch_nodes(0, 0.0)
    assert {one.node.name: (one.state, one.exit) for one in changes.nodes} == {
        name: (NodeState.GONE, NodeExit.REMOVED) for name in ("worker-0", "worker-1")
    }
    assert not changes.whole


def test_a_watch_ends_with_its_time_and_with_the_scaler(platform: Platform) -> None:
    scaler = platform.scaler
    assert scaler.watch_nodes(0, 0.01).nodes == ()
    ended = threading.Event()
    waiting = threading.Thread(target=lambda: (scaler.watch_nodes(10, 300.0), ended.set()))
    waiting.start()
    scaler.stop(0.0)
    assert ended.wait(60)
    waiting.join()


def test_nodes_are_started_in_parallel_and_scale_returns_at_once(platform: Platform) -> None:
    """Starts pass a barrier in groups as large as the scaler starts at once: one after the other would never pass."""
    barrier, most = threading.Barrier(AT_ONCE), platform.groups * AT_ONCE
    platform.before_start = lambda node: barrier.wait(60)
    platform.scaler.scale(group(most))
    waits = {NodeState.WAITING, NodeState.STARTING}
    assert waits & set(states(platform.scaler).values()), "scale has waited for its nodes"
    assert_running(platform, *(f"worker-{number}" for number in range(most)))
    platform.before_start = lambda node: None
    platform.scaler.scale(group(most + 2))
    assert_running(platform, *(f"worker-{number}" for number in range(most + 2)))


def test_a_plan_that_is_refused_changes_nothing(platform: Platform) -> None:
    scaler = platform.scaler
    both = ScalePlan({"worker": NodeGroupResource(3)}, [worker(0)], [worker(0)])
    for wrong in (both, ScalePlan({"wroker": NodeGroupResource(1)})):
        with pytest.raises(UsageError):
            scaler.scale(wrong)
    assert (scaler.list_nodes(), platform.alive()) == ((), [])


def test_plans_that_come_before_the_start_are_carried_out_after_it(
    request: pytest.FixtureRequest, platform: Platform, tmp_path: Path
) -> None:
    later = PLATFORMS[request.node.callspec.params["platform"]](tmp_path)
    later.scaler.scale(launch(worker(0)))
    assert states(later.scaler) == {"worker-0": NodeState.WAITING}
    later.scaler.start()
    later.scaler.start()
    until(lambda: states(later.scaler) == {"worker-0": NodeState.RUNNING}, "the node")
    later.scaler.stop(0.0)
    assert later.alive() == []


def test_stop_leaves_no_node_and_refuses_further_plans(platform: Platform) -> None:
    scaler = platform.scaler
    scaler.scale(group(5))
    until(lambda: NodeState.RUNNING in states(scaler).values(), "some of them run")
    scaler.stop(0.0)
    assert (platform.alive(), scaler.list_nodes()) == ([], ())
    with pytest.raises(UsageError, match="stopped"):
        scaler.scale(group(1))
    scaler.stop(0.0)
