"""What a failure costs the job, on whatever node; which node is not to be used again."""

import os
import signal
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launched import Launched, all_gone
from tests.e2e.master_process import LiveMaster
from tests.e2e.test_nodes import STAY
from tests.e2e.test_replaced_worker import SURVIVOR, in_round

Node = Callable[..., Launched]


def lives_of(lives: list[dict], name: str) -> list[int]:
    return [life["life"] for life in lives if life["node"] == name]


def test_the_budget_is_the_jobs(node: Node) -> None:
    """Each node fails once, and with the third failure it is spent, though one of the two has seen one of them only."""
    flags = ("--nnodes", "2", "--max-restarts", "2")
    a = node("a", STAY, *flags)
    a.child("dlrover_hooks.master")
    b = node("b", STAY, *flags)
    lives = a.wait_for(lambda lives: len(lives) == 2)
    os.kill(next(life["pid"] for life in lives if life["node"] == "a"), signal.SIGKILL)
    a.wait_for(lambda lives: len(lives) == 4)
    b.process.kill()
    b.end()
    c = node("c", STAY, *flags)
    lives = a.wait_for(lambda lives: len(lives) == 6)
    assert (lives_of(lives, "a"), lives_of(lives, "b"), lives_of(lives, "c")) == ([0, 1, 2], [0, 1], [2])
    os.kill(lives[-1]["pid"], signal.SIGKILL)
    os.kill(lives[-2]["pid"], signal.SIGKILL)
    (code, said_a), (other, said_c) = a.end(), c.end()
    assert (code, other) == (77, 77), said_a + said_c
    assert "gave up after 2 restarts (--max-restarts) of the job" in said_a + said_c
    assert all_gone([life["pid"] for life in a.read()])
    assert a.leftovers() == []


@pytest.mark.deep
def test_a_worker_says_that_its_node_is_bad(node: Node) -> None:
    """Exit code 76: that launcher ends with it, whatever the step; the other node goes on with another one."""
    script = STAY.replace("threading", "os.environ['DLROVER_HOOKS_NODE'] == 'b' and exit(76)\nthreading")
    a = node("a", script, "--nnodes", "2")
    a.child("dlrover_hooks.master")
    b = node("b", script, "--nnodes", "2")
    code, errors = b.end()
    assert code == 76, errors
    assert "died (exit code 76): this node is bad; replace it" in errors
    assert "end    this node is bad" in errors
    c = node("c", STAY, "--nnodes", "2")
    lives = a.wait_for(lambda lives: 1 in lives_of(lives, "a") and lives_of(lives, "c") != [])
    assert lives_of(lives, "c") == [1]
    c.process.kill()
    c.end()
    a.process.send_signal(signal.SIGINT)
    code, errors = a.end()
    assert code == 130, errors
    assert a.leftovers() == []


@pytest.mark.deep
def test_a_node_that_fails_again_and_again_is_replaced(node: Node) -> None:
    """Three times in a row its worker took the job along, and no step was made: 76, with restarts left for the job."""
    script = """
        note(node=place.node, life=life)
        attach()
        beat(1)
        watcher = client.watch(conf.job, lambda notice: None)
        while place.node == "b":
            view = client.call(p.ShowJob(conf.job))
            if sum(one.attached for one in view.members) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(600)
        """
    a = node("a", script, "--nnodes", "2", member=True)
    a.child("dlrover_hooks.master")
    b = node("b", script, "--nnodes", "2", member=True)
    code, errors = b.end()
    assert code == 76, errors
    assert "for the 3rd time in a row on node b, at step 1; replace that node" in errors
    assert len(lives_of(a.read(), "b")) == 3
    assert a.process.poll() is None, "it waits for the replacement"
    a.process.send_signal(signal.SIGINT)
    assert a.end()[0] == 130


@pytest.mark.deep
def test_a_preempted_script_is_not_started_again(launch: Callable[..., Launched]) -> None:
    """Exit code 75 of its own: the launcher passes it on."""
    run = launch("note(); exit(75)")
    code, errors = run.end()
    assert (code, len(run.read())) == (75, 1), errors
    assert "preempted (a signal); start it again to go on" in errors


DONE = """
watcher = survive()
if life == 0 and place.rank == 0:
    leave(1)
    exit(0)
if life == 0:
    LAST
leave(2)
"""


