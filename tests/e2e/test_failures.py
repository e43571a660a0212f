"""What the launcher makes of the end of a worker, of a signal, and of what an earlier launch left."""

import re
import shlex
import signal
from collections.abc import Callable
from typing import cast

import pytest

from tests.e2e.launched import Launched


@pytest.mark.deep
def test_a_crash_after_the_end_is_not_restarted(launch: Callable[..., Launched]) -> None:
    """The job is over at the master: what fails afterwards is the script's, and a restart has nothing to train."""
    run = launch("note(); attach(); beat(5); leave(5); raise ValueError('in test')", member=True)
    code, errors = run.end(timeout_s=60)
    assert code == 1, errors
    assert "training was finished at step 5; the script failed afterwards" in errors
    assert len(run.read()) == 1
    assert run.leftovers() == []


@pytest.mark.deep
def test_a_finished_job_in_a_journal_only_says_so(launch: Callable[..., Launched]) -> None:
    """Launched again with the journal of its end: exit 0, nothing is started; `--fresh` trains."""
    run = launch("note(); attach(); beat(5); leave(5)", "--journal", "job.db", member=True)
    assert run.end()[0] == 0
    code, errors = launch("note()", "--journal", "job.db", job=run.job).end()
    assert (code, len(run.read())) == (0, 1), errors
    assert "was finished at step 5" in errors
    code, errors = launch("note()", "--journal", "job.db", "--fresh", job=run.job).end()
    assert (code, len(run.read())) == (0, 2), errors


LEAVE = """
    def quit():
        client.call(p.Leave(conf.job, place.incarnation, p.Departure.FAILED, 1))

    attach()
    begun()
    beat(1)
    """


@pytest.mark.parametrize("how", ["quit()", "quit() if place.rank else os._exit(0)"])
def test_exit_code_0_is_the_end_of_the_script(launch: Callable[..., Launched], how: str) -> None:
    """All leave training by `sys.exit(0)`, or by an exception that the script catches: nothing is started again."""
    run = launch(f"{LEAVE}\n    {how}\n    note()\n    exit(0)", "-n", "2", member=True)
    code, errors = run.end()
    assert code == 0, errors
    assert len(run.read()) == 1 + (how == "quit()")
    assert "all 2 workers are done" in errors
    assert "restarting" not in errors


def test_workers_that_have_left_are_waited_for(launch: Callable[..., Launched]) -> None:
    """All have left, so nobody waits for them: what they do behind training takes as long as it takes."""
    script = f"""{LEAVE}
    quit()
    note()
    while not os.path.exists("go"):
        threading.Event().wait(0.05)
    exit(0)
    """
    run = launch(script, "-n", "2", member=True)
    run.wait_for(lambda lives: len(lives) == 2)
    (run.lives.parent / "go").touch()
    code, errors = run.end()
    assert (code, len(run.read())) == (0, 2), errors


@pytest.mark.deep
def test_a_worker_that_ends_early_is_blamed_and_charged(launch: Callable[..., Launched]) -> None:
    """Exit code 0 of one, and the others fail without it: that is no end of the script, and the budget bounds it."""
    script = f"""{LEAVE}
    note()
    if place.rank == 0:
        os._exit(0)
    while client.call(p.ShowJob(conf.job)).members[0].alive:
        pass
    quit()
    raise RuntimeError("Connection closed by peer")
    """
    run = launch(script, "-n", "2", "--max-restarts", "1", member=True)
    code, errors = run.end()
    assert (code, len(run.read())) == (77, 4), errors
    early = "worker 0 ended with exit code 0 before the others were done"
    assert re.search(f"{early} at step .; restarting 2 workers \\(1 of 1 restarts\\)", errors), errors
    assert re.search(f"{early} at step .; gave up after 1 restart", errors)


@pytest.mark.deep
@pytest.mark.parametrize("attaches", ["", "attach()"])
def test_members_of_a_dead_launcher_do_not_block_the_next(launch: Callable[..., Launched], attaches: str) -> None:
    """The journal still seats workers of a launcher that was killed: the next one on that node gives them up."""
    script = f"{attaches or 'life'}; note(); threading.Event().wait(600)"
    first = launch(script, "-n", "2", "--journal", "job.db", member=True)
    first.wait_for(lambda lives: len(lives) == 2)
    first.process.kill()
    first.end()
    code, errors = launch("note()", "-n", "2", "--journal", "job.db", job=first.job).end(timeout_s=60)
    assert code == 0, errors
    assert len(first.read()) == 4


