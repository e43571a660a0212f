"""Several masters on one journal in etcd, in virtual time: clients write and read while leaders and etcd fail.

Election, journal and runtime are the real ones, on threads of virtual time. What is promised: an event that was
acknowledged is in the journal, once; one that was refused is not; no journaled event is replaced; an answer contains
every event that was acknowledged before its question; when nothing fails any more, a leader is found.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from dlrover_hooks import protocol as p
from dlrover_hooks.client import master_addresses
from dlrover_hooks.client.http_client import _AGAIN, _LONGEST_PAUSE_OF_SEVERAL_S, _TURN_S
from dlrover_hooks.client.master_addresses import MasterAddresses
from dlrover_hooks.errors import HooksError, JournalFailed, MasterAway
from dlrover_hooks.master.clock import Clock
from dlrover_hooks.master.core import events, job_registry
from dlrover_hooks.master.journal import etcd_journal, etcd_leadership
from dlrover_hooks.master.journal.etcd_journal import EtcdJournal, EtcdUrl, Replica
from dlrover_hooks.master.journal.etcd_leadership import EtcdLeadership, Leader
from dlrover_hooks.master.journal.journal_protocol import checksum
from dlrover_hooks.master.manifest_storage import NoStorage
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.protocol import Message, Route
from tests.simulation.client import Client
from tests.simulation.etcd import EtcdCluster, SimulatedGateway
from tests.simulation.host import key_of, refusal_of
from tests.simulation.loop import Process, monotonic
from tests.simulation.network import Answer, Connection, Network, Reset, Silence
from tests.simulation.story import Broken, Checks, Story
from tests.simulation.swarm import Swarm, draw
from tests.simulation.threadlets import Bell, Event, ThreadedLoop, Threadlet, start_thread
from tests.simulation.world import Result

MASTERS, WRITERS, EVENTS = 3, 3, 50
PREFIX = EtcdUrl.parse("etcd://m0/simulated").prefix.encode()
FOREVER_S = 1e6
TROUBLE_S = 40.0
TAKEOVER_S = 20.0
"""A leader is found, and each client is answered by it, within so many seconds after the last fault."""
_EPOCH_S = 1_000_000.0
_PART_BYTES = 10_000
"""Small, so that values have several parts."""
_ENCODER = msgspec.json.Encoder()


class Candidate:
    """One process of a master. `runtime`: that of a leader."""

    def __init__(self, world: Leaders, index: int) -> None:
        self.world, self.index = world, index
        self.process = Process(f"m{index}", world.loop, rate=world.rate())
        self.process.run(self._start)

    def _start(self) -> None:
        world, url = self.world, self.world.urls[self.index]
        self.runtime: Runtime | None = None
        self.leadership = EtcdLeadership(
            SimulatedGateway(world.etcd, url, 0.5), PREFIX + b"leader", url, self._lost, ttl_s=2
        )
        self.journal = EtcdJournal(SimulatedGateway(world.etcd, url, 1.0), PREFIX.decode(), self.leadership)
        start_thread(world.loop, self.process, self._live)

    def _live(self) -> None:
        stop: Any = Event(self.world.loop)
        try:
            assert self.leadership.campaign(stop, self.journal.follow)
            clock = Clock(wall=lambda: _EPOCH_S + self.world.loop.now, monotonic=monotonic)
            runtime = Runtime(
                self.journal, storage=NoStorage(), snapshot_every=15, clock=clock, leads=self.leadership.holds
            )
            runtime.on_failure = self._failed
            runtime.start()
        except Exception as error:
            self.world.bug(error)
            return
        self.world.takes_over(self, runtime)
        self.runtime = runtime

    def _failed(self) -> None:
        self.world.check(False, f"m{self.index} ends, though it may go on as a standby")

    def _lost(self) -> None:
        """See `LeaderCandidate`: a fresh standby takes this process's place."""
        self.world.tell(f"m{self.index}", "leads no longer")
        self.process.kill()
        self.world.restarts(self.index, self.world.dice.uniform(0.3, 2.0))
        Bell(self.world.loop).wait()  # nothing of this process goes on

    async def serve(self, row: Route, body: bytes, key: str | None) -> Answer:
        """The answer to one request."""
        runtime, led = self.runtime, self.leadership.epoch == self.world.epoch()
        try:
            if runtime is None:
                raise MasterAway("This master is a standby.")
            message: Any = msgspec.json.decode(body, type=row.request)
            if row.event:
                reply = await runtime.event(message, key_of(key, message))
            else:
                reply = await runtime.query(message)
                led = led or self.leadership.epoch == self.world.epoch()
                self.world.check(led, f"m{self.index} answers, and did not lead since the question")
            return Answer(200, _ENCODER.encode(reply))
        except HooksError as error:
            return refusal_of(error)._replace(leader=self.leadership.leader if runtime is None else None)


