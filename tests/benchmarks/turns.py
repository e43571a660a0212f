"""Two ways of training in one process, some steps each in turn, so that a busy machine hurts both alike."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from dlrover_hooks.checkpoint.save.schedule import StepPace
from dlrover_hooks.session import Session

TURN = 60
"""Steps of one turn. A save falls into most turns: what it costs is shared out to their steps."""
TURN_S = 120.0
"""Timeout of one turn."""


class _Turns:
    """Lets two threads train in turn."""

    def __init__(self) -> None:
        self._changed, self._next, self._over = threading.Condition(), 0, False

    def wait(self, mine: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._over or self._next == mine, TURN_S), "the other one hangs"

    def hand_over(self, mine: int) -> None:
        with self._changed:
            self._next = 1 - mine
            self._changed.notify_all()

    def end(self) -> None:
        """The other one goes on alone."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class Clock:
    """CPU seconds of this thread, and wall seconds, of a step: the mean of each turn."""

    def __init__(self, turns: _Turns, mine: int) -> None:
        self._turns, self._mine, self._steps, self._begun = turns, mine, 0, (0.0, 0.0)
        self.cpu_s, self.wall_s = list[float](), list[float]()
        self.session: Callable[[], Session | None] = lambda: None
        """The session of the training, if it has one: the other one's turn is no part of its steps."""

    def step_ended(self) -> None:
        """To be called by the training at the end of each step."""
        self._steps += 1
        if self._steps % TURN:
            return
        self.cpu_s.append((time.thread_time() - self._begun[0]) / TURN)
        self.wall_s.append((time.perf_counter() - self._begun[1]) / TURN)
        self._turns.hand_over(self._mine)
        self._turns.wait(self._mine)
        if (session := self.session()) is not None:
            session._pace = StepPace()
        self._begun = time.thread_time(), time.perf_counter()


Train = Callable[[Clock, int, bool], object]
"""Makes so many steps, with the hook or without it."""


def measured(name: str, steps: int, train: Train) -> tuple[dict[str, Any], dict[str, float]]:
    """The conditions, and the cost of the hook in per cent of the CPU time of a step without it.

    Each way has a thread of its own: the main thread's memory is managed otherwise, which alone shifts a step by some
    per cent. All is done twice, with the threads exchanged.

    Args:
        name: of the framework, for the names of the figures.
        steps: of each way on each thread, beside the first turn.
        train: called on two threads.
    """
    more, without, walls = list[float](), list[float](), (list[float](), list[float]())
    for hooked in (0, 1):
        clocks = _both(steps, train, hooked)
        plain, hook = clocks[1 - hooked], clocks[hooked]
        more.append(statistics.median(b - a for a, b in zip(plain.cpu_s[1:], hook.cpu_s[1:], strict=True)))
        without += plain.cpu_s[1:]
        for wall, clock in zip(walls, (plain, hook), strict=True):
            wall.extend(clock.wall_s[1:])
    step_s, hook_s = statistics.median(without), statistics.mean(more)
    conditions = {
        f"{name}_steps": steps,
        f"{name}_step_ms": step_s * 1e3,
        f"{name}_step_wall_ms": statistics.median(walls[0]) * 1e3,
        f"{name}_hook_step_wall_ms": statistics.median(walls[1]) * 1e3,
        f"{name}_hook_us": hook_s * 1e6,
        f"{name}_hook_us_by_thread": [round(one * 1e6) for one in more],
    }
    return conditions, {f"callback_overhead_pct_{name}": 100 * hook_s / step_s}


def _both(steps: int, train: Train, hooked: int) -> tuple[Clock, Clock]:
    """The clocks of the two threads. `hooked`: which of them trains with the hook."""
    turns, failures = _Turns(), list[BaseException]()
    clocks = Clock(turns, 0), Clock(turns, 1)

    def one(mine: int) -> None:
        try:
            turns.wait(mine)
            train(clocks[mine], TURN + steps, mine == hooked)
        except BaseException as error:
            failures.append(error)
        finally:
            turns.end()

    threads = [threading.Thread(target=one, args=(mine,)) for mine in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TURN_S * (2 + 2 * steps / TURN))
    if failures:
        raise failures[0]
    return clocks
