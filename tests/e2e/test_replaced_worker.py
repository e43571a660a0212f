"""A worker dies and the others live on: only the dead one is replaced, where the fault level lets it be.

The worker here speaks the protocol of in-process recovery, without torch.
"""

import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deep import deep
from tests.descendants import descendants
from tests.e2e.launched import Launched, all_gone
from tests.e2e.master_process import LiveMaster

Node = Callable[..., Launched]

SURVIVOR = textwrap.dedent("""
    import queue
    from dlrover_hooks.worker.round_join import join_request, take_seat
    heard = queue.Queue()

    def say(seated, **more):
        note(round=seated.round, world_size=seated.world_size, now=seated.ranks[0], **more)

    def survive(**more):
        attach(recovers=True)
        beat(1)
        watcher = client.watch(conf.job, heard.put)
        seated = p.Seated(place.round, (place.rank,), place.world_size)
        say(seated, local_rank=place.local_rank, node=place.node, **more)
        return watcher

    def regroup(seconds=60):
        before = heard.get(timeout=seconds).round
        join = join_request(conf, place, place.incarnation)
        seated = take_seat(client, join, after=before, away_s=place.master_away_s)
        attach(recovers=True)
        say(seated)
        return seated
    """)
STAY = """
survive()
while True:
    regroup(600)
"""


@pytest.fixture
def survivors(launch: Callable[..., Launched]) -> Callable[..., Launched]:
    def start(script: str, *options: str) -> Launched:
        return launch(SURVIVOR + textwrap.dedent(script), *options, member=True)

    return start


def in_round(lives: list[dict], number: int) -> dict[int, dict]:
    """The workers that have said that they are in that round, by the rank there."""
    return {life["now"]: life for life in lives if life["round"] == number}


def stop(run: Launched) -> str:
    run.process.send_signal(signal.SIGINT)
    code, errors = run.end()
    assert code == 130, errors
    assert all_gone([life["pid"] for life in run.read()])
    assert run.leftovers() == []
    return errors