class Site:
    """The machine of a master: requests reach the process that runs there. Stands for `Host` in `Network`."""

    def __init__(self, world: Leaders, index: int) -> None:
        self.world = world
        self.network = Network(world.swarm, world.loop, random.Random(f"net {index} {world.swarm.seed}"), world.story)
        self.network.twice = 0.0  # a copy that comes after the refusal of the first one would be carried out
        host: Any = self
        self.network.host = host
        self.candidate: Candidate | None = None

    def arrive(self, connection: Connection, row: Route, body: bytes, key: str | None) -> None:
        """A request."""
        self.world.story.note(self.world.loop.now, row.path)
        candidate = self.candidate
        if candidate is None or candidate.process.dead:
            self.world.loop.deliver(self.network.delay("client"), connection.fail, Reset())
            return

        async def serve() -> None:
            try:
                self.network.answer(connection, await candidate.serve(row, body, key))
            except Exception as error:
                self.world.bug(error)

        candidate.process.ends.append(lambda: connection.fail(Reset()))
        candidate.process.spawn(serve())

    def hung_up(self, connection: Connection) -> None:
        """No request waits long here."""


class Masters:
    """The networks of all masters as one, for a client that has their addresses. Stands for a `Network` in `Client`."""

    longest_pause_s = _LONGEST_PAUSE_OF_SEVERAL_S

    def __init__(self, world: Leaders) -> None:
        self._world = world
        self.addresses = MasterAddresses(",".join(world.urls))

    def speaks(self, incarnation: str, process: Process) -> None:
        """Nothing depends on it here."""

    async def exchange(
        self, client: Process, node: str, row: Route, body: bytes, key: str | None, left: float
    ) -> Answer:
        """One attempt. Raises Reset or Silence."""
        url = self.addresses.current
        network = self._world.sites[self._world.urls.index(url)].network
        try:
            answer = await network.exchange(client, node, row, body, key, min(left, _TURN_S))
        except (Reset, Silence) as error:
            self.addresses.failed(url, silent=isinstance(error, Silence))
            raise
        if answer.status in _AGAIN:
            self.addresses.failed(url, answer.leader or "")
        return answer


