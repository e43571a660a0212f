"""Thousands of workers on real connections to one master's process.

Each worker has two connections, as a real one: its liveness connection, on which a `Watch` is open, and one for its
other requests. Each node has an agent with a liveness connection. All are coroutines of this process, on another core
than the master; the master's CPU time is that of its process alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import tempfile
import time
from collections.abc import Awaitable, Iterable
from pathlib import Path

import msgspec
import psutil
import uvloop

from dlrover_hooks import protocol as p
from tests.benchmarks.lease_load import cpu_s
from tests.benchmarks.rendezvous_load import Line
from tests.benchmarks.report import Figures
from tests.e2e.master_process import LiveMaster

PER_NODE = 8
POLL_S = 60.0
AT_ONCE = 64
"""Requests under way at the same time while the crowd is set up."""
SPARE_FILES = 200
SETTLE_S, WINDOW_S = 5.0, 15.0
PERIODS = 1.2
"""Heartbeats are counted for so many intervals, at least `WINDOW_S`."""


class Agent:
    """The launcher of a node: joins for its workers, and keeps its liveness connection open."""

    def __init__(self, master: LiveMaster, number: int, workers: int) -> None:
        self.name = f"node{number:04}"
        self.ear = Line(master, self.name)
        self.workers = [Worker(master, self, f"{self.name}.{index}", index) for index in range(workers)]

    async def join(self, world: int) -> None:
        await self.ear.open()
        seats = tuple(p.Seat(worker.name, worker.local_rank) for worker in self.workers)
        await self.ear.ask(
            p.Join("crowd", self.name, self.name, seats, "10.0.0.1", 29500, world // 2, world, "run", 60.0, sole=True)
        )

    async def seat(self) -> None:
        while True:
            reply = await self.ear.ask(p.AwaitRound("crowd", self.name, 0, POLL_S))
            if msgspec.json.decode(reply, type=p.Seated).round is not None:
                return

    async def listen(self) -> None:
        watch = p.Watch("crowd", self.name)
        while True:
            watch = watch.told(msgspec.json.decode(await self.ear.ask(watch), type=p.Notice))


class Worker:
    """One training process."""

    def __init__(self, master: LiveMaster, agent: Agent, name: str, local_rank: int) -> None:
        self.name, self.agent, self.local_rank = name, agent, local_rank
        self.line, self.ear = Line(master, name), Line(master, name)
        self.broken = asyncio.Event()
        self.asked_s, self.beats = 0.0, 0

    async def attach(self) -> None:
        await self.line.ask(p.Attach("crowd", self.name, self.agent.name, 1, recovers=True))

    async def plan(self, after: int) -> None:
        while True:
            reply = await self.line.ask(p.AwaitPlan("crowd", self.name, after, POLL_S))
            if msgspec.json.decode(reply, type=p.Plan).number:
                return

    async def listen(self) -> None:
        watch = p.Watch("crowd", self.name)
        while True:
            notice = msgspec.json.decode(await self.ear.ask(watch), type=p.Notice)
            watch = watch.told(notice)
            if notice.broken:
                self.broken.set()

    async def beat(self) -> None:
        """As the reporter of a worker does."""
        before_s = 0.0
        while True:
            await asyncio.sleep(max(1.0, before_s))
            vitals = p.Vitals(cpu_percent=99.0, memory_bytes=10**10)
            reply = await self.line.ask(p.Heartbeat("crowd", self.name, 1000, vitals))
            self.beats += 1
            self.asked_s = msgspec.json.decode(reply, type=p.Beat).interval_s
            if self.asked_s > max(1.0, before_s):
                await asyncio.sleep(random.uniform(1.0, self.asked_s))
            before_s = self.asked_s

    async def recover(self, world: int) -> None:
        """The round broke: join the next one in this process."""
        await self.broken.wait()
        name, node = self.name, self.agent.name
        seats = (p.Seat(name, self.local_rank),)
        join = p.Join("crowd", name, node, seats, "10.0.0.1", 29500, world // 2, world, "run", 60.0, launcher=node)
        await self.line.ask(join)
        while True:
            seated = msgspec.json.decode(await self.line.ask(p.AwaitRound("crowd", name, 1, POLL_S)), type=p.Seated)
            if seated.round is not None:
                break
        await self.attach()
        await self.plan(2)

    async def poll(self) -> None:
        """A long-poll that is not answered before its end."""
        await self.line.ask(p.AwaitPlan("crowd", self.name, 10**6, timeout_s=1.0))


class Crowd:
    """A job of `workers` workers, from the first join on."""

    def __init__(self, master: LiveMaster, workers: int) -> None:
        self.process = psutil.Process(master.pid)
        nodes = -(-workers // PER_NODE)
        self.agents = [Agent(master, number, PER_NODE) for number in range(nodes)]
        self.workers = [worker for agent in self.agents for worker in agent.workers]
        self._tasks: dict[object, list[asyncio.Task[None]]] = {}

    async def form(self) -> float:
        """Form the round. Returns seconds from the first connection to the last plan."""
        began = time.perf_counter()
        await _some(agent.join(len(self.workers)) for agent in self.agents)
        await asyncio.gather(*[agent.seat() for agent in self.agents])
        await _some(self._enter(worker) for worker in self.workers)
        await asyncio.gather(*[worker.plan(0) for worker in self.workers])
        took_s = time.perf_counter() - began
        for agent in self.agents:
            self._tasks[agent] = [asyncio.ensure_future(agent.listen())]
        return took_s

    async def _enter(self, worker: Worker) -> None:
        await worker.line.open()
        await worker.attach()
        await worker.ear.open()
        self._tasks[worker] = [asyncio.ensure_future(worker.listen())]

    async def beat(self) -> Figures:
        """CPU time of the master for a heartbeat, at the interval that it asks for."""
        for worker in self.workers:
            self._tasks[worker].append(asyncio.ensure_future(worker.beat()))
        await asyncio.sleep(SETTLE_S)
        interval_s = max(1.0, *[worker.asked_s for worker in self.workers])
        await asyncio.sleep(2 * interval_s)  # until all beat at it
        interval_s = max(1.0, *[worker.asked_s for worker in self.workers])
        before, used_s, began = self._beats(), cpu_s(self.process), time.perf_counter()
        await asyncio.sleep(max(WINDOW_S, PERIODS * interval_s))
        used_s, took_s = cpu_s(self.process) - used_s, time.perf_counter() - began
        beats = self._beats() - before
        return {
            "interval_s": interval_s,
            "beats_per_s": beats / took_s,
            "beat_cpu_us": 1e6 * used_s / beats,
            "core_share": used_s / took_s,
        }

    def _beats(self) -> int:
        return sum(worker.beats for worker in self.workers)

    def quiet(self) -> None:
        """No more heartbeats; what is under way is answered to nobody."""
        for worker in self.workers:
            for task in self._tasks[worker][1:]:
                task.cancel()

    async def poll(self) -> float:
        """CPU seconds of the master for one long-poll that waits and times out, of all workers at the same time."""
        used_s = cpu_s(self.process)
        await asyncio.gather(*[worker.poll() for worker in self.workers])
        return (cpu_s(self.process) - used_s) / len(self.workers)

    async def lose(self, share: float) -> tuple[float, float]:
        """A share of the nodes is lost at once, all connections with them.

        Returns seconds until the last of the others has its rank and its plan in the next round, and CPU seconds.
        """
        lost = self.agents[: round(share * len(self.agents))]
        left = [worker for agent in self.agents[len(lost) :] for worker in agent.workers]
        again = [asyncio.ensure_future(worker.recover(len(self.workers))) for worker in left]
        await asyncio.sleep(0)
        used_s, began = cpu_s(self.process), time.perf_counter()
        for agent in lost:
            for one in (agent, *agent.workers):
                for task in self._tasks.pop(one):
                    task.cancel()
                one.ear.abort()
            for worker in agent.workers:
                worker.line.abort()
        await asyncio.gather(*again)
        return time.perf_counter() - began, cpu_s(self.process) - used_s

    async def close(self) -> None:
        """End all tasks."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def _some(work: Iterable[Awaitable[None]]) -> None:
    """All of it, `AT_ONCE` at a time."""
    left = iter(work)

    async def next_ones() -> None:
        for one in left:
            await one

    await asyncio.gather(*[next_ones() for _ in range(AT_ONCE)])


