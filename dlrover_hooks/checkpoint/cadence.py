"""When to save and when to make durable. Pure: from the same cadence and saves every rank comes to the same answer."""

from __future__ import annotations

from collections import deque

from dlrover_hooks.protocol import Cadence, Generation


def save_due(cadence: Cadence, step: int) -> bool:
    """True if `step` is to be saved. While the master knows no step time (`every` 0): at 1, 2, 4, 8, ..."""
    if step < 1:
        return False
    return step % cadence.every == 0 if cadence.every else step & (step - 1) == 0


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
