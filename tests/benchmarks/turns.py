"""Two ways of training in one process, some steps each in turn, so that a busy machine hurts both alike."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from dlrover_hooks.session import Session

TURN = 6
"""Steps of one turn. Short, because the speed of a machine that others use changes by a tenth within a second."""
WARM, STEPS = 60, 240
"""Steps of each way in a round: not measured, as first steps are slow and saved more often, and measured."""
TURN_S = 120.0
"""Timeout of one turn."""
STEP_S = 5e-3
"""CPU time of a step without the hook, about. Machines differ by a factor of three: each trains a model of its size."""


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
    """CPU seconds of this thread, and wall seconds, of a step: the mean over all measured ones, saves among them."""

    def __init__(self, turns: _Turns, mine: int) -> None:
        self._turns, self._mine, self._steps, self._begun = turns, mine, 0, (0.0, 0.0)
        self.cpu_s = self.wall_s = 0.0
        self.session: Callable[[], Session | None] = lambda: None
        """The session of the training, if it has one: the other one's turn is no part of its steps."""

    def step_ended(self) -> None:
        """To be called by the training at the end of each step."""
        if not self._steps:  # what this thread starts, the keeper, is started by now
            os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        self._steps += 1
        if self._steps % TURN:
            return
        if self._steps > WARM:
            self.cpu_s += (time.thread_time() - self._begun[0]) / STEPS
            self.wall_s += (time.perf_counter() - self._begun[1]) / STEPS
        self._turns.hand_over(self._mine)
        self._turns.wait(self._mine)
        if (session := self.session()) is not None:
            session._pace._last = None
        self._begun = time.thread_time(), time.perf_counter()


Train = Callable[[Clock, int, bool, int], object]
"""Makes so many steps, with the hook or without it, of a model of this size."""


def measured(name: str, rounds: int, train: Train, sizes: Sequence[int]) -> tuple[dict[str, Any], dict[str, float]]:
    """The conditions, and the cost of the hook in per cent of the CPU time of a step without it: the median round.

    Each way has a thread of its own, as the main thread's memory is managed otherwise. Both run on one processor, as
    two are not equally fast. A model's place in memory shifts its steps, by some per cent if it does not fit into the
    processor's cache: each round has new models, and the hook changes to the other thread.

    Args:
        name: of the framework, for the names of the figures.
        rounds: of `STEPS` steps of each way.
        train: called on two threads.
        sizes: of models, ascending. The one whose step is nearest to `STEP_S` is measured.
    """
    size, pairs = _fitting(train, sizes), list[tuple[Clock, Clock]]()
    for number in range(rounds):
        one, other = _trained(train, size, [number % 2 == 0, number % 2 == 1])
        pairs.append((other, one) if number % 2 == 0 else (one, other))
    each = [100 * (hook.cpu_s / plain.cpu_s - 1) for plain, hook in pairs]
    step_s = statistics.median(plain.cpu_s for plain, _ in pairs)
    conditions = {
        f"{name}_rounds": rounds,
        f"{name}_model_size": size,
        f"{name}_step_ms": step_s * 1e3,
        f"{name}_step_wall_ms": statistics.median(plain.wall_s for plain, _ in pairs) * 1e3,
        f"{name}_hook_step_wall_ms": statistics.median(hook.wall_s for _, hook in pairs) * 1e3,
        f"{name}_hook_us": statistics.median(each) / 100 * step_s * 1e6,
        f"{name}_overhead_pct_of_each": [round(one, 1) for one in each],
    }
    return conditions, {f"callback_overhead_pct_{name}": statistics.median(each)}


def _fitting(train: Train, sizes: Sequence[int]) -> int:
    """See `measured`."""
    found = dict[int, float]()
    for size in sizes:
        (clock,) = _trained(train, size, [False])
        found[size] = abs(clock.cpu_s - STEP_S)
        if clock.cpu_s > STEP_S:
            break
    return min(found, key=found.__getitem__)


def _trained(train: Train, size: int, hooks: Sequence[bool]) -> list[Clock]:
    """The clocks of trainings with the hook or without it, one or two, each on a thread of its own."""
    turns, failures = _Turns(), list[BaseException]()
    clocks = [Clock(turns, mine) for mine in range(len(hooks))]
    if len(hooks) == 1:
        turns.end()

    def one(mine: int) -> None:
        try:
            turns.wait(mine)
            train(clocks[mine], WARM + STEPS, hooks[mine], size)
        except BaseException as error:
            failures.append(error)
        finally:
            turns.end()

    threads = [threading.Thread(target=one, args=(mine,)) for mine in range(len(hooks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TURN_S * (2 + 2 * STEPS / TURN))
    if failures:
        raise failures[0]
    return clocks
