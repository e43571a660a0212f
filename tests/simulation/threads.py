"""The real background threads of a worker without their threads: `LeaseClient` (leases) and `Reporter` (votes, beats).

Their decisions run as they are. What blocks a thread there, a call to the master or a wait on a queue, is here an
`await` of the process that they belong to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from dlrover_hooks import protocol as p
from dlrover_hooks.data.leased.lease_client import HeldLease, LeaseClient, LeaseRequester
from dlrover_hooks.errors import HooksError, MasterAway, Stale
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.worker.reporter import Reporter, _BeatNow, _Saved, _Skipped, _Woken
from tests.simulation.loop import Loop, Process

Call = Callable[..., Awaitable[Any]]
T = TypeVar("T")


class Bell:
    """A queue that is rung. `wait` returns when it was, or after some seconds of the process's clock."""

    def __init__(self, loop: Loop, process: Process) -> None:
        self._loop, self._process = loop, process
        self._items: list[Any] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    set = put

    async def wait(self, seconds: float | None) -> bool:
        """True if it was rung; `pop` gives what with."""
        if self._items:
            return True
        self._waiting = self._loop.create_future()
        timer = None
        if seconds is not None:
            timer = self._loop.call_later(seconds, self._late, self._waiting)
        await self._waiting
        if timer is not None:
            timer.cancel()
        return bool(self._items)

    def _late(self, waiting: asyncio.Future[None]) -> None:
        if not waiting.done():
            waiting.set_result(None)

    def pop(self) -> Any:
        return self._items.pop(0)

    def get(self, timeout: float | None = None) -> Any:
        """As a queue's; but where that would block it says for how long."""
        if not self._items:
            raise Idle(timeout)
        return self.pop()


class Idle(Exception):
    """The thread would sleep now, for `args[0]` seconds at most (None: until it is rung)."""


