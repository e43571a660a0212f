"""Tasks of a parameter server job with limits, and what they use; without TensorFlow: plain scripts are the tasks."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import psutil
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.host.child_process import Child
from dlrover_hooks.launcher.failures.restart_budget import Over
from dlrover_hooks.launcher.failures.verdict import DONE, GAVE_UP
from dlrover_hooks.launcher.tasks import task_processes
from dlrover_hooks.launcher.tasks.task_processes import TaskProcesses
from dlrover_hooks.launcher.tasks.task_supervisor import TaskSupervisor
from dlrover_hooks.scalers.resource_limits import LimitMethods
from dlrover_hooks.vitals.node_reports import NodeReports
from tests.e2e.master_process import LiveMaster
from tests.waiting import until

WAITS = (sys.executable, "-c", "import threading; threading.Event().wait()")
HUNGRY = (sys.executable, "-c", "x = bytearray(300 << 20); x[::4096] = b'1' * len(x[::4096])")
REGISTERS = (
    sys.executable,
    "-c",
    """
import os, threading, uuid
from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient

kind, index, number, address = os.environ["DLROVER_HOOKS_TASK"].split(":", 3)
me = uuid.uuid4().hex
client = MasterClient(os.environ["DLROVER_HOOKS_MASTER"], os.environ["DLROVER_HOOKS_TOKEN"], incarnation=me)
kind = p.NodeType(kind)
client.call(p.RegisterTask("job", me, kind, int(index), "" if kind is p.NodeType.CHIEF else address, int(number)))
threading.Event().wait()
""",
)
SMALL = p.NodeResource(cpu=1.0, memory=96)
FIRST = p.ScaleTasks("job", "launcher", 1, 1, only_first=True)


class OneStandby:
    """A standby pool with one process that is ready, and runs none of what it is given."""

    def __init__(self) -> None:
        self.ready, self.pid = 1, 0

    def take(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Child | None:
        if not self.ready:
            return None
        self.ready = 0
        child = Child(name, WAITS, env=env)
        self.pid = child.pid
        return child

    def refill(self) -> None:
        pass


class Recorder:
    """The requests that the launcher's client has sent."""

    def __init__(self, client: object) -> None:
        self._client, self.sent = client, list[p.Message]()
        self.incarnation = "launcher"

    def call(self, request: p.Message, **more: object) -> object:
        self.sent.append(request)
        return self._client.call(request, **more)  # type: ignore[attr-defined]


@pytest.fixture
def processes(live_master: LiveMaster) -> Iterator[TaskProcesses]:
    environment = {"DLROVER_HOOKS_MASTER": live_master.url, "DLROVER_HOOKS_TOKEN": str(live_master.token)}
    with selectors.DefaultSelector() as selector:
        made = TaskProcesses("job", REGISTERS, environment, "127.0.0.1", selector, None)
        yield made
        made.end()


def supervisor(
    processes: TaskProcesses,
    client: object,
    look: Callable[[], None],
    follow: Callable[[Mapping[str, int]], None],
    first: p.ScaleTasks | p.StartScaling = FIRST,
) -> TaskSupervisor:
    return TaskSupervisor(
        "job", first, client, processes, processes._selector, look, follow,  # type: ignore[arg-type]
        max_restarts=0, restart_window_s=3600.0,
    )  # fmt: skip


def chief(resource: p.NodeResource) -> p.Task:
    return p.Task(1, p.NodeType.CHIEF, 0, p.NodeStatus.INITIAL, resource=resource)


def one_core(pid: int) -> bool:
    return len(os.sched_getaffinity(pid)) == 1


def test_a_task_runs_with_its_limits(processes: TaskProcesses) -> None:
    processes.start(chief(SMALL))
    assert one_core(processes.pids[1])


def test_a_task_that_takes_a_standby_runs_with_its_limits() -> None:
    with selectors.DefaultSelector() as selector:
        standbys = OneStandby()
        made = TaskProcesses("job", WAITS, {}, "127.0.0.1", selector, standbys)  # type: ignore[arg-type]
        try:
            made.start(chief(SMALL))
            assert made.pids == {1: standbys.pid}
            assert one_core(made.pids[1])
        finally:
            made.end()


def test_a_task_without_limits_has_none_and_needs_no_control_group(processes: TaskProcesses) -> None:
    processes.start(chief(p.NodeResource()))
    assert os.sched_getaffinity(processes.pids[1]) == os.sched_getaffinity(0)
    assert processes._methods is None


def test_a_task_that_is_killed_for_memory_is_known_and_others_are_not(processes: TaskProcesses) -> None:
    processes._command = HUNGRY
    processes.start(chief(SMALL))
    ended = until(processes.ended, "its end")
    counts = LimitMethods("job").counts_kills
    assert [(one.exit_code, one.out_of_memory) for one in ended] == [(-9, True) if counts else (1, False)]
    processes._command = WAITS
    processes.start(chief(p.NodeResource(cpu=1.0, memory=512)))
    processes.signal(signal.SIGKILL)
    assert [(one.exit_code, one.out_of_memory) for one in until(processes.ended, "its end")] == [(-9, False)]


