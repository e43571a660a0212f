"""Product code that blocks its thread, in virtual time: each thread is a greenlet of the process that it belongs to.

The code runs as it is. Where it would block, its greenlet gives way to the loop, which goes on with it later; a killed
process is never gone on with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from dlrover_hooks.errors import HooksError
from tests.simulation.loop import Loop, Process, current


class Bell:
    """What a thread waits for. `ring` may come first, from anywhere."""

    def __init__(self, loop: Loop) -> None:
        self._loop, self.rung, self.value = loop, False, None
        self._waiting: list[Callable[[], None]] = []

    def ring(self, value: Any = None) -> None:
        if not self.rung:
            self.rung, self.value = True, value
            for wake in self._waiting:
                self._loop.deliver(0.0, wake)

    def wait(self, seconds: float | None = None) -> bool:
        """Block this thread until it is rung, or for some seconds of its process's clock. Whether it was rung."""
        if not self.rung:
            me, process, woken = getcurrent(), current(), False

            def wake() -> None:
                nonlocal woken
                if not woken:
                    woken = True
                    me.switch()

            def later() -> None:  # as the process: it may be stopped or dead
                process.run(self._loop.call_soon, wake)

            self._waiting.append(later)
            if seconds is not None:
                self._loop.call_later(seconds, wake)
            assert me.parent is not None, "the event loop would block"
            me.parent.switch()
            self._waiting.remove(later)
        return self.rung


class Event(Bell):
    """Stands for `threading.Event`."""

    set = Bell.ring

    def is_set(self) -> bool:
        return self.rung


def start_thread(loop: Loop, process: Process, work: Callable[[], object]) -> None:
    """Run `work` as a thread of `process`. It gives way to the loop, also if another thread has started it."""
    loop_of_all = getcurrent()
    while loop_of_all.parent is not None:
        loop_of_all = loop_of_all.parent
    thread = greenlet(work, loop_of_all)
    thread.gr_context = process.context()
    process.run(loop.call_soon, thread.switch)


class ThreadedLoop(Loop):
    """A loop whose executors run their work in threads."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        del executor
        done = self.create_future()

        def work() -> None:
            try:
                settle, outcome = done.set_result, func(*args)
            except Exception as error:
                settle, outcome = done.set_exception, error
            if not done.done():
                settle(outcome)

        start_thread(self, current(), work)
        return done


class Threadlet:
    """Stands for `BackgroundThread`: of one run, without repetition."""

    def __init__(
        self, name: str, run: Callable[[], object], *, failed: Callable[[HooksError], object], **rest: object
    ) -> None:
        del name, rest
        self._process = current()
        self._loop, self._run, self._failed = self._process.loop, run, failed
        self.stopping = Event(self._loop)

    def start(self) -> None:
        start_thread(self._loop, self._process, self._live)

    def stop(self) -> None:
        self.stopping.set()

    def _live(self) -> None:
        try:
            self._run()
        except HooksError as error:
            self._failed(error)