class Answered:
    """The event that the training thread waits for."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell

    def set(self) -> None:
        self._bell.put(None)


class Lender(LeaseClient):
    """`LeaseClient._run` and `_exchange`, awaited; everything else is inherited."""

    def __init__(
        self, loop: Loop, process: Process, call: Call, claim: LeaseRequester, reopen: Any, *, exact: bool
    ) -> None:
        self._loop, self._process, self._await = loop, process, call
        self._heard = Bell(loop, process)
        super().__init__(_nobody, claim, exact=exact)  # pyright: ignore[reportArgumentType]
        self._bell = Bell(loop, process)  # pyright: ignore[reportAttributeAccessIssue]
        self._answered = Answered(self._heard)  # pyright: ignore[reportAttributeAccessIssue]
        self._reopen_later = reopen
        self.over = process.spawn(self._live())

    def _start(self) -> BackgroundThread:
        return BackgroundThread("simulated", lambda: None, where=str(self.claim))  # never started: `_live` is its body

    async def _live(self) -> None:
        try:
            while (request := await self._next_request()) is not None:
                if isinstance(request, dict):
                    await self._reopen_later(request)
                    self._tell_ends(request)
                elif isinstance(request, p.AwaitShards):
                    self._hear(await self._await(request, timeout_s=self.patience_s), 0.0)
                else:
                    await self._trade(request)
        except HooksError as error:
            self._fail(error)

    async def _next_request(self) -> Any:
        while True:
            try:
                return self._next()
            except Idle as idle:
                bell: Any = self._bell
                if await bell.wait(idle.args[0]):
                    bell.pop()

    async def _trade(self, request: p.TakeLeases) -> None:
        asked_at = self._process.clock()
        try:
            reply = await self._take(request)
        except Stale:
            if not request.acks:
                raise
            await self._trade_one_by_one(request)
            return
        self._told(request.acks, asked_at)
        self._hear(reply, asked_at)

    async def _take(self, request: p.TakeLeases) -> p.Leases:
        return await self._await(request, channel="leases-data", timeout_s=self.patience_s)

    async def _trade_one_by_one(self, request: p.TakeLeases) -> None:
        for ack in request.acks:
            asked_at = self._process.clock()
            try:
                await self._take(self._request(0, [ack]))
            except Stale as error:
                self._lose(ack, error)
            else:
                self._told((ack,), asked_at)

    # ---- the training task -------------------------------------------------------------------------------------------

    async def wait_for(self, timeout_s: float) -> None:
        """See `wait`."""
        self._starving = True
        self._bell.put(None)
        seen = self.state
        if not self.ready and self.error is None and self.state is seen and await self._heard.wait(timeout_s):
            self._heard.pop()
        self.surface()

    async def end(self) -> None:
        """See `close`."""
        self._closing = True
        self._bell.put(None)
        await asyncio.wait([self.over], timeout=5.0)

    def lapsed(self, held: HeldLease) -> bool:
        """See `LoaderFeed._left`: it was not worked off in its time."""
        if self._process.clock() < held.until:
            return False
        self.stop(held, held.received)
        return True


_nobody: Any = None


class UnderWay(Exception):
    """The thread would wait for an answer now."""


class Turns:
    """A caller that cannot wait: it says what it was asked to send, and the second time it has the answer."""

    def __init__(self) -> None:
        self.wanted: tuple[p.Message, str, float | None, bool] | None = None
        self.outcome: p.Message | HooksError | None = None

    async def ask(self, call: Call) -> None:
        """Send it, and wait for the answer."""
        wanted, self.wanted = self.wanted, None
        assert wanted is not None
        request, channel, timeout_s, again = wanted
        try:
            self.outcome = await call(request, channel=channel, timeout_s=timeout_s, again=again)
        except HooksError as error:
            self.outcome = error

    def call(
        self, request: p.Message, *, channel: str = "main", timeout_s: float | None = None, again: bool = True
    ) -> p.Message:
        outcome, self.outcome = self.outcome, None
        if outcome is None:
            self.wanted = request, channel, timeout_s, again
            raise UnderWay
        if isinstance(outcome, HooksError):
            raise outcome
        return outcome


class Post(Reporter):
    """`Reporter._run`, awaited."""

    def __init__(
        self,
        loop: Loop,
        process: Process,
        call: Call,
        seat: tuple[str, tuple[str, int, int]],
        engine: Any,
        beat_s: float,
    ) -> None:
        self._turns = Turns()
        super().__init__(self._turns, *seat, engine)
        self._process, self._await = process, call
        self._mail = Bell(loop, process)
        self._over, self._beat_s = False, beat_s

    def begin(self, cadence: p.Cadence) -> None:
        self.cadence = cadence
        self._process.spawn(self._live())

    def notice(self, notice: Any) -> None:
        if not self._process.dead:
            self._mail.put(notice)

    def saved(self, generation: p.Generation, copy_s: float, *, durable: bool = False) -> None:
        self._copy_s[generation] = copy_s
        self._mail.put(_Saved(generation, durable))

    def skipped(self, generation: p.Generation) -> None:
        self._mail.put(_Skipped(generation))

    def wake(self) -> None:
        self._mail.put(_Woken())

    def beat_now(self) -> None:
        self._mail.put(_BeatNow())

    def end(self) -> None:
        """No more beats. What is not delivered is not."""
        self._over = True
        self._mail.put("end")

    async def _live(self) -> None:
        next_beat = 0.0
        while not self._over:
            rung = await self._mail.wait(max(0.0, next_beat - self._process.clock()))
            notice = self._mail.pop() if rung else None
            if isinstance(notice, _BeatNow):
                next_beat = 0.0
            elif notice is not None and notice != "end":
                self._take(notice)
            await self._turn(self._deliver)
            if self._process.clock() >= next_beat and not self._over:
                await self._turn(self._beat)
                next_beat = self._process.clock() + max(self._beat_s, self._asked_s)
            await self._speak()

    async def _speak(self) -> None:
        """See `Preemption.speak`."""
        of = self.preemption
        while of is not None and not self._over and (word := of.word()) is not None:
            reply = await self._turn(lambda word=word: self._call(word, "preempt"))
            if reply is None:
                return
            of.hear(word, reply)

    async def _turn(self, work: Callable[[], T]) -> T | None:
        """Let `work` go on until it wants nothing more of the master."""
        turns = self._turns
        while not self._over:
            try:
                return work()
            except UnderWay:
                await turns.ask(self._await)
            if isinstance(turns.outcome, MasterAway):
                return work()
        return None
