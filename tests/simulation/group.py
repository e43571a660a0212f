"""The collectives between the ranks of one round."""

from __future__ import annotations

import asyncio
import random
from typing import NamedTuple

from tests.simulation.loop import Loop, Process
from tests.simulation.model import Model
from tests.simulation.promises import Promises


class Share(NamedTuple):
    """What one rank brings to a step."""

    model: Model
    batch: int = 0
    finished: bool = False


class Total(NamedTuple):
    """What all ranks bring. `again`: positions that two brought."""

    batches: int
    again: int
    finished: bool


class Aborted(Exception):
    """The collective failed, or was cut."""


class Group:
    """The process group of one round, on one store prefix. A member that dies or is cut off fails it for all."""

    def __init__(self, loop: Loop, dice: random.Random, promises: Promises, prefix: str) -> None:
        self._loop, self._dice, self._promises, self._prefix = loop, dice, promises, prefix
        self._members: dict[int, Process] = {}
        self._shares: dict[int, tuple[Share, asyncio.Future[Total]]] = {}
        self._settling: list[asyncio.Future[Total]] = []
        """Of the newest step: complete, and not everybody knows."""
        self._broken = False

    def enter(self, rank: int, world_size: int, process: Process, incarnation: str) -> None:
        """Take `rank`'s place."""
        self._promises.entered(self._prefix, rank, world_size, incarnation)
        self._members[rank] = process

    def left(self, rank: int, *, silent: bool, done: bool = False) -> None:
        """The member's process ended; its sockets are closed, but not those of a crashed machine.

        `done`: it has sent all that it had to send, and what is sent arrives.
        """
        if rank in self._members and not silent:
            self._broken = True
            for _, reply in self._shares.values():
                self._loop.deliver(self._dice.uniform(0.01, 0.1), _fail, reply)
            for reply in self._settling:  # so that some are one step ahead
                if not done and not reply.done() and self._dice.random() < 0.5:
                    _fail(reply)

    def cut(self, rank: int) -> None:
        """This rank gives up."""
        if rank in self._shares:
            _fail(self._shares[rank][1])
        self.left(rank, silent=False)

    async def reduce(self, rank: int, world_size: int, share: Share) -> Total:
        """All ranks' shares. Raises Aborted; waits for ever for a stopped member."""
        if self._broken:
            raise Aborted
        reply: asyncio.Future[Total] = self._loop.create_future()
        self._shares[rank] = share, reply
        if len(self._shares) == world_size:
            self._complete()
        return await reply

    def _complete(self) -> None:
        shares, self._shares = self._shares, {}
        self._promises.alike(self._prefix, [share.model for share, _ in shares.values()])
        batches = again = 0
        for share, _ in shares.values():
            again |= batches & share.batch
            batches |= share.batch
        total = Total(batches, again, all(share.finished for share, _ in shares.values()))
        self._settling = [reply for _, reply in shares.values()]
        for reply in self._settling:
            self._loop.deliver(self._dice.uniform(0.0, 0.05), _settle, reply, total)


def _settle(reply: asyncio.Future[Total], total: Total) -> None:
    if not reply.done():
        reply.set_result(total)


def _fail(reply: asyncio.Future[Total]) -> None:
    if not reply.done():
        reply.set_exception(Aborted())
