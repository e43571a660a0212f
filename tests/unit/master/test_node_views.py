"""The view for one node leads its launcher to the same conclusions as the whole view, and stays small."""

from __future__ import annotations

import random

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import MasterError
from dlrover_hooks.launcher.failures import round_diagnosis as diagnosis
from dlrover_hooks.master.core.rounds.members import census_of
from dlrover_hooks.testing import MasterFake
from tests.e2e.job_script import attach, join

NODES, WORKERS = 4, 3


def job(nodes: int, workers: int) -> MasterFake:
    """A round of `nodes` x `workers`; the workers of agent `a1` are `a1-0`, `a1-1`, ..."""
    master, world = MasterFake(), nodes * workers
    for node in range(nodes):
        master.call(join(f"a{node}", workers, lives=f"a{node}-", low=world, high=world))
    return master


def change(master: MasterFake, chance: random.Random, *, well: bool) -> None:
    """Something happens to one worker or agent; `well`: a worker is done. What the master refuses changes nothing."""
    agent = f"a{chance.randrange(NODES)}"
    worker = f"{agent}-{chance.randrange(WORKERS)}"
    event = (
        p.Exited("job", agent, worker, 0)
        if well
        else chance.choice(
            [
                attach(worker, agent, recovers=chance.random() < 0.8),
                p.Exited("job", agent, worker, chance.choice([0, 1, -9, p.REQUEUE])),
                p.Leave("job", worker, chance.choice([p.Departure.FAILED, p.Departure.DONE])),
                p.Leave("job", agent, p.Departure.STOPPED),
                join(agent, WORKERS, lives=f"{agent}-again", low=1, high=NODES * WORKERS),
            ]
        )
    )
    try:
        master.call(event)
    except MasterError:
        return


def conclusions(view: p.JobView, node: str) -> dict[str, object]:
    here = {one.incarnation for one in view.members if one.node == node}
    dead = {one.incarnation for one in view.members if one.node == node and not one.alive}
    return {
        "live_on": [diagnosis.live_on(view, dead, whole) for whole in (0, 1)],
        "needed_again": [diagnosis.needed_again(view, dead, (), least) for least in range(NODES * WORKERS + 2)],
        "living": [diagnosis.living(view), diagnosis.living(view, here)],
        "ended": diagnosis.ended_by_master(view, here),
        "left_only": diagnosis.left_only(view),
        "all_ended": diagnosis.all_ended(view),
        "restart": diagnosis.is_restart(view),
        "elsewhere": diagnosis.elsewhere(view, node),
        "missing": diagnosis.missing(view, node),
    }


@pytest.mark.parametrize("seed", range(5))
def test_a_launcher_concludes_the_same(seed: int) -> None:
    """Row 9: after each of many changes, from both views. Some histories begin with all attached, or end well."""
    chance = random.Random(seed)
    seen, found = set[str](), dict[str, object]()
    for history in range(40):
        master = job(NODES, WORKERS)
        for node in range(NODES if history % 2 else 0):
            for worker in range(WORKERS):
                master.call(attach(f"a{node}-{worker}", f"a{node}", recovers=True))
        well = history % 4 == 0
        for _ in range(80 if well else 12):
            change(master, chance, well=well)
            current = master.state.jobs["job"].rounds.round
            assert current is not None
            assert current.census == census_of(current.members.values())
            whole = master.call(p.ShowJob("job"))
            for node in (f"node-a{number}" for number in range(NODES)):
                mine = master.call(p.ShowJob("job", node))
                found = conclusions(whole, node)
                assert conclusions(mine, node) == found
                seen |= {name for name, value in found.items() if value}
    assert seen == found.keys()


def test_a_view_for_a_node_is_small_and_lists_the_causes_first() -> None:
    """Row 9: every agent asks when a round breaks, so that the whole view would cost the square of the job's size."""
    master = job(40, 4)
    for node in range(1, 40):
        for worker in range(4):
            code = {(30, 2): -11, (31, 0): 0}.get((node, worker), 1)
            master.call(p.Exited("job", f"a{node}", f"a{node}-{worker}", code))
    view = master.call(p.ShowJob("job", "node-a0"))
    assert len(view.members) == 4 + p.LISTED_GONE
    assert [one.rank for one in view.members] == sorted(one.rank for one in view.members)
    assert "worker 122 on node node-a30 died (SIGSEGV)" in [str(end) for end in diagnosis.elsewhere(view, "node-a0")]
    assert 124 not in [one.rank for one in view.members]
    assert (view.unlisted.alive, view.unlisted.unended) == (0, 155 - p.LISTED_GONE)
    quiet = job(40, 4)
    view = quiet.call(p.ShowJob("job", "node-a7"))
    assert (len(view.members), view.unlisted.alive, view.unlisted.unended) == (4, 156, 156)
    assert len(msgspec.json.encode(view)) < 2000
