"""The parts of steps on a device that runs asynchronously to Python, such as a GPU.

Python queues work for the device and goes on, so its own clock says nothing of how long that work takes. A mark is
queued at each border between two parts instead, and the device notes when it comes to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
MOST_PENDING = 64
"""The most steps that are kept until the device has finished them. With more, the oldest are dropped, and not measured.
A queue of CUDA holds some thousand operations, so Python is rarely more than a few steps ahead."""

MOST_MARKS = 4096
"""The most marks in a step; a step with more is not measured. About a thousand micro-batches make this many."""


class DeviceEvents(Protocol):
    """Marks in a device's queue of work."""

    def record(self) -> Any | None:
        """A mark behind what is queued by this thread so far. None: it cannot be made now."""

    def reached(self, mark: Any) -> bool:
        """Whether the device has come to the mark. Does not wait."""
        ...

    def seconds(self, earlier: Any, later: Any) -> float:
        """Time between two marks that were reached."""
        ...

    def release(self, marks: Iterable[Any]) -> None:
        """These marks were reached, and are not needed any more."""


class _Step(NamedTuple, Generic[T]):
    begin: Any
    ends: list[tuple[int, Any]]
    """Of each part of the step the number, and the mark at its end."""
    kept: T


class DeviceTimeline(Generic[T]):
    """Marks the ends of parts, which have the numbers 0 to `parts` - 1. One thread at a time.

    Where the device waits for Python, that time is in the part in which Python queues the next work.
    """

    def __init__(self, events: DeviceEvents, parts: int) -> None:
        self._events, self._parts = events, parts
        self._begin: Any = events.record()
        self._ends: list[tuple[int, Any]] = []
        self._pending: deque[_Step[T]] = deque(maxlen=MOST_PENDING)

    def mark(self, part: int) -> None:
        """This part ends behind what is queued so far, and the next one begins."""
        if len(self._ends) == MOST_MARKS:  # a loop that never steps
            self._begin, self._ends = None, []
        self._ends.append((part, self._events.record()))

    def end_step(self, kept: T, complete: bool) -> None:
        """The step ends with the last mark. Unless it is `complete`, it is not measured. `kept`: for `measured`."""
        step = _Step(self._begin, self._ends, kept)
        self._begin, self._ends = step.ends[-1][1], []
        if complete and step.begin is not None and all(mark is not None for _, mark in step.ends):
            self._pending.append(step)

    def measured(self) -> Iterator[tuple[list[float], T]]:
        """Of each step that the device has finished meanwhile the seconds of its parts, and what was `kept`."""
        while self._pending and all(self._events.reached(mark) for _, mark in reversed(self._pending[0].ends)):
            begin, ends, kept = self._pending.popleft()
            seconds, last = [0.0] * self._parts, begin
            for part, mark in ends:
                seconds[part] += self._events.seconds(last, mark)
                last = mark
            self._events.release([begin, *(mark for _, mark in ends[:-1])])  # the next step begins with the last one
            yield seconds, kept
