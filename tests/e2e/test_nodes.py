"""Several launchers, one job: `--nnodes` with real processes, each launcher a node of its own name on this machine."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.launched import Launched, all_gone
from tests.e2e.master_process import LiveMaster

Node = Callable[..., Launched]

WORLD = """
place = {name.lower(): int(os.environ[name]) for name in ("WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK")}
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
note(**place, node=os.environ["DLROVER_HOOKS_NODE"], life=life)
"""
STAY = WORLD + "threading.Event().wait(600)\n"


@pytest.mark.requirement("ED-38")
def test_two_nodes_are_one_world(node: Node) -> None:
    """The first node serves the master; ranks are the world's, the workers of a node are next to each other."""
    a, b = node("a", WORLD, "--nnodes", "2", "-n", "2"), node("b", WORLD, "--nnodes", "2", "-n", "2")
    for launched in (a, b):
        code, errors = launched.end()
        assert code == 0, errors
    lives = sorted(a.read(), key=lambda life: life["rank"])
    assert [life["rank"] for life in lives] == [0, 1, 2, 3]
    assert {life["world_size"] for life in lives} == {4}
    assert [life["local_rank"] for life in lives] == [0, 1, 0, 1]
    assert [life["group_rank"] for life in lives] == [0, 0, 1, 1]
    assert {life["node"] for life in lives} == {"a", "b"}
    assert a.leftovers() == []


@pytest.mark.deep
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_node_that_waits_joins_again_if_the_next_master_knows_nothing(
    launch: Callable[..., Launched], tmp_path: Path, first: str
) -> None:
    """As a master in a Pod without a volume. `first`: the launcher that the next master hears of first."""
    master = LiveMaster(tmp_path, token="secret")
    try:
        flags = ("--rdzv-endpoint", master.url, "--nnodes", "2")
        nodes = {name: {"DLROVER_HOOKS_NODE": name, "DLROVER_HOOKS_TOKEN": "secret"} for name in ("a", "b")}
        a = launch(WORLD, *flags, job="again", **nodes["a"])
        a.says("waiting for the other nodes")
        if first == "b":  # it does not see the master before the other one has joined
            a.process.send_signal(signal.SIGSTOP)
        master.kill()
        for left in tmp_path.glob("master.db*"):
            left.unlink()
        master.restart()
        if first == "a":
            a.says("joining again")
        b = launch(WORLD, *flags, job="again", **nodes["b"])
        if first == "b":
            b.says("waiting for the other nodes")
            a.process.send_signal(signal.SIGCONT)
        for launched in (a, b):
            code, errors = launched.end()
            assert code == 0, errors
        assert sorted(life["node"] for life in a.read()) == ["a", "b"], "one round was enough"
    finally:
        master.close()


