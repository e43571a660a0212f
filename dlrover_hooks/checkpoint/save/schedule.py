"""When to save. Pure: the same cadence gives the same answer on every rank."""

from __future__ import annotations

from dlrover_hooks.protocol import Cadence


def save_due(cadence: Cadence, step: int) -> bool:
    """True if `step` is to be saved. Until the master has a step time: 1, 2, 4, 8, ... steps after `begun_step`.

    A loop that was given an older checkpoint of the user's own is before `begun_step`. The master learns that from the
    vote for its first save, and sends another cadence.
    """
    done = step - cadence.begun_step
    if done < 0:
        return step % max(cadence.every, 1) == 0
    if done == 0:
        return False
    return step % cadence.every == 0 if cadence.every else done & (done - 1) == 0


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
