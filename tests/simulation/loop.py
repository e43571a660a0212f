"""One thread, one virtual time line: an event loop that never waits, and the processes that run on it.

Every callback belongs to the process whose task or timer asked for it (a context variable says which). A killed
process never runs again, not even its `finally`; a stopped one goes on where it was; each has a clock of its own.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol

Item = tuple[Context, Callable[..., Any], tuple[Any, ...]]


class Process:
    """Something that can be killed or stopped. `rate`: its clock's seconds in one true second."""

    def __init__(self, name: str, loop: Loop, *, rate: float = 1.0) -> None:
        self.name, self.rate = name, rate
        self.dead = self.frozen = False
        self.runs = True
        """It is neither."""
        self.ends: list[Callable[[], None]] = []
        """Called when it dies."""
        self.loop = loop
        self._held: list[Item] = []
        self._context = Context()
        self._context.run(_OWNER.set, self)

    def clock(self) -> float:
        """Its monotonic clock."""
        return self.loop.now * self.rate

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` in this process."""
        return self.run(self.loop.create_task, work)

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call as this process."""
        return self.context().run(call, *args)

    def context(self) -> Context:
        """For what runs as this process."""
        return self._context.copy()

    async def sleep(self, seconds: float) -> None:
        """By its own clock."""
        await self.loop.sleep(seconds)

    def kill(self) -> None:
        """As `kill -9`."""
        if not self.dead:
            self.dead, self.runs = True, False
            for end in self.ends:
                end()

    def freeze(self) -> None:
        """As SIGSTOP."""
        self.frozen, self.runs = True, False

    def thaw(self) -> None:
        """As SIGCONT."""
        self.frozen, self.runs = False, not self.dead
        held, self._held = self._held, []
        self.loop.ready.extend(held)

    def hold(self, item: Item) -> None:
        self._held.append(item)


_OWNER: ContextVar[Process | None] = ContextVar("owner", default=None)


def current() -> Process:
    """The process that runs."""
    owner = _OWNER.get()
    assert owner is not None
    return owner


def monotonic() -> float:
    """`time.monotonic` of the running process; nobody runs any more where coroutines are closed."""
    owner = _OWNER.get()
    return owner.clock() if owner is not None else 0.0


MOST = 200_000
"""Moments of one seed."""
TICK_S = 1e-6
"""No timer comes sooner: rounding must not make time stand still."""
MOST_AT_ONCE = 20_000
"""So many callbacks at one moment are a loop that waits for nothing."""


class Timer(list[Any]):
    """What `call_later` returns: when, a number that no other timer has, and what to do then (None: nothing)."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = None


class Disk(Protocol):
    """Whose methods run in threads. `pace`: seconds before and after the deed."""

    def pace(self, args: tuple[Any, ...]) -> tuple[float, float]: ...


class Loop(asyncio.AbstractEventLoop):
    """As much of an event loop as asyncio's futures, tasks, locks and `wait` ask for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ready: deque[Item] = deque()
        self.stopped = False
        self.tasks: list[asyncio.Task[Any]] = []
        self._timers: list[list[Any]] = []
        """A heap, in the form of `Timer`; they are found in order by their first two places."""
        self._count = self.moments = 0
        self._outside = Context()

    def time(self) -> float:
        return self.now

    get_debug: Any = staticmethod(bool)
    """False, without a call of Python: every future asks."""

    def is_running(self) -> bool:
        return True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Futures that nobody asks: the process died."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        del context
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name)
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
        self.tasks.append(task)
        return task

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        self.ready.append((copy_context() if context is None else context, callback, args))

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        """By the clock of the process that asks."""
        owner = _OWNER.get()
        true_s = delay / owner.rate if owner is not None else delay
        return self._schedule(true_s, (copy_context() if context is None else context, callback, args))

    def deliver(self, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        """Call it as nobody: what is on its way arrives though its sender is dead."""
        self._schedule(delay, (self._outside, callback, args))

    def _schedule(self, delay: float, item: Item) -> Timer:
        self._count += 1
        timer = Timer((self.now + (delay if delay > TICK_S else TICK_S), self._count, item))
        heapq.heappush(self._timers, timer)
        return timer

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """There are no threads: the work is done a moment later, unless the process is killed before."""
        done = self.create_future()
        disk: Disk = getattr(func, "__self__", None) or args[0]
        before, after = disk.pace(args)

        def perform() -> None:
            try:
                settle, outcome = done.set_result, func(*args)
            except Exception as error:
                settle, outcome = done.set_exception, error
            self.call_later(after, lambda: None if done.done() else settle(outcome))

        self.call_later(before, perform)
        return done

    async def sleep(self, seconds: float) -> None:
        woken = self.create_future()
        self.call_later(seconds, _wake, woken)
        await woken

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self, until: float) -> None:
        """Go on to `until`, or until `stopped`, or until nothing will ever happen."""
        asyncio._set_running_loop(self)
        ready, timers, at_once = self.ready, self._timers, 0
        try:
            while not self.stopped:
                if ready:
                    item = context, callback, args = ready.popleft()
                    owner = context.get(_OWNER)
                    if owner is None or owner.runs:
                        context.run(callback, *args)
                    elif not owner.dead:
                        owner.hold(item)
                    at_once += 1
                    if at_once > MOST_AT_ONCE:
                        raise RuntimeError(f"time stands still: {callback}")
                elif not timers or timers[0][0] > until:
                    return
                else:
                    at, _, item = heapq.heappop(timers)
                    if item is not None:
                        self.now, at_once = at, 0
                        self.moments += 1
                        ready.append(item)
                        if self.moments > MOST:
                            raise RuntimeError(f"{MOST} moments, and no end: {item[1:]} {timers[:3]}")
        finally:
            asyncio._set_running_loop(None)

    def end(self) -> None:
        """Close every coroutine, so that none is collected while another simulation runs."""
        self.stopped, self._timers = False, []
        self.ready.clear()
        asyncio._set_running_loop(self)
        for task in self.tasks:
            if not task.done():
                coro: Any = task.get_coro()
                try:
                    coro.close()
                except (RuntimeError, asyncio.InvalidStateError):
                    continue
        asyncio._set_running_loop(None)
        self.ready.clear()
        self._timers, self.tasks = [], []


def _wake(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)