def most_workers(wanted: int) -> int:
    """As many as the limit on open files allows; the master has the same limit as this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    nodes = int((hard - SPARE_FILES) // (2 * PER_NODE + 1))
    return min(wanted, nodes * PER_NODE)


async def _measure(master: LiveMaster, workers: int, share_lost: float) -> Figures:
    crowd = Crowd(master, workers)
    empty = crowd.process.memory_info().rss
    formed_s = await crowd.form()
    held = crowd.process.memory_info().rss
    found = {"workers": float(len(crowd.workers)), "form_s": formed_s, **await crowd.beat()}
    found["rss_mib"] = crowd.process.memory_info().rss / 2**20
    found["rss_empty_mib"], found["rss_formed_mib"] = empty / 2**20, held / 2**20
    crowd.quiet()
    found["poll_cpu_us"] = 1e6 * await crowd.poll()
    if share_lost:
        found["reform_s"], found["reform_cpu_s"] = await crowd.lose(share_lost)
    await crowd.close()
    return found


def crowd_figures(workers: int, *, share_lost: float = 0.0) -> Figures:
    """The figures of one crowd of `workers`."""
    with tempfile.TemporaryDirectory() as folder:
        master = LiveMaster(Path(folder))
        try:
            return uvloop.run(_measure(master, workers, share_lost))
        finally:
            master.close()