class Writer:
    """One client: it sends events one after the other, and asks now and then what there is."""

    def __init__(self, world: Leaders, index: int) -> None:
        self.world, self.name = world, f"client{index}"
        self.process = Process(self.name, world.loop, rate=world.rate())
        self._masters = Masters(world)
        self._client = Client(self._masters, self.process, self.name, self.name, FOREVER_S)
        self._forgets = index == WRITERS - 1
        """It asks any master, and learns from it which one leads, as each new process of a job does."""
        self.done = 0
        self.over = False
        self.process.spawn(self._live())

    async def _live(self) -> None:
        world = self.world
        try:
            while not world.calm or self.done < EVENTS:
                await self._write()
                if world.dice.random() < 0.5:
                    before = set(world.jobs)
                    missing = before - set((await self._call(p.ListJobs())).jobs)
                    world.check(not missing, f"an answer lacks {missing}, acknowledged before its question")
                await self.process.sleep(world.dice.expovariate(1 / 0.4))
            self.over = True
        except Exception as error:
            world.bug(error)

    async def _write(self) -> None:
        self.done += 1
        job, key = f"{self.name}-{self.done}", f"{self.name}/main/{self.done}"
        seat = p.Seat(incarnation=f"{job}-w", local_rank=0)
        join = p.Join(
            job=job, incarnation=self.name, node=self.name, seats=(seat,), host="127.0.0.1", port=1,
            min_workers=1, max_workers=1, proposed_run="r", last_call_s=0.0,
        )  # fmt: skip
        try:
            await self._call(join)
            self.world.acknowledged(job, key)
        except JournalFailed:
            self.world.refused.add(key)

    async def _call(self, request: Message) -> Any:
        if self._forgets:
            self._masters.addresses = MasterAddresses(self.world.dice.choice(self.world.urls))
        return await self._client.call(request)


