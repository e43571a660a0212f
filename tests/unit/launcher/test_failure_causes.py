"""The table of causes: what each end of a worker is taken for, and what follows."""

from __future__ import annotations

import pytest

from dlrover_hooks.launcher.failures.causes import CAUSES, USAGE, Action, cause_of
from dlrover_hooks.launcher.failures.verdict import USER_ERROR, BadNodes, RepeatedFailures, WorkerExit, judge
from dlrover_hooks.launcher.processes.worker_errors import WorkerError
from dlrover_hooks.protocol import AGAIN, BAD_NODE, REQUEUE, JobView, MemberView, Phase


def raised(error: str) -> WorkerExit:
    return WorkerExit("worker 1", 1, reported=WorkerError(error, "a.py:3, f", step=7))


ENDS = {
    "preempted": WorkerExit("worker 1", REQUEUE),
    "bad node": WorkerExit("worker 1", BAD_NODE),
    "setting": WorkerExit("worker 1", USAGE),
    "fenced": WorkerExit("worker 1", AGAIN),
    "broken device": raised("AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
    "GPU memory": raised("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    "memory": WorkerExit("worker 1", -9, out_of_memory=True),
    "storage": raised("OSError: [Errno 28] No space left on device: 'log.txt'"),
    "exception": raised("ValueError: x"),
    "signal": WorkerExit("worker 1", -11),
    "stall": WorkerExit("worker 1", None, stalled=True),
    "slow rank": WorkerExit("worker 1", None, slow=True),
    "silence": WorkerExit("worker 1", None, where="; its process is stopped"),
    "early end": WorkerExit("worker 1", 0),
}


def view(*nodes: str, step: int = 7) -> JobView:
    members = tuple(MemberView(f"w{rank}", node, rank, 0, True, True) for rank, node in enumerate(nodes))
    return JobView("job", "run", 1, 1, Phase.BROKEN, step, members, begun_step=0)


def judged(end: WorkerExit, *nodes: str, again: bool = False) -> int | None:
    found = judge(end, view(*nodes), 3, node="a", failures=1, max_restarts=10, window_s=60.0, again=again)
    return found.code


def test_each_row_has_an_end() -> None:
    assert {name: cause_of(end).name for name, end in ENDS.items()} == {name: name for name in ENDS}
    assert [row.name for row in CAUSES] == list(ENDS)


@pytest.mark.parametrize("name", ENDS)
def test_what_follows_is_what_the_table_says(name: str) -> None:
    row, end = cause_of(ENDS[name]), ENDS[name]
    codes = {Action.RESTART: None, Action.FAIL: USAGE, Action.LEAVE: REQUEUE, Action.REPLACE_NODE: BAD_NODE}
    assert judged(end, "a", "b") == codes[row.action]
    if row.action is Action.RESTART:
        assert judged(end, "a", "b", again=True) == (USER_ERROR if row.in_vain is Action.FAIL else None)


@pytest.mark.parametrize("name", ENDS)
def test_only_what_may_be_the_nodes_fault_counts_against_it(name: str) -> None:
    nodes = BadNodes("a")
    said = [nodes.falls(ENDS[name], view("a", "b")) for _ in range(BadNodes.MOST)]
    assert bool(said[-1]) == (cause_of(ENDS[name]).in_vain is Action.REPLACE_NODE)


def test_a_broken_device_on_the_only_node_is_tried_again_once() -> None:
    """It cannot be told from the script there."""
    assert judged(ENDS["broken device"], "a", "a") is None
    assert judged(ENDS["broken device"], "a", "a", again=True) == USER_ERROR


def test_a_worker_that_runs_out_of_memory_at_the_same_step_again_is_not_restarted() -> None:
    repeats = RepeatedFailures()
    assert [repeats.seen(ENDS["memory"], view("a")) for _ in range(2)] == [False, True]
    found = judge(ENDS["memory"], view("a"), 3, node="a", failures=1, max_restarts=10, window_s=60.0, again=True)
    assert found.text.startswith("worker 1 died (SIGKILL: out of memory) at step 7, the same failure as before: not")
    assert "a higher memory limit" in found.text
