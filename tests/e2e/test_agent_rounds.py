"""Agents meet through a real master (torch-free): rounds, losses, newcomers, spares, the end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import MasterAway, Unauthorized
from dlrover_hooks.host.ports import free_port
from dlrover_hooks.torchrun.agent_rounds import JobOver, Meeting, NotFormed, Terms
from tests.e2e.master_process import LiveMaster
from tests.waiting import WAIT_S, until


class Agents:
    """Makes agents of one job; `meet` has them join at the same time."""

    def __init__(self, master: LiveMaster, job: str) -> None:
        self.master, self.job = master, job
        self.made: list[Meeting] = []
        self._pool = ThreadPoolExecutor(8)

    def agent(self, node: str, low: int = 1, high: int = 3, **more: object) -> Meeting:
        fields: dict[str, object] = {
            "url": self.master.url,
            "token": self.master.token,
            "job": self.job,
            "node": node,
            "host": "127.0.0.1",
            "min_nodes": low,
            "max_nodes": high,
            "join_s": WAIT_S,
            "connect_s": WAIT_S,
        }
        self.made.append(Meeting(Terms(**(fields | more))))  # type: ignore[arg-type]
        return self.made[-1]

    def joining(self, agent: Meeting) -> Future[p.Seated]:
        return self._pool.submit(agent.join)

    def meet(self, *agents: Meeting) -> list[p.Seated]:
        return [future.result(WAIT_S) for future in [self.joining(agent) for agent in agents]]

    def waiting(self, count: int) -> None:
        """Until so many seats are asked for that no round has."""
        job = f"{self.job}@agents"
        watcher = self.made[0].life
        until(
            lambda: watcher.ask(p.Heartbeat(job, watcher.incarnation), 5.0).waiting == count, f"{count} waiting nodes"
        )

    def close(self) -> None:
        for agent in self.made:
            agent.leave(p.Departure.STOPPED)
        self._pool.shutdown()


def die(agent: Meeting, master: LiveMaster) -> None:
    """As the kernel ends a killed agent: its connections close, and it says nothing."""
    master.await_connections(agent.terms.agents)
    agent.life.end()
    agent._life = None


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMaster]:
    """With a long lease: a death that is detected in time is detected by its connection."""
    master = LiveMaster(tmp_path_factory.mktemp("master"), "--lease", f"{2 * WAIT_S:g}s")
    yield master
    master.close()


@pytest.fixture
def agents(process: LiveMaster, request: pytest.FixtureRequest) -> Iterator[Agents]:
    made = Agents(process, request.node.name)
    yield made
    made.close()


@pytest.mark.requirement("DL-81", "ED-77")
def test_a_lost_member_is_a_reason_to_meet_and_the_survivors_keep_their_ranks(agents: Agents) -> None:
    """By its connection, though nothing says that it is gone; the next round has a port and a number of its own."""
    a, b, c = (agents.agent(node, low=1) for node in "abc")
    first = {agent: seated for agent, seated in zip((a, b, c), agents.meet(a, b, c), strict=True)}
    assert sorted(seated.ranks for seated in first.values()) == [(0,), (1,), (2,)]
    assert [agent.reasons_to_meet() for agent in (a, b, c)] == [0, 0, 0]
    victim = next(agent for agent, seated in first.items() if seated.ranks == (2,))
    survivors = [agent for agent in first if agent is not victim]
    die(victim, agents.master)
    until(lambda: all(agent.reasons_to_meet() for agent in survivors), "the news of the death")
    again = agents.meet(*survivors)
    assert [seated.ranks for seated in again] == [first[agent].ranks for agent in survivors]
    assert {seated.world_size for seated in again} == {2}
    assert {seated.round for seated in again} == {2}
    assert {seated.master_port for seated in again} != {first[a].master_port}
    assert [agent.reasons_to_meet() for agent in survivors] == [0, 0]


def test_survivors_do_not_wait_for_the_last_call(agents: Agents) -> None:
    """Nor does a job that is full: the last call is for nodes that start together."""
    a, b = (agents.agent(node, high=2, last_call_s=60.0) for node in "ab")
    agents.meet(a, b)
    die(b, agents.master)
    until(a.reasons_to_meet, "a reason for a new round")
    assert agents.meet(a)[0].world_size == 1


@pytest.mark.requirement("DL-85")
def test_a_newcomer_that_fits_is_a_reason_to_meet_and_one_that_does_not_waits(agents: Agents) -> None:
    """A spare takes the place of the first that is lost."""
    a = agents.agent("a", high=2, last_call_s=0.0)
    agents.meet(a)
    b = agents.agent("b", high=2)
    coming = agents.joining(b)
    until(lambda: a.reasons_to_meet() == 1, "the news of the newcomer")
    agents.meet(a)
    assert coming.result(WAIT_S).ranks == (1,)
    spare = agents.agent("spare", high=2)
    ready = agents.joining(spare)
    until(lambda: spare._life is not None and spare._life.listens, "the connection of the spare")
    assert (a.reasons_to_meet(), b.reasons_to_meet(), ready.done()) == (0, 0, False)
    die(b, agents.master)
    until(a.reasons_to_meet, "a reason for a new round")
    assert agents.meet(a)[0].ranks == (0,)
    assert (ready.result(WAIT_S).ranks, ready.result().world_size) == ((1,), 2)


def test_a_newcomer_may_raise_the_bounds(agents: Agents) -> None:
    a = agents.agent("a", high=1)
    agents.meet(a)
    b = agents.agent("b", low=1, high=2)
    coming = agents.joining(b)
    until(lambda: a.reasons_to_meet() == 1, "the news of the newcomer")
    agents.meet(a)
    assert coming.result(WAIT_S).world_size == 2


def test_who_leaves_after_a_failure_closes_nothing(agents: Agents) -> None:
    """The others go on without it, and another node can still come; c10d would have ended the job for ever."""
    a, b = agents.agent("a", low=1, high=2), agents.agent("b", low=1, high=2)
    agents.meet(a, b)
    assert b.leave(p.Departure.FAILED)
    until(a.reasons_to_meet, "a reason for a new round")
    assert agents.meet(a)[0].world_size == 1
    coming = agents.joining(agents.agent("c", high=2))
    until(a.reasons_to_meet, "a reason for a new round")
    agents.meet(a)
    assert coming.result(WAIT_S).world_size == 2
    assert not a.over


@pytest.mark.requirement("ED-77")
def test_when_all_are_done_spares_and_latecomers_hear_that_the_job_is_over(agents: Agents) -> None:
    a, b = agents.agent("a", low=2, high=2), agents.agent("b", low=2, high=2)
    agents.meet(a, b)
    spare = agents.agent("spare", low=2, high=2)
    ready = agents.joining(spare)
    until(lambda: spare._life is not None and spare._life.listens, "the connection of the spare")
    assert a.leave(p.Departure.DONE)
    assert b.reasons_to_meet() == 0
    assert b.leave(p.Departure.DONE)
    with pytest.raises(JobOver, match="is done"):
        ready.result(WAIT_S)
    with pytest.raises(JobOver):
        agents.agent("late").join()
    assert agents.agent("anew", fresh=True).join().world_size == 1


def test_a_master_that_is_killed_and_comes_back_costs_nothing(agents: Agents) -> None:
    """No new round is formed because of it, and a death afterwards is still noticed."""
    a, b = agents.agent("a", low=1, high=2), agents.agent("b", low=1, high=2)
    first = agents.meet(a, b)
    agents.master.kill()
    agents.master.restart()
    watched = f"{agents.job}@agents"
    until(lambda: a.life.ask(p.ShowJob(watched), 5.0).phase is p.Phase.TRAINING, "training")
    assert (a.reasons_to_meet(), b.reasons_to_meet()) == (0, 0)
    die(b, agents.master)
    until(a.reasons_to_meet, "the news of the death")
    assert agents.meet(a)[0].round == (first[0].round or 0) + 1


def test_an_agent_that_was_taken_for_dead_joins_as_a_new_node(agents: Agents) -> None:
    """A suspended machine wakes up: its workers are in nobody's round, so it meets the others again."""
    a, b = agents.agent("a", low=1, high=2), agents.agent("b", low=1, high=2)
    agents.meet(a, b)
    ghost = b.life.incarnation
    farewell = p.Leave(f"{agents.job}@agents", ghost, p.Departure.FAILED)
    agents.master.client(ghost).call(farewell, channel="test")
    until(b.reasons_to_meet, "a reason for a new round")
    coming = agents.joining(b)
    while not coming.done():
        until(lambda: a.reasons_to_meet() or coming.done(), "a newcomer")
        if a.reasons_to_meet():
            agents.meet(a)
    assert coming.result().world_size == 2
    assert b.life.incarnation != ghost