class Leaders(Checks):
    """One seed. `calm`: nothing fails any more."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.dice = random.Random(f"leaders dice {swarm.seed}")
        self.chance = random.Random(f"leaders chaos {swarm.seed}")
        self.loop, self.story = ThreadedLoop(), Story()
        super().__init__(self.loop, self.story)
        members = self.chance.choice((1, 3, 3))
        self.etcd = EtcdCluster(self.loop, random.Random(f"etcd {swarm.seed}"), members, self._put)
        self.urls = [f"http://m{index}" for index in range(MASTERS)]
        self.sites = [Site(self, index) for index in range(MASTERS)]
        self.calm = False
        self.takeovers = 0
        self.log: list[bytes] = []
        """Every record that is stored, in order: what is deleted later is kept here."""
        self.keys: list[str] = []
        self.jobs: set[str] = set()
        self.refused: set[str] = set()
        self._parts: dict[bytes, bytes] = {}
        self._frozen: list[Process] = []

    # ---- what its parts ask of it ------------------------------------------------------------------------------------

    def rate(self) -> float:
        return 1.0 + 0.02 * self.dice.uniform(-1.0, 1.0)

    def tell(self, who: str, what: str) -> None:
        self.story.tell(self.loop.now, who, what)

    def restarts(self, index: int, after_s: float) -> None:
        """The next process of a master begins."""
        self.loop.deliver(after_s, self._start, index)

    def _start(self, index: int) -> None:
        self.sites[index].candidate = Candidate(self, index)

    def takes_over(self, candidate: Candidate, runtime: Runtime) -> None:
        """A leader has read the journal."""
        self.takeovers += 1
        self.tell(f"m{candidate.index}", f"leads with {len(runtime.state.jobs)} jobs")

    def acknowledged(self, job: str, key: str) -> None:
        """A client has its answer."""
        self.check(key in self.keys, f"{key} is acknowledged, and not in the journal")
        self.jobs.add(job)

    # ---- what etcd stores --------------------------------------------------------------------------------------------

    def _put(self, key: bytes, value: bytes) -> None:
        folder = PREFIX + b"events/"
        if not key.startswith(folder):
            return
        number, part = int(key[len(folder) :].split(b"/")[0]), int(key.rsplit(b"/", 1)[1])
        if part:
            self._parts[key] = value
            return
        line, _, first = value.partition(b"\n")
        head = msgspec.json.decode(line, type=etcd_journal.ValueHead)
        whole = first + b"".join(self._parts[key[:-5] + b"%05d" % index] for index in range(1, head.parts))
        self.check(checksum(number, whole) == head.crc, f"event {number} is stored damaged")
        records = msgspec.msgpack.decode(whole, type=list[bytes])
        if number == len(self.log) + 1:
            self._append(records)
            return
        same = self.log[number - 1 : number - 1 + len(records)] == records
        self.check(same, f"event {number} is replaced or leaves a gap: {len(self.log)} are stored")

    def _append(self, records: list[bytes]) -> None:
        for record in records:
            key = events.decode(record).key
            if key is not None:
                text = f"{key.incarnation}/{key.channel}/{key.seq}"
                self.check(text not in self.keys, f"{text} is done twice")
                self.keys.append(text)
        self.log += records

    # ---- harm --------------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        if self.calm:
            return
        kinds = (self._kill_leader, self._stop_leader, self._kill_master, self._member, self._slow, self._lossy)
        kinds += (self._cut, self._full, self._late_write)
        what = self.chance.choice(kinds)
        if (whom := what()) and what != self._late_write:
            self.story.fault(self.loop.now, f"masters: {what.__name__.strip('_').replace('_', ' ')}", whom)
        self.loop.deliver(self.chance.expovariate(1 / 3.0), self._strike)

    def epoch(self) -> int:
        """That of the leader, as etcd sees it; 0: there is none."""
        stored = self.etcd.store.get(PREFIX + b"leader")
        return stored.created if stored is not None else 0

    def _leader(self) -> Candidate | None:
        stored = self.etcd.store.get(PREFIX + b"leader")
        if stored is None:
            return None
        address = msgspec.json.decode(stored.value, type=Leader).address
        candidate = self.sites[self.urls.index(address)].candidate
        return candidate if candidate is not None and candidate.process.runs else None

    def _kill(self, candidate: Candidate | None) -> str:
        if candidate is None or candidate.process.dead:
            return ""
        candidate.process.kill()
        self.restarts(candidate.index, self.chance.uniform(0.3, 8.0))
        return candidate.process.name

    def _kill_leader(self) -> str:
        return self._kill(self._leader())

    def _kill_master(self) -> str:
        return self._kill(self.chance.choice(self.sites).candidate)

    def _stop_leader(self) -> str:
        candidate = self._leader()
        if candidate is None:
            return ""
        candidate.process.freeze()
        self._frozen.append(candidate.process)
        self.loop.deliver(self.chance.uniform(0.05, 8.0), candidate.process.thaw)
        return candidate.process.name

    def _late_write(self) -> str:
        """The next write is under way when its master is killed or stopped, or etcd's quota is used up."""

        def lose() -> float:
            harm = self.chance.choice((self._kill_leader, self._stop_leader, self._full_soon))
            self.story.fault(self.loop.now, "masters: late write", harm() or "no leader")
            return 0.0 if harm == self._full_soon else self.chance.uniform(1.0, 6.0)

        self.etcd.lose_next = lose
        return "the next one"

    def _full_soon(self) -> str:
        self.loop.deliver(0.1, self._full)
        return "etcd's space, once it is carried out"

    def _member(self) -> str:
        member, seconds = self.chance.choice(self.etcd.members), self.chance.uniform(0.2, 6.0)
        self.etcd.down[member] = self.loop.now + seconds
        return f"{member} is away for {seconds:.1f} s"

    def _slow(self) -> str:
        self.etcd.slow_until = self.loop.now + self.chance.uniform(0.2, 4.0)
        return f"etcd until {self.etcd.slow_until:.1f} s"

    def _lossy(self) -> str:
        self.etcd.lossy_until = self.loop.now + self.chance.uniform(0.2, 6.0)
        return f"etcd until {self.etcd.lossy_until:.1f} s"

    def _cut(self) -> str:
        url, seconds = self.chance.choice(self.urls), self.chance.uniform(0.2, 6.0)
        self.etcd.cut[url] = self.loop.now + seconds
        return f"{url} from etcd for {seconds:.1f} s"

    def _full(self) -> str:
        self.etcd.store.full = True
        self.loop.deliver(seconds := self.chance.uniform(0.2, 4.0), self._empty)
        return f"etcd for {seconds:.1f} s"

    def _empty(self) -> None:
        self.etcd.store.full = False

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Broken."""
        for index in range(MASTERS):
            self.loop.deliver(0.0, self._start, index)
        writers = [Writer(self, index) for index in range(WRITERS)]
        self.loop.deliver(self.chance.uniform(0.0, 5.0), self._strike)
        self._go_on(TROUBLE_S)
        self.calm = True
        self.etcd.heal()
        for site in self.sites:
            site.network.heal()
        for process in self._frozen:
            process.thaw()
        progress = [writer.done for writer in writers]
        self._go_on(TROUBLE_S + TAKEOVER_S)
        stuck = [one.name for one, was in zip(writers, progress, strict=True) if not one.over and one.done == was]
        self.check(not stuck, f"{stuck} have no answer for {TAKEOVER_S:g} s, though nothing fails any more")
        until = self.loop.now + 10.0 * EVENTS
        while self.story.broken is None and not all(one.over for one in writers):
            self.check(self.loop.now < until, "the clients do not end, though nothing fails any more")
            self._go_on(self.loop.now + 5.0)
        self._look()

    def _go_on(self, until: float) -> None:
        self.loop.run(until)
        if self.story.broken is not None:
            raise Broken(self.story.broken)
        self.loop.now = max(self.loop.now, until)

    def _look(self) -> None:
        """At the end: the leader's state is what all events give, and so is what a new master would read."""
        done = self.refused & set(self.keys)
        self.check(not done, f"{done} were refused, and are in the journal")
        state = job_registry.Master()
        for record in self.log:
            envelope = events.decode(record)
            job_registry.apply(state, envelope.event, envelope.now, envelope.key)
        leaders = [site.candidate.runtime for site in self.sites if site.candidate and site.candidate.process.runs]
        leaders = [one for one in leaders if one is not None and one._leads()]
        self.check(len(leaders) == 1, f"{len(leaders)} leaders")
        wanted = job_registry.encode(state)
        self.check(job_registry.encode(leaders[0].state) == wanted, "the leader's state is not that of the events")
        read: list[bytes] = []
        reader = Process("reader", self.loop)
        replica = Replica(SimulatedGateway(self.etcd, "reader", 1.0), PREFIX, "journal")
        start_thread(self.loop, reader, lambda: (replica.catch_up(), read.append(job_registry.encode(replica.state))))
        self._go_on(self.loop.now + 5.0)
        self.check(read == [wanted], "the journal gives another state than its events")

    def end(self) -> None:
        self.loop.end()


