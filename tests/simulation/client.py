"""Stands for `dlrover_hooks.client.MasterClient` and `watching.Watcher`, which wait in threads.

The same discipline: a call is sent again with the same key until its deadline; events of one channel go one by one; a
refusal is raised by its class. Requests are encoded and replies decoded by the real structs and routes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from dlrover_hooks.client.http_client import _AGAIN, _within
from dlrover_hooks.errors import HooksError, JournalFailed, MasterAway, MasterError, named
from dlrover_hooks.protocol import Message, Notice, Problem, Route, Routes, Watch
from tests.simulation.loop import Process
from tests.simulation.network import Answer, Reset, Silence

_ENCODER = msgspec.json.Encoder()
_DECODERS = {row.reply: msgspec.json.Decoder(row.reply) for row in Routes.by_request.values()}


class Way(Protocol):
    """To the master: a `Network`, or several."""

    longest_pause_s: float

    def speaks(self, incarnation: str, process: Process) -> None: ...

    async def exchange(
        self, client: Process, node: str, row: Route, body: bytes, key: str | None, left: float
    ) -> Answer: ...


class Client:
    """Talks to the master as `incarnation`, from `process` on `node`."""

    def __init__(self, network: Way, process: Process, node: str, incarnation: str, deadline_s: float) -> None:
        self.incarnation = incarnation
        self._network, self._process, self._node, self._deadline_s = network, process, node, deadline_s
        self._seqs: collections.Counter[str] = collections.Counter()
        network.speaks(incarnation, process)

    async def call(
        self,
        request: Message,
        *,
        channel: str = "main",
        timeout_s: float | None = None,
        again: bool = True,
        key: str | None = None,
    ) -> Any:
        """See `MasterClient.call`."""
        row = Routes.by_request[type(request)]
        until = self._process.clock() + (self._deadline_s if timeout_s is None else timeout_s)
        pause_s, unknown = 0.05, key is not None
        if row.event and key is None:
            self._seqs[channel] += 1
            key = f"{self.incarnation}/{channel}/{self._seqs[channel]}"
        while (left := until - self._process.clock()) > 0:
            body = _ENCODER.encode(_within(request, left) if row.waits else request)
            try:
                answer = await self._network.exchange(self._process, self._node, row, body, key, left)
            except (Reset, Silence):
                unknown = True
            else:
                if answer.status < 300:
                    return _DECODERS[row.reply].decode(answer.body)
                error = refusal(answer)
                if answer.status not in _AGAIN or (isinstance(error, JournalFailed) and not unknown):
                    raise error
                unknown = unknown or answer.leader is None
            if not again:
                break
            await self._process.sleep(min(max(0.0, until - self._process.clock()), 0.75 * pause_s))
            pause_s = min(self._network.longest_pause_s, 2 * pause_s)
        raise MasterAway(f"no answer to {type(request).__name__}")

    def watch(self, job: str, on_notice: Callable[[Notice], None], on_error: Callable[[HooksError], None]) -> None:
        """See `MasterClient.watch`; it ends with the process."""
        self._process.spawn(self._watch(Watch(job, self.incarnation, parting=0), on_notice, on_error))

    async def _watch(
        self, request: Watch, on_notice: Callable[[Notice], None], on_error: Callable[[HooksError], None]
    ) -> None:
        row, pause_s = Routes.by_request[Watch], 0.02
        while True:
            try:
                body = _ENCODER.encode(request)
                answer = await self._network.exchange(self._process, self._node, row, body, None, 1e9)
            except (Reset, Silence):
                answer = Answer(503, b"")
            if answer.status < 300:
                pause_s = 0.02
                notice = msgspec.json.decode(answer.body, type=Notice)
                request = request.told(notice)
                on_notice(notice)
                if notice.finished:
                    return
            elif answer.status in (500, *_AGAIN):
                await self._process.sleep(pause_s)
                pause_s = min(1.0, 2 * pause_s)
            else:
                on_error(refusal(answer))
                return


def refusal(answer: Answer) -> HooksError:
    """The error that a problem+json body names."""
    if not answer.body:
        return MasterError(f"HTTP {answer.status}")
    problem = msgspec.json.decode(answer.body, type=Problem)
    error = named(problem.type)(problem.detail, hint=problem.hint)
    error.status = problem.status
    return error
