"""One suite for every master: the core in process (`InProcessMaster`, `MasterFake`) and a real process over HTTP."""

from __future__ import annotations

import threading

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.client.in_process_master import InProcessMaster
from dlrover_hooks.errors import BadRequest, SaveToBusy, Stale, UnknownJob
from tests.contracts.masters import CallerOf, started
from tests.e2e.job_script import attach, held, join, stored, vote


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    return f"job/{request.node.name}"


@pytest.mark.requirement("DL-79")
def test_ranks_world_and_place_of_rank_zero(caller_of: CallerOf, job: str) -> None:
    """The master gives ranks, and what is needed to build the world."""
    joined = caller_of("agent").call(join(job=job))
    seated = caller_of("agent").call(p.AwaitRound(job=job, incarnation="agent"))
    assert (joined.run, seated.ranks, seated.world_size, seated.node_count) == ("run0", (0, 1), 2, 1)
    assert (seated.master_addr, seated.master_port, seated.store_prefix) == ("127.0.0.1", 29500, f"{job}/run0/1")


@pytest.mark.requirement("DL-81")
def test_members_change_ranks_again(caller_of: CallerOf, job: str) -> None:
    """A lost member breaks the round; the survivor is rank 0 of the next."""
    for agent, life in (("a", "x"), ("b", "y")):
        caller_of(agent).call(join(agent, 1, lives=life, job=job))
    assert caller_of("b").call(p.AwaitRound(job=job, incarnation="b")).ranks == (1,)
    caller_of("a").call(p.Exited(job=job, incarnation="a", worker="x0", exit_code=-9))
    assert caller_of("y0").call(p.Heartbeat(job=job, incarnation="y0")).broken
    caller_of("a").call(join("a", 1, lives="new", job=job))
    caller_of("b").call(join("b", 1, lives="y", job=job))
    again = caller_of("b").call(p.AwaitRound(job=job, incarnation="b", after=1))
    assert (again.round, again.ranks, again.world_size) == (2, (0,), 2)


def test_waiting_ends_with_the_round(caller_of: CallerOf, job: str) -> None:
    """A long-poll of a waiting agent is answered when the last seat is taken."""
    caller_of("a").call(join("a", 1, lives="x", job=job))
    found: list[p.Seated] = []
    ask = p.AwaitRound(job=job, incarnation="a", timeout_s=60.0)

    def wait() -> None:
        while not found or found[-1].round is None:
            found.append(caller_of("a").call(ask))

    waiter = threading.Thread(target=wait)
    waiter.start()
    caller_of("b").call(join("b", 1, lives="y", job=job))
    waiter.join(60)
    assert found[-1].round == 1


def test_nothing_yet(caller_of: CallerOf, job: str) -> None:
    """A long-poll whose time passes says so."""
    caller_of("a").call(join("a", 1, lives="x", job=job))
    assert caller_of("a").call(p.AwaitRound(job=job, incarnation="a", timeout_s=0.02)).round is None


def test_a_fresh_start_trains_at_once(caller_of: CallerOf, job: str) -> None:
    plan = started(caller_of, job)
    assert (plan.phase, plan.attempt, plan.run, plan.restore) == (p.Phase.TRAINING, 1, "run0", None)


def test_memory_wins_over_older_storage_and_falls_back_to_it(caller_of: CallerOf, job: str) -> None:
    """The restore choice is part of the round; what a rank cannot load makes a new round without it."""
    slots = (held(8, 0), held(8, 1), held(9, 0))
    caller_of("agent").call(join(job=job))
    caller_of("w1").call(attach("w1", job=job, save_to=f"memory://{job}"))
    caller_of("w0").call(attach("w0", job=job, save_to=f"memory://{job}", held=slots, stored=(stored(4),)))
    plan = caller_of("w0").call(p.AwaitPlan(job=job, incarnation="w0"))
    assert (plan.phase, plan.restore.generation.step, plan.restore.source) == (p.Phase.RESTORING, 8, p.Source.MEMORY)
    assert plan.attempt == 2
    bad = p.Loaded(job=job, incarnation="w1", round=plan.round, ok=False, reason="hash")
    caller_of("w1").call(bad)
    again = caller_of("w0").call(p.AwaitPlan(job=job, incarnation="w0", after=plan.number))
    assert (again.restore.generation.step, again.restore.source, again.round) == (4, p.Source.STORAGE, 2)
    assert again.attempt == 3
    assert "rank 1" in again.fallbacks[0]
    assert "hash" in again.fallbacks[0]
    with pytest.raises(Stale, match="round 1"):
        caller_of("w0").call(p.Loaded(job=job, incarnation="w0", round=1, ok=True))
    for worker in ("w0", "w1"):
        caller_of(worker).call(p.Loaded(job=job, incarnation=worker, round=2, ok=True))
    last = caller_of("w1").call(p.AwaitPlan(job=job, incarnation="w1", after=again.number))
    assert last.phase is p.Phase.TRAINING
    assert last.restore == again.restore


