"""The Brain as a process: a master's way through it, its death in mid-event, bad databases, bad requests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import sqlalchemy as sa
from click.testing import CliRunner

from dlrover_hooks.errors import BrainAway, Unauthorized, UsageError
from dlrover_hooks.master.brain.__main__ import command as brain_command
from dlrover_hooks.master.brain.client.brain_jobs import BrainJobs
from dlrover_hooks.master.brain.client.brain_optimizer import BrainOptimizer
from dlrover_hooks.master.brain.client.stats_reporter import StatsReporter
from dlrover_hooks.master.brain.database.database import Database
from dlrover_hooks.master.brain.database.tables import cluster_sample, job_sample, optimize_event, resource_plan
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.scaling import NodeType, OptimizeStage
from dlrover_hooks.master.scaling.job_resource_optimizer import situation
from dlrover_hooks.protocol import Node, ResourceLimits, ScalingMode, StartScaling
from tests.brain_jobs import SIZE, sample, told
from tests.disks import small_disk
from tests.e2e.brain_process import BrainProcess, environment, plug_in
from tests.e2e.postgresql_process import PostgresqlProcess
from tests.waiting import WAIT_S, until

Start = Callable[..., BrainProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Brain; all are ended with the test."""
    made: list[BrainProcess] = []

    def one(database: str | None = None, *flags: str, plug_ins: Path | None = None) -> BrainProcess:
        made.append(BrainProcess(tmp_path, database or str(tmp_path / "brain.db"), *flags, plug_ins=plug_ins))
        return made[-1]

    yield one
    for brain in made:
        brain.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "brain.db")
        return
    server = PostgresqlProcess()
    yield server.database()
    server.close()


def optimizer(brain: BrainProcess, name: str = "job", *, deadline_s: float = WAIT_S, **more: Any) -> BrainOptimizer:
    return BrainOptimizer(brain.url, None, told(name, **more), deadline_s=deadline_s)


def rows(url: str, query: sa.Select) -> list[sa.Row]:
    database = Database(url)
    with database.reading() as connection:
        found = list(connection.execute(query))
    database.close()
    return found


def command(*arguments: str, preload: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{preload}\nfrom dlrover_hooks.cli.main import main\nmain(['brain', *{list(arguments)}])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S,
                          env=environment())  # fmt: skip


@pytest.mark.requirement("SC-23", "SC-24", "DL-34", "DL-93")
def test_a_master_gets_plans_and_its_statistics_are_kept(start: Start, url: str) -> None:
    brain = start(url)
    asking, reporter = optimizer(brain), StatsReporter(brain.url, None, told(), every_s=0.1)
    reporter.start()
    first = asking.generate_opt_plan(OptimizeStage.CREATE)
    assert first.node_group_resources["worker"].count == 1
    for _ in range(5):
        reporter.report(sample(1, speed=8.0))
    until(lambda: reporter.sent == 5, "the samples")
    grown = asking.generate_opt_plan(OptimizeStage.RUNNING)
    assert grown.node_group_resources["worker"].count == 2
    assert asking.answer.algorithm == "running"
    killed = asking.generate_oom_recovery_plan([Node(NodeType.WORKER, 0, SIZE)], OptimizeStage.RUNNING)
    assert killed.node_group_resources["worker"].node_resource.memory == 2 * SIZE.memory
    assert asking.generate_resource_plan_with_optimizer().empty
    reporter.report(sample(1, speed=9.0))
    assert reporter.stop()
    assert (reporter.sent, reporter.dropped) == (6, 0), "what waits is sent at the end"
    assert [row.speed for row in rows(url, sa.select(job_sample.c.speed))] == [8.0] * 5 + [9.0]
    asking.end_job(succeeded=True)
    asking.close()
    assert brain.end() == 0


def test_a_master_asks_for_servers_where_the_job_has_them(start: Start) -> None:
    """What the planning thread of a master asks, of a job in Cluster Mode."""
    jobs, limits = BrainJobs(start().url, None), ResourceLimits(16, 1 << 16, min_ps=2)
    for ps, kinds in ((True, {"ps": 2, "worker": 1}), (False, {"worker": 1})):
        state = job_registry.Master()
        request = StartScaling(f"job {ps}", "launcher", ScalingMode.CLUSTER, limits, ps=ps)
        job_registry.apply(state, request, 1000.0)
        job = state.jobs[f"job {ps}"]
        assert job.scaling is not None
        plan = jobs.optimizer(situation(job, job.scaling, 1000.0)).generate_opt_plan(OptimizeStage.CREATE)
        assert {name: group.count for name, group in plan.node_group_resources.items()} == kinds
    jobs.close()


