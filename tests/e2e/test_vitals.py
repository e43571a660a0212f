"""What nodes and ranks use, with real launchers: their process trees are what the master shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import Stale, UnknownJob
from tests.e2e.launched import Launched
from tests.e2e.master_process import LiveMaster
from tests.waiting import until

MIB = 1 << 20
BIG = 200 * MIB
STAY = """
    import subprocess
    rank = int(os.environ["RANK"])
    if rank == 1:
        ballast = bytearray(b"x") * (200 << 20)
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait(600)"])
    attach()
    begun()
    beat(3)
    note()
    threading.Event().wait(600)
"""


def use_of(client: MasterClient, job: str, condition: Callable[[p.JobVitals], Any]) -> p.JobVitals:
    """The first view that fulfills `condition`."""

    def found() -> p.JobVitals | None:
        view = client.call(p.ShowVitals(job))
        return view if condition(view) else None

    return until(found, "such vitals", diagnostic=lambda: client.call(p.ShowVitals(job)))


def reported(view: p.JobVitals) -> bool:
    """All ranks have process trees, and rank 1 has its child."""
    trees = [rank.processes for rank in view.ranks]
    return len(trees) == 2 and all(trees) and trees[1] is not None and trees[1].processes == 2


@pytest.mark.requirement("DL-58", "DL-61")
def test_each_rank_is_seen_with_its_process_tree(launch: Callable[..., Launched], live_master: LiveMaster) -> None:
    """The master has them from the launcher, and forgets them with the job and with the launcher's end."""
    environment = {"DLROVER_HOOKS_TOKEN": str(live_master.token), "DLROVER_HOOKS_NODE": "here"}
    at = ("--rdzv-endpoint", live_master.url)
    job = launch(STAY, *at, "--nproc-per-node", "2", "--standby", "0", member=True, **environment)
    client = live_master.client("viewer")
    job.wait_for(lambda lives: len(lives) == 2)
    view = use_of(client, job.job, reported)
    assert [node.node for node in view.nodes] == ["here"]
    node = view.nodes[0]
    assert 0 < node.memory.used_bytes < node.memory.total_bytes
    assert node.cpu.cores > 0
    assert node.age_s < 60
    first, second = (rank.processes for rank in view.ranks)
    assert first is not None
    assert second is not None
    assert first.processes == 1
    assert second.memory_bytes > first.memory_bytes + BIG
    assert [rank.step for rank in view.ranks] == [3, 3]
    text = requests.get(f"{live_master.url}/metrics", headers={"Authorization": f"Bearer {live_master.token}"}).text
    assert f'dlrover_hooks_rank_tree_processes{{job="{job.job}",rank="1"}} 2.0' in text
    assert f'dlrover_hooks_node_memory_used_bytes{{job="{job.job}",node="here"}}' in text
    job.process.terminate()
    job.end()
    gone = client.call(p.ShowVitals(job.job))
    assert (gone.nodes, gone.ranks) == ((), ())
    client.call(p.DeleteJob(job.job))
    with pytest.raises(UnknownJob):
        client.call(p.ShowVitals(job.job))
    with pytest.raises((UnknownJob, Stale)):
        client.call(p.NodeVitals(job.job, "agent", "here", node.cpu, node.memory, node.network))


@pytest.mark.deep
def test_both_nodes_are_shown_until_one_is_lost(launch: Callable[..., Launched], live_master: LiveMaster) -> None:
    """Each launcher reports its own. The workers have no hooks, so the ranks have the launchers' figures alone."""

    def node(name: str) -> Launched:
        environment = {"DLROVER_HOOKS_TOKEN": str(live_master.token), "DLROVER_HOOKS_NODE": name}
        options = ("--rdzv-endpoint", live_master.url, "--nnodes", "2", "--standby", "0")
        return launch("note()\nthreading.Event().wait(600)\n", *options, job="two-nodes", **environment)

    a, b = node("a"), node("b")
    a.wait_for(lambda lives: len(lives) == 2)
    client = live_master.client("viewer")
    view = use_of(client, a.job, lambda view: len(view.nodes) == 2 and all(one.processes for one in view.ranks))
    assert [use.node for use in view.nodes] == ["a", "b"]
    assert sorted(use.node for use in view.ranks) == ["a", "b"]
    assert [use.vitals for use in view.ranks] == [None, None]
    b.process.kill()
    gone = use_of(client, a.job, lambda view: [use.node for use in view.nodes] == ["a"])
    assert {use.node for use in gone.ranks} <= {"a"}
