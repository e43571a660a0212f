"""Leases over HTTP beside a bare echo: CPU time of the server's process for a request, in turns of the same clients.

Also how memory grows with the number of requests. The clients are coroutines of this process, whose cost is in no
figure but `leases_per_s_32_clients`.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import psutil

from dlrover_hooks import protocol as p
from tests.benchmarks.rendezvous_load import Line
from tests.benchmarks.report import REPOSITORY, Figures
from tests.e2e.master_process import LiveMaster

CLIENTS = 32
TURN = 2000
"""Requests of one turn: a tenth of a second of CPU time for the echo, twice as much for the leases."""
SAMPLES, SHARD = 10**15, 8192


class Holder:
    """A lease holder without a rank: acknowledges its lease and takes another one in each request."""

    def __init__(self, master: LiveMaster, number: int) -> None:
        self.name = f"holder-{number}"
        self.line = Line(master, self.name)

    async def open(self) -> None:
        await self.line.open()
        whole = (p.Partition(end=SAMPLES),)
        ledger = p.OpenLedger(
            "load", self.name, "data", "f", whole, SAMPLES, batch_size=32, shard_size=SHARD, free=True
        )
        await self.line.ask(ledger)
        await self._take(())

    async def _take(self, acks: tuple[p.Ack, ...]) -> None:
        reply = await self.line.ask(p.TakeLeases("load", self.name, "data", 1, 1, acks=acks, rate=2000.0))
        (self.lease,) = msgspec.json.decode(reply, type=p.Leases).leases

    async def turn(self) -> None:
        await self._take((p.Ack(self.lease.id, self.lease.hi),))


class Echo:
    """A client of the bare echo. Its requests are as long as those for leases, and so are the replies."""

    def __init__(self, port: int) -> None:
        self._port = port
        lease = p.Ack(10**6, 10**9)
        self._body = msgspec.json.encode(p.TakeLeases("load", "holder-00", "data", 1, 1, acks=(lease,), rate=2000.0))

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def turn(self) -> None:
        head = "Host: x\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\n"
        head += f"Idempotency-Key: holder-00/main/1000\r\nContent-Length: {len(self._body)}\r\n\r\n"
        self._writer.write(f"POST /echo HTTP/1.1\r\n{head}".encode() + self._body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        await self._reader.readexactly(len(self._body))


class EchoServer:
    """The process of `echo_server`."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self.listener.getsockname()[1]
        fd = self.listener.fileno()
        command = [sys.executable, "-m", "tests.benchmarks.echo_server", str(fd)]
        self.process = subprocess.Popen(command, pass_fds=(fd,), cwd=REPOSITORY)

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self.listener.close()


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of the threads that `process` has now, by the kernel's scheduler, which counts nanoseconds."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


async def _spent(
    process: psutil.Process, turns: list[Callable[[], Awaitable[None]]], requests: int
) -> tuple[float, float]:
    """CPU seconds of the server for a request, and seconds for all of them."""
    left = requests

    async def work(turn: Callable[[], Awaitable[None]]) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await turn()

    before, began = cpu_s(process), time.perf_counter()
    await asyncio.gather(*[work(turn) for turn in turns])
    return (cpu_s(process) - before) / requests, time.perf_counter() - began


async def _ratio(master: LiveMaster, echo: EchoServer, pairs: int) -> Figures:
    """Medians over interleaved turns."""
    holders, echoes = [Holder(master, number) for number in range(CLIENTS)], [Echo(echo.port) for _ in range(CLIENTS)]
    for client in (*holders, *echoes):
        await client.open()
    lease, bare, rates = list[float](), list[float](), list[float]()
    for _ in range(pairs + 1):  # the first warms up
        cost_s, took_s = await _spent(psutil.Process(master.pid), [one.turn for one in holders], TURN)
        lease.append(cost_s)
        rates.append(TURN / took_s)
        bare.append((await _spent(psutil.Process(echo.process.pid), [one.turn for one in echoes], TURN))[0])
    return {
        "lease_cpu_over_echo": statistics.median(a / b for a, b in zip(lease[1:], bare[1:], strict=True)),
        "lease_cpu_us": 1e6 * statistics.median(lease[1:]),
        "echo_cpu_us": 1e6 * statistics.median(bare[1:]),
        "leases_per_s_32_clients": statistics.median(rates[1:]),
    }


def lease_figures(pairs: int) -> Figures:
    """A lease against an echo, by 32 clients at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        master, echo = LiveMaster(Path(folder)), EchoServer()
        try:
            return asyncio.run(_ratio(master, echo, pairs))
        finally:
            echo.close()
            master.close()


# ---- memory ---------------------------------------------------------------------------------------------------------


async def _grow(master: LiveMaster, requests: int) -> Figures:
    holders, process = [Holder(master, number) for number in range(CLIENTS)], psutil.Process(master.pid)
    for holder in holders:
        await holder.open()
    sizes = list[tuple[int, float]]()
    batch = max(TURN, requests // 50)
    for done in range(0, requests, batch):
        await _spent(process, [one.turn for one in holders], batch)
        sizes.append((done + batch, process.memory_info().rss / 2**20))
    warm = [size for size in sizes if size[0] > sizes[-1][0] / 2]
    slope = statistics.linear_regression([done for done, _ in warm], [rss for _, rss in warm]).slope
    return {
        "rss_growth_mib_per_1e6_requests": 1e6 * slope,
        "rss_growth_mib_second_half": warm[-1][1] - warm[0][1],
        "rss_mib_after_requests": sizes[-1][1],
        "requests": float(sizes[-1][0]),
    }


def memory_figures(requests: int) -> Figures:
    """Growth of the master's memory over the second half of so many lease requests."""
    with tempfile.TemporaryDirectory() as folder:
        master = LiveMaster(Path(folder))
        try:
            return asyncio.run(_grow(master, requests))
        finally:
            master.close()