def test_a_master_that_was_started_again_goes_on_with_the_same_job(start: Start) -> None:
    brain = start()
    first = optimizer(brain)
    first.generate_opt_plan(OptimizeStage.CREATE)
    again = optimizer(brain)
    assert again.generate_opt_plan(OptimizeStage.CREATE) == first.generate_opt_plan(OptimizeStage.CREATE)
    assert again.answer.number > 1, "made anew: an old plan says nothing about now"


@pytest.mark.deep
def test_a_brain_whose_database_was_lost_learns_of_the_job_again(start: Start, tmp_path: Path) -> None:
    brain = start()
    asking, reporter = optimizer(brain), StatsReporter(brain.url, None, told(), every_s=0.05)
    plan = asking.generate_opt_plan(OptimizeStage.CREATE)
    brain.kill()
    for file in tmp_path.glob("brain.db*"):
        file.unlink()
    brain.restart()
    reporter.start()
    reporter.report(sample())
    until(lambda: reporter.sent == 1, "the sample")
    assert asking.generate_opt_plan(OptimizeStage.CREATE) == plan
    reporter.stop()


@pytest.mark.deep
def test_a_brain_that_is_away_is_an_error_in_time_and_statistics_wait(start: Start) -> None:
    brain = start()
    asking, reporter = optimizer(brain, deadline_s=1.0), StatsReporter(brain.url, None, told(), every_s=0.05, queue=10)
    asking.generate_opt_plan(OptimizeStage.CREATE)
    reporter.start()
    os.kill(brain.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(BrainAway, match="gave no answer to AskPlan"):
        asking.generate_opt_plan(OptimizeStage.RUNNING)
    assert time.monotonic() - began < 5.0
    brain.kill()
    with pytest.raises(BrainAway):
        asking.generate_opt_plan(OptimizeStage.RUNNING)
    for number in range(25):
        reporter.report(sample(speed=float(number)))
    until(lambda: reporter.dropped >= 15, "the oldest samples to be dropped")
    brain.restart()
    until(lambda: reporter.sent + reporter.dropped == 25, "the samples that waited")
    assert reporter.sent == 10

    def planned() -> bool:
        """A request of before the kill may be answered now, and others like it meanwhile: without samples."""
        return bool(asking.generate_opt_plan(OptimizeStage.RUNNING).node_group_resources)

    until(planned, "a plan by the samples")
    assert reporter.stop()


@pytest.mark.deep
def test_samples_that_cannot_be_sent_at_the_end_are_counted(start: Start) -> None:
    brain = start()
    reporter = StatsReporter(brain.url, None, told(), every_s=60.0)
    reporter.start()
    brain.kill()
    brain.listener.close()
    reporter.report(sample())
    began = time.monotonic()
    assert not reporter.stop()
    assert time.monotonic() - began < 10.0
    assert (reporter.sent, reporter.dropped) == (0, 1)


SLOW = """
import pathlib, select
folder = pathlib.Path(config["folder"])
(folder / f"began-{len(list(folder.glob('began-*')))}").touch()
while not (folder / "go").exists():
    select.select([], [], [], 0.01)
return Proposal(ResourcePlan({"worker": NodeGroupResource(5, NodeResource(2, 2048))}), "at last")
"""


def test_the_event_of_a_killed_brain_is_taken_over_and_one_plan_results(start: Start, url: str, tmp_path: Path) -> None:
    """SIGKILL in mid-event. Another Brain takes the event over, not before the deadline of the claim."""
    plug_ins = plug_in(tmp_path / "plug-ins", "slow", SLOW)
    flags = ("--use", "running=slow", "--claim", "2s")
    doomed, asking = start(url, *flags, plug_ins=plug_ins), None
    asking = optimizer(doomed, deadline_s=0.5)
    asking.generate_opt_plan(OptimizeStage.CREATE)
    with pytest.raises(BrainAway):
        asking.generate_opt_plan(OptimizeStage.RUNNING, {"folder": str(tmp_path)})
    until(lambda: (tmp_path / "began-0").exists(), "the algorithm")
    doomed.kill()
    (tmp_path / "go").touch()
    event = sa.select(optimize_event).where(optimize_event.c.kind == "periodic")
    (claimed,) = rows(url, event)
    assert (claimed.state, claimed.attempts) == ("claimed", 1)
    heir = start(url, *flags, plug_ins=plug_ins)
    until(lambda: rows(url, event)[0].state == "done", "the other Brain to finish the event")
    (done,) = rows(url, event)
    assert done.attempts == 2
    assert done.claimed_by != claimed.claimed_by
    assert done.finished_at > claimed.claim_deadline
    plans = rows(url, sa.select(resource_plan).where(resource_plan.c.event_id == done.id))
    assert [plan.algorithm for plan in plans] == ["slow"]
    went_on = optimizer(heir)
    went_on._registered, went_on._have = True, 1  # the same master: it has the first plan
    assert went_on.generate_opt_plan(OptimizeStage.RUNNING).node_group_resources["worker"].count == 5
    assert len(rows(url, sa.select(resource_plan))) == 2, "the plan was handed out, no other one was made"


@pytest.mark.deep
@pytest.mark.requirement("DL-97")
def test_two_brains_on_one_database_share_the_work(start: Start, url: str) -> None:
    """What one is told the other plans by; no event is processed twice."""
    brains = [start(url), start(url)]
    asking = [optimizer(brains[number % 2], f"job-{number}") for number in range(6)]
    for one in asking:
        one.generate_opt_plan(OptimizeStage.CREATE)
    reporters = [StatsReporter(brains[1 - n % 2].url, None, told(f"job-{n}"), every_s=0.05) for n in range(6)]
    for one in reporters:
        one.start()
        for _ in range(3):
            one.report(sample(1, worker_cpu=0.5))
    until(lambda: all(one.sent == 3 for one in reporters), "the samples")
    initial = sa.select(optimize_event.c.job_id, optimize_event.c.state, optimize_event.c.attempts).where(
        optimize_event.c.kind == "worker_initial"
    )
    until(lambda: [row.state for row in rows(url, initial)] == ["done"] * 6, "the events of the administers")
    assert {row.attempts for row in rows(url, initial)} == {1}
    for one in asking:
        assert one.generate_opt_plan(OptimizeStage.WORKER_INITIAL).node_group_resources["worker"].node_resource.cpu == 1
    assert len(rows(url, sa.select(resource_plan))) == 12
    assert all(one.stop() for one in reporters)


def test_this_machine_is_a_cluster(start: Start, tmp_path: Path) -> None:
    """A process of a job is found by its environment."""
    job = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**environment(), "DLROVER_HOOKS_JOB": "found"}
    )
    until(lambda: psutil.Process(job.pid).environ().get("DLROVER_HOOKS_JOB"), "the process")
    try:
        start(None, "--monitor", "process")
        query = sa.select(cluster_sample.c.view)
        (view,) = until(lambda: rows(str(tmp_path / "brain.db"), query), "a sample")[0]
    finally:
        job.communicate(b"\n", timeout=WAIT_S)
    assert (view["source"], view["capacity"]) == (socket.gethostname(), {"cpu": psutil.cpu_count()})
    assert view["memory"] > view["used_memory"] > 0
    assert [(one["job"], one["processes"]) for one in view["jobs"] if one["job"] == "found"] == [("found", 1)]