def test_progress_counts_from_the_restored_step(launch: Callable[..., Launched]) -> None:
    """A resumed job whose script fails at the step it resumed from is not started again in vain."""
    script = """
        note()
        found = p.Manifest(conf.job, p.Generation(1, 16, "run"), 1, (), 0.0)
        attach(save_to=os.path.abspath("saved"), stored=(found,))
        beat(16)
        raise ValueError("wrong learning rate")
        """
    run = launch(script, member=True)
    code, errors = run.end()
    assert code == 1, errors
    assert "at step 16, no further than where it started: not restarted, see its traceback above" in errors
    assert len(run.read()) == 1


def test_an_error_after_progress_is_restarted(launch: Callable[..., Launched]) -> None:
    """Past the restored step the same exception may be the machine's: it is tried again."""
    script = "note(); attach(); beat(life + 1); life or exit(1)"
    code, errors = launch(script, member=True).end()
    assert code == 0, errors
    assert "at step 1; restarting 1 worker (1 of 10 restarts)" in errors


@pytest.mark.deep
def test_a_wrong_setting_is_not_restarted_a_false_death_is(launch: Callable[..., Launched]) -> None:
    """UsageError: 78, though there was progress. Stale: the master took a living worker for dead; try again."""
    script = "note(); attach(); beat(3); raise UsageError('no such thing', hint='mend it')"
    run = launch(script, member=True)
    code, errors = run.end()
    assert (code, len(run.read())) == (78, 1), errors
    assert "HINT: mend it" in errors
    run = launch("note()\nif life == 0: raise Stale('declared dead')", member=True)
    code, errors = run.end()
    assert (code, len(run.read())) == (0, 3), errors


