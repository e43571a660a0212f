"""`dlrover-hooks run` with real processes: environment, restarts, cleanup, refusals."""

import functools
import glob
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.launched import Launched, all_gone


@pytest.mark.requirement("ED-36", "ED-43")
def test_workers_get_torchruns_environment_and_one_thread(launch: Callable[..., Launched]) -> None:
    """Without TORCHELASTIC_RUN_ID Lightning picks the wrong cluster environment."""
    run = launch("note(env=dict(os.environ), argv=sys.argv[2:], leader=os.getsid(0) == os.getpid())", "-n", "2")
    code, said = run.end()
    assert code == 0
    lives = sorted(run.read(), key=lambda life: life["rank"])
    assert [life["rank"] for life in lives] == [0, 1]
    assert f"worker 0 has pid {lives[0]['pid']}, worker 1 has pid {lives[1]['pid']}" in said
    for life in lives:
        env = life["env"]
        assert life["leader"], "each worker leads its own session"
        assert env["TORCHELASTIC_RUN_ID"] == env["DLROVER_HOOKS_JOB"] == run.job
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["OMP_NUM_THREADS"]) == ("2", "2", "1")
        assert env["LOCAL_RANK"] == env["RANK"]
        assert env["MASTER_PORT"].isdigit()
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert run.leftovers() == []


@pytest.mark.requirement("ED-27")
def test_a_killed_worker_restarts_all_and_its_forked_children_end(launch: Callable[..., Launched]) -> None:
    """kill -9 of one: both start again with a new round and port; what the old ones forked is gone."""
    run = launch(
        """
        life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        child = os.fork()
        if child == 0:
            threading.Event().wait(600)
        note(life=life, child=child, port=os.environ["MASTER_PORT"])
        if life == 0:
            threading.Event().wait(600)
        os.kill(child, signal.SIGKILL)
        """,
        "-n", "2",
    )  # fmt: skip
    first = run.wait_for(lambda lives: len(lives) == 2)
    os.kill(first[0]["pid"], signal.SIGKILL)
    code, errors = run.end()
    lives = run.read()
    assert code == 0, errors
    assert sorted(life["life"] for life in lives) == [0, 0, 1, 1]
    assert {life["port"] for life in lives if life["life"] == 1} != {first[0]["port"]}
    assert all_gone([life[key] for life in lives for key in ("pid", "child")])
    assert f"worker {first[0]['rank']} died (SIGKILL)" in errors


def test_ctrl_c_ends_everything_and_leaves_nothing(launch: Callable[..., Launched]) -> None:
    """SIGINT: workers get SIGTERM and their grace; then no process, port, temporary file or socket is left."""
    before = set(glob.glob(f"{tempfile.gettempdir()}/dlrover-hooks-run-*"))
    run = launch(
        """
        def polite(*_):
            note(said="goodbye")
            sys.exit(0)
        signal.signal(signal.SIGTERM, polite)
        note(master=os.environ["DLROVER_HOOKS_MASTER"])
        threading.Event().wait(600)
        """,
        "-n", "2",
    )  # fmt: skip
    lives = run.wait_for(lambda lives: len(lives) == 2)
    run.process.send_signal(signal.SIGINT)
    code, _ = run.end()
    assert code == 130
    assert [life.get("said") for life in run.read()].count("goodbye") == 2
    assert run.leftovers() == []
    assert set(glob.glob(f"{tempfile.gettempdir()}/dlrover-hooks-run-*")) <= before
    port = int(lives[0]["master"].rpartition(":")[2])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.requirement("ED-62")
def test_a_dead_master_is_restarted_on_its_socket(launch: Callable[..., Launched]) -> None:
    """kill -9 of the master: the next request to the same URL is answered by a new life."""
    run = launch(
        """
        import urllib.request
        def master():
            return json.load(urllib.request.urlopen(os.environ["DLROVER_HOOKS_MASTER"] + "/healthz", timeout=60))["pid"]
        old = master()
        os.kill(old, signal.SIGKILL)
        def answered():
            try:
                return master()
            except OSError:
                return None
        from tests.waiting import until
        note(old=old, new=until(answered, "an answer of the new master"))
        """
    )
    code, errors = run.end()
    assert code == 0, errors
    (life,) = run.read()
    assert life["old"] != life["new"]
    assert "the master died (SIGKILL); restarting it" in errors