class _Time:
    monotonic = staticmethod(monotonic)


@contextmanager
def virtual_leaders() -> Iterator[None]:
    """Election and journal use threads and clocks of virtual time."""
    before = etcd_leadership.now, etcd_leadership.BackgroundThread, master_addresses.time, etcd_journal.PART_BYTES
    logging.disable(logging.CRITICAL)
    etcd_leadership.now, etcd_leadership.BackgroundThread = monotonic, Threadlet  # pyright: ignore[reportAttributeAccessIssue]
    master_addresses.time, etcd_journal.PART_BYTES = _Time, _PART_BYTES  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        etcd_leadership.now, etcd_leadership.BackgroundThread, master_addresses.time, etcd_journal.PART_BYTES = before


def simulate_masters(seed: int) -> Result:
    """Run one seed."""
    with virtual_leaders():
        world = Leaders(draw(seed))
        try:
            world.run()
        except Broken:
            pass
        except Exception as error:
            world.story.broken = world.story.broken or f"{type(error).__name__}: {error}"
        finally:
            world.end()
    story = world.story
    faults = story.faults | {"takeover": world.takeovers}
    return Result(
        seed, story.events, world.loop.now / 3600, faults, story.trace, 1, story.broken, story.text(),
        command="make simulate-masters",
    )  # fmt: skip
