"""Between every node and the master: messages take their time, get lost, come twice, late, or not through at all.

A message is the bytes that a client would send. It travels as TCP carries it: on a broken connection it is lost, before
or after the other side has heard it, and the sender sees a reset; on a blocked one it comes later. A killed process's
connections are closed by its kernel; those of a crashed node stay open until the master's gives up.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrover_hooks.protocol import Route
from tests.simulation.loop import Loop, Process
from tests.simulation.story import Story
from tests.simulation.swarm import Swarm

if TYPE_CHECKING:
    from tests.simulation.host import Host


KEEPALIVE_S = 25.0
"""After so long the master's kernel gives a machine up that does not answer (its options are in `master.__main__`)."""


class Reset(Exception):
    """The connection ended without an answer."""


class Silence(Exception):
    """No answer within the time."""


class Answer(NamedTuple):
    status: int
    body: bytes
    leader: str | None = None
    """The header by which a standby names the leader; None: it is no standby's answer."""


class Connection:
    """One request on its way, and its answer."""

    def __init__(self, client: Process, node: str, reply: asyncio.Future[Answer]) -> None:
        self.client, self.node, self.reply = client, node, reply
        self.open = True
        self.waits: list[asyncio.Task[Any]] = []
        """Long-polls at the master; they end with the connection."""

    def fail(self, error: Exception) -> None:
        """The client sees it."""
        if not self.reply.done():
            self.reply.set_exception(error)


class Network:
    """`host` is where all requests go. `cut`: nodes that reach nobody, until when; `clogged`: how slow."""

    host: Host
    longest_pause_s = 1.0
    """Between two attempts of a client."""

    def __init__(self, swarm: Swarm, loop: Loop, dice: random.Random, story: Story) -> None:
        self.loop, self._dice, self._story = loop, dice, story
        self._latency_s = swarm.latency_s
        self.loss, self.twice, self.late = swarm.loss, swarm.twice, swarm.late
        self.cut: dict[str, float] = {}
        self.clogged: dict[str, float] = {}
        self.gone: set[str] = set()
        """Crashed nodes: what they had open is never closed."""

    def speaks(self, incarnation: str, process: Process) -> None:
        """A client begins."""
        self.host.promises.speakers[incarnation] = process

    def heal(self) -> None:
        """From now on every message comes through, once and in time."""
        self.cut.clear()
        self.clogged.clear()
        self.loss = self.twice = self.late = 0.0

    def delay(self, node: str) -> float:
        """Of the next message from or to `node`, if it comes through."""
        seconds = self._latency_s * (0.5 + self._dice.expovariate(2.0)) * self.clogged.get(node, 1.0)
        if self.late and self._dice.random() < self.late:
            seconds += self._dice.uniform(0.0, 10.0)
        return seconds

    async def exchange(
        self, client: Process, node: str, row: Route, body: bytes, key: str | None, left: float
    ) -> Answer:
        """One attempt. Raises Reset or Silence."""
        reply: asyncio.Future[Answer] = self.loop.create_future()
        connection = Connection(client, node, reply)
        timer = self.loop.call_later(left, connection.fail, Silence()) if left < 1e9 else None
        client.ends.append(hang := lambda: self.hang_up(connection))
        self._send(connection, row, body, key)
        try:
            return await reply
        finally:
            if timer is not None:
                timer.cancel()
            if not client.dead:
                client.ends.remove(hang)
                hang()

    def _send(self, connection: Connection, row: Route, body: bytes, key: str | None) -> None:
        copies = 1 + (self._dice.random() < self.twice)
        for _ in range(copies):
            wait = self._passes(connection)
            if wait is not None:
                self.loop.deliver(wait, self.host.arrive, connection, row, body, key)

    def _passes(self, connection: Connection) -> float | None:
        """When the message arrives; None: never."""
        wait = self.delay(connection.node) + self._blocked_s(connection.node)
        if self.loss and self._dice.random() < self.loss:
            self.loop.deliver(wait, connection.fail, Reset())
            return None
        return wait

    def _blocked_s(self, node: str) -> float:
        """TCP sends again until the way is free, at growing intervals."""
        blocked_s = self.cut.get(node, 0.0) - self.loop.now
        return blocked_s * self._dice.uniform(1.0, 1.5) if blocked_s > 0.0 else 0.0

    def answer(self, connection: Connection, answer: Answer) -> None:
        """The master's word goes back."""
        wait = self._passes(connection) if connection.node not in self.gone else None
        if wait is not None:
            self.loop.deliver(wait, self._answered, connection, answer)

    def _answered(self, connection: Connection, answer: Answer) -> None:
        if not connection.reply.done():
            connection.reply.set_result(answer)

    def hang_up(self, connection: Connection) -> None:
        """The client, or its kernel, closes."""
        if connection.open:
            connection.open = False
            wait = self.delay(connection.node) + self._blocked_s(connection.node)
            if connection.node in self.gone:
                wait = KEEPALIVE_S
            if connection.waits:  # else the master has nothing to end, and begins nothing any more
                self.loop.deliver(wait, self.host.hung_up, connection)
