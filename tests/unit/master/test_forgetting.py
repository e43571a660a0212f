"""Jobs that are over do not stay for ever: after a time, or on request, a master knows nothing of them any more."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from dlrover_hooks import protocol as p
from dlrover_hooks.cli.main import main
from dlrover_hooks.errors import JobAlive, UnknownJob
from dlrover_hooks.master.__main__ import command
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.events import ForgetFinished, Key
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.master.metrics import SERIES, Metrics
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.testing import StorageFake
from tests.e2e.job_script import attach, join
from tests.e2e.master_process import LiveMaster

DONE = tuple(p.Leave("job", worker, p.Departure.DONE, step=3) for worker in ("w0", "w1"))


def named(event: Any, job: str) -> Any:
    return msgspec.structs.replace(event, job=job)


def finished(state: Master, job: str = "job", now: float = 10.0, save_to: str | None = None) -> None:
    for event in (join(), attach("w0", save_to=save_to), attach("w1", save_to=save_to), *DONE):
        job_registry.apply(state, named(event, job), now)
    assert state.jobs[job].finished


def test_a_finished_job_is_forgotten_after_a_time() -> None:
    """With its claim; one that is not over stays, and so does one that somebody asked for meanwhile."""
    state = Master()
    finished(state, "old", 10.0, "/tree")
    finished(state, "asked", 10.0)
    finished(state, "new", 60.0)
    job_registry.apply(state, named(join(), "trains"), 10.0)
    job_registry.apply(state, named(join(lives="other"), "asked"), 55.0)
    outcome = job_registry.apply(state, ForgetFinished(before=50.0), 70.0)
    assert set(state.jobs) == {"asked", "new", "trains"}
    assert state.owners == {}
    assert "ReleaseClaims" in {type(effect).__name__ for effect in outcome.effects}
    assert job_registry.encode(job_registry.decode(job_registry.encode(state))) == job_registry.encode(state)


def test_a_job_is_deleted_on_request() -> None:
    """Not while it has workers, unless that is forced; a request that waits for it is woken and refused."""
    state = Master()
    for event in (join(), attach("w0")):
        job_registry.apply(state, event, 10.0)
    before = job_registry.encode(state)
    with pytest.raises(JobAlive, match="'job'"):
        job_registry.apply(state, p.DeleteJob("job"), 11.0)
    assert job_registry.encode(state) == before
    outcome = job_registry.apply(state, p.DeleteJob("job", force=True), 11.0)
    topics = {getattr(effect, "topic", "") for effect in outcome.effects}
    assert topics >= {"watch job", "plan job", "round job", "parting job"}
    with pytest.raises(UnknownJob):
        job_registry.apply(state, attach("w1"), 12.0)
    finished(state)
    job_registry.apply(state, p.DeleteJob("job"), 12.0)
    assert state.jobs == {}


def checked(node: str) -> p.JoinCheck:
    """One of two nodes that are checked."""
    return p.JoinCheck("job", f"life of {node}", node, "10.0.0.1", 4711, p.Secret(node), 2, 2, 60.0, 2.0, 20.0)


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_a_job_whose_nodes_are_checked_is_not_deleted(nodes: str) -> None:
    """Neither while a node waits for the other one, nor during the check; not as a job that is over, either."""
    state = Master()
    finished(state)
    for node in nodes:
        job_registry.apply(state, checked(node), 11.0)
    assert (state.jobs["job"].check.running is None) == (nodes == "a")
    before = job_registry.encode(state)
    with pytest.raises(JobAlive, match=f"{len(nodes)} workers, agents or nodes under check"):
        job_registry.apply(state, p.DeleteJob("job"), 12.0)
    assert job_registry.finished_before(state, 12.0) == []
    assert job_registry.encode(state) == before
    job_registry.apply(state, p.DeleteJob("job", force=True), 12.0)
    assert state.jobs == {}


def test_a_check_of_a_deleted_job_ends(tmp_path: Path) -> None:
    """Its nodes are told, and nothing of it stays in the runtime: no waiting request, no timer, no lease."""

    async def scenario() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "m.db"), storage=StorageFake(), suspicion_s=0.02)
        runtime.start()
        for node in "ab":
            await runtime.event(checked(node))
        first = await runtime.wait(p.AwaitCheck("job", "life of a", 0, 60.0))
        assert isinstance(first, p.CheckStep)
        assert first.peer is not None
        requests = [p.AwaitCheck("job", f"life of {node}", first.step, 60.0) for node in "ab"]
        requests += [p.Watch("job", f"life of {node}") for node in "ab"]
        polls = [asyncio.create_task(runtime.wait(request)) for request in requests]
        await asyncio.sleep(0)
        assert list(runtime._deadlines) == ["job"]
        await runtime.event(p.DeleteJob("job", force=True))
        for poll in polls:
            with pytest.raises(UnknownJob):
                await asyncio.wait_for(poll, 60)
        with pytest.raises(UnknownJob):
            await runtime.event(p.ReportTransfer("job", "life of a", first.step, failed="the other node is gone"))
        assert runtime._waiters == {}
        assert runtime._deadlines == {}

        async def untracked() -> None:
            while runtime.nodes.pulses:
                await asyncio.sleep(0)

        await asyncio.wait_for(untracked(), 60)
        assert job_registry.encode(runtime.state) == job_registry.encode(Master(now=runtime.state.now))
        await runtime.close()

    asyncio.run(scenario())


def test_joins_to_a_finished_job_leave_nothing() -> None:
    state = Master()
    finished(state)
    sizes = []
    for index in range(9):
        late = join(f"late{index}", lives=f"late{index}-")
        reply = job_registry.apply(state, late, 20.0, Key(incarnation=f"late{index}", channel="main", seq=1)).reply
        assert isinstance(reply, p.Joined)
        assert reply.finished
        sizes.append(len(job_registry.encode(state)))
    assert len(set(sizes)) == 1


def test_a_master_forgets(tmp_path: Path) -> None:
    """Also one without any other work, and its next life."""

    async def first() -> None:
        runtime = Runtime(
            SqliteJournal(tmp_path / "m.db"), storage=StorageFake(), lease_s=0.2, suspicion_s=0.02, forget_after_s=0.05
        )
        runtime.start()
        for event in (join(), attach("w0", save_to="/tree"), attach("w1", save_to="/tree"), *DONE):
            await runtime.event(event)

        async def forgotten() -> None:
            while runtime.state.jobs:
                await asyncio.sleep(0)

        await asyncio.wait_for(forgotten(), 60)
        await runtime.close()

    asyncio.run(first())
    journal = SqliteJournal(tmp_path / "m.db")
    assert journal.load().jobs == {}
    journal.close()


def test_a_watch_of_a_deleted_job_ends(tmp_path: Path) -> None:
    """Deleted in the same commit that forms its round, too."""

    async def scenario() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "m.db"), storage=StorageFake())
        runtime.start()
        await runtime.event(join())
        await runtime.event(attach("w0"))
        watch = asyncio.create_task(runtime.wait(p.Watch("job", "w0")))
        keys = asyncio.create_task(runtime.wait(p.AwaitKeys("job", "w0", 1, ("key",), 60.0)))
        await asyncio.sleep(0)
        done = [
            runtime.event(named(join(), "short")),
            runtime.event(p.DeleteJob("short", force=True)),
            runtime.event(p.DeleteJob("job", force=True)),
        ]
        await asyncio.gather(*done)
        for waiting in (watch, keys):
            with pytest.raises(UnknownJob):
                await asyncio.wait_for(waiting, 60)
        assert runtime.state.jobs == {}
        await runtime.close()

    asyncio.run(scenario())


def test_metrics_are_bounded() -> None:
    """Finished jobs are only counted, and of unfinished ones the newest have series."""
    state = Master()
    for index in range(SERIES + 20):
        job_registry.apply(state, named(join(), f"u{index}"), float(index))
    finished(state, "f")
    text = Metrics().text(state, Nodes()).decode()
    assert text.count("dlrover_hooks_rounds_total{") == SERIES
    assert 'job="f"' not in text
    assert 'job="u3"' not in text
    assert f'job="u{SERIES + 19}"' in text
    assert 'dlrover_hooks_jobs{state="finished"} 1.0' in text
    assert f'dlrover_hooks_jobs{{state="unfinished"}} {SERIES + 20}.0' in text


@pytest.mark.parametrize(("text", "seconds"), [("12h", 43200.0), ("7d", 604800.0), ("50", 50.0), ("never", math.inf)])
def test_forget_after(text: str, seconds: float) -> None:
    assert command.make_context("master", ["--forget-after", text]).params["forget_after_s"] == seconds


@pytest.mark.parametrize("text", ["0", "auto", "soon", "-1"])
def test_forget_after_is_a_duration(text: str) -> None:
    assert CliRunner().invoke(command, ["--forget-after", text]).exit_code == 78


def test_the_command_deletes(live_master: LiveMaster) -> None:
    """`dlrover-hooks forget` at a real master: refused while the job lives, forced, and then unknown."""

    def forget(*flags: str) -> tuple[int, str]:
        arguments = ["forget", "x/y z", "--master", live_master.url, "--token", str(live_master.token), *flags]
        result = CliRunner().invoke(main, arguments)
        return result.exit_code, result.output

    client = live_master.client("agent")
    client.call(named(join(), "x/y z"))
    code, said = forget()
    assert (code, "--force" in said) == (1, True), said
    assert client.call(p.ListJobs()).jobs == ("x/y z",)
    assert forget("--force")[0] == 0
    code, said = forget()
    assert (code, "keeps no job 'x/y z'" in said) == (1, True), said
    assert client.call(p.ListJobs()).jobs == ()
