"""When to save and when to make durable. Pure: from the same cadence and saves every rank comes to the same answer."""

from __future__ import annotations

from collections import deque

from dlrover_hooks.protocol import Cadence, Generation


def save_due(cadence: Cadence, step: int) -> bool:
    """True if `step` is to be saved. While the master knows no step time: 1, 2, 4, 8, ... steps after `begun_step`."""
    done = step - cadence.begun_step
    if done < 1:
        return False
    return step % cadence.every == 0 if cadence.every else done & (done - 1) == 0


class Durable:
    """Picks the generation to make durable: the first saved one at or after `Cadence.persist_from`.

    Ranks hear of `persist_from` at different moments but all pick the same generation, because the choice depends on
    the saved steps alone. Heard too late, the slot is gone, the rank votes FAILED and the master asks anew.
    """

    def __init__(self, remember: int = 16) -> None:
        self._saved: deque[Generation] = deque(maxlen=remember)
        self._served: int | None = None

    def saved(self, generation: Generation) -> None:
        self._saved.append(generation)

    def due(self, cadence: Cadence) -> Generation | None:
        """The generation to persist now, named once per `persist_from`; None if nothing is due or saved yet."""
        start = cadence.persist_from
        if start is None or start == self._served:
            return None
        found = next((generation for generation in self._saved if generation.step >= start), None)
        if found is not None:
            self._served = start
        return found


class Passing:
    """How far a rank has come: `step` is `Vote.passed`. A save is a promise of a vote, until it is voted for.

    One that was never hashed, because its keeper died or its copy failed, is forgotten once newer ones fill all slots.
    """

    def __init__(self, slots: int = 3) -> None:
        self._saved: deque[int] = deque(maxlen=slots)
        self._voted: set[int] = set()
        self._newest = 0

    @property
    def step(self) -> int:
        """Of older steps no further one will be voted for."""
        return min((step for step in self._saved if step not in self._voted), default=self._newest + 1)

    def saved(self, step: int) -> None:
        """Its vote is to come; it may have come already."""
        if not self._saved or step > self._saved[-1]:
            self._newest = max(self._newest, step)
            self._saved.append(step)
            self._voted &= set(self._saved)

    def skipped(self, step: int) -> None:
        """There will be no vote for it."""
        self._newest = max(self._newest, step)

    def voted(self, step: int) -> None:
        """The vote for it is on its way, before any that says how far the rank has come by now."""
        self.saved(step)
        self._voted.add(step)


class StepPace:
    """How long optimizer steps take, from the moments at which they were over."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Smoothed; 0 until two steps were seen."""
        self._last: tuple[int, float] | None = None

    def at(self, step: int, now: float) -> float | None:
        """`step` is over at `now`: how long it took, if the one before it was seen. Again for the same step: None."""
        last, seconds = self._last, None
        if last is None or step != last[0]:
            self._last = (step, now)
        if last is not None and step > last[0]:
            seconds = (now - last[1]) / (step - last[0])
            self.step_s = seconds if not self.step_s else 0.9 * self.step_s + 0.1 * seconds
        return seconds if last is not None and step == last[0] + 1 else None
