"""torch's contract of a rendezvous, with a real master."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import UsageError
from dlrover_hooks.torchrun.entry_point import get_handler
from dlrover_hooks.torchrun.rendezvous_handler import Rendezvous, terms
from tests.e2e.master_process import LiveMaster
from tests.e2e.test_agent_rounds import die
from tests.waiting import WAIT_S, until


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMaster]:
    master = LiveMaster(tmp_path_factory.mktemp("master"))
    yield master
    master.close()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous tells the agent's children of the master; this process is to forget it."""
    for name in ("DLROVER_HOOKS_MASTER", "DLROVER_HOOKS_TOKEN"):
        monkeypatch.setenv(name, "")


class Agents:
    def __init__(self, master: LiveMaster, job: str) -> None:
        self.master, self.job, self.made = master, job, list[Any]()
        self.pool = ThreadPoolExecutor(4)

    def agent(self, low: int = 1, high: int = 2, **conf: str) -> Any:
        conf = {"token": "secret", "join_timeout": f"{WAIT_S:g}", "timeout": "900"} | conf
        endpoint = self.master.url.removeprefix("http://")
        self.made.append(get_handler()(RendezvousParameters("dlrover", endpoint, self.job, low, high, **conf)))
        return self.made[-1]

    def meet(self, *agents: Any) -> list[RendezvousInfo]:
        return [future.result(WAIT_S) for future in [self.pool.submit(agent.next_rendezvous) for agent in agents]]

    def close(self) -> None:
        for agent in self.made:
            agent.shutdown()
        self.pool.shutdown()


@pytest.fixture
def agents(process: LiveMaster, request: pytest.FixtureRequest) -> Iterator[Agents]:
    made = Agents(process, request.node.name)
    yield made
    made.close()


def ranks_of(info: RendezvousInfo, workers: int) -> list[int]:
    """What torch's own agent makes of it: the global ranks of its workers."""
    spec: Any = SimpleNamespace(role="default", local_world_size=workers)
    agent: Any = SimpleNamespace()
    assign: Any = SimpleElasticAgent._assign_worker_ranks
    found = assign(agent, info.store, info.rank, info.world_size, spec)
    return [worker.global_rank for worker in found]


@pytest.mark.requirement("DL-78", "ED-77")
def test_agents_meet_and_their_workers_find_the_master(agents: Agents) -> None:
    """Node ranks, a world, workers' ranks by torch's own exchange, a fresh address, settings for the workers."""
    a, b = agents.agent(), agents.agent()
    assert (a.get_backend(), a.get_run_id(), a.use_agent_store) == ("dlrover", agents.job, False)
    first = sorted(agents.meet(a, b), key=lambda info: info.rank)
    assert [(info.rank, info.world_size) for info in first] == [(0, 2), (1, 2)]
    ranks = agents.pool.map(ranks_of, first, (2, 3))
    assert list(ranks) == [[0, 1], [2, 3, 4]]
    addresses = [info.bootstrap_store_info for info in first]
    assert addresses[0] == addresses[1]
    assert addresses[0] is not None
    assert addresses[0].master_addr == "127.0.0.1"
    assert os.environ["DLROVER_HOOKS_MASTER"] == agents.master.url
    assert os.environ["DLROVER_HOOKS_TOKEN"] == "secret"
    again = agents.meet(a, b)
    assert again[0].bootstrap_store_info != addresses[0]
    assert not again[0].store.check(["torchelastic/role_info/0"])


def test_the_port_is_kept_for_the_worker_of_rank_0(agents: Agents) -> None:
    """torch's store can listen there, and nothing else gets it in the meantime."""
    (info,) = agents.meet(agents.agent(high=1))
    address = info.bootstrap_store_info
    assert address is not None
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", address.master_port))
    store = dist.TCPStore(address.master_addr, address.master_port, is_master=True, wait_for_workers=False)
    store.set("k", "v")
    assert store.get("k") == b"v"


