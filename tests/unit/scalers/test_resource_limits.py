"""Limits of real processes: by control groups where this user can make them, and always without."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dlrover_hooks.host.child_process import Child
from dlrover_hooks.protocol import NodeResource
from dlrover_hooks.scalers.resource_limits import LimitMethods, NodeLimits
from tests.waiting import until

HUNGRY = "import sys; x = bytearray(int(sys.argv[1]) << 20); x[::4096] = b'1' * len(x[::4096])"
WAITS = "import sys; print('up', flush=True); import threading; threading.Event().wait(60)"
BUSY = "while True: pass"


@pytest.fixture(params=["control groups", "without"])
def methods(request: pytest.FixtureRequest) -> Iterator[LimitMethods]:
    made = LimitMethods("limits", control_groups=request.param == "control groups")
    if request.param == "control groups" and not (made.counts_kills and "quota" in made.cpu_method):
        pytest.skip("this user can make no control groups")
    yield made
    made.close()


@contextlib.contextmanager
def running(limits: NodeLimits, code: str, *arguments: str) -> Iterator[Child]:
    with limits.entrance() as prepared:
        command = [sys.executable, "-c", code, *arguments]
        child = Child("test", command, env=dict(os.environ), stderr=subprocess.DEVNULL, limits=prepared)
    try:
        yield child
    finally:
        child.end()
        limits.close()


def data_limit(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_DATA)[0]


def test_memory_that_is_allowed_can_be_used(methods: LimitMethods) -> None:
    limits = methods.limit("a", NodeResource(memory=256))
    with running(limits, HUNGRY, "32") as child:
        assert (child.wait(60), limits.killed_for_memory(0), limits.explain(0)) == (0, False, "")


def test_a_node_that_needs_more_memory_ends(methods: LimitMethods) -> None:
    """A control group says why. Without one it can only be explained what may be the reason."""
    limits = methods.limit("a", NodeResource(memory=96))
    with running(limits, HUNGRY, "300") as child:
        code = child.wait(60)
        assert code is not None
        if methods.counts_kills:
            assert (code, limits.killed_for_memory(code), limits.explain(code)) == (-9, True, "")
        else:
            assert (code, limits.killed_for_memory(code)) == (1, False)
            assert "96 MiB" in limits.explain(code)


def test_no_limit_is_no_limit(methods: LimitMethods) -> None:
    limits = methods.limit("a", NodeResource())
    with running(limits, HUNGRY, "300") as child:
        assert child.wait(60) == 0


def test_half_a_core_is_one_core_and_half_its_time(methods: LimitMethods) -> None:
    limits = methods.limit("a", NodeResource(cpu=0.25))
    with running(limits, BUSY) as child:
        process = psutil.Process(child.pid)
        until(lambda: process.cpu_times().user > 0.05, "it runs")
        assert len(os.sched_getaffinity(child.pid)) == 1
        began, before = time.monotonic(), sum(process.cpu_times()[:2])
        until(lambda: time.monotonic() > began + 1.0, "a second")
        used = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
        assert used < (0.4 if "quota" in methods.cpu_method else 1.1)


def test_a_process_that_runs_already_is_limited_with_its_descendants(methods: LimitMethods) -> None:
    fork = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}])"
    child = Child("test", [sys.executable, "-c", fork], env=dict(os.environ), stdout=subprocess.DEVNULL)
    limits = methods.limit("a", NodeResource(cpu=1.0, memory=128))
    try:
        (descendant,) = until(lambda: psutil.Process(child.pid).children(), "a descendant")
        limits.apply(child.pid)
        for pid in (child.pid, descendant.pid):
            assert len(os.sched_getaffinity(pid)) == 1
            if methods.counts_kills:
                assert "dlrover-hooks-node-" in Path(f"/proc/{pid}/cgroup").read_text()
            else:
                assert data_limit(pid) == 128 << 20
    finally:
        child.end()
        limits.close()


def test_the_limits_of_a_running_node_can_be_changed(methods: LimitMethods) -> None:
    limits = methods.limit("a", NodeResource(cpu=1.0, memory=64))
    every = len(os.sched_getaffinity(0))
    with running(limits, WAITS) as child:
        limits.resize(NodeResource(cpu=float(every), memory=512), child.pid)
        assert len(os.sched_getaffinity(child.pid)) == every
        if not methods.counts_kills:
            assert data_limit(child.pid) == 512 << 20
        limits.resize(NodeResource(), child.pid)
        assert data_limit(child.pid) == resource.RLIM_INFINITY


def test_no_memory_limit_below_what_is_used(methods: LimitMethods) -> None:
    limits = methods.limit("a", NodeResource(memory=256))
    hold = (
        "import sys, threading; x = bytearray(100 << 20); x[::4096] = b'1' * len(x[::4096]); threading.Event().wait(60)"
    )
    with running(limits, hold) as child:
        until(lambda: psutil.Process(child.pid).memory_info().rss > 100 << 20, "memory in use")
        if methods.counts_kills:
            with pytest.raises(OSError, match="are used"):
                limits.resize(NodeResource(memory=32), child.pid)
        assert child.exit_code() is None


def test_an_ended_node_leaves_no_group_and_no_process(methods: LimitMethods) -> None:
    """Not even a process that has left the session of the node, where there are groups."""
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}], start_new_session=True)"
    limits = methods.limit("../b/c", NodeResource(memory=256))
    with running(limits, leaves) as child:
        assert child.wait(60) == 0
        groups = [group.group.folder for group in limits._groups.values()]
        orphans = [pid for group in limits._groups.values() for pid in group.pids()]
    methods.close()
    assert [folder for folder in groups if os.path.exists(folder)] == []
    assert (len(groups) > 0) == methods.counts_kills
    until(lambda: not [pid for pid in orphans if psutil.pid_exists(pid)], "the end of the orphans")


def test_groups_of_owners_that_were_killed_are_removed() -> None:
    made = LimitMethods("first")
    if not made.counts_kills:
        pytest.skip("this user can make no control groups")
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    limits = made.limit("a", NodeResource())
    parent = Path(limits._groups["memory"].group.folder).parent
    limits.close()
    left = parent / f"dlrover-hooks-node-{ended.stdout.strip()}-1-worker-0"
    left.mkdir()
    LimitMethods("second").close()
    assert not left.exists()
    made.close()


def test_one_line_says_how_nodes_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LimitMethods("mine", control_groups=False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("job mine: CPU of nodes is limited by affinity to ")
    assert "RLIMIT_DATA" in line
