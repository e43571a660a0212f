"""A preempted job, with real processes: all ranks save one step and end with 75."""

import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover_hooks.launcher.interruption import last_code
from dlrover_hooks.launcher.requeue import here
from tests.e2e.launched import Launched

SCRIPT = f"""
    import runpy
    sys.argv[2:] = ["saved", *FRAMEWORK]
    runpy.run_path({str(Path(__file__).with_name("preempted_script.py"))!r}, run_name="__main__")
    """


def seen(lives: list[dict[str, Any]], key: str) -> list[Any]:
    return [life[key] for life in lives if key in life]


def leave_together(launch: Callable[..., Launched], script: str) -> tuple[Launched, int]:
    """SIGTERM to rank 1 alone, mid-epoch; the job, and the step where both left."""
    run = launch(script, "-n", "2", "--standby", "0")
    lives = run.wait_for(lambda lives: 4 in seen(lives, "step"), timeout_s=100)
    os.kill(next(life["pid"] for life in lives if life["rank"] == 1), signal.SIGTERM)
    code, errors = run.end(timeout_s=60)
    assert code == 75, errors
    lives = run.read()
    steps = seen(lives, "left")
    assert len(steps) == 2, errors
    assert len(set(steps)) == 1, "both save the same step"
    assert steps[0] <= max(seen(lives, "step")) + 1, "nothing is trained for nothing"
    assert seen(lives, "durable") == [True, True]
    assert "could not be saved" not in errors
    assert set(seen(lives, "reason")) == {"SIGTERM"}
    run.lives.write_text("")
    return run, steps[0]


@pytest.mark.deep
@pytest.mark.timeout(300)
def test_one_of_two_gets_the_signal(launch: Callable[..., Launched]) -> None:
    """Both leave at one step, durable; the same command goes on there and ends as an undisturbed run does."""
    script = SCRIPT.replace("*FRAMEWORK", "")
    run, step = leave_together(launch, script)
    again = launch(script, "-n", "2", "--standby", "0", job=run.job)
    code, errors = again.end(timeout_s=100)
    assert code == 0, errors
    ends = [life for life in again.read() if "weights" in life]
    assert {life["weights"] for life in ends} == {life["undisturbed"] for life in ends}
    assert [life["end"] for life in ends] == [20, 20]
    assert seen(again.read(), "restored").count(step) == 2


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_of_two_under_lightning(launch: Callable[..., Launched]) -> None:
    """Lightning's own handler would wait for the other rank inside the signal."""
    leave_together(launch, SCRIPT.replace("*FRAMEWORK", "'lightning'"))


LEAVES = """
    from dlrover_hooks.worker.preemption import Preemption, Signals
    import select
    attach()
    part = Preemption(conf.job, place.incarnation, place.node, conf.grace_s)
    part.gate.begin(0)
    Signals(conf.signals, part.flag).take()
    note(grace_s=conf.grace_s)
    step = 0
    while not part.leaves_at(step, client):
        part.summon(client.call(p.Heartbeat(conf.job, place.incarnation, step)).parting)
        part.speak(lambda request, channel: client.call(request, channel=channel))
        step += 1
        select.select([], [], [], 0.02)
    note(left=step, reason=part.reason, left_s=part.left_s)
    client.call(p.Leave(conf.job, place.incarnation, p.Departure.PREEMPTED, step))
    exit(75)
    """


@pytest.mark.deep
def test_sigterm_to_the_launcher_is_passed_on(launch: Callable[..., Launched]) -> None:
    """The workers get it, and --grace seconds; they leave together, and the launcher says 75 for them."""
    run = launch(LEAVES, "-n", "2", "--grace", "20", member=True)
    run.wait_for(lambda lives: len(lives) == 2)
    run.process.terminate()
    code, errors = run.end()
    assert code == 75, errors
    assert len(set(seen(run.read(), "left"))) == 1
    assert seen(run.read(), "grace_s") == [20, 20]
    assert run.leftovers() == []


@pytest.mark.deep
def test_the_first_to_end_does_not_take_the_others_along(launch: Callable[..., Launched]) -> None:
    """Workers that recover are left alone when another one dies; of a preempted node all leave, each in its time."""
    said = "select.select([], [], [], 1.0 * place.rank); note(said=True); exit(75)"
    script = LEAVES.replace("attach()", "attach(recovers=True)").replace("exit(75)", said)
    run = launch(script, "-n", "2", member=True)
    lives = run.wait_for(lambda lives: len(lives) == 2)
    os.kill(lives[0]["pid"], signal.SIGTERM)
    code, errors = run.end()
    assert code == 75, errors
    assert seen(run.read(), "said") == [True, True]