def test_complete_only_when_all_voted(caller_of: CallerOf, job: str) -> None:
    started(caller_of, job)
    first = caller_of("w0").call(vote(0, 4, job=job))
    both = caller_of("w1").call(vote(1, 4, job=job))
    assert first.newest_complete is None
    assert both.newest_complete == p.Generation(attempt=1, step=4, run="run0")


def test_strangers_and_stale_attempts_are_refused(caller_of: CallerOf, job: str) -> None:
    """409 for an old incarnation or attempt, 404 for a job nobody joined."""
    with pytest.raises(UnknownJob):
        caller_of("w0").call(p.Heartbeat(job=job, incarnation="w0"))
    started(caller_of, job)
    with pytest.raises(Stale, match="zombie") as stale:
        caller_of("zombie").call(p.Heartbeat(job=job, incarnation="zombie"))
    assert stale.value.status == 409
    assert stale.value.hint
    with pytest.raises(Stale, match="attempt 1"):
        caller_of("w0").call(vote(0, 4, attempt=2, job=job))


def test_bad_joins_are_refused(caller_of: CallerOf, job: str) -> None:
    for bad in (
        join(job=job, low=3, high=2),
        join(job=job, low=0, high=0),
        join(job=job, count=3),
        join(job=""),
        join(job=job, seats=()),
        join(job=job, seats=(p.Seat("x", 0), p.Seat("x", 1))),
        join(job=job, seats=(p.Seat("x", 0, 0), p.Seat("y", 1))),
        join(job=job, seats=(p.Seat("x", 0, 0), p.Seat("y", 1, 2))),
    ):
        with pytest.raises(BadRequest):
            caller_of("agent").call(bad)
    with pytest.raises(UnknownJob):
        caller_of("agent").call(p.ShowJob(job=job))


def test_done_is_remembered(caller_of: CallerOf, job: str) -> None:
    """A newcomer after the end is told, and does not train from step 0; `fresh` starts at step 0. (No save_to.)"""
    started(caller_of, job)
    for worker in ("w0", "w1"):
        caller_of(worker).call(p.Leave(job=job, incarnation=worker, reason=p.Departure.DONE, step=7))
    late = caller_of("late").call(join("late", job=job, lives="l", again=True))
    assert (late.finished, late.finished_step) == (True, 7)
    anew = caller_of("anew").call(join("anew", job=job, lives="n", fresh=True, proposed_run="run1"))
    assert (anew.finished, anew.run) == (False, "run1")


def test_a_finished_job_goes_on_for_longer(caller_of: CallerOf, job: str) -> None:
    """Started again, it restores the last step from storage, in the run that it was, in a later attempt."""
    started(caller_of, job, save_to=f"memory://{job}/tree")
    run = caller_of("w0").call(p.ShowJob(job)).run
    for worker in ("w0", "w1"):
        caller_of(worker).call(p.Leave(job=job, incarnation=worker, reason=p.Departure.DONE, step=7))
    caller_of("again").call(join("again", job=job, lives="n", again=True, proposed_run="run1"))
    last = msgspec.structs.replace(stored(7), job=job, generation=p.Generation(attempt=1, step=7, run=run))
    for worker in ("n0", "n1"):
        caller_of(worker).call(attach(worker, job=job, save_to=f"memory://{job}/tree", stored=(last,)))
    plan = caller_of("n0").call(p.AwaitPlan(job, "n0"))
    assert plan.restore is not None
    assert plan.restore.generation == last.generation
    assert (plan.run, plan.attempt) == (run, 2)
    assert not caller_of("n0").call(p.ShowJob(job)).finished


def test_two_live_jobs_on_one_url(caller_of: CallerOf, job: str) -> None:
    started(caller_of, job, save_to=f"memory://{job}/tree")
    caller_of("agent").call(join(job=job + "2"))
    with pytest.raises(SaveToBusy):
        caller_of("w0").call(attach("w0", job=job + "2", save_to=f"memory://{job}/tree/"))