@pytest.mark.deep
def test_the_echo_of_a_death_is_not_its_cause(launch: Callable[..., Launched]) -> None:
    """A worker whose collective failed may end first: the one that was shot a moment later is the cause."""
    script = """
        note()
        import select
        while life == 0 and len(open(sys.argv[1]).readlines()) < 2:
            select.select([], [], [], 0.02)
        if life == 0 and place.rank == 0:
            raise RuntimeError("connection closed by peer")
        if life == 0:
            select.select([], [], [], 0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    run = launch(script, "-n", "2", member=True)
    code, errors = run.end()
    assert (code, len(run.read())) == (0, 4), errors
    assert "worker 1 died (SIGKILL)" in errors


@pytest.mark.deep
@pytest.mark.parametrize(
    ("stored", "what"),
    [
        ("both", "saved step 7 at"),
        ("damaged", "saved step 7 at"),  # what a next start does with such a file
        ("forged", "no step was saved at"),  # a generation of which nothing is there
        ("", "no step was saved at"),
    ],
)
def test_ctrl_c_says_what_is_left(launch: Callable[..., Launched], stored: str, what: str) -> None:
    """The step that is durable, where, and how to go on; nothing is claimed that is not there."""
    script = f"""
        from pathlib import Path
        from dlrover_hooks.checkpoint.storage import catalog, generations as storage
        folder = os.path.abspath("saved")
        attach(save_to=folder)
        which, latest = p.Generation(1, 7, "run"), Path(folder, catalog.LATEST)
        if {stored!r} in ("both", "damaged"):
            file = storage.write_shard(folder, None, which, 0, 1, [memoryview(b"data")], 4, job=conf.job)
            storage.commit(folder, None, p.Manifest(conf.job, which, 1, (file,), 1.0), 2)
        if {stored!r} == "damaged":
            latest.write_bytes(latest.read_bytes().replace(b":7", b":9"))
        if {stored!r} == "forged":
            latest.write_bytes(catalog.encode(catalog.Latest(conf.job, which, "step-0000000007-0001")))
        note()
        threading.Event().wait(600)
        """
    run = launch(script, member=True)
    run.wait_for(lambda lives: len(lives) == 1)
    run.process.send_signal(signal.SIGINT)
    code, errors = run.end()
    assert code == 130
    again = f"start again with: {shlex.join(['dlrover-hooks', *cast(list[str], run.process.args)[3:]])}"
    last = errors.splitlines()[-1]
    assert what in last, errors
    assert last.endswith(again), errors


@pytest.mark.deep
def test_the_first_failure_is_not_buried_by_those_that_follow(launch: Callable[..., Launched]) -> None:
    """The traceback of a worker whose peer is gone stays off the screen; one line tells of it, behind the cause.

    It ends just before the one that is the cause, as a peer of a killed process may.
    """
    script = """
        note()
        attach()
        begun()
        beat(1)
        if life:
            exit(0)
        if place.rank:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1160")
        while not all(one.attached for one in client.call(p.ShowJob(conf.job)).members):
            pass
        import psutil
        def runs(pid):
            try:
                return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False
        for other in (one["pid"] for one in map(json.loads, open(sys.argv[1])) if one["rank"]):
            while runs(other):
                pass
        os.kill(os.getpid(), signal.SIGKILL)
        """
    code, errors = launch(script, "-n", "2", member=True).end()
    assert code == 0, errors
    assert "Traceback" not in errors
    cause = errors.index("worker 0 died (SIGKILL) at step 1; restarting 2 workers")
    assert cause < errors.index("worker 1 died (exit code 1) since a peer was gone: RuntimeError: [gloo/transport")


@pytest.mark.deep
def test_a_lost_peer_that_nobody_knows_of_is_shown_whole(launch: Callable[..., Launched]) -> None:
    """No other failure explains it: then the traceback is what there is to go by."""
    script = """
        note()
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection refused [127.0.0.1]:1160")
        """
    code, errors = launch(script, member=True).end()
    assert code == 1, errors
    assert errors.count("Traceback") == 1
    assert errors.index("Traceback") < errors.index("before any progress: not restarted, see its traceback above")


@pytest.mark.deep
def test_errors_in_a_file_are_whole(launch: Callable[..., Launched]) -> None:
    """There they bury nothing."""
    script = "note()\nraise RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection refused')"
    run = launch(script, "--log-dir", "logs", "-r", "3", member=True)
    code, errors = run.end()
    assert code == 1, errors
    assert "Traceback" in (run.lives.parent / "logs/1/0/stderr.log").read_text()


def test_the_same_failure_twice_is_the_scripts_own(launch: Callable[..., Launched]) -> None:
    """Restored from step 3, it fails at step 5 each time: steps were made, but none that is new."""
    script = """
        note()
        found = p.Manifest(conf.job, p.Generation(1, 3, "run"), 1, (), 0.0)
        attach(save_to=os.path.abspath("saved"), stored=(found,))
        beat(5)
        raise ValueError("a sample of another shape")
        """
    run = launch(script, member=True)
    code, errors = run.end()
    assert (code, len(run.read())) == (1, 2), errors
    assert "at step 5; restarting 1 worker (1 of 10 restarts)" in errors
    assert "at step 5, the same failure as before: not restarted, see its traceback above" in errors


@pytest.mark.deep
@pytest.mark.parametrize("known_first", [False, True])
def test_ranks_that_are_not_those_of_the_launcher(launch: Callable[..., Launched], known_first: bool) -> None:
    """A framework that numbers its processes itself: said at once, not where the first vote of a checkpoint counts.

    Also where torch's excepthook lies over ours (`known_first`), and gathers what that prints.
    """
    script = """
        import torch
        import torch.distributed as dist
        from dlrover_hooks import AsyncCheckpointer, elastic_loader
        note()
        seat = int(os.environ["RANK"])
        os.environ["RANK"] = str(1 - seat)
        dist.init_process_group("gloo")
        seat and threading.Event().wait(600)  # one is enough: what the other one would say is the echo
        net = torch.nn.Linear(2, 2)
        data = torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True)
        AsyncCheckpointer(model=net, optimizer=torch.optim.SGD(net.parameters()), loader=elastic_loader(data))
        """
    run = launch(script, "-n", "2", member=known_first)
    code, errors = run.end()
    assert (code, len(run.read())) == (78, 2), errors
    assert "rank 1 of 2 in its process group has the place of rank 0 of 2" in errors, errors
    assert "TorchElasticEnvironment" in errors


@pytest.mark.deep
def test_what_an_exception_says_is_heard_once(launch: Callable[..., Launched]) -> None:
    """torch's excepthook lies over ours when the settings are read again, as each session does."""
    script = """
        from dlrover_hooks import config
        config.load()
        ours = sys.excepthook
        sys.excepthook = lambda *error: ours(*error)
        config.load()
        note()
        raise ValueError("wrong learning rate")
        """
    code, errors = launch(script).end()
    assert code == 1, errors
    assert "why    exit code 1: ValueError: wrong learning rate" in errors