def test_only_the_dead_worker_is_replaced(survivors: Callable[..., Launched], tmp_path: Path) -> None:
    """Two of three keep process and rank; the third is a new process with the rank of the old.

    Its output has a file of its own.
    """
    run = survivors(STAY, "-n", "3", "--log-dir", "logs", "-r", "1")
    first = in_round(run.wait_for(lambda lives: len(in_round(lives, 1)) == 3), 1)
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = in_round(run.wait_for(lambda lives: len(in_round(lives, 2)) == 3), 2)
    assert [second[rank]["pid"] == first[rank]["pid"] for rank in (0, 1, 2)] == [True, False, True]
    assert second[1]["local_rank"] == 1
    assert {str(path.parent.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*.log")} == {
        "1/0", "1/1", "1/2", "2/1"
    }  # fmt: skip
    errors = stop(run)
    assert "worker 1 died (SIGKILL) at step 1; the others live on, replacing 1 worker (1 of 10 restarts)" in errors


@pytest.mark.deep
def test_a_program_that_is_not_run_by_this_python_is_replaced_too(survivors: Callable[..., Launched]) -> None:
    """`--no-python`: the new process has a rank before the program starts, although the program cannot join."""
    run = survivors(STAY, "-n", "2", "--no-python", sys.executable)
    first = in_round(run.wait_for(lambda lives: len(in_round(lives, 1)) == 2), 1)
    os.kill(first[1]["pid"], signal.SIGKILL)
    second = in_round(run.wait_for(lambda lives: len(in_round(lives, 2)) == 2), 2)
    assert [second[rank]["pid"] == first[rank]["pid"] for rank in (0, 1)] == [True, False]
    stop(run)


@pytest.mark.deep
def test_a_worker_that_the_master_has_lost_is_killed_and_replaced(
    survivors: Callable[..., Launched], tmp_path: Path
) -> None:
    """It says nothing any more, though the process lives: nobody waits for it. The master is one that runs already."""
    script = """
        if life == 0 and place.rank == 1:
            attach(recovers=True)
            begun()
            beat(1)
            note(round=1, now=1)
            threading.Event().wait(600)
        survive()
        while True:
            regroup(600)
        """
    master = LiveMaster(tmp_path, "--lease", "1")
    run = survivors(script, "-n", "2", "--rdzv-endpoint", master.url, "--token", "secret")
    first = in_round(run.wait_for(lambda lives: len(in_round(lives, 1)) == 2), 1)
    second = in_round(run.wait_for(lambda lives: len(in_round(lives, 2)) == 2), 2)
    assert second[0]["pid"] == first[0]["pid"]
    assert all_gone([first[1]["pid"]])
    lost = r"worker 1 was lost \(silent for too long[,;].*\) at step 1; the others live on, replacing 1 worker"
    assert re.search(lost, stop(run))
    master.close()


@pytest.mark.deep
def test_a_worker_is_named_by_the_rank_that_it_has(survivors: Callable[..., Launched]) -> None:
    """Rank 0 dies, so a survivor gets its rank; the next death is that of rank 0, in the place of local rank 1."""
    run = survivors(STAY, "-n", "2")
    first = in_round(run.wait_for(lambda lives: len(in_round(lives, 1)) == 2), 1)
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = in_round(run.wait_for(lambda lives: len(in_round(lives, 2)) == 2), 2)
    assert second[0]["pid"] == first[1]["pid"]
    os.kill(second[0]["pid"], signal.SIGKILL)
    third = in_round(run.wait_for(lambda lives: len(in_round(lives, 3)) == 2), 3)
    assert third[0]["pid"] == second[1]["pid"]
    errors = stop(run)
    assert "worker 0 died (SIGKILL) at step 1; the others live on" in errors
    assert "worker 0 (local rank 1) died (SIGKILL) at step 1; the others live on" in errors


@pytest.mark.deep
@pytest.mark.requirement("ED-10")
def test_shrink_replaces_nobody(survivors: Callable[..., Launched]) -> None:
    """Three, then two, then the one that is enough; when that dies, too, the run fails and says why."""
    run = survivors(STAY, "-n", "2:3", "--fault-level", "shrink")
    first = in_round(run.wait_for(lambda lives: len(in_round(lives, 1)) == 3), 1)
    os.kill(first[0]["pid"], signal.SIGKILL)
    second = in_round(run.wait_for(lambda lives: len(in_round(lives, 2)) == 2), 2)
    assert {life["pid"] for life in second.values()} == {first[1]["pid"], first[2]["pid"]}
    os.kill(first[1]["pid"], signal.SIGKILL)
    code, errors = run.end()
    assert code == 77, errors
    assert "1 worker of node" in errors
    assert "left, and 2 needed: --fault-level shrink replaces no worker" in errors
    assert len({life["pid"] for life in run.read()}) == 3
    assert all_gone([life["pid"] for life in run.read()])


@pytest.mark.deep
@pytest.mark.requirement("ED-13", "ED-14", "ED-52")
def test_elastic_goes_on_at_once_and_grows_again(survivors: Callable[..., Launched]) -> None:
    """The survivor does not wait for the newcomer; when that has come, it makes room for it."""
    run = survivors(STAY, "-n", "1:2", "--fault-level", "elastic")
    first = in_round(run.wait_for(lambda lives: len(in_round(lives, 1)) == 2), 1)
    os.kill(first[0]["pid"], signal.SIGKILL)
    lives = run.wait_for(lambda lives: any(life["round"] > 1 and life["world_size"] == 2 for life in lives))
    alone = [life for life in lives if life["world_size"] == 1]
    assert [life["pid"] for life in alone] == [first[1]["pid"]]
    last = max(life["round"] for life in lives)
    again = in_round(run.wait_for(lambda lives: len(in_round(lives, last)) == 2), last)
    assert first[1]["pid"] in {life["pid"] for life in again.values()}
    stop(run)


@pytest.mark.deep
def test_a_replacement_that_dies_is_replaced_until_the_budget_is_spent(survivors: Callable[..., Launched]) -> None:
    script = STAY.replace("survive()", "survive() if life == 0 else os.kill(os.getpid(), signal.SIGKILL)")
    run = survivors(script, "-n", "2", "--max-restarts", "2")
    first = in_round(run.wait_for(lambda lives: len(in_round(lives, 1)) == 2), 1)
    os.kill(first[1]["pid"], signal.SIGKILL)
    code, errors = run.end()
    assert code == 77, errors
    assert "gave up after 2 restarts (--max-restarts)" in errors
    assert all_gone([life["pid"] for life in run.read()])
    assert run.leftovers() == []


@pytest.mark.deep
@pytest.mark.requirement("ED-13", "ED-52")
def test_a_node_replaces_its_own_and_the_others_are_not_touched(node: Node) -> None:
    """Two nodes, elastic: the only worker of one dies, the other goes on alone, and makes room for the replacement.

    Meanwhile the first node has no part in the round; its agent does not take that for its own end.
    """
    a, b = (node(name, SURVIVOR + STAY, "--nnodes", "1:2", member=True) for name in "ab")
    lives = a.wait_for(lambda lives: [life["world_size"] for life in lives].count(2) == 2)
    mine = {life["node"]: life["pid"] for life in in_round(lives, lives[-1]["round"]).values()}
    os.kill(mine["b"], signal.SIGKILL)
    lives = a.wait_for(lambda lives: [life["world_size"] for life in lives].count(2) == 4)
    last = {life["pid"] for life in lives if life["world_size"] == 2 and life["round"] == lives[-1]["round"]}
    assert mine["a"] in last
    assert mine["b"] not in last
    assert [life["pid"] for life in lives if life["world_size"] == 1][-1] == mine["a"]
    for launched in (b, a):
        launched.process.send_signal(signal.SIGINT)
    (code, said), (other, _) = b.end(), a.end()
    assert {code, other} <= {130, 77}
    assert "restarting" not in said
    assert all_gone([life["pid"] for life in a.read()])


@pytest.mark.deep
@pytest.mark.requirement("ED-9")
def test_a_lost_node_is_waited_for_by_survivors_too(node: Node) -> None:
    """At level hot the survivor keeps its process and waits, and after the deadline the job fails."""
    a = node("a", SURVIVOR + STAY, "--nnodes", "2", "--replace-timeout", "2", member=True)
    a.child("dlrover_hooks.master")
    b = node("b", SURVIVOR + STAY, "--nnodes", "2", "--replace-timeout", "2", member=True)
    a.wait_for(lambda lives: len(in_round(lives, 1)) == 2)
    b.process.kill()
    code, errors = a.end()
    assert code == 77, errors
    assert "formed within 2 s: node b is lost (--replace-timeout)" in errors
    assert "the others live on (1 of 10 restarts)" in errors
    b.end()
    assert all_gone([life["pid"] for life in a.read()])


@pytest.mark.parametrize(
    ("options", "recovers"),
    [((), True), (("--standby", "1"), False), deep((), False), deep(("--standby", "1"), True)],
)
def test_a_warm_standby_takes_the_seat(
    launch: Callable[..., Launched], options: tuple[str, ...], recovers: bool
) -> None:
    """The newcomer has been there before its predecessor died, in a whole restart, too. None is left.

    Without a flag there is one for each worker, and what that costs is said.
    """
    script = "from dlrover_hooks.worker import preimport_list as preload; preload.tell()\n" + STAY
    if not recovers:
        script = script.replace("survive()", "attach(); beat(1); note(now=place.rank); threading.Event().wait(600)")
    run = launch(SURVIVOR + script, "-n", "2", *options, member=True)
    first = run.wait_for(lambda lives: len(lives) == 2)
    ready = "1 warm standby is" if options else "2 warm standbys are"
    assert run.says(f"{ready} ready to replace workers at once, for ")
    found = descendants(run.process.pid, "dlrover_hooks.launcher.warm.fork_server", children_only=True)
    warm = {one.pid for one in found}
    assert len(warm) == (2 if options else 3), "the server, and those that wait"
    os.kill(first[1]["pid"], signal.SIGKILL)
    lives = run.wait_for(lambda lives: len(lives) == 4)
    assert len({life["pid"] for life in lives[2:]} & warm) == (1 if options or recovers else 2)
    assert (first[0]["pid"] in {life["pid"] for life in lives[2:]}) == recovers
    run.process.send_signal(signal.SIGINT)
    code, errors = run.end()
    assert code == 130
    assert errors.count("ready to replace workers at once") == 1
    assert "Traceback" not in errors
    assert all_gone([*warm, *(life["pid"] for life in run.read())])
    assert run.leftovers() == []


@pytest.mark.deep
def test_no_standby_where_the_user_says_so(launch: Callable[..., Launched]) -> None:
    """`--standby 0`: a replacement starts cold, and no process but those of the job is there."""
    script = "from dlrover_hooks.worker import preimport_list as preload; preload.tell()\n" + STAY
    run = launch(SURVIVOR + script, "-n", "2", "--standby", "0", member=True)
    first = run.wait_for(lambda lives: len(lives) == 2)
    os.kill(first[1]["pid"], signal.SIGKILL)
    lives = run.wait_for(lambda lives: len(lives) == 4)
    assert not descendants(run.process.pid, "dlrover_hooks.launcher.warm.fork_server", children_only=True)
    assert first[0]["pid"] in {life["pid"] for life in lives[2:]}
    stop(run)
