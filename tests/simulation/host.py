"""The machine of the master: real `Runtime`s, one life after another, on one disk and one listening socket.

`app.App` is left out: its work (decode by the route, read the key, answer problem+json, end a long-poll whose client
hung up) is `_serve`.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from dlrover_hooks.errors import BadRequest, HooksError
from dlrover_hooks.master.clock import Clock
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.effects import Effect
from dlrover_hooks.master.core.events import Key
from dlrover_hooks.master.manifest_storage import NoStorage, Storage
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.protocol import Message, Problem, Route, Routes
from tests.simulation.disk import Disk, FakeJournal
from tests.simulation.loop import Loop, Process, monotonic
from tests.simulation.network import Answer, Connection, Network, Reset
from tests.simulation.promises import Promises
from tests.simulation.story import Story
from tests.simulation.swarm import Swarm

_ENCODER = msgspec.json.Encoder()
_DECODERS = {kind: msgspec.json.Decoder(kind) for kind in Routes.by_request}
MOST = 20_000
"""Events of one seed; more are a storm."""
_EPOCH_S = 1_000_000.0


class Witnessed(Runtime):
    """The real runtime; each applied event is shown to `promises`."""

    promises: Promises
    journal: FakeJournal

    def _enqueue(self, event: Message, key: Key | None) -> Any:
        before = self._queue[-1] if self._queue else None
        done = super()._enqueue(event, key)
        entry = self._queue[-1] if self._queue and self._queue[-1] is not before else None
        self.promises.applied(self.state, event, key, entry, now=self._now())
        return done

    async def _reload(self, done: Any) -> None:
        kept = self.journal.kept + len(self._queue)
        await super()._reload(done)
        self.promises.rolled_back(self.state, kept)

    def _do(self, effect: Effect) -> None:
        self.promises.effect(effect)
        super()._do(effect)


class Host:
    """`process` is the life that runs, None between two."""

    def __init__(
        self, swarm: Swarm, loop: Loop, dice: random.Random, story: Story, network: Network, promises: Promises
    ) -> None:
        self.network, self.promises, self.story = network, promises, story
        self.disk = Disk(dice, torn=swarm.torn, slow=swarm.disk_s)
        self.store: Storage = NoStorage()
        self.process: Process | None = None
        self.offset_s = 0.0
        """How far its wall clock is off."""
        self.lives = 0
        self._swarm, self._loop, self._dice = swarm, loop, dice
        self._backlog: list[tuple[Connection, Route, bytes, str | None]] = []
        self._connections: list[Connection] = []
        self.runtime: Witnessed | None = None

    # ---- lives -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The next life."""
        self.lives += 1
        self.process = Process(
            f"master.{self.lives}", self._loop, rate=1.0 + self._swarm.skew * self._dice.uniform(-1, 1)
        )
        self.process.run(self._start)
        if self.lives > 1:
            self.story.tell(
                self._loop.now, "master", f"life {self.lives} goes on after {len(self.disk.durable)} events"
            )
        backlog, self._backlog = self._backlog, []
        for arrived in backlog:
            self.arrive(*arrived)

    def _start(self) -> None:
        clock = Clock(wall=lambda: _EPOCH_S + self._loop.now + self.offset_s, monotonic=monotonic)
        runtime = self.runtime = self._life(clock)
        runtime.promises = self.promises
        runtime.nodes.beats_per_s = self._swarm.beats_per_s
        self.promises.started(runtime.state, self.disk.durable)
        replayed = self.disk.replayed()
        self.promises.check(
            job_registry.encode(runtime.state) == replayed, "a restart gives another state than its events"
        )
        runtime.start()

    def _life(self, clock: Clock) -> Witnessed:
        every, lease_s = self._swarm.snapshot_every, self._swarm.lease_s
        try:
            return Witnessed(self.disk.open(), storage=self.store, lease_s=lease_s, snapshot_every=every, clock=clock)
        except HooksError as error:
            self.promises.check(False, f"the journal cannot be replayed: {error.message}")
            raise

    def kill(self) -> str:
        """As `kill -9`; says what became of the journal."""
        process, runtime = self.process, self.runtime
        assert process is not None
        assert runtime is not None
        process.kill()
        self.process = None
        how = self.disk.crash(runtime.journal)
        for connection in self._connections:
            self._loop.deliver(self.network.delay(connection.node), connection.fail, Reset())
        self._connections = []
        return how

    # ---- requests ----------------------------------------------------------------------------------------------------

    def arrive(self, connection: Connection, row: Route, body: bytes, key: str | None) -> None:
        """A request is here. While no master lives it waits in the socket, which the launcher owns."""
        self.story.note(self._loop.now, row.path)
        if self.story.events > MOST:
            self.promises.bug(RuntimeError(f"{MOST} events, and no end"))
        if self.process is None:
            self._backlog.append((connection, row, body, key))
            return
        if row.waits and not connection.open:
            return
        if len(self._connections) > 100:
            self._connections = [one for one in self._connections if not one.reply.done()]
        self._connections.append(connection)
        task = self.process.spawn(self._serve(connection, row, body, key))
        if row.waits:
            connection.waits.append(task)

    def hung_up(self, connection: Connection) -> None:
        """The client's end of the connection is closed."""
        for task in connection.waits:
            task.cancel()

    async def _serve(self, connection: Connection, row: Route, body: bytes, key: str | None) -> None:
        runtime = self.runtime
        assert runtime is not None
        try:
            message: Any = _DECODERS[row.request].decode(body)
            if row.waits:
                reply = await runtime.wait(message)
            elif row.event:
                reply = await runtime.event(message, key_of(key, message))
                self.promises.answered(key, self.disk.durable)
            else:
                reply = await runtime.query(message)
            self.promises.told(message, reply)
            self.network.answer(connection, Answer(200, _ENCODER.encode(reply)))
        except msgspec.DecodeError as error:
            problem = Problem(type="BadRequest", title="BadRequest", status=400, detail=str(error))
            self.network.answer(connection, Answer(400, _ENCODER.encode(problem)))
        except HooksError as error:
            self.network.answer(connection, refusal_of(error))
        except Exception as error:
            self.promises.bug(error)


def refusal_of(error: HooksError) -> Answer:
    """As `app.App` answers."""
    name = type(error).__name__
    problem = Problem(type=name, title=name, status=error.status, detail=error.message, hint=error.hint)
    return Answer(error.status, _ENCODER.encode(problem))


def key_of(text: str | None, message: Message) -> Key | None:
    """The idempotency key of a request. Raises BadRequest."""
    if text is None:
        return None
    incarnation, channel, seq = text.split("/")
    if incarnation != getattr(message, "incarnation", incarnation):
        raise BadRequest("The key is not the sender's.")
    return Key(incarnation=incarnation, channel=channel, seq=int(seq))
