"""The same tests for both backends of jobs of several roles: processes on this machine, and actors of Ray.

All processes are real. They are killed with SIGKILL and stopped with SIGSTOP.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import Conflict
from dlrover_hooks.job import DLJobBuilder, JobSpec
from tests.waiting import WAIT_S, until

REPOSITORY = Path(__file__).parents[2]
ROLES, TRAINERS = "tests.contracts.job_roles", "tests.contracts.job_trainers"
HOOKS = "tests.contracts.job_hooks"
RUNNING, DONE = p.WorkerState.RUNNING, p.WorkerState.DONE


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two plug-ins, which are installed in processes that have it in sys.path."""
    folder = tmp_path_factory.mktemp("plugins")
    installed = folder / "site_plugins-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: site-plugins\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[dlrover_hooks.plugins]\nsite = job_plugin\nbroken = broken_plugin\n")
    for name in ("job_plugin.py", "broken_plugin.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    return folder


@pytest.fixture(scope="module")
def cluster(plugins: Path) -> Iterator[None]:
    """A Ray cluster that only this process uses."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(plugins))
        _start_ray()
    yield
    ray.shutdown()


def _start_ray() -> None:
    import ray

    ray.init(address="local", num_cpus=16, include_dashboard=False, namespace="dlrover_hooks", log_to_driver=False)


class Backend:
    """Submits jobs to one backend, and finds the processes of their masters."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.handles: list[Any] = []

    def job(self, name: str = "job") -> DLJobBuilder:
        own = f"{name}-{os.getpid()}"  # tests in other processes of this machine use other names
        return DLJobBuilder(own).config(folder=str(self.folder)).env(PYTHONPATH=str(REPOSITORY))

    def submit(self, spec: JobSpec) -> Any:
        handle = spec.submit(backend=self.name, wait=False)
        self.handles.append(handle)
        return handle

    def end(self) -> None:
        (self.folder / "end").touch()

    def sub_master(self, handle: Any, role: str) -> int:
        if self.name == "local":
            return _process(handle, "dlrover_hooks.job.local.sub_master", role)
        return _ping(handle, "sub-master", role)

    def prime(self, handle: Any) -> int:
        return _process(handle, "dlrover_hooks.job.local.prime") if self.name == "local" else _ping(handle, "prime")

    def left(self, handle: Any) -> list[str]:
        """What is left of an ended job."""
        if self.name == "local":
            folder = handle._folder
            return [folder] * os.path.exists(folder) + [one.name() for one in _processes(folder)]
        import ray

        from dlrover_hooks.integrations.ray import cluster_state

        groups = ray.util.placement_group_table().values()
        kept = [one["name"] for one in groups if one["state"] != "REMOVED" and one["name"].startswith(handle.name)]
        return cluster_state.actor_names(handle.name + "/") + kept


def _processes(*words: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if one.info["cmdline"] and set(words) <= set(one.info["cmdline"])]


def _process(handle: Any, *words: str) -> int:
    return until(lambda: _processes(handle._folder, *words), f"a process of {words}")[0].pid


def _ping(handle: Any, *parts: str) -> int:
    import ray
    from ray.exceptions import RayError

    from dlrover_hooks.integrations.ray import cluster_state

    def asked() -> int:
        try:
            return ray.get(cluster_state.actor(cluster_state.actor_name(handle.name, *parts)).ping.remote(), timeout=10)
        except (ValueError, RayError):
            return 0

    return until(asked, f"the actor {parts}")


@pytest.fixture(params=["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "ray":
        request.getfixturevalue("cluster")
    made = Backend(request.param, tmp_path)
    yield made
    for handle in made.handles:
        handle.stop()
    for handle in made.handles:
        nothing_left(made, handle)


def nothing_left(backend: Backend, handle: Any) -> None:
    until(lambda: not backend.left(handle), "nothing is left", diagnostic=lambda: backend.left(handle))


def workers(handle: Any) -> dict[tuple[str, int], p.RoleWorker]:
    return {(one.role, one.rank): one for one in handle.status().workers}


def runs(handle: Any, role: str, rank: int, life: int = 1) -> p.RoleWorker:
    """Wait until this life of a worker runs, and return it."""

    def found() -> p.RoleWorker | None:
        one = workers(handle)[role, rank]
        return one if one.life == life and one.state is RUNNING else None

    return until(found, f"life {life} of {role} {rank} runs", diagnostic=lambda: events(handle))


def events(handle: Any, *kinds: str) -> list[tuple[str, str, int, int, str]]:
    found = handle.status().events
    return [(one.kind, one.role, one.rank, one.life, one.text) for one in found if not kinds or one.kind in kinds]


def used(handle: Any) -> dict[str, int]:
    """How much of each budget is used, by "KIND OF". Unused budgets and those of nodes are left out."""
    return {
        f"{one.kind} {one.of}".strip(): one.used for one in handle.status().budgets if one.used and one.kind != "node"
    }


def command(backend: Backend, handle: Any, *words: str, code: int = 0) -> list[str]:
    """What `dlrover-hooks roles` prints about the job: its lines, with one space between the columns."""
    where, env = list[str](), os.environ | {"PYTHONPATH": str(REPOSITORY)}
    if backend.name == "ray":
        import ray

        where = ["--ray-address", ray.get_runtime_context().gcs_address]
        env["RAY_AUTH_MODE"] = "token"  # ray.init has set it in this process, and each test begins without it
    line = [sys.executable, "-m", "dlrover_hooks", "roles", "--job", handle.name, *where, *words]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return [" ".join(one.split()) for one in (done.stdout + done.stderr).splitlines()]


def trains(folder: Path, worker: p.RoleWorker, beyond: int = 0) -> int:
    """Wait until a trainer's process has made more than `beyond` steps, and return their number."""
    return counted(folder / f"steps-{worker.pid}", beyond, f"{worker.role} {worker.rank} trains")


def passed(folder: Path, worker: p.RoleWorker) -> int:
    """Wait until a process has passed a number through a queue, and return how many."""
    return counted(folder / f"passed-{worker.pid}", 0, f"{worker.role} {worker.rank} passes numbers")


def counted(file: Path, beyond: int, what: str) -> int:
    """Wait until the number in a file is greater than `beyond`, and return it."""

    def found() -> int:
        text = file.read_text() if file.exists() else ""
        return int(text) if text and int(text) > beyond else 0

    return until(found, what)


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_roles_call_each_other_and_the_job_is_done_with_its_drivers(backend: Backend) -> None:
    job = backend.job().role("server").run(f"{ROLES}:serve").workers(2).not_driver().role("main").run(f"{ROLES}.talk")
    handle = backend.submit(job.build())
    assert handle.wait(WAIT_S) == 0, handle.status()
    assert handle.status().phase is p.JobPhase.DONE
    assert ("done", "main", 0, 1, "") in events(handle)
    assert not used(handle)


@pytest.mark.deep
def test_many_waiting_callers_do_not_delay_others_and_a_call_of_a_done_worker_fails(backend: Backend) -> None:
    job = backend.job().role("server").run(f"{ROLES}:serve").not_driver().role("main").run(f"{ROLES}:crowd")
    handle = backend.submit(job.role("short").run(f"{ROLES}:return_at_once").build())
    assert handle.wait(WAIT_S) == 0, handle.status()
    assert not used(handle)


@pytest.mark.deep
def test_forked_children_of_a_worker_make_calls_of_their_own(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Ray does not support processes that its workers fork."""
    backend = Backend("local", tmp_path)
    job = backend.job().role("server").run(f"{ROLES}:serve").not_driver().role("main").run(f"{ROLES}:fork")
    handle = backend.submit(job.build())
    request.addfinalizer(handle.stop)
    assert handle.wait(WAIT_S) == 0, handle.status()


@pytest.mark.deep
@pytest.mark.requirement("DL-7", "DL-8", "DL-13", "DL-15", "DL-25")
def test_roles_of_different_kinds_work_at_the_same_time(backend: Backend) -> None:
    job = backend.job().role("dp").train(f"{TRAINERS}:train").workers(2).restarts(on_failure="rejoin")
    job = job.role("producer").run(f"{ROLES}:produce").not_driver().role("main").run(f"{ROLES}:consume")
    job = job.role("aid").run(f"{REPOSITORY}/tests/contracts/job_script.py --of 3")
    handle: Any = job.build().submit(job_name="testing", backend=backend.name, wait=False)
    backend.handles.append(handle)
    assert handle.name == "testing"
    trains(backend.folder, runs(handle, "dp", 0))
    (backend.folder / "steps").touch()
    assert handle.wait(WAIT_S) == 0, handle.status()
    assert (backend.folder / "consumed").read_text() == "True False", "all in order, and without torch"
    assert (backend.folder / "script").read_text() == "--of 3"
    assert not used(handle)


@pytest.mark.requirement("DL-12", "DL-22")
def test_a_server_is_replaced_and_no_other_process_notices(backend: Backend) -> None:
    job = backend.job().role("server").run(f"{ROLES}:serve").workers(2).not_driver().role("main").run(f"{ROLES}:call")
    handle = backend.submit(job.build())
    first, other, main = runs(handle, "server", 0), runs(handle, "server", 1), runs(handle, "main", 0)
    kill(first.pid)
    second = runs(handle, "server", 0, life=2)
    kill(second.pid)  # DLRover ignores the second death of a worker of one role
    third = runs(handle, "server", 0, life=3)
    assert len({first.pid, second.pid, third.pid}) == 3
    assert (workers(handle)["server", 1].pid, workers(handle)["main", 0].pid) == (other.pid, main.pid)
    assert used(handle) == {"worker server": 2}
    backend.end()
    assert handle.wait(WAIT_S) == 0


@pytest.mark.deep
def test_a_trainer_rejoins_and_the_others_keep_their_processes(backend: Backend) -> None:
    handle = backend.submit(
        backend.job().role("dp").train(f"{TRAINERS}:train").workers(2).restarts(on_failure="rejoin").build()
    )
    survivor, first = runs(handle, "dp", 0), runs(handle, "dp", 1)
    before = trains(backend.folder, survivor)
    trains(backend.folder, first)
    kill(first.pid)
    trains(backend.folder, runs(handle, "dp", 1, life=2))
    trains(backend.folder, survivor, beyond=before + 1)
    assert workers(handle)["dp", 0] == survivor
    assert used(handle) == {"worker dp": 1}
    backend.end()
    assert handle.wait(WAIT_S) == 0, handle.status()


@pytest.mark.deep
def test_a_role_that_cannot_recover_is_started_again_and_counted_once(backend: Backend) -> None:
    role = backend.job().role("dp").train(f"{TRAINERS}:reduce").workers(2).restarts(on_failure="rejoin")
    handle = backend.submit(role.build())
    runs(handle, "dp", 0)
    kill(runs(handle, "dp", 1).pid)
    for life in (2, 3):
        runs(handle, "dp", 0, life)
        last = runs(handle, "dp", 1, life)
        if life == 2:
            kill(last.pid)
    assert used(handle) == {"worker dp": 2, "role dp": 2}
    backend.end()
    assert handle.wait(WAIT_S) == 0, handle.status()


@pytest.mark.deep
def test_all_roles_are_started_again_where_the_policy_is_job(backend: Backend) -> None:
    job = backend.job().role("one").run(f"{ROLES}:wait").restarts(on_failure="job").role("two").run(f"{ROLES}:wait")
    handle = backend.submit(job.build())
    first, second = runs(handle, "one", 0), runs(handle, "two", 0)
    kill(first.pid)
    assert runs(handle, "two", 0, life=2).pid != second.pid
    runs(handle, "one", 0, life=2)
    assert used(handle) == {"worker one": 1, "job": 1}
    arguments = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    assert not [line for line in arguments if handle.token in line], "every user of the machine can read it"
    backend.end()
    assert handle.wait(WAIT_S) == 0


@pytest.mark.deep
def test_the_command_shows_a_job_restarts_a_role_and_stops_the_job(backend: Backend) -> None:
    job = backend.job().role("server").run(f"{ROLES}:serve").workers(2).not_driver().role("main").run(f"{ROLES}:wait")
    handle = backend.submit(job.build())
    first, other, main = runs(handle, "server", 0), runs(handle, "server", 1), runs(handle, "main", 0)
    kill(first.pid)
    second = runs(handle, "server", 0, life=2)
    lines = command(backend, handle)
    assert lines[0] == f"job {handle.name}: running"
    assert f"server 0 2 running {second.node} {second.pid} {second.reason}" in lines, lines
    assert f"server 1 1 running {other.node} {other.pid}" in lines, lines
    assert "workers of server 1 10" in lines, lines
    assert lines[-1].endswith(f"running server 0 2 node {second.node}, pid {second.pid}"), lines
    assert f"main 0 1 running {main.node} {main.pid}" in command(backend, handle, "--restart", "server")
    runs(handle, "server", 0, life=3)
    runs(handle, "server", 1, life=2)
    assert workers(handle)["main", 0] == main
    assert used(handle) == {"worker server": 1}
    assert command(backend, handle, "--stop")[0] == f"job {handle.name}: stopped: a user stopped it"
    assert handle.wait(WAIT_S) == 130
    nothing_left(backend, handle)
    assert f"{handle.name!r} runs" in command(backend, handle, code=78)[0]


@pytest.mark.deep
@pytest.mark.requirement("DL-21")
def test_masters_that_are_killed_leave_the_workers_alone(backend: Backend) -> None:
    """In DLRover a restarted PrimeMaster restarts all workers."""
    job = backend.job().role("dp").train(f"{TRAINERS}:train").workers(2).restarts(on_failure="rejoin")
    handle = backend.submit(job.role("other").run(f"{ROLES}:wait").build())
    ranks = [runs(handle, "dp", rank) for rank in range(2)]
    steps = trains(backend.folder, ranks[0])
    runs(handle, "other", 0)
    before = workers(handle)
    kill(backend.sub_master(handle, "dp"))
    until(lambda: events(handle, "sub_master"), "the SubMaster is started again")
    kill(backend.prime(handle))
    until(lambda: events(handle, "prime_master"), "the PrimeMaster is started again")
    trains(backend.folder, ranks[0], beyond=steps + 5)
    assert workers(handle) == before
    assert not used(handle)
    backend.end()
    assert handle.wait(WAIT_S) == 0, handle.status()


@pytest.mark.requirement("DL-20", "DL-21")
def test_prime_master_sub_master_and_worker_die_together(backend: Backend) -> None:
    job = backend.job().role("server").run(f"{ROLES}:serve").workers(2).not_driver().role("main").run(f"{ROLES}:call")
    handle = backend.submit(job.build())
    first, other = runs(handle, "server", 0), runs(handle, "server", 1)
    runs(handle, "main", 0)
    kill(backend.prime(handle), backend.sub_master(handle, "server"), first.pid)
    runs(handle, "server", 0, life=2)
    assert workers(handle)["server", 1] == other
    assert used(handle) == {"worker server": 1}  # the death is counted although no master was running
    backend.end()
    assert handle.wait(WAIT_S) == 0, handle.status()


@pytest.mark.deep
def test_a_restart_of_the_prime_master_loses_neither_places_nor_queues_and_concerns_no_other_job(
    backend: Backend,
) -> None:
    """DLRover loses both, and its actors have the same names in all jobs."""
    one, two = [
        backend.submit(
            backend.job(name).role("server").run(f"{ROLES}:serve").not_driver().role("main").run(main).build()
        )
        for name, main in (("one", f"{ROLES}:pass_numbers"), ("two", f"{ROLES}:wait"))
    ]
    server, first = runs(one, "server", 0), runs(one, "main", 0)
    runs(two, "server", 0), runs(two, "main", 0)
    others = workers(two)
    passed(backend.folder, first)
    kill(backend.prime(one))
    until(lambda: events(one, "prime_master"), "the PrimeMaster is started again")
    kill(first.pid)
    passed(backend.folder, runs(one, "main", 0, life=2))
    assert workers(one)["server", 0] == server
    assert (workers(two), used(two), events(two, "prime_master")) == (others, {}, [])
    backend.end()
    assert (one.wait(WAIT_S), two.wait(WAIT_S)) == (0, 0)


@pytest.mark.deep
def test_an_exception_is_counted_and_ends_the_job_when_the_budget_is_used_up(backend: Backend) -> None:
    """The text of the exception cannot be sent as it is."""
    job = backend.job().role("main").run(f"{ROLES}:raise_always").restarts(2).role("two").run(f"{ROLES}:wait")
    handle = backend.submit(job.build())
    assert handle.wait(WAIT_S) == 1
    status = handle.status()
    assert status.phase is p.JobPhase.FAILED
    assert "main" in status.reason
    assert r"raised: tests.contracts.job_roles.Unspeakable: no \ud800 such prompt" in status.reason
    assert len(events(handle, "lost")) == 3
    nothing_left(backend, handle)


@pytest.mark.deep
def test_a_worker_that_raises_or_is_preempted_once_is_done_in_its_second_life(backend: Backend) -> None:
    """Preemptions have a budget of their own."""
    job = backend.job().role("raises").run(f"{ROLES}:raise_once").role("leaves").run(f"{ROLES}:leave_once").restarts(0)
    handle = backend.submit(job.build())
    assert handle.wait(WAIT_S) == 0, handle.status()
    lost = sorted(events(handle, "lost"))
    assert lost == [("lost", "leaves", 0, 1, "preempted"), ("lost", "raises", 0, 1, "raised")]
    assert used(handle) == {"worker raises": 1, "preemption": 1}


@pytest.mark.deep
def test_a_function_that_cannot_be_imported_ends_the_job(backend: Backend) -> None:
    handle = backend.submit(backend.job().role("main").run("no_such_package.module:main").build())
    assert handle.wait(WAIT_S) == 1
    assert "no module 'no_such_package'" in handle.status().reason


@pytest.mark.deep
def test_a_silent_worker_is_replaced_and_ends_when_it_wakes(backend: Backend) -> None:
    """DLRover neither detects nor kills a process that hangs."""
    job = backend.job().silent_after(6).role("server").run(f"{ROLES}:serve").not_driver()
    handle = backend.submit(job.role("main").run(f"{ROLES}:wait").build())
    first = psutil.Process(runs(handle, "server", 0).pid)
    first.suspend()
    runs(handle, "server", 0, life=2)
    assert events(handle, "lost")[0][-1] == "silent"
    until(lambda: not first.is_running(), "it is killed although it was stopped")
    assert used(handle) == {"worker server": 1}


@pytest.mark.deep
def test_a_user_restarts_a_role_and_stops_the_job(backend: Backend) -> None:
    job = backend.job().role("dp").train(f"{TRAINERS}:reduce").workers(2).restarts(on_failure="role")
    handle = backend.submit(job.build())
    first = [runs(handle, "dp", rank) for rank in range(2)]
    handle.restart("dp")
    second = [runs(handle, "dp", rank, life=2) for rank in range(2)]
    assert not {one.pid for one in first} & {one.pid for one in second}
    assert not used(handle)
    assert handle.stop("enough") == 130
    assert handle.status().reason == "enough"


@pytest.mark.deep
def test_a_second_job_of_one_name_is_refused(backend: Backend) -> None:
    spec = backend.job().role("main").run(f"{ROLES}:wait").build()
    handle = backend.submit(spec)
    with pytest.raises(Conflict, match="already"):
        spec.submit(backend=backend.name, wait=False)
    handle.stop()
    again = backend.submit(spec)
    runs(again, "main", 0)


@pytest.mark.ray
@pytest.mark.slow
def test_one_job_has_the_same_events_on_both_backends(
    tmp_path: Path, cluster: None, request: pytest.FixtureRequest
) -> None:
    logs: list[Any] = []
    for name in ("local", "ray"):
        backend = Backend(name, tmp_path / name)
        backend.folder.mkdir()
        job = backend.job().role("server").run(f"{ROLES}:serve").not_driver().role("main").run(f"{ROLES}:wait")
        handle = backend.submit(job.restarts(2).build())
        request.addfinalizer(handle.stop)
        runs(handle, "main", 0)
        for life in (1, 2):
            kill(runs(handle, "server", 0, life).pid)
        runs(handle, "server", 0, life=3)
        kill(backend.sub_master(handle, "server"))
        until(lambda handle=handle: events(handle, "sub_master"), "the SubMaster is started again")
        handle.restart("server")
        runs(handle, "server", 0, life=4)
        backend.end()
        assert handle.wait(WAIT_S) == 0
        log = events(handle)
        logs.append([log[0], sorted(log[1:3]), *log[3:]])  # the first two workers may register in either order
    assert logs[0] == logs[1]


@pytest.mark.deep
@pytest.mark.requirement("DL-23")
def test_plug_ins_change_a_job_and_follow_it_and_one_that_fails_does_not_harm_it(
    backend: Backend, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(plugins))
    monkeypatch.setenv("PYTHONPATH", str(plugins))
    calls = plugins / "calls"
    calls.unlink(missing_ok=True)
    handle = backend.submit(backend.job().restarts(node=0).role("one").run(f"{ROLES}:site").build())
    sites = [backend.folder / f"site-{life}" for life in (1, 2)]
    first = runs(handle, "one", 0)
    assert until(lambda: sites[0].exists() and sites[0].read_text(), "it writes") == f"prepared, {handle.name} one 0"
    kill(first.pid)
    runs(handle, "one", 0, life=2)
    assert (
        until(lambda: sites[1].exists() and sites[1].read_text(), "it writes again") == f"prepared, {handle.name} one 0"
    )
    until(lambda: handle.status().events[-1].kind == "plugin" and not handle.status().avoid, "the node is relaunched")
    backend.end()
    assert handle.wait(WAIT_S) == 0, handle.status()

    assert used(handle) == {"worker one": 1, "role one": 1}, "the plug-in has chosen another policy"
    lines = calls.read_text().splitlines()
    assert lines.count("relaunched 1") == 1
    told = [
        f"event {one.kind} {one.role} {one.rank} {one.life}" for one in handle.status().events if one.kind != "plugin"
    ]
    assert [line for line in lines if line.startswith("event")] == told
    broken, site = handle.status().plugins
    assert (site.name, site.failures, site.problem) == ("site", 0, "")
    assert set(site.functions) == {"prepare_job", "worker_env", "on_worker_ended", "on_event", "relaunch_nodes"}
    failed = {one.text for one in handle.status().events if one.kind == "plugin"}
    assert failed == {f"broken: {name} failed" for name in set(site.functions) - {"prepare_job"}}
    assert broken.failures == 1 + sum(one.kind == "plugin" for one in handle.status().events)


def lines(folder: Path, name: str) -> list[list[int]]:
    """The lines that `job_hooks` has written in the files that match `name`."""
    return [
        [int(word) for word in line.split()] for file in folder.glob(name) for line in file.read_text().splitlines()
    ]


def await_lines(folder: Path, name: str) -> None:
    """Wait until a process works."""
    until(lambda: len(lines(folder, name)) >= 5, f"{name} has five lines")


@pytest.mark.deep
def test_the_hooks_work_in_roles_as_everywhere(backend: Backend) -> None:
    """ElasticCallback in a role that rejoins, ShardDataset in one whose workers are replaced; one of each dies."""
    job = backend.job().role("trainer").train(f"{HOOKS}:lightning").workers(2).restarts(on_failure="rejoin")
    handle = backend.submit(job.role("reader").run(f"{HOOKS}:shards").workers(2).build())
    survivor, trainer, reader = runs(handle, "trainer", 0), runs(handle, "trainer", 1), runs(handle, "reader", 1)
    for role, name in ((trainer, "lightning"), (reader, "shards")):
        await_lines(backend.folder, f"{name}-{role.pid}")
        kill(role.pid)
        (backend.folder / f"go-{name}").touch()
    assert handle.wait(WAIT_S) == 0, handle.status()
    assert workers(handle)["trainer", 0].pid == survivor.pid
    assert used(handle) == {"worker trainer": 1, "worker reader": 1}

    steps = dict[tuple[str, int], list[int]]()
    for file in backend.folder.glob("lightning-*"):
        for step, *numbers in lines(backend.folder, file.name):
            steps[file.name, step] = numbers  # if a step was made twice, the second one counts
    kept = {step for name, step in steps if name.endswith(f"-{survivor.pid}")}
    trained = Counter(number for (_, step), numbers in steps.items() if step in kept for number in numbers)
    assert set(trained) == set(range(400))
    read = Counter(number for numbers in lines(backend.folder, "shards-*") for number in numbers)
    assert set(read) == set(range(400))