@pytest.mark.deep
def test_a_node_that_waits_gives_way_to_a_later_one_of_its_name(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    """Of two machines with one name the later one stays. They must not displace each other for ever."""
    master = LiveMaster(tmp_path, token="secret")
    try:
        place = {"DLROVER_HOOKS_NODE": "a", "DLROVER_HOOKS_TOKEN": "secret"}
        flags = ("--rdzv-endpoint", master.url, "--nnodes", "2")
        started = list[Launched]()
        for name in ("one", "two"):
            (tmp_path / name).mkdir(mode=0o700)
            started.append(launch(WORLD, *flags, job="again", DLROVER_HOOKS_RUNTIME_DIR=str(tmp_path / name), **place))
            started[-1].says("waiting for the other nodes")
        code, errors = started[0].end()
        assert code == 77, errors
        assert "joining again" not in errors
        assert started[1].process.poll() is None
        started[1].process.send_signal(signal.SIGINT)
        assert started[1].end()[0] == 130
    finally:
        master.close()


@pytest.mark.requirement("ED-75")
def test_a_dead_worker_of_one_node_restarts_both(node: Node) -> None:
    """The other agent hears of it from the master; both count it, and form the next round together."""
    script = WORLD + "life or threading.Event().wait(600)\n"
    a, b = node("a", script, "--nnodes", "2"), node("b", script, "--nnodes", "2")
    first = a.wait_for(lambda lives: len(lives) == 2)
    os.kill(next(life["pid"] for life in first if life["node"] == "b"), signal.SIGKILL)
    (code, said_a), (other, said_b) = a.end(), b.end()
    assert (code, other) == (0, 0), said_a + said_b
    assert sorted((life["node"], life["life"]) for life in a.read()) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert "died (SIGKILL)" in said_b
    assert "on node b died (SIGKILL)" in said_a
    assert all_gone([life["pid"] for life in a.read()])


@pytest.mark.deep
def test_a_wrong_script_ends_the_job_on_all_nodes(node: Node) -> None:
    """One rank fails before any progress: that node says why, the other ends with the same code at once."""
    script = (
        WORLD + "if place['group_rank'] == 1: raise ValueError('wrong learning rate')\nthreading.Event().wait(600)\n"
    )
    a, b = node("a", script, "--nnodes", "2"), node("b", script, "--nnodes", "2")
    (code, said_a), (other, said_b) = a.end(), b.end()
    assert (code, other) == (1, 1), said_a + said_b
    assert len(a.read()) == 2
    assert "was given up: node" in said_a + said_b
    assert "before any progress" in said_a
    assert "before any progress" in said_b
    assert a.leftovers() == []


@pytest.mark.deep
@pytest.mark.requirement("ED-8", "ED-9", "ED-14")
def test_hot_waits_for_a_replacement_and_then_fails(node: Node) -> None:
    """A lost node is waited for until the deadline; then the job fails with the reason."""
    flags = ("--nnodes", "2", "--fault-level", "hot", "--replace-timeout", "2s")
    a, b = node("a", STAY, *flags), None
    a.child("dlrover_hooks.master")
    b = node("b", STAY, *flags)
    a.wait_for(lambda lives: len(lives) == 2)
    b.process.kill()
    code, errors = a.end()
    assert code == 77, errors
    assert "no round of 2 nodes with 1 workers each formed within 2 s: node b is lost (--replace-timeout)" in errors
    b.end()
    assert all_gone([life["pid"] for life in a.read()])
    assert a.leftovers() == []


@pytest.mark.deep
@pytest.mark.requirement("ED-7", "ED-8")
def test_hot_takes_the_replacement(node: Node) -> None:
    """Only the faulty node is replaced; the others wait for it, and the world is as large as before."""
    a = node("a", STAY, "--nnodes", "2")
    a.child("dlrover_hooks.master")
    b = node("b", STAY, "--nnodes", "2")
    a.wait_for(lambda lives: len(lives) == 2)
    b.process.kill()
    b.end()
    c = node("c", STAY, "--nnodes", "2")
    last = a.wait_for(lambda lives: len(lives) == 4)[-2:]
    assert {(life["node"], life["world_size"]) for life in last} == {("a", 2), ("c", 2)}
    a.process.send_signal(signal.SIGINT)
    (code, said_a), (other, said_c) = a.end(), c.end()
    assert (code, other) == (130, 77), said_a + said_c
    assert "node a, which serves the master, was stopped" in said_c
    assert all_gone([life["pid"] for life in a.read()])
    assert a.leftovers() == []


@pytest.mark.deep
@pytest.mark.requirement("ED-10", "ED-12", "ED-14", "ED-22")
def test_shrink_goes_on_with_fewer_and_refuses_newcomers(node: Node) -> None:
    """One node of two is lost; the other trains on, and one that comes later is told why it is not taken."""
    flags = ("--nnodes", "1:2", "--fault-level", "shrink")
    a = node("a", STAY, *flags)
    a.child("dlrover_hooks.master")
    b = node("b", STAY, *flags)
    a.wait_for(lambda lives: len(lives) == 2)
    b.process.kill()
    b.end()
    a.wait_for(lambda lives: lives[-1]["world_size"] == 1 and lives[-1]["life"] == 1)
    code, errors = node("c", STAY, *flags).end()
    assert code == 78
    assert "does not grow: node 'c' is refused" in errors
    a.process.send_signal(signal.SIGINT)
    assert a.end()[0] == 130
    assert all_gone([life["pid"] for life in a.read()])


@pytest.mark.deep
@pytest.mark.requirement("ED-23")
def test_elastic_nodes_are_taken_in_and_given_up(node: Node) -> None:
    """One node begins, a second one is added, and lost again; workers without recovery restart."""
    script = """
        attach()
        beat(1)
        note(world_size=place.world_size, node=place.node, life=life)
        client.watch(conf.job, lambda notice: None)
        threading.Event().wait(600)
        """
    flags = ("--nnodes", "1:2", "--max-restarts", "1")
    a = node("a", script, *flags, member=True)
    a.wait_for(lambda lives: [life["world_size"] for life in lives] == [1])
    b = node("b", script, *flags, member=True)
    a.wait_for(lambda lives: [life["world_size"] for life in lives[1:]] == [2, 2])
    b.process.kill()
    lives = a.wait_for(lambda lives: len(lives) == 4)
    assert (lives[-1]["world_size"], lives[-1]["node"], lives[-1]["life"]) == (1, "a", 1)
    assert {life["life"] for life in lives[:3]} == {0}, "growing is no failure"
    b.end()
    a.process.send_signal(signal.SIGINT)
    code, errors = a.end()
    assert code == 130
    assert "1 newcomer joined: restarting all workers to include them" in errors
    assert all_gone([life["pid"] for life in a.read()])


@pytest.mark.deep
def test_killing_the_launcher_with_the_master_ends_the_job(node: Node) -> None:
    """kill -9: no worker, keeper, master or file of it is left; the other node waits, and then says why it ends."""
    flags = ("--nnodes", "2", "-n", "2", "--replace-timeout", "1", "--master-away", "3s")
    a = node("a", STAY, *flags)
    a.child("dlrover_hooks.master")
    b = node("b", STAY, *flags)
    lives = a.wait_for(lambda lives: len(lives) == 4)
    family = psutil.Process(a.process.pid).children(recursive=True)
    a.process.kill()
    a.end()
    assert all_gone([life["pid"] for life in lives if life["node"] == "a"])
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive
    os.kill(next(life["pid"] for life in lives if life["node"] == "b"), signal.SIGKILL)
    code, errors = b.end()
    assert code == 77, errors
    assert "It goes with the node that serves it" in errors
    assert all_gone([life["pid"] for life in lives])
    assert a.leftovers() == []


@pytest.mark.deep
def test_slurm_needs_no_other_flag(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """`srun dlrover-hooks run --slurm SCRIPT`: nodes, ranks, address, job and a token that the nodes share."""
    port = 15000 + os.getpid() % 5000
    step = {"SLURM_JOB_ID": str(port - 15000), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "2",
            "SLURM_STEP_NODELIST": "localhost,other", "HOME": str(tmp_path)}  # fmt: skip
    runs = [
        launch(WORLD, "--slurm", job="-", DLROVER_HOOKS_NODE=f"n{rank}", SLURM_NODEID=rank, SLURM_PROCID=rank, **step)
        for rank in "01"
    ]
    for run in runs:
        code, errors = run.end()
        assert code == 0, errors
    assert sorted(life["rank"] for life in runs[0].read()) == [0, 1]
    assert not list((tmp_path / ".dlrover-hooks").iterdir())
