"""The interval between heartbeats in a large job: few senders are asked for nothing, many for fewer heartbeats each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import heartbeats
from dlrover_hooks.master.core.heartbeats import BEATS_PER_S, MISSED, Nodes
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.testing import MasterFake, StorageFake
from tests.e2e.job_script import attach, join


def tracked(count: int, **more: float) -> Nodes:
    """`count` processes, of which none has sent a heartbeat yet."""
    nodes = Nodes(**more)  # type: ignore[arg-type]
    for index in range(count):
        heartbeats.heard(nodes, ("job", f"w{index}"), 0.0, 1e6)
    return nodes


@pytest.mark.parametrize(("count", "seconds"), [(1, 0.0), (1000, 0.0), (1001, 2.0), (10_000, 10.0), (30_000, 30.0)])
def test_all_together_send_no_more_than_one_core_can_take(count: int, seconds: float) -> None:
    nodes = tracked(count)
    assert heartbeats.interval_s(nodes) == seconds
    assert count / max(seconds, 1.0) <= BEATS_PER_S
    assert heartbeats.silence_s(nodes) == max(nodes.lease_s, MISSED * seconds)


def test_a_long_interval_has_a_long_lease_until_the_sender_is_told_another() -> None:
    """It was told 10 s. The others end, so that 1 s would do for the next reply: what it was told still holds."""
    nodes = tracked(100, beats_per_s=10.0, open_lease_s=10.0)
    heartbeats.beat(nodes, ("job", "w0"), 0.0, told_s=heartbeats.interval_s(nodes))
    for index in range(1, 100):
        heartbeats.forget(nodes, ("job", f"w{index}"))
    assert heartbeats.interval_s(nodes) == 0.0
    assert heartbeats.verdicts(nodes, 29.9) == []
    assert [lost.reason for lost in heartbeats.verdicts(nodes, 30.0)] == ["no heartbeat for 30 s"]


def test_a_closed_connection_is_noticed_as_fast_in_a_large_job() -> None:
    """After 0.5 s. One that comes back has the lease of its interval."""
    nodes = tracked(100, beats_per_s=10.0)
    for name in (("job", "w0"), ("job", "w1")):
        heartbeats.opened(nodes, name, 0.0)
        heartbeats.beat(nodes, name, 0.0, told_s=10.0)
        heartbeats.closed(nodes, name, 5.0)
    heartbeats.heard(nodes, ("job", "w1"), 5.2, 0.0)
    assert [lost.incarnation for lost in heartbeats.verdicts(nodes, 5.5)] == ["w0"]
    assert heartbeats.verdicts(nodes, 34.9) == []
    assert [lost.incarnation for lost in heartbeats.verdicts(nodes, 35.0)] == ["w1"]


def test_thousands_of_connections_that_close_at_once_have_the_time_to_connect_again() -> None:
    """As when a proxy is restarted: the master accepts 1000 connections a second. The one that does not come back is
    lost when it could have been the last one.
    """
    nodes, back, found = tracked(0), 3.0, list[tuple[float, str]]()
    names = [("job", f"w{index}") for index in range(4000)]
    for name in names:
        heartbeats.opened(nodes, name, 0.0)
        heartbeats.beat(nodes, name, 0.0)
        heartbeats.closed(nodes, name, 0.0)
    assert nodes.cut == 4000
    for tenth in range(100):
        now = tenth / 10
        if now == back:
            for name in names[1:]:
                heartbeats.opened(nodes, name, now)
        found += [(now, lost.incarnation) for lost in heartbeats.verdicts(nodes, now)]
    ((at, who),) = found
    assert (at, who) == (4.0, "w0")
    assert (nodes.cut, nodes.most_cut) == (0, 0)


def test_all_that_are_dead_are_found_although_they_are_many() -> None:
    nodes = tracked(0)
    for index in range(4000):
        heartbeats.opened(nodes, ("job", f"w{index}"), 0.0)
        heartbeats.beat(nodes, ("job", f"w{index}"), 0.0)
        heartbeats.closed(nodes, ("job", f"w{index}"), 0.0)
    found = [lost for tenth in range(41) for lost in heartbeats.verdicts(nodes, tenth / 10)]
    assert len(found) == 4000
    assert {lost.reason for lost in found} == {"its connection was lost"}
    assert (nodes.cut, nodes.pulses) == (0, {})


def test_a_stopped_worker_is_lost_after_the_lease_of_open_connections() -> None:
    """SIGSTOP: its connection stays open, and it sends nothing."""
    nodes = tracked(1)
    heartbeats.opened(nodes, ("job", "w0"), 0.0)
    heartbeats.beat(nodes, ("job", "w0"), 0.0, told_s=10.0)
    assert heartbeats.verdicts(nodes, 59.9) == []
    assert [lost.reason for lost in heartbeats.verdicts(nodes, 60.0)] == ["no heartbeat for 60 s"]


def test_the_reply_states_the_interval() -> None:
    master = MasterFake()
    master.call(join())
    for worker in ("w0", "w1"):
        master.call(attach(worker))
        assert master.call(p.Heartbeat("job", worker)).interval_s == 0.0
    master.nodes.beats_per_s = 0.1
    assert master.call(p.Heartbeat("job", "w0")).interval_s == 20.0
    master.call(p.Heartbeat("job", "w1"))
    master.advance(59.0)
    assert not master.call(p.Heartbeat("job", "w0")).broken
    master.advance(2.0)
    assert master.call(p.Heartbeat("job", "w0")).broken, "w1 was silent for three intervals"


def test_a_new_life_waits_for_what_the_one_before_has_told(tmp_path: Path) -> None:
    """All members are silent for the interval that so many need, not only for `lease_s`."""

    async def first() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=StorageFake())
        runtime.start()
        await runtime.event(join())
        for worker in ("w0", "w1"):
            await runtime.event(attach(worker))
        await runtime.close()

    async def second() -> None:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=StorageFake(), lease_s=1.0)
        runtime.nodes.beats_per_s = 0.1
        runtime.start()
        leases = {name: round(pulse.until) for (_, name), pulse in runtime.nodes.pulses.items()}
        assert leases == {"w0": 60, "w1": 60}
        await runtime.close()

    asyncio.run(first())
    asyncio.run(second())


def test_a_preemption_is_told_on_the_liveness_connection() -> None:
    """Once for each round: with long intervals a heartbeat would bring the news late. Agents, and clients that do not
    ask for such notices, get none.
    """
    master, told = MasterFake(), list[tuple[str, p.Notice]]()
    for agent in ("a", "b"):
        master.call(join(agent, 1, lives=agent))
    for name in ("a0", "b0", "a"):
        master.watch("job", lambda notice, name=name: told.append((name, notice)), incarnation=name)
    master._ears[0].request = p.Watch("job", "a0")
    for agent in ("a", "b"):
        master.call(attach(f"{agent}0", agent))
    for node in ("node-a", "node-b"):
        master.call(p.Preempt("job", "a0", node, 60.0, "spot"))
        master.call(p.Heartbeat("job", "b0"))
    assert told == [("b0", p.Notice(round=1, parting=True))]