@pytest.mark.deep
def test_a_grace_that_is_too_short(launch: Callable[..., Launched]) -> None:
    """A worker that has not left by then is killed, and 143 says so; forked children of workers go too."""
    run = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN); note(); os.fork(); threading.Event().wait(600)",
                 "-n", "2", "--grace", "0.3")  # fmt: skip
    run.wait_for(lambda lives: len(lives) == 2)
    began = time.monotonic()
    run.process.terminate()
    code, errors = run.end()
    assert code == 143, errors
    assert time.monotonic() - began < 10
    assert run.leftovers() == []


@pytest.mark.parametrize(("content", "reason"), [("60", "file: "), ("", "SIGTERM")])
def test_a_notice_by_a_file(launch: Callable[..., Launched], tmp_path: Path, content: str, reason: str) -> None:
    """With its time the master tells the workers, and they have it all; without it they get SIGTERM at once."""
    notice = tmp_path / "notice"
    run = launch(LEAVES, "-n", "2", "--preemption", f"file:{notice}", member=True)
    run.wait_for(lambda lives: len(lives) == 2)
    notice.write_text(content)
    code, errors = run.end()
    assert code == 75, errors
    lives = run.read()
    assert len(set(seen(lives, "left"))) == 1
    assert all(one.startswith(reason) for one in seen(lives, "reason"))
    assert all((50 if content else 15) < one <= 60 for one in seen(lives, "left_s"))


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a SLURM job. `scontrol` writes down what it is called with; `code` is its exit code."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    code = f"cat {tmp_path}/code 2>/dev/null || echo 0"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\nexit $({code})\n')
    program.chmod(0o755)
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    path = f"{program.parent}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": "4711", "SLURM_NODEID": "0", "DLROVER_HOOKS_RUNTIME_DIR": str(runtime)}


@pytest.mark.deep
def test_slurms_time_limit_requeues(launch: Callable[..., Launched], slurm: dict[str, str], tmp_path: Path) -> None:
    """Near the limit the workers leave, and the job goes back into the queue. The exit code is not 75 then."""
    run = launch(LEAVES, "--requeue", member=True, **slurm, SLURM_JOB_END_TIME=str(int(time.time()) + 100))
    code, errors = run.end()
    assert code == 143, errors
    assert seen(run.read(), "reason") == ["SLURM's time limit"]
    assert (tmp_path / "called").read_text() == "requeue 4711\n"