def test_a_script_that_fails_at_once_is_not_restarted(launch: Callable[..., Launched]) -> None:
    """An error before any progress is the user's: exit code 1, one life, the traceback stays the last word."""
    run = launch("note(); raise ValueError('wrong learning rate')", "-n", "1")
    code, errors = run.end()
    assert code == 1
    assert len(run.read()) == 1
    assert "wrong learning rate" in errors
    assert "before any progress" in errors


def test_it_gives_up_after_the_budget(launch: Callable[..., Launched]) -> None:
    run = launch("note(); os.kill(os.getpid(), signal.SIGKILL)", "--max-restarts", "2")
    code, errors = run.end()
    assert code == 77
    assert len(run.read()) == 3
    assert "gave up after 2 restarts" in errors


def test_a_port_in_use_is_named(launch: Callable[..., Launched]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = launch("note()", "--port", str(port))
        code, errors = run.end()
    assert code == 78
    assert f"port {port} cannot be used" in errors
    assert run.leftovers() == []


def test_killing_the_launcher_leaves_no_worker_master_or_keeper(launch: Callable[..., Launched]) -> None:
    """kill -9 of the launcher itself: the kernel ends the workers, the closed pipe ends master and keeper."""
    run = launch("note(); threading.Event().wait(600)", "-n", "2")
    run.wait_for(lambda lives: len(lives) == 2)
    family = psutil.Process(run.process.pid).children(recursive=True)
    assert len(family) == 4, [child.cmdline() for child in family]
    run.process.kill()
    run.end()
    _, alive = psutil.wait_procs(family, timeout=60)
    for process in alive:
        process.kill()
    assert not alive
    assert run.leftovers() == []


def test_a_dead_keeper_is_replaced(launch: Callable[..., Launched]) -> None:
    """kill -9 of the keeper: a new one serves the next saves while the workers live on."""
    run = launch("note(); threading.Event().wait(600)")
    run.wait_for(lambda lives: len(lives) == 1)
    old = run.child("checkpoint.keeper")
    old.kill()
    run.child("checkpoint.keeper", other_than=old.pid)
    run.process.send_signal(signal.SIGINT)
    code, errors = run.end()
    assert code == 130
    assert "the keeper died (SIGKILL); restarting it" in errors
    assert len(run.read()) == 1


@pytest.mark.parametrize(("options", "environment"), [(["--fresh"], {}), ([], {"DLROVER_HOOKS_FRESH": "1"})])
def test_fresh_is_said_once(launch: Callable[..., Launched], options: list[str], environment: dict[str, str]) -> None:
    """`--fresh` (or the variable) starts at step 0 in the first life only: a restart resumes."""
    script = """
        fresh = os.environ.get("DLROVER_HOOKS_FRESH")
        note(fresh=fresh)
        if fresh:
            os.kill(os.getpid(), signal.SIGKILL)
        """
    run = launch(script, "--max-restarts", "2", *options, **environment)
    code, errors = run.end()
    assert code == 0, errors
    assert [life["fresh"] or "" for life in run.read()] == ["1", ""]


@pytest.mark.deep
def test_one_launcher_for_each_job(launch: Callable[..., Launched]) -> None:
    """A second launch of a job that lives here is refused at once, naming the first; it leaves nothing."""
    first = launch("note(); threading.Event().wait(600)")
    first.wait_for(lambda lives: len(lives) == 1)
    code, errors = launch("note()", job=first.job).end(timeout_s=60)
    assert code == 78
    assert f"pid {first.process.pid}" in errors
    assert len(first.read()) == 1
    first.process.kill()
    first.end()
    code, errors = launch("note()", job=first.job).end()
    assert code == 0, errors
    assert first.leftovers() == []


@pytest.mark.deep
@pytest.mark.parametrize("meet", [True, False])
def test_a_job_of_one_node_has_one_launcher_whatever_the_node_is_called(
    launch: Callable[..., Launched], node: Callable[..., Launched], meet: bool
) -> None:
    """Two would train the job apart; where they meet the second one waited, and then ended with 0."""
    stay = "note(); threading.Event().wait(600)"
    if meet:
        first, second = node("a", stay), functools.partial(node, "b", "note()")
    else:
        first = launch(stay, DLROVER_HOOKS_NODE="a")
        second = functools.partial(launch, "note()", job=first.job, DLROVER_HOOKS_NODE="b")
    first.wait_for(lambda lives: len(lives) == 1)
    code, errors = second().end()
    assert (code, len(first.read())) == (78, 1), errors
    assert f"job {first.job} already runs on this machine, and its nodes are one (--nnodes 1)" in errors
    assert f"its launcher is pid {first.process.pid}" in errors


@pytest.mark.deep
def test_who_waited_while_another_machine_trained_has_not_succeeded(node: Callable[..., Launched]) -> None:
    """Another machine, of which only the master can know: here it is one with a runtime folder of its own."""
    script = """
        attach()
        begun()
        beat(1)
        note()
        while not os.path.exists("go"):
            threading.Event().wait(0.05)
        leave(1)
        """
    first = node("a", script, member=True)
    first.wait_for(lambda lives: len(lives) == 1)
    with tempfile.TemporaryDirectory() as other:
        second = node("b", "note()", DLROVER_HOOKS_RUNTIME_DIR=other)
        assert second.says("runs already, on node a: this launcher has no place there (--nnodes 1)")
        (first.lives.parent / "go").touch()
        code, errors = first.end()
        assert code == 0, errors
        code, errors = second.end()
    assert (code, len(first.read())) == (77, 1), errors
    assert "the launcher on node a trained it to its end, while this one waited for a place" in errors


@pytest.mark.deep
def test_a_journal_that_is_gone_costs_a_restart(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """The master begins a new one; the workers that it does not know start again, from what they have saved."""
    script = """
        attach()
        begun()
        note()
        while len(open(sys.argv[1]).readlines()) < 4:
            beat(1)
            threading.Event().wait(0.05)
        leave(1)
        """
    (tmp_path / "books").mkdir()
    run = launch(script, "-n", "2", "--journal", "books/job.db", member=True)
    run.wait_for(lambda lives: len(lives) == 2)
    shutil.rmtree(tmp_path / "books")
    run.child("dlrover_hooks.master").kill()
    code, errors = run.end()
    assert (code, len(run.read())) == (0, 4), errors
    assert "the master's journal books/job.db is gone: the master begins a new one" in errors
    assert (tmp_path / "books" / "job.db").exists()


@pytest.mark.deep
def test_a_signal_is_heard_while_the_master_is_not(launch: Callable[..., Launched]) -> None:
    """SIGTERM while the launcher waits for its master or its round: 143 at once, not after a minute."""
    run = launch("note()")
    run.child("dlrover_hooks.master").suspend()
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.end(timeout_s=60)
    assert code == 143, errors
    assert run.leftovers() == []


def test_log_dir_keeps_what_each_worker_said(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """By round and rank, also of a replacement; its stderr only there, as --redirects says, its stdout seen, too."""
    script = """
        life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("life", life, "of rank", os.environ["RANK"], flush=True)
        sys.stderr.write("trouble" + chr(10))
        note()
        life or threading.Event().wait(600)
        """
    run = launch(script, "-n", "2", "--log-dir", "logs", "-r", "2", "--tee", "0:1")
    os.kill(run.wait_for(lambda lives: len(lives) == 2)[0]["pid"], signal.SIGKILL)
    code, errors = run.end()
    assert code == 0, errors
    assert "trouble" not in errors
    found = {str(path.relative_to(tmp_path / "logs")): path.read_text() for path in (tmp_path / "logs").rglob("*.log")}
    assert found == {
        "1/0/stdout.log": "life 0 of rank 0\n", "2/0/stdout.log": "life 1 of rank 0\n",
        **{f"{number}/{rank}/stderr.log": "trouble\n" for number in (1, 2) for rank in (0, 1)},
    }  # fmt: skip
