"""When to save and when to persist. Pure: the same cadence and saves give the same answer on every rank."""

from __future__ import annotations

from collections import deque

from dlrover_hooks.protocol import Cadence, Generation


def save_due(cadence: Cadence, step: int) -> bool:
    """True if `step` is to be saved. Until the master has a step time: 1, 2, 4, 8, ... steps after `begun_step`."""
    done = step - cadence.begun_step
    if done < 1:
        return False
    return step % cadence.every == 0 if cadence.every else done & (done - 1) == 0


class Durable:
    """Picks the generation to persist: the first saved one at or after `Cadence.persist_from`.

    Ranks receive `persist_from` at different moments but pick the same generation, because the choice depends on the
    saved steps alone. If it arrives too late, the slot was overwritten, the rank votes FAILED and the master retries.
    """

    def __init__(self, remember: int = 16) -> None:
        self._saved: deque[Generation] = deque(maxlen=remember)
        self._served: int | None = None

    def saved(self, generation: Generation) -> None:
        self._saved.append(generation)

    def due(self, cadence: Cadence) -> Generation | None:
        """The generation to persist now, returned once per `persist_from`; None if nothing is due or saved yet."""
        start = cadence.persist_from
        if start is None or start == self._served:
            return None
        found = next((generation for generation in self._saved if generation.step >= start), None)
        if found is not None:
            self._served = start
        return found


class Passing:
    """The progress of a rank. `step` is `Vote.passed`. Each save is expected to be voted for.

    A save that was never hashed, because the keeper died or its copy failed, is forgotten once newer ones fill all
    slots.
    """

    def __init__(self, slots: int = 3) -> None:
        self._saved: deque[int] = deque(maxlen=slots)
        self._voted: set[int] = set()
        self._newest = 0

    @property
    def step(self) -> int:
        """No further vote follows for steps before this one."""
        return min((step for step in self._saved if step not in self._voted), default=self._newest + 1)

    def saved(self, step: int) -> None:
        """Its vote will follow, or has been sent already."""
        if not self._saved or step > self._saved[-1]:
            self._newest = max(self._newest, step)
            self._saved.append(step)
            self._voted &= set(self._saved)

    def skipped(self, step: int) -> None:
        """No vote will follow for it."""
        self._newest = max(self._newest, step)

    def voted(self, step: int) -> None:
        """Its vote is being sent, before any vote that reports this newer progress."""
        self.saved(step)
        self._voted.add(step)


class StepPace:
    """The duration of optimizer steps, from the moments at which they ended."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Smoothed; 0 until two steps were seen."""
        self._last: tuple[int, float] | None = None

    def at(self, step: int, now: float) -> float | None:
        """`step` ended at `now`. Returns its duration if the previous step was seen; None if `step` is repeated."""
        last, seconds = self._last, None
        if last is None or step != last[0]:
            self._last = (step, now)
        if last is not None and step > last[0]:
            seconds = (now - last[1]) / (step - last[0])
            self.step_s = seconds if not self.step_s else 0.9 * self.step_s + 0.1 * seconds
        return seconds if last is not None and step == last[0] + 1 else None
