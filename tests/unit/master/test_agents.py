"""Several agents of one job, at the master: which may come, which have ended, and which end it for all."""

from __future__ import annotations

import asyncio

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, GivenUp, Stale
from dlrover_hooks.master.clock import Uptime
from dlrover_hooks.master.core import job_registry, views
from dlrover_hooks.master.core.heartbeats import GRACE_S, Nodes
from dlrover_hooks.master.failure_detector import Liveness
from dlrover_hooks.testing import MasterFake
from tests.e2e.job_script import join


def two_nodes(*, low: int = 2, attached: bool = True, recovers: bool = False) -> MasterFake:
    master = MasterFake()
    for agent in "ab":
        master.call(join(agent, 1, lives=agent, low=low, high=2))
    for agent in "ab" if attached else "":
        master.call(p.Attach("job", f"{agent}0", agent, 1, recovers=recovers))
    return master


def told(master: MasterFake, agent: str, **asked: int) -> p.Message | None:
    return views.query(master.state, master.nodes, p.Watch("job", agent, **asked))


def view(master: MasterFake) -> p.JobView:
    return master.call(p.ShowJob("job"))


def test_a_job_that_shrinks_refuses_newcomers_as_long_as_somebody_stands() -> None:
    """Whether it trains or is broken. When nobody is left it may be launched again."""
    master = two_nodes()
    late = join("c", 1, lives="c", low=1, high=2, shrinks=True)
    with pytest.raises(BadRequest, match="does not grow: node 'node-c' is refused"):
        master.call(late)
    master.call(p.Exited("job", "b", "b0", -9))
    with pytest.raises(BadRequest, match="does not grow"):
        master.call(late)
    master.call(join("a", 1, lives="again", low=1, high=2, shrinks=True))
    with pytest.raises(BadRequest, match="does not grow"):
        master.call(late)
    master.call(p.Leave("job", "a", p.Departure.STOPPED))
    master.call(late)


def test_one_agent_ends_the_job_for_all_and_a_launch_begins_anew() -> None:
    """The others hear it at their watch and see why; no round forms until somebody new comes."""
    master = two_nodes()
    master.call(p.Exited("job", "b", "b0", 1))
    master.call(p.Leave("job", "b", p.Departure.STOPPED, ending=p.Ending(1, "wrong script")))
    assert told(master, "a", after=1) == p.Notice(1, finished=True)
    assert view(master).ending == p.Ending(1, "wrong script")
    master.call(join("a", 1, lives="again", low=1, high=2))
    master.advance(10.0)
    with pytest.raises(GivenUp, match="wrong script"):
        master.call(p.AwaitRound("job", "a", 1, timeout_s=0.0))
    assert view(master).round == 1
    master.call(join("new", 1, lives="new", low=1, high=2))
    assert view(master).ending is None
    assert view(master).round == 2


def test_agents_hear_of_newcomers_for_workers_that_do_not_recover() -> None:
    """The workers that do hear it themselves."""
    for recovers in (False, True):
        master = MasterFake()
        master.call(join("a", 1, lives="a", low=1, high=2))
        master.advance(1.0)
        master.call(p.Attach("job", "a0", "a", 1, recovers=recovers))
        master.call(join("b", 1, lives="b", low=1, high=2))
        assert told(master, "a") == (None if recovers else p.Notice(1, waiting=1))
        assert told(master, "a0") == (p.Notice(1, waiting=1) if recovers else None)


def test_exit_code_0_is_the_end_of_a_worker_that_says_nothing() -> None:
    """A script without hooks: the round is not broken by it, and with the last one the job is finished."""
    master = two_nodes(attached=False)
    master.call(p.Exited("job", "a", "a0", 0))
    assert told(master, "b") is None
    master.call(p.Exited("job", "b", "b0", 0))
    assert view(master).finished
    assert told(master, "a") == p.Notice(1, finished=True)


def test_why_a_member_is_gone_can_be_seen() -> None:
    master = two_nodes(attached=False)
    master.call(p.Exited("job", "b", "b0", -9))
    master.call(join("a", 1, lives="again", low=2, high=2))
    assert [(one.gone, one.exit_code) for one in view(master).members] == [("replaced", None), ("lost", -9)]


