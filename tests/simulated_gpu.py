"""A GPU in simulated time: a queue of work behind the Python code of one rank."""

from __future__ import annotations

from collections.abc import Iterable

AHEAD_S = 0.5
"""Work that Python may have queued; with more it waits. CUDA limits the number of operations instead."""


class SimulatedClock:
    """Seconds, which only its user moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedGpu:
    """Has marks as `DeviceEvents`. `clock`: that of the Python code which queues the work."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock, self.free_at = clock, 0.0
        self.capturing, self.released = False, 0

    def launch(self, seconds: float) -> None:
        """Queue work that takes so long."""
        self.free_at = max(self.free_at, self.clock.now) + seconds
        self.clock.now = max(self.clock.now, self.free_at - AHEAD_S)

    def wait_until(self, then: float) -> None:
        """Queue a wait, as for a collective that ends at `then`."""
        self.free_at = max(self.free_at, then)

    def synchronize(self) -> None:
        """Python waits for all that is queued, as `loss.item()` does."""
        self.clock.now = max(self.clock.now, self.free_at)

    def record(self) -> float | None:
        return None if self.capturing else max(self.free_at, self.clock.now)

    def reached(self, mark: float) -> bool:
        return mark <= self.clock.now

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier

    def release(self, marks: Iterable[float]) -> None:
        self.released += len(list(marks))
