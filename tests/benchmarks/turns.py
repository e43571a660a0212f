"""Two ways of training in one process, a step each in turn, so that a busy machine hurts both alike."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

FIRST, TURN_S = 30, 60.0
"""Steps at the start that are left out; timeout of one turn."""


class _Turns:
    """Lets two threads make a step each, in turn."""

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
    """CPU seconds of this thread, and wall seconds, from one turn of the step's end to that of the next."""

    def __init__(self, turns: _Turns, mine: int) -> None:
        self._turns, self._mine, self._begun = turns, mine, (0.0, 0.0)
        self.cpu_s, self.wall_s = list[float](), list[float]()

    def step_ended(self) -> None:
        """To be called by the training at the end of each step."""
        self.cpu_s.append(time.thread_time() - self._begun[0])
        self.wall_s.append(time.perf_counter() - self._begun[1])
        self._turns.hand_over(self._mine)
        self._turns.wait(self._mine)
        self._begun = time.thread_time(), time.perf_counter()


def measured(
    name: str, steps: int, train: Callable[[Clock, int, bool], object]
) -> tuple[dict[str, Any], dict[str, float]]:
    """The conditions, and the cost of the hook in per cent of the CPU time of a step without it.

    Args:
        name: of the framework, for the names of the figures.
        steps: of each way, beside the first ones.
        train: makes so many steps, with the hook or without it.
    """
    turns, failures = _Turns(), list[BaseException]()
    clocks = Clock(turns, 0), Clock(turns, 1)

    def one(mine: int) -> None:
        try:
            turns.wait(mine)
            train(clocks[mine], FIRST + steps, mine == 1)
        except BaseException as error:
            failures.append(error)
        finally:
            turns.end()

    plain = threading.Thread(target=one, args=(0,))
    plain.start()
    one(1)  # on the main thread, as a training script would
    plain.join(TURN_S)
    if failures:
        raise failures[0]
    without, hooked = (clock.cpu_s[FIRST:] for clock in clocks)
    more = [b - a for a, b in zip(without, hooked, strict=True)]
    step_s = statistics.median(without)
    conditions = {
        f"{name}_steps": len(hooked),
        f"{name}_step_ms": step_s * 1e3,
        f"{name}_step_wall_ms": statistics.median(clocks[0].wall_s[FIRST:]) * 1e3,
        f"{name}_hook_step_wall_ms": statistics.median(clocks[1].wall_s[FIRST:]) * 1e3,
        f"{name}_hook_us": statistics.median(more) * 1e6,
        f"{name}_hook_mean_us": statistics.mean(more) * 1e6,
    }
    return conditions, {f"callback_overhead_pct_{name}": 100 * statistics.median(more) / step_s}
