"""Hashes slots on worker threads, numbered in the order in which they were published. No torch."""

from __future__ import annotations

from collections.abc import Callable

from dlrover_hooks.checkpoint.memory.keeper_segments import Segment, prove
from dlrover_hooks.checkpoint.memory.slot_states import HashedSlot
from dlrover_hooks.host.thread_pool import ThreadPool


class SlotHasher:
    """Hashes slots on threads. All calls, and `done(segment, slot, outcome)`, are on the loop's thread."""

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        done: Callable[[Segment, int, HashedSlot | Exception | None], None],
    ) -> None:
        self._threads = ThreadPool("hash", 2, post)
        self._done = done
        self._number, self._under_way = 0, dict[int, int]()
        """Bytes, by number."""
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        """Calls to be made once all hashes up to this number are done."""

    @property
    def pending(self) -> int:
        """Number of hashes whose outcome has not been given to `done`."""
        return self._threads.pending

    @property
    def pending_bytes(self) -> int:
        """Bytes that are still to be hashed."""
        return sum(self._under_way.values())

    def submit(self, segment: Segment, index: int, seq: int) -> None:
        """Hash this slot of the segment as it was at sequence number `seq`."""
        self._number += 1
        number = self._number
        self._under_way[number] = segment.shared.slot(index).image_bytes

        def then(proof: HashedSlot | Exception | None) -> None:
            self._under_way.pop(number)
            self._done(segment, index, proof)
            self._call_waiting()

        self._threads.submit(lambda: prove(segment.shared, index, seq), then)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call()` once everything submitted so far is done; at once if nothing is pending."""
        self._waiting.append((self._number, call))
        self._call_waiting()

    def _call_waiting(self) -> None:
        oldest = min(self._under_way, default=self._number + 1)
        for one in [one for one in self._waiting if one[0] < oldest]:
            self._waiting.remove(one)
            one[1]()
