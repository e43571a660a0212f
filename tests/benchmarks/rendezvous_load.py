"""1000 nodes meet: real HTTP to a real master process, each node with a watch and a long-poll of its own.

The nodes are coroutines of one process, so their own cost is in the figures, too.
"""

from __future__ import annotations

import asyncio
import re
import resource
import statistics
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from dlrover_hooks import protocol as p
from tests.benchmarks.report import Figures
from tests.e2e.master_process import LiveMaster

NODES = 1000

_LENGTH = re.compile(rb"content-length: (\d+)", re.I)
_BACKLOG = 64
"""Connections that are opened at the same time."""


class Line:
    """One HTTP connection to the master."""

    def __init__(self, master: LiveMaster, incarnation: str) -> None:
        self._port = int(master.url.rpartition(":")[2])
        self._head = f"Host: x\r\nAuthorization: Bearer {master.token}\r\nContent-Type: application/json\r\n"
        self._incarnation, self._seq = incarnation, 0

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, request: p.Message) -> bytes:
        row, body, head = p.Routes.by_request[type(request)], msgspec.json.encode(request), self._head
        if row.event:
            self._seq += 1
            head += f"Idempotency-Key: {self._incarnation}/main/{self._seq}\r\n"
        self._writer.write(f"POST {row.path} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(answer)
        assert length is not None
        reply = await self._reader.readexactly(int(length[1]))
        assert answer.startswith(b"HTTP/1.1 200"), reply
        return reply

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """As the kernel does for a process that is killed."""
        self._writer.transport.abort()


class Node:
    """One agent."""

    def __init__(self, master: LiveMaster, number: int) -> None:
        self.name, self.round = f"node-{number:04d}", 0
        self.line, self.ear = Line(master, self.name), Line(master, self.name)

    async def join(self) -> None:
        seats = (p.Seat(self.name, 0),)
        join = p.Join("load", self.name, self.name, seats, "10.0.0.1", 29500, NODES, NODES, "run", 0.3, agents=True)
        await self.line.ask(join)

    async def listen(self) -> None:
        """As `Watcher` does: what it hears, it asks for no more."""
        watch = p.Watch("load", self.name, after=self.round)
        while True:
            watch = watch.told(msgspec.json.decode(await self.ear.ask(watch), type=p.Notice))

    async def seat(self) -> float:
        """When it had its rank."""
        reply = await self.line.ask(p.AwaitRound("load", self.name, after=self.round, timeout_s=30.0))
        seated = msgspec.json.decode(reply, type=p.Seated)
        assert seated.round is not None
        assert seated.world_size == NODES
        self.round, self.rank = seated.round, seated.ranks[0]
        return time.perf_counter()

    async def learn_ranks(self) -> None:
        """What torchrun's agents tell each other then: how many workers each brings."""
        await self.line.ask(self._set(f"role/{self.rank}", b'{"role": "default", "local_world_size": 8}'))
        if self.rank == 0:
            await self.line.ask(self._await([f"role/{rank}" for rank in range(NODES)]))
            await self.line.ask(self._set_all())
        await self.line.ask(self._await([f"assigned/{self.rank}"]))

    def _set(self, key: str, value: bytes) -> p.ChangeKeys:
        return p.ChangeKeys("load", self.name, self.round, (p.KeyChange(p.Change.SET, key, value),))

    def _set_all(self) -> p.ChangeKeys:
        changes = [p.KeyChange(p.Change.SET, f"assigned/{rank}", b"[0, 8000, 0, 8000]") for rank in range(NODES)]
        return p.ChangeKeys("load", self.name, self.round, tuple(changes))

    def _await(self, keys: list[str]) -> p.AwaitKeys:
        return p.AwaitKeys("load", self.name, self.round, tuple(keys), timeout_s=30.0)


async def _meet(nodes: list[Node], master: psutil.Process) -> tuple[float, float]:
    """Seconds from the last join to the last rank, and of the master's CPU; all others are waiting by then."""
    last, others = nodes[-1], nodes[:-1]
    await asyncio.gather(*[node.join() for node in others])
    waiting = [asyncio.ensure_future(node.seat()) for node in others]
    await _settled(master)
    began, cpu_s = time.perf_counter(), sum(master.cpu_times()[:2])
    await last.join()
    seated = await asyncio.gather(last.seat(), *waiting)
    return max(seated) - began, sum(master.cpu_times()[:2]) - cpu_s


async def _settled(master: psutil.Process) -> None:
    """All long-polls are open, and nothing is left to do."""
    used_s = -1.0
    while used_s != (used_s := sum(master.cpu_times()[:2])):
        await asyncio.sleep(0.5)


async def _measure(master: LiveMaster, rounds: int) -> Figures:
    nodes = [Node(master, number) for number in range(NODES)]
    for first in range(0, NODES, _BACKLOG):
        some = nodes[first : first + _BACKLOG]
        await asyncio.gather(*[line.open() for node in some for line in (node.line, node.ear)])
    process = psutil.Process(master.pid)
    met, ranked = [await _meet(nodes, process)], list[float]()
    ears = [asyncio.ensure_future(node.listen()) for node in nodes]
    for _ in range(rounds):
        met.append(await _meet(nodes, process))
        began = time.perf_counter()
        await asyncio.gather(*[node.learn_ranks() for node in nodes])
        ranked.append(time.perf_counter() - began)
    for ear in ears:
        ear.cancel()
    for node in nodes:
        node.line.close()
        node.ear.close()
    return {
        "rendezvous_1000_after_last_join_s": statistics.median(wall for wall, _ in met),
        "rendezvous_1000_after_last_join_max_s": max(wall for wall, _ in met),
        "rendezvous_1000_master_cpu_s": statistics.median(cpu for _, cpu in met),
        "store_1000_ranks_s": statistics.median(ranked),
    }


def measure(rounds: int) -> Figures:
    """The figures. Needs some 4000 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8 * NODES)), hard))
    with tempfile.TemporaryDirectory() as folder:
        master = LiveMaster(Path(folder))
        try:
            return asyncio.run(_measure(master, rounds))
        finally:
            master.close()