def test_a_master_that_forgot_everything_has_them_meet_again(tmp_path: Path) -> None:
    """It came back without its journal: the agents bring their bounds and form a first round again."""
    master = LiveMaster(tmp_path)
    agents = Agents(master, "forgotten")
    a, b = agents.agent("a", low=2, high=2), agents.agent("b", low=2, high=2)
    try:
        agents.meet(a, b)
        master.kill()
        for file in tmp_path.glob("master.db*"):
            file.unlink()
        master.restart()
        until(lambda: a.reasons_to_meet() and b.reasons_to_meet(), "a reason for a new round")
        assert {seated.round for seated in agents.meet(a, b)} == {1}
    finally:
        agents.close()
        master.close()


def test_too_few_nodes_end_in_time_with_a_reason(agents: Agents) -> None:
    with pytest.raises(NotFormed, match=r"waited 0\.5 s .* --nnodes=2:3") as late:
        agents.agent("a", low=2, join_s=0.5).join()
    assert "join_timeout" in late.value.hint


def test_a_wrong_token_and_a_wrong_address_say_so(agents: Agents) -> None:
    with pytest.raises(Unauthorized):
        agents.agent("a", token="wrong").join()
    with pytest.raises(MasterAway, match="gave no answer"):
        agents.agent("a", url=f"http://127.0.0.1:{free_port()}", connect_s=0.5).join()