@pytest.mark.requirement("DL-79")
def test_one_job_as_it_stands(caller_of: CallerOf, job: str) -> None:
    """All workers can be seen."""
    started(caller_of, job)
    caller_of("w1").call(p.Heartbeat(job=job, incarnation="w1", step=3, vitals=p.Vitals(cpu_percent=50.0)))
    view = caller_of("any").call(p.ShowJob(job=job))
    assert [(member.rank, member.attached, member.alive, member.step) for member in view.members] == [
        (0, True, True, 0),
        (1, True, True, 3),
    ]
    assert (view.phase, view.round, view.attempt, view.step) == (p.Phase.TRAINING, 1, 1, 3)
    assert job in caller_of("any").call(p.ListJobs()).jobs


@pytest.mark.requirement("DL-58")
def test_what_nodes_and_ranks_use(caller_of: CallerOf, job: str) -> None:
    """From the agent's report and the heartbeats."""
    started(caller_of, job)
    gpu = p.AcceleratorVitals(name="GPU", use_percent=90.0)
    caller_of("w1").call(p.Heartbeat(job, "w1", 3, vitals=p.Vitals(50.0, 1 << 20, gpu)))
    cpu, memory = p.CPUVitals(8, 2.5, (1.0, 1.0, 1.0)), p.MemoryVitals(100, 40)
    tree = p.WorkerProcesses("w1", 5, 150.0, 2 << 20)
    told = p.NodeVitals(job, "agent", "node-agent", cpu, memory, p.NetworkVitals(1.0, 2.0), workers=(tree,))
    assert caller_of("agent").call(told).within_s > 0
    view = caller_of("any").call(p.ShowVitals(job))
    assert [(use.node, use.cpu, use.memory, use.disk) for use in view.nodes] == [("node-agent", cpu, memory, None)]
    assert 0 <= view.nodes[0].age_s < 60
    assert [(use.rank, use.step, use.processes) for use in view.ranks] == [(0, 0, None), (1, 3, tree)]
    assert view.ranks[1].vitals == p.Vitals(50.0, 1 << 20, gpu)
    with pytest.raises(Stale):
        caller_of("agent").call(msgspec.structs.replace(told, node="elsewhere"))


def test_a_watch_tells_of_a_break_once(caller_of: CallerOf, job: str) -> None:
    """Survivors learn of a death without polling."""
    started(caller_of, job)
    told, heard = threading.Event(), []

    def notice(news: p.Notice) -> None:
        heard.append(news)
        told.set()

    caller = caller_of("w0")
    alone = isinstance(caller, InProcessMaster)
    watch = caller.watch(job, notice, incarnation="w0") if alone else caller.watch(job, notice)
    caller_of("agent").call(p.Exited(job=job, incarnation="agent", worker="w1", exit_code=-9))
    assert told.wait(60)
    caller_of("w0").call(p.Heartbeat(job=job, incarnation="w0"))
    watch.close()
    assert heard == [p.Notice(round=1, broken=True)]


def test_a_node_check(caller_of: CallerOf, job: str) -> None:
    """Two nodes wait for each other, get each other's address and secret, and learn both verdicts."""

    def ask(node: str, after: int = 0) -> p.CheckStep:
        return caller_of(node).call(p.AwaitCheck(job, node, after, timeout_s=60.0))

    for node in ("a", "b"):
        join_check = p.JoinCheck(job, node, node, "127.0.0.1", 4711, p.Secret(f"of {node}"), 2, 2, 60.0, 1.0, 60.0)
        assert caller_of(node).call(join_check).number == 1
    tasks = {node: ask(node) for node in ("a", "b")}
    assert [(task.round, task.peer.secret, task.dials_first) for task in tasks.values() if task.peer] == [
        (1, p.Secret("of b"), True),
        (1, p.Secret("of a"), False),
    ]
    for node, task in tasks.items():
        caller_of(node).call(p.ReportTransfer(job, node, task.step, speed=1e9, round_trip_s=1e-4))
    report = ask("a", tasks["a"].step).report
    assert report is not None
    assert [(one.node, one.verdict, one.network) for one in report.nodes] == [
        ("a", p.NodeVerdict.OK, 1e9),
        ("b", p.NodeVerdict.OK, 1e9),
    ]
    assert caller_of("b").call(p.ShowCheck(job)).nodes == report.nodes