@pytest.mark.deep
def test_requests_without_the_token_and_from_web_pages_are_refused(start: Start, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret")
    secret.chmod(0o600)
    closed, free = start(None, "--token-file", str(secret)), start()
    with pytest.raises(Unauthorized):
        optimizer(closed).generate_opt_plan(OptimizeStage.CREATE)
    allowed = BrainOptimizer(closed.url, "secret", told(), deadline_s=WAIT_S)
    assert allowed.generate_opt_plan(OptimizeStage.CREATE).node_group_resources
    from_page = {"Origin": "http://evil.example", "Content-Type": "application/json"}
    assert requests.post(free.url + "/v1/brain/end", data=b"{}", headers=from_page, timeout=WAIT_S).status_code == 403
    assert "without a token" in command("--host", "0.0.0.0", "--database", str(tmp_path / "x.db")).stderr


NODE = '{"name":"worker-0","type":"worker","config_resource":{"cpu":2},"cpu":%s,"memory":%s}'
REQUESTS = [
    ("register", '{"job":"a","limits":{"cpu":4,"memory":4096,"min_workers":3,"max_workers":2}}', 400, "min_workers 3"),
    ("register", '{"job":"a","limits":{"cpu":0.5,"memory":4096}}', 400, "at least 1 core"),
    ("register", '{"job":"","limits":{"cpu":4,"memory":4096}}', 400, "length"),
    ("register", '{"job":"a"}', 400, "limits"),
    ("samples", '{"job":"b","samples":[]}', 404, "no job 'b'"),
    ("samples", '{"job":"a","samples":[{"at":1,"sample":{"speed":-1,"nodes":[]}}]}', 400, "speed is -1"),
    (
        "samples",
        '{"job":"a","samples":[{"at":1,"sample":{"speed":1,"nodes":[%s]}}]}' % (NODE % (-1, 5)),
        400,
        "uses -1",
    ),
    ("samples", '{"job":"a","samples":[{"at":1,"sample":{"speed":1,"nodes":[%s]}}]}' % (NODE % (1, -5)), 400, "memory"),
    ("plan", '{"job":"b","stage":"job_stage_create"}', 404, "no job 'b'"),
    ("plan", '{"job":"a","stage":"job_stage_dance"}', 400, "job_stage_dance"),
    ("plan", '{"job":"a","stage":"job_stage_create","oom_nodes":[{"type":"ps","id":-1}]}', 400, "oom_nodes[0].id"),
    ("end", "[" * 100_000, 400, "malformed"),
    ("end", b"\xff\xfe", 400, "malformed"),
]


def test_bad_requests_are_refused_by_name(start: Start) -> None:
    brain = start()
    for path, body, status, said in REQUESTS:
        answer = requests.post(f"{brain.url}/v1/brain/{path}", data=body, timeout=WAIT_S,
                               headers={"Content-Type": "application/json"})  # fmt: skip
        problem = answer.json()
        assert (answer.status_code, answer.headers["Content-Type"]) == (status, "application/problem+json"), body
        assert said in problem["detail"] + problem["hint"], (body, problem)
    assert requests.get(brain.url + "/readyz", timeout=WAIT_S).json() == {"status": "ready"}
    with pytest.raises(UsageError, match="plain values"):
        optimizer(brain).generate_opt_plan(OptimizeStage.CREATE, {"a": object()})
    with pytest.raises(UsageError, match="is no URL"):
        BrainOptimizer("localhost:1", None, told())


@pytest.mark.deep
def test_a_full_disk_is_said_and_survived(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk") as disk:
        (disk / "filler").write_bytes(bytes(1 << 20))
        brain = start(str(disk / "brain.db"))
        reporter = StatsReporter(brain.url, None, told(), every_s=0.02, queue=20)
        reporter.start()

        def more() -> bool:
            for _ in range(20):
                reporter.report(sample(30))
            return "database or disk is full make room on the disk of the database" in caplog.text

        until(more, "the disk to be full", every_s=0.1)
        (disk / "filler").unlink()
        before = reporter.sent
        until(lambda: reporter.sent > before, "samples to be kept again")
        assert optimizer(brain, "other").generate_opt_plan(OptimizeStage.CREATE).node_group_resources
        reporter.stop()
        brain.close()


@pytest.mark.deep
def test_a_database_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """By the mode of the connection: root may write any file."""
    file = tmp_path / "brain.db"
    assert command("upgrade", "--database", str(file)).returncode == 0
    done = command("--database", f"sqlite:///file:{file}?mode=ro&uri=true", "--port", "0")
    assert done.returncode == 70
    assert "readonly" in done.stderr
    assert "writable" in done.stderr
    missing = command("--database", str(tmp_path / "no" / "brain.db"), "--port", "0")
    assert missing.returncode == 70
    assert "unable to open database file" in missing.stderr


@pytest.mark.deep
def test_an_older_database_names_the_command_that_upgrades_it(tmp_path: Path) -> None:
    file = str(tmp_path / "brain.db")
    database = Database(file)
    with database.writing() as connection:
        connection.execute(sa.text("create table job (id integer primary key)"))
    database.close()
    done = command("--database", file, "--port", "0")
    assert done.returncode == 78
    assert f"dlrover-hooks brain upgrade --database sqlite:///{file}" in done.stderr


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    file = str(tmp_path / "brain.db")
    for arguments, said in (
        (["--database", "mysql://host/name"], "names no database"),
        (["--database", ":memory:"], "lost with its process"),
        (["--database", file, "--use", "dancing=x"], "problems: creation"),
        (["--database", file, "--use", "running=x"], "no algorithm 'x'"),
        (["--database", file, "--quota", "a=b"], "TENANT=UNITS"),
        (["--database", file, "--claim", "soon"], "--claim"),
        (["dance"], "No such command"),
    ):
        done = CliRunner().invoke(brain_command, arguments)
        assert (done.exit_code, said in done.output) == (78, True), (arguments, done.output)
    made = CliRunner().invoke(brain_command, ["upgrade", "--database", file])
    assert made.exit_code == 0
    assert "none -> 0001" in made.output
    assert "0001 -> 0001" in CliRunner().invoke(brain_command, ["--database", file, "upgrade"]).output


@pytest.mark.parametrize(
    ("module", "hint", "database"),
    [("sqlalchemy", "dlrover-hooks[brain]", "brain.db"), ("psycopg", "[brain-postgresql]", "postgresql://h/n")],
)
def test_a_missing_extra_is_named(module: str, hint: str, database: str) -> None:
    done = command("--database", database, preload=f"import sys; sys.modules['{module}'] = None")
    assert (done.returncode, hint in done.stderr) == (78, True), done.stderr