def test_the_master_is_told_that_memory_was_the_reason(
    processes: TaskProcesses, live_master: LiveMaster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not LimitMethods("job").counts_kills:
        pytest.skip("this user can make no control groups")
    monkeypatch.setattr(task_processes, "SERVER", HUNGRY)
    client = Recorder(live_master.client("launcher"))
    client.call(p.ScaleTasks("job", "launcher", 1, 1, ps_resource=SMALL, worker_resource=SMALL))
    code = supervisor(processes, client, lambda: None, lambda pids: None).run()
    fenced = [one for one in client.sent if isinstance(one, p.Fenced)]
    assert (code, [one.out_of_memory for one in fenced]) == (GAVE_UP, [True])
    assert "it was killed for want of memory" in caplog.text


@pytest.mark.deep
def test_planned_tasks_are_started_and_a_worker_gets_another_size_while_it_runs(
    processes: TaskProcesses, live_master: LiveMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_processes, "SERVER", REGISTERS)
    client, pids = live_master.client("launcher"), list[int]()
    limits = p.ResourceLimits(4, 8192, max_workers=1, max_ps=1)
    first = p.StartScaling("job", "launcher", p.ScalingMode.MANUAL, limits, ps=True)
    larger = p.ResourcePlan({"worker": p.NodeGroupResource(1, p.NodeResource(2.0, 2048))})

    def look() -> None:
        found: p.Tasks = client.call(p.ShowTasks("job"))
        running = [task for task in found.tasks if task.status is p.NodeStatus.RUNNING]
        worker = next((task for task in running if task.type is p.NodeType.WORKER), None)
        if worker is None or len(running) < 3:
            return
        if not pids:
            assert worker.resource == p.NodeResource(1, 1639)  # a fifth of the limits
            pids.append(processes.children[worker.id].pid)
            assert one_core(pids[0])
            client.call(p.ScaleNodes("job", "launcher", larger))
        elif len(os.sched_getaffinity(processes.children[worker.id].pid)) == 2:
            pids.append(processes.children[worker.id].pid)
            raise Over(DONE)

    assert supervisor(processes, client, look, lambda pids: None, first).run() == DONE
    assert pids[0] == pids[1]
    shown = hooks(live_master, "scale", "--job", "job", "--master", live_master.url, "--no-wait")
    assert shown.stdout.splitlines()[0] == "job job: cluster version 0"
    refused = hooks(live_master, "scale", "--job", "job", "--ps", "2", "--master", live_master.url)
    assert refused.returncode == 1
    assert "may have 1 to 1 parameter servers, not 2" in refused.stderr
    released = hooks(live_master, "scale", "--job", "job", "--release", "--no-wait", "--master", live_master.url)
    assert released.returncode == 0, released.stderr
    held = hooks(live_master, "plans", "job", "--json", "--master", live_master.url)
    assert '"held":false' in held.stdout


def hooks(master: LiveMaster, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of dlrover-hooks."""
    env = {**os.environ, "DLROVER_HOOKS_TOKEN": str(master.token), "COLUMNS": "160"}
    command = [sys.executable, "-m", "dlrover_hooks", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.deep
def test_what_tasks_use_is_reported_by_their_launcher_and_shown(
    processes: TaskProcesses, live_master: LiveMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_processes, "SERVER", REGISTERS)
    client, seen = live_master.client("launcher"), list[p.JobVitals]()
    client.call(p.ScaleTasks("job", "launcher", 1, 1, ps_resource=p.NodeResource(cpu=1.0, memory=1024)))
    reports = NodeReports(client, "job", "launcher", "here", os.getcwd())

    def look() -> None:
        view = client.call(p.ShowVitals("job"))
        if len(view.tasks) == 3 and all(use.processes is not None for use in view.tasks):
            seen.append(view)
            raise Over(DONE)

    reports.start()
    try:
        assert supervisor(processes, client, look, reports.follow).run() == DONE
    finally:
        reports.stop()
    assert [node.node for node in seen[0].nodes] == ["here"]
    by_name = {f"{use.type.value}:{use.index}": use for use in seen[0].tasks}
    assert set(by_name) == {"chief:0", "ps:0", "worker:0"}
    for use in by_name.values():
        assert use.processes is not None
        assert (use.status, use.node, use.processes.processes) == (p.NodeStatus.RUNNING, "here", 1)
        assert use.processes.memory_bytes > 1 << 20
    assert by_name["ps:0"].resource.memory == 1024
    shown = hooks(live_master, "vitals", "job", "--master", live_master.url).stdout
    row = next(line for line in shown.splitlines() if "ps 0" in line)
    assert "running" in row
    assert "100 %" in row
    assert "1.1 GB" in row
    assert all(psutil.pid_exists(child.pid) for child in processes.children.values())