def test_a_broken_round_is_one_failure_of_the_job_whoever_dies_of_it() -> None:
    """Counted for all nodes, so that a budget is the job's. An end that was asked for is none."""
    master = two_nodes()
    master.call(p.Exited("job", "b", "b0", -9))
    assert view(master).failures == 1
    master.call(p.Exited("job", "a", "a0", 1))
    assert view(master).failures == 1, "the echo"
    for number, departure in enumerate((p.Departure.STOPPED, p.Departure.PREEMPTED, p.Departure.FAILED), 2):
        for agent in "ab":
            master.call(join(agent, 1, lives=f"{agent}{number}-", low=2, high=2))
        for agent in "ab":
            master.call(p.Attach("job", f"{agent}{number}-0", f"node-{agent}", 1))
        assert view(master).round == number
        assert view(master).failures == 1
        master.call(p.Leave("job", f"a{number}-0", departure))
    assert view(master).failures == 2, "the last of them"


def test_a_preempted_workers_exit_is_no_failure() -> None:
    """Exit code 75, of a script that does not tell the master otherwise."""
    master = two_nodes()
    master.call(p.Exited("job", "b", "b0", p.REQUEUE))
    assert view(master).failures == 0
    assert view(master).phase is p.Phase.BROKEN
    assert view(master).members[1].gone == "preempted"


def test_a_replacement_that_dies_before_it_has_a_seat_is_a_failure_too() -> None:
    """Whether it waits or still imports, though the round does not know its launcher any more; each once."""
    master = two_nodes(recovers=True)
    master.call(p.Exited("job", "b", "b0", -9))
    master.call(join("a0", seats=(p.Seat("a0", 0),), node="node-a", low=1, high=2, launcher="a"))
    assert view(master).round == 2, "the survivor went on alone"
    with pytest.raises(Stale):
        master.call(p.Exited("job", "b", "b0", -9, newcomer=True))
    assert view(master).failures == 1, "its launcher's word came late"
    master.call(p.Exited("job", "b", "importing", -9, newcomer=True))
    assert view(master).failures == 2
    master.call(join("waits", seats=(p.Seat("waits", 0),), node="node-b", low=1, high=2, launcher="b"))
    with pytest.raises(BadRequest, match="belongs to another agent"):
        master.call(p.Exited("job", "a", "waits", -9, newcomer=True))
    master.call(p.Exited("job", "b", "waits", 1, newcomer=True))
    assert view(master).failures == 3
    with pytest.raises(Stale):
        master.call(p.Exited("job", "b", "somebody", -9))
    for code in (0, p.REQUEUE):
        master.call(p.Exited("job", "b", f"importing {code}", code, newcomer=True))
    assert view(master).failures == 3
    assert job_registry.decode(job_registry.encode(master.state)) == master.state


def test_a_newcomer_that_has_ended_gets_no_seat() -> None:
    """Its own join may come behind its launcher's word. Nobody would tell of its end once more, and all would wait."""
    master = two_nodes(recovers=True)
    master.call(p.Exited("job", "b", "b0", -9))
    for _ in range(2):
        master.call(p.Exited("job", "b", "new", -9, newcomer=True))
        assert view(master).failures == 2, "each once"
        with pytest.raises(Stale, match="'new' has already left"):
            master.call(join("new", seats=(p.Seat("new", 0),), node="node-b", low=1, high=2, launcher="b"))
    master.call(join("a0", seats=(p.Seat("a0", 0),), node="node-a", low=1, high=2, launcher="a"))
    assert [one.incarnation for one in view(master).members] == ["a0"]
    with pytest.raises(Stale, match="'b0' has already left"):
        master.call(join("b0", seats=(p.Seat("b0", 0),), node="node-b", low=1, high=2, launcher="b"))


def test_a_launch_has_its_budget_a_node_that_joins_has_the_jobs() -> None:
    master = two_nodes()
    master.call(p.Exited("job", "b", "b0", -9))
    master.call(join("c", 1, lives="c", again=True))
    assert view(master).failures == 1, "node a goes on"
    master.call(p.Leave("job", "a", p.Departure.STOPPED))
    master.call(p.Leave("job", "c", p.Departure.STOPPED))
    master.call(join("late", 1, lives="late", again=True))
    assert view(master).failures == 0, "nobody was left"