def test_a_start_is_requeued_once(
    slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever rank asks, and again for the next start; by one node; what fails is left to others: 75 stays 75."""
    called = tmp_path / "called"
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    job = here()
    assert job is not None
    assert [last_code(75, job, wanted=True) for _ in range(3)] == [143] * 3
    assert called.read_text() == "requeue 4711\n"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    (tmp_path / "code").write_text("1")
    assert last_code(75, here(), wanted=True) == 75
    assert "could not be requeued (scontrol: exit code 1)" in caplog.text
    (tmp_path / "code").unlink()
    assert last_code(75, here(), wanted=True) == 143
    assert called.read_text() == "requeue 4711\n" * 3
    assert [one.name for one in (tmp_path / "runtime").iterdir()] == ["requeued-4711-1"], "one mark for each job"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    elsewhere = msgspec.structs.replace(job, restarts=2, node_rank=1)
    assert [last_code(code, one, wanted=wanted) for code, one, wanted in (
        (75, elsewhere, True), (75, job, False), (75, None, True), (77, job, True), (0, job, True),
    )] == [75, 75, 75, 77, 0]  # fmt: skip
    assert called.read_text() == "requeue 4711\n" * 3


@pytest.mark.deep
def test_usr1_warns_of_the_limit(launch: Callable[..., Launched], slurm: dict[str, str]) -> None:
    """`sbatch --signal=B:USR1@300`: the launcher tells the workers how long they have; without --requeue: 75."""
    run = launch(LEAVES, member=True, **slurm, SLURM_JOB_END_TIME=str(int(time.time()) + 300))
    run.wait_for(lambda lives: len(lives) == 1)
    run.process.send_signal(signal.SIGUSR1)
    code, errors = run.end()
    assert code == 75, errors
    assert seen(run.read(), "reason") == ["SIGUSR1"]
    assert 250 < seen(run.read(), "left_s")[0] <= 300


@pytest.mark.deep
def test_the_last_screen_tells_the_first_failure(launch: Callable[..., Launched]) -> None:
    """Which worker, in its own words, where, what was done; its stderr streamed on as ever."""
    script = """
        attach()
        begun()
        beat(5 + life)
        if life == 0 and place.rank == 1:
            raise ValueError("wrong learning rate")
        note()
        life or threading.Event().wait(600)
        """
    run = launch(script, "-n", "2", member=True)
    code, errors = run.end()
    assert code == 0, errors
    assert errors.index("Traceback") < errors.index("job " + run.job + ": the first failure")
    told = errors[errors.index("the first failure") :]
    for line in ("who    worker 1 on node ", "why    exit code 1: ValueError: wrong learning rate", "script.py:",
                 "when   at step 5", "done   restarting 2 workers", "end    the job is done"):  # fmt: skip
        assert line in told


def test_one_node_of_two_is_preempted(node: Callable[..., Launched], tmp_path: Path) -> None:
    """All workers leave at one step; that node's launcher says 75, the other goes on alone, and counts no failure."""
    script = "if os.environ['WORLD_SIZE'] == '1':\n    note(alone=True)\n    exit(0)\n" + textwrap.dedent(LEAVES)
    flags = ("--nnodes", "1:2", "--max-restarts", "0")
    a = node("a", script, *flags, member=True)
    a.child("dlrover_hooks.master")
    b = node("b", script, *flags, "--preemption", f"file:{tmp_path / 'notice'}", member=True)
    a.wait_for(lambda lives: len(seen(lives, "grace_s")) == 2)
    (tmp_path / "notice").write_text("60")
    (code, said_a), (other, said_b) = a.end(), b.end()
    assert (code, other) == (0, 75), said_a + said_b
    lives = a.read()
    assert len(set(seen(lives, "left"))) == 1
    assert seen(lives, "alone") == [True]
    assert "b is preempted; restarting" in said_a


SURVIVES = """
    import select, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run

    def say(**more):
        note(node=os.environ["DLROVER_HOOKS_NODE"], **more)

    def tell(gone):
        select.select([], [], [], 1.0 * int(os.environ["LOCAL_RANK"]))
        say(left=gone.step)

    @elastic_run
    def train():
        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        data = [torch.tensor([float(i)]) for i in range(36)]
        loader = elastic_loader(
            DataLoader(data, batch_size=2), optimizer=optimizer, global_batch_size=6, accumulation="manual"
        )
        with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, on_preempt=tell) as saves:
            begun, world = saves.step, dist.get_world_size()
            pace_s = 0.05 if world == 3 or begun else 0.5  # a node that begins alone must not finish alone
            say(restored=begun, world=world)
            for _ in loader.epochs(8):
                for x in loader:
                    (model(x).square().mean() / loader.sampler.plan.micro_batches).backward()
                    if loader.step_ends:
                        optimizer.step()
                        optimizer.zero_grad()
                        say(step=saves.step, of=world)
                        select.select([], [], [], pace_s)
        say(end=saves.step)
        dist.destroy_process_group()

    train()
    """


@pytest.mark.deep
@pytest.mark.slow
def test_one_node_of_two_goes_and_the_other_one_recovers(node: Callable[..., Launched]) -> None:
    """Its process goes on; of the other node both leave, with the time that each needs, and nobody is replaced."""
    a = node("a", SURVIVES, "--nnodes", "1:2", "--max-restarts", "0", "-n", "1")
    assert a.says(
        "waiting for the other nodes"
    )  # the world's bounds are those of the last join: b's allow four workers, a's two
    b = node("b", SURVIVES, "--nnodes", "1:2", "--max-restarts", "0", "-n", "2")

    def together(lives: list[dict[str, Any]]) -> bool:
        """All three have made a step of the world of three."""
        return len({life["pid"] for life in lives if life.get("of") == 3 and life["step"] >= 4}) == 3

    a.wait_for(together, timeout_s=100)
    os.kill(next(life["pid"] for life in a.read() if life["node"] == "b"), signal.SIGTERM)
    (other, said_b), (code, said_a) = b.end(), a.end()
    assert (code, other) == (0, 75), said_a + said_b
    lives = a.read()
    said = said_a + said_b
    (step,) = set(seen(lives, "left"))
    assert [life["node"] for life in lives if "left" in life] == ["b", "b"], said
    assert [(life["node"], life["restored"]) for life in lives if life.get("world") == 1][-1:] == [("a", step)], said
    assert [(life["node"], life["end"]) for life in lives if "end" in life] == [("a", 48)], said
    assert len({life["pid"] for life in lives}) == 3
