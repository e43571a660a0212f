"""A trainer's memory at its keeper: requested, mapped and populated on a thread, before the save. No torch.

New memory costs 130 ms per GB in the keeper and as much here; a save that finds it ready does not wait for that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_client import KeeperClient
from dlrover_hooks.checkpoint.memory.segment import NOTE_BYTES, SharedSegment
from dlrover_hooks.errors import CheckpointError, HooksError, KeeperAway
from dlrover_hooks.host.background_thread import BackgroundThread

PREPARE_WAIT_S = 1.0
"""A save waits at most this long for memory that is being prepared; then it is skipped and counted."""
SPARE_BYTES = 64 << 10
"""Allows a header to grow without a new segment. A request for 0 bytes gets this much, for notes."""
_ALLOCATE_S = 300.0


class MemoryNotReady(CheckpointError):
    """The memory is being prepared: a later save will find it ready."""


class SegmentClient:
    """The segment of one worker. `prepare`, `ready`, `take` and `close` on the training thread; `lose` from any.

    `allocated(reply)` is called on the helper thread, before the memory is used; `closing()` on the training thread,
    before memory is unmapped.
    """

    def __init__(
        self,
        line: KeeperClient,
        allocated: Callable[[keeper_messages.Allocated], None],
        closing: Callable[[], None] = lambda: None,
    ) -> None:
        self._line, self._allocated, self._closing = line, allocated, closing
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._shared: SharedSegment | None = None
        self._next: SharedSegment | None = None
        """Ready, but not in use yet."""
        self._stale: list[SharedSegment] = []
        """Made by keepers that are gone; not closed yet."""
        self._notes: dict[int, tuple[bytes, bytes]] = {}
        self._note_bytes = NOTE_BYTES
        self._lives = 0
        self._wanted = 0
        self._closed = False
        self._helper: BackgroundThread | None = None
        self._error: HooksError | None = None

    @property
    def ready(self) -> bool:
        """The memory requested last is ready: a save of that size does not wait."""
        with self._changed:
            return self._fits(self._wanted)

    def prepare(self, nbytes: int) -> None:
        """Prepare slots of `nbytes` in the background; the present ones stay until then. Never blocks."""
        with self._changed:
            self._wanted = nbytes
            self._see_to_it()

    def expect(self, note_bytes: int) -> None:
        """Reserve space for notes of `note_bytes` in the next segment; longer notes are not written. Never blocks."""
        with self._changed:
            self._note_bytes = max(self._note_bytes, note_bytes)
            self._see_to_it()

    def _see_to_it(self) -> None:
        if self._closed or self._helper is not None or self._serves():
            return
        self._error = None
        helper = BackgroundThread(
            "dlrover-hooks-memory", self._work, where="the memory for saves", kind=CheckpointError, failed=self._worked
        )
        try:
            helper.start()
        except RuntimeError as error:
            self._error = KeeperAway(f"no thread can be started that asks for memory: {error}")
        else:
            self._helper = helper  # it needs this lock before it can reset `_helper`

    def take(self, nbytes: int) -> SharedSegment:
        """The segment, with slots of at least `nbytes`. If it is a new one, the previous one is closed.

        Raises:
            MemoryNotReady: the memory is being prepared, and was not ready within `PREPARE_WAIT_S`.
            KeeperAway: there is no keeper, it has not enough memory, or `close` was called.
            UsageError: another process is registered for this worker.
        """
        with self._changed:
            if not self._fits(nbytes):
                self._await(nbytes)
                if self._shared is not None and self._helper is None and self._error is not None:
                    self._stale.append(self._shared)  # both do not fit into memory: give up the old one
                    self._shared = None
                    self._switch()
                    self._await(nbytes)
            self._switch()
            if self._shared is not None and self._fits(nbytes):
                return self._shared
            if self._helper is None and self._error is not None:
                raise self._error
            if self._closed:
                raise KeeperAway("this worker has left its keeper", hint="save before the job is left")
            raise MemoryNotReady("the memory is being prepared", hint="a save after this one will find it ready")

    def _await(self, nbytes: int) -> None:
        self.prepare(nbytes)
        self._changed.wait_for(lambda: self._helper is None or self._fits(nbytes), PREPARE_WAIT_S)

    def note(self, place: int, data: bytes, body: bytes) -> None:
        """Write the note `data + body` into the present memory, and into later segments. Any thread, but one at a time.

        Without memory, some is requested.
        """
        with self._lock:
            self._notes[place] = data, body
            for shared in (self._shared, self._next):
                if shared is not None:
                    shared.note(place, data, body)
            if not self._fits(0):
                self._see_to_it()

    def lose(self) -> None:
        """The keeper is gone, and its memory is unusable. Any thread."""
        with self._changed:
            self._lives += 1
            self._stale += [shared for shared in (self._shared, self._next) if shared is not None]
            self._shared = self._next = None

    def close(self) -> None:
        """Unmap, and end the thread. The connection must be closed already. Idempotent."""
        with self._changed:
            self._closed, helper = True, self._helper
        if helper is not None:
            helper.stop()
        self.lose()
        with self._changed:
            self._switch()

    def _fits(self, nbytes: int) -> bool:
        shared = self._next or self._shared
        return shared is not None and shared.slot_bytes >= nbytes and self._line.seated

    def _serves(self) -> bool:
        """Everything requested is there."""
        shared = self._next or self._shared
        return shared is not None and shared.serves(self._wanted, self._note_bytes) and self._line.seated

    def _switch(self) -> None:
        """Use the prepared memory and close the rest. Only on the training thread, where no copy can be in progress."""
        if self._next is not None:
            self._stale += [self._shared] if self._shared is not None else []
            self._shared, self._next = self._next, None
        if self._stale:
            self._closing()
        while self._stale:
            self._stale.pop().close()

    def _work(self) -> None:
        error = None
        try:
            while self._make():
                pass
        except HooksError as raised:
            error = raised
        except OSError as raised:
            error = KeeperAway(f"the memory cannot be mapped: {raised}")
        self._worked(error)

    def _worked(self, error: HooksError | None) -> None:
        """The helper thread ends; the next `take` raises `error`."""
        with self._changed:
            self._helper, self._error = None, error
            self._changed.notify_all()

    def _make(self) -> bool:
        """Get what is requested now; True if more has been requested since."""
        link = self._line.seat()
        with self._changed:
            lives, wanted, note_bytes = self._lives, self._wanted, self._note_bytes
            gives = self._shared is None and self._next is None and not self._stale
            if self._serves():  # only the registration was missing
                return False
        size = wanted + max(wanted // 64, SPARE_BYTES)
        reply, fd = link.call(
            lambda ref: keeper_messages.Allocate(ref=ref, slot_bytes=size, note_bytes=note_bytes, gives=gives),
            timeout_s=_ALLOCATE_S,
        )
        if isinstance(reply, keeper_messages.Refused):
            raise KeeperAway(reply.reason, hint=reply.hint)
        shared = SharedSegment.attach(fd)
        with self._changed:
            if self._closed or lives != self._lives:
                shared.close()
                return not self._closed
            self._allocated(reply)
            self._stale += [self._next] if self._next is not None else []
            self._next = shared
            old = [one for one in (self._shared, *self._stale) if one is not None and one.number != shared.number]
            for place, note in self._notes.items():
                shared.note(place, *note)
                for one in old:  # it may still be read for a while
                    one.note(place, b"")
            self._changed.notify_all()
            return not shared.serves(self._wanted, self._note_bytes)