def test_a_launcher_speaks_on_after_its_workers_have_joined_for_themselves() -> None:
    """It watches, and its whole restart gives up their seats."""
    master = two_nodes(recovers=True)
    master.call(p.Exited("job", "b", "b0", -9))
    for name, agent in (("a0", "a"), ("new", "b")):
        master.call(join(name, seats=(p.Seat(name, 0),), node=f"node-{agent}", low=2, high=2, launcher=agent))
    assert view(master).round == 2
    assert told(master, "a", after=1) is None
    assert told(master, "b", after=1) is None
    master.call(join("b", 1, lives="whole", low=1, high=2))
    assert [(one.incarnation, one.gone) for one in view(master).members] == [("a0", ""), ("new", "replaced")]


def test_who_has_not_attached_is_its_launchers_to_watch() -> None:
    """A script without hooks is not lost after five minutes of silence; when its launcher goes, it is."""
    master, now, lost = two_nodes(attached=False), [0.0], list[p.Message]()

    async def lives() -> None:
        nodes = Nodes()
        liveness = Liveness(nodes, lambda: master.state, lost.append, Uptime(lambda: now[0], 1e6), lambda: now[0])
        liveness.start()
        watch = p.Watch("job", "a")
        liveness.waits(watch, 0.0)
        liveness.round_formed("job")
        now[0] += GRACE_S + 1
        liveness._judge()
        assert [getattr(one, "incarnation", "") for one in lost] == ["b0"], "nobody watches for that one"
        liveness.waited(watch, answered=False)
        now[0] += 1
        liveness._judge()
        assert [getattr(one, "incarnation", "") for one in lost] == ["b0", "a"]
        liveness.close()

    asyncio.run(lives())


@pytest.mark.parametrize("beaten", [False, True])
def test_a_worker_that_received_its_rank_may_be_silent_until_it_attaches(beaten: bool) -> None:
    """It imports, or waits for one that does; no launcher watches it. Once it sends heartbeats, a lease is enough.

    `beaten`: it was in an earlier round.
    """
    master, now, lost = MasterFake(), [0.0], list[p.Message]()

    async def lives() -> None:
        liveness = Liveness(Nodes(), lambda: master.state, lost.append, Uptime(lambda: now[0], 1e6), lambda: now[0])
        liveness.start()
        if beaten:
            liveness.beat(p.Heartbeat("job", "w0"))
        asked = p.AwaitRound("job", "w0")
        liveness.waits(asked, 5.0)
        master.call(join("w0", seats=(p.Seat("w0", 0),), low=1, high=1, launcher="sub-master"))
        liveness.round_formed("job")
        liveness.waited(asked, answered=True)
        now[0] += GRACE_S - 1
        liveness._judge()
        assert lost == []
        attach = p.Attach("job", "w0", "w0", 1)
        master.call(attach)
        liveness.heard_of(attach)
        liveness.beat(p.Heartbeat("job", "w0"))
        now[0] += Nodes().lease_s + 1
        liveness._judge()
        assert [getattr(one, "incarnation", "") for one in lost] == ["w0"]
        liveness.close()

    asyncio.run(lives())


def test_failures_before_the_window_are_not_recent() -> None:
    """A failure each hour: the total counts up, and within an hour before the newest there are two at most."""
    master = MasterFake()
    for life in range(5):
        master.call(join("a", 1, lives=f"w{life}-", low=1, high=1))
        master.advance(3600.0 if life else 0.0)
        master.call(p.Exited("job", "a", f"w{life}-0", -9))
    windows = {3000.0: 1, 3700.0: 2, 1e9: 5}
    found = {window_s: master.call(p.ShowJob("job", window_s=window_s)) for window_s in windows}
    assert {window_s: one.recent_failures for window_s, one in found.items()} == windows
    assert {one.failures for one in found.values()} == {5}
    master.call(p.Leave("job", "a", p.Departure.STOPPED))
    master.call(join("b", 1, lives="again", low=1, high=1, again=True))
    assert master.call(p.ShowJob("job")).recent_failures == 0, "a job that is launched again has its full budget"