@pytest.mark.deep
@pytest.mark.parametrize("last", ["regroup()", "heard.get(); leave(1); exit(0)"])
def test_workers_that_were_done_are_called_back(launch: Callable[..., Launched], last: str) -> None:
    """One is done, one dies, the third joins again, or is done, too: nobody waits in vain for the others."""
    run = launch(SURVIVOR + DONE.replace("LAST", last), "-n", "3", member=True)
    first = in_round(run.wait_for(lambda lives: len(in_round(lives, 1)) == 3), 1)
    assert all_gone([first[0]["pid"]])
    os.kill(first[1]["pid"], signal.SIGKILL)
    code, errors = run.end()
    assert code == 0, errors
    assert sorted(in_round(run.read(), 2)) == [0, 1, 2]
    all_were_done = "restarting 3 workers" in errors  # the third can be quicker than the launcher: nobody lives on then
    assert "done before others failed, and needed again" in errors or (all_were_done and "exit(0)" in last)
    assert run.leftovers() == []


RESTARTS = "attach(); beat(1); say(p.Seated(place.round, (place.rank,), 2), node=place.node)"


@pytest.mark.deep
@pytest.mark.parametrize("hooks", ["survive()", RESTARTS], ids=["recovers", "restarts"])
def test_a_node_that_was_done_starts_again_with_the_others(node: Node, hooks: str) -> None:
    """All workers of one node are done when one of the other fails; the job ends when all are done once more."""
    script = SURVIVOR + textwrap.dedent("""
        watcher = HOOKS
        if life == 0 and place.rank:
            threading.Event().wait(600)
        leave(1)
        """).replace("HOOKS", hooks)
    a = node("a", script, "--nnodes", "2", member=True)
    a.child("dlrover_hooks.master")
    b = node("b", script, "--nnodes", "2", member=True)
    first = in_round(a.wait_for(lambda lives: len(in_round(lives, 1)) == 2), 1)
    assert {"a": a, "b": b}[first[0]["node"]].says("its worker is done")
    os.kill(first[1]["pid"], signal.SIGKILL)
    (code, said_a), (other, said_b) = a.end(), b.end()
    assert (code, other) == (0, 0), said_a + said_b
    assert sorted(in_round(a.read(), 2)) == [0, 1]
    assert "another node has failed before it was done: starting again with it" in said_a + said_b


@pytest.mark.deep
def test_a_master_that_has_gone_is_not_waited_for(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """Its node is lost while the others need a round: they end with 77, say whose master it was, and what to do.

    The survivor that waits for its next round says so first; its launcher does not wait once more.
    """
    master = LiveMaster(tmp_path)
    flags = ("--nnodes", "2", "--rdzv-endpoint", master.url, "--token", "secret", "--master-away", "1.5s")
    job, script = (
        f"away-{uuid.uuid4().hex[:8]}",
        SURVIVOR
        + textwrap.dedent("""
        survive()
        heard.put(heard.get(timeout=600))
        note(round=0, heard=True)
        regroup(600)
        threading.Event().wait(600)
        """),
    )
    a, b = (launch(script, *flags, job=job, member=True, DLROVER_HOOKS_NODE=name) for name in "ab")
    a.wait_for(lambda lives: len(in_round(lives, 1)) == 2)
    b.process.kill()
    b.end()
    a.wait_for(lambda lives: any("heard" in life for life in lives))  # it would train on without the master otherwise
    master.kill()
    master.listener.close()
    began = time.monotonic()
    code, errors = a.end(timeout_s=100)
    assert code == 77, errors
    assert f"the master at {master.url} has not answered for" in errors
    assert "(--master-away). It goes with the node that serves it: launch the job again on all nodes" in errors
    assert time.monotonic() - began < 60, "two minutes are the default, ten a round's"
    assert a.leftovers() == []
    master.close()


@pytest.mark.deep
def test_failures_before_the_window_do_not_end_the_job(node: Node) -> None:
    """With a window of an instant each failure is the only one: three are followed by a restart, of a budget of one."""
    a = node("a", STAY, "--max-restarts", "1", "--restart-window", "1ms")
    for life in range(3):
        lives = a.wait_for(lambda lives, life=life: len(lives) == life + 1)
        os.kill(lives[-1]["pid"], signal.SIGKILL)
    a.wait_for(lambda lives: len(lives) == 4)
    a.process.send_signal(signal.SIGINT)
    code, errors = a.end()
    assert code == 130, errors
    assert errors.count("(1 of 1 restarts)") == 3