@pytest.mark.parametrize("victim", [0, 1])
def test_an_agent_that_dies_while_ranks_are_agreed_on_takes_nobody_along(agents: Agents, victim: int) -> None:
    """torch has no second try there: the survivor gets some ranks, and hears at once that it is to meet again."""
    a, b = agents.agent(), agents.agent()
    infos = dict(zip((a, b), agents.meet(a, b), strict=True))
    dead, alive = sorted(infos, key=lambda agent: infos[agent].rank == victim, reverse=True)
    coming = agents.pool.submit(ranks_of, infos[alive], 2)
    die(dead._meeting, agents.master)
    assert coming.result(20) == [2 * infos[alive].rank, 2 * infos[alive].rank + 1]
    until(lambda: alive.num_nodes_waiting() == 1, "a reason for a new round")
    (info,) = agents.meet(alive)
    assert (info.rank, info.world_size, ranks_of(info, 2)) == (0, 1, [0, 1])


def test_shutdown_says_how_it_ended(agents: Agents) -> None:
    """torch calls it without a word, after success and while the exception of a failure is under way."""
    a, b = agents.agent(), agents.agent()
    agents.meet(a, b)
    try:
        raise RuntimeError("ChildFailedError")
    except RuntimeError:
        assert b.shutdown()
    until(lambda: a.num_nodes_waiting() == 1, "a reason for a new round")
    assert not a.is_closed()
    a.set_closed()
    agents.meet(a)
    assert a.shutdown()
    with pytest.raises(SystemExit) as end:
        agents.agent().next_rendezvous()
    assert end.value.code == 0


def test_a_done_job_with_checkpoints_may_go_on(agents: Agents, process: LiveMaster) -> None:
    """Its workers find what they saved; the first node that is started again opens the agents' job again."""
    worker = process.client("worker")
    seats = (p.Seat("worker", 0, 0),)
    worker.call(p.Join(agents.job, "worker", "node", seats, "127.0.0.1", 0, 1, 1, "run"))
    worker.call(p.Attach(agents.job, "worker", "node", 1, save_to="memory://none"))
    a = agents.agent(high=1)
    agents.meet(a)
    assert a.shutdown()
    (info,) = agents.meet(agents.agent(high=1))
    assert info.world_size == 1


def test_errors_are_torchs_and_say_what_to_do(agents: Agents) -> None:
    with pytest.raises(RendezvousConnectionError, match="DLROVER_HOOKS_TOKEN"):
        agents.agent(token="wrong").next_rendezvous()
    with pytest.raises(RendezvousTimeoutError, match="start the nodes that are missing"):
        agents.agent(low=2, join_timeout="0.3").next_rendezvous()


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("host", "http://host:8780"),
        ("host:1", "http://host:1"),
        ("https://host/", "https://host/"),
        ("[::1]:5", "http://[::1]:5"),
    ],
)
def test_endpoints(endpoint: str, url: str) -> None:
    assert terms(RendezvousParameters("dlrover", endpoint, "job", 1, 1)).url == url


@pytest.mark.parametrize(
    ("endpoint", "job", "conf", "said"),
    [
        ("", "job", {}, "is no address"),
        ("host:port", "job", {}, "is no address"),
        ("host", "none", {}, "--rdzv-id=NAME"),
        ("host", "job", {"last_cal": "1"}, "did you mean 'last_call'"),
        ("host", "job", {"join_timeout": "soon"}, "is no time"),
        ("host", "job", {"last_call": "nan"}, "is no time"),
    ],
)
def test_what_must_be_mended_is_said(
    endpoint: str, job: str, conf: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DLROVER_HOOKS_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=said):
        Rendezvous(RendezvousParameters("dlrover", endpoint, job, 1, 1, **conf))


def test_a_wait_of_the_store_has_a_deadline(agents: Agents) -> None:
    (info,) = agents.meet(agents.agent(high=1))
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        info.store.wait(["never"], timedelta(seconds=0.2))
