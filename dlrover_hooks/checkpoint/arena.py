"""One seat's shared memory: a sealed memfd with a header page and three slots (DL-90).

Where memfd_create is refused (a seccomp filter), a file without a name in /dev/shm or in the runtime folder: it cannot
be sealed, but like a memfd it is gone with its last user, however that ends.

    page 0    64 B: magic, slots, slot_bytes, number     then one line of 64 B per slot:
              seq u64 | attempt u64 | step u64 | image_len u64 | rank u32, world u32 | run 16 bytes | 8 spare
    slot k    a safetensors image (`image`)

`seq` is odd while the slot is being written; each store is one aligned 8-byte store. The trainer writes, the keeper
owns the memory and frees torn slots once the trainer is gone. On machines with a weak memory order the socket message
that follows a publication is the barrier. Linux only. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import uuid
from collections.abc import Collection, Sequence

from dlrover_hooks.checkpoint.image import PAGE
from dlrover_hooks.config import runtime_dir
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation, Message

SLOTS = 3
STUCK_STEPS = 8
"""While a slot is being persisted, a rank may have to leave a save out that another one makes. Then no generation gets
complete any more, and what each published last would block it until the store is done. So at steps divisible by this,
the same ones on all ranks, it gives way. The newest complete one stays on all ranks: no newer one can have become it.
"""
_MAGIC = int.from_bytes(b"DLRHOOK1", "little")
_LINE = 8  # words
_POPULATE_READ = 22
_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Slot(Message, frozen=True):
    """One line of the slot table, read at one moment. `generation` None: free (never written, or given back)."""

    index: int
    seq: int
    generation: Generation | None = None
    image_bytes: int = 0
    rank: int = 0
    world_size: int = 0

    @property
    def torn(self) -> bool:
        """A copy into it has begun and not ended."""
        return self.seq % 2 == 1


def choose_slot(
    slots: Sequence[Slot],
    newest_complete: Generation | None,
    persisting: Collection[Generation],
    *,
    run: str | None = None,
    step: int = 1,
) -> int | None:
    """The slot that the save of `step` may overwrite; None: there is none now, so skip this save.

    Never the newest memory-complete one, never one being persisted, never the newest published one, unless saves are
    stuck (see `STUCK_STEPS`). Torn and free slots come first, then the oldest. Slots of another run than `run` count as
    older than all of this run.
    """
    published = [slot for slot in slots if slot.generation is not None and not slot.torn]
    newest = max(published, key=lambda slot: _age(slot, run), default=None)
    usable = [slot for slot in slots if not _kept(slot, newest, newest_complete, persisting)]
    if not usable and newest is not None and _stuck(newest, newest_complete, persisting, step):
        return newest.index
    return min(usable, key=lambda slot: _age(slot, run)).index if usable else None


def _stuck(newest: Slot, newest_complete: Generation | None, persisting: Collection[Generation], step: int) -> bool:
    """What was published last is old, and still not complete: other ranks have left it out."""
    generation = newest.generation
    if generation is None or generation == newest_complete or generation in persisting:
        return False
    return step % STUCK_STEPS == 0 and step - generation.step >= STUCK_STEPS


def _kept(
    slot: Slot, newest: Slot | None, newest_complete: Generation | None, persisting: Collection[Generation]
) -> bool:
    if slot.torn or slot.generation is None:
        return False
    return slot is newest or slot.generation == newest_complete or slot.generation in persisting


def _age(slot: Slot, run: str | None) -> tuple[bool, bool, int, int]:
    if slot.torn or slot.generation is None:
        return (False, False, 0, 0)
    return (True, run in (None, slot.generation.run), slot.generation.attempt, slot.generation.step)


class Arena:
    """A mapping of one segment. One writer (the seat's trainer) at a time; reading is free for all.

    Views of slots must be dropped before `close`, or the mapping lives until they are.
    """

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        self.fd = -1
        self.nbytes = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self._view = memoryview(self._map)
        self._words = self._view[:PAGE].cast("Q")
        if self._words[0] != _MAGIC and any(self._view[:64]):
            raise Corrupt("this segment is not an arena")
        self._cells = (ctypes.c_uint64 * (PAGE // 8)).from_buffer(self._map) if writable else None
        self.slot_bytes = self._words[2]
        self.number: int = self._words[3]
        """Tells it from all other segments of its seat."""
        self.fd = fd  # from here on it is ours to close

    @classmethod
    def create(cls, seat: int, slot_bytes: int, slots: int = SLOTS) -> Arena:
        """A new sealed segment of slots of at least `slot_bytes`, all its pages resident. Takes 137 ms per GB.

        This process does not map them now: two that fill page tables at once take three times as long, and reading
        faults them in cheaply (20 ms per GB).

        Raises:
            OSError: there is not enough memory.
        """
        size = -(-slot_bytes // PAGE) * PAGE
        folder = shared_folder()
        fd = _memfd(f"dlrover-hooks-seat-{seat}") if folder is None else _nameless(folder)
        try:
            os.ftruncate(fd, PAGE + slots * size)
            os.posix_fallocate(fd, 0, PAGE + slots * size)
            if folder is None:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            arena = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        number = int.from_bytes(os.urandom(6), "little") | 1
        for index, word in enumerate((_MAGIC, slots, size, number)):
            arena._store(index, word)
        arena.slot_bytes, arena.number = size, number
        return arena

    @classmethod
    def attach(cls, fd: int, *, writable: bool = True) -> Arena:
        """Map a segment received from the keeper; takes over `fd`. Writable ones get their page tables filled now."""
        try:
            arena = cls(fd, writable=writable)
        except BaseException:
            os.close(fd)
            raise
        if writable:
            arena.populate()
        return arena

    def populate(self) -> None:
        """Map every page for writing, 123 ms per GB. Best effort: old kernels fault them in one by one later."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _libc.madvise(address, self.nbytes, _POPULATE_WRITE)

    def fault_in(self) -> None:
        """Map every page for reading, at a fifth of what touching them one by one costs. Best effort."""
        with contextlib.suppress(OSError):
            self._map.madvise(_POPULATE_READ)

    def close(self) -> None:
        """Unmap (once all views are gone) and close the descriptor. Idempotent."""
        self._cells = None
        self._words.release()
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:  # the keeper lets segments go while a thread may still read them
            os.close(self.fd)

    def slots(self) -> tuple[Slot, ...]:
        """The slot table now."""
        return tuple(self.slot(index) for index in range(self._words[1]))

    def seq(self, index: int) -> int:
        """The sequence word of a slot: one load."""
        return self._words[_LINE * (1 + index)]

    def slot(self, index: int) -> Slot:
        """One line; read again if it changed under the reading."""
        line = _LINE * (1 + index)
        while True:
            seq, attempt, step, length, ranks = self._words[line : line + 5]
            run = bytes(self._view[8 * (line + 5) : 8 * (line + 7)])
            if self._words[line] == seq:
                break
        if not length:
            return Slot(index=index, seq=seq)
        generation = Generation(attempt=attempt, step=step, run=run.hex())
        return Slot(index, seq, generation, length, ranks & 0xFFFFFFFF, ranks >> 32)

    def view(self, index: int, nbytes: int | None = None) -> memoryview:
        """The first `nbytes` of slot `index`."""
        start = PAGE + index * self.slot_bytes
        return self._view[start : start + (self.slot_bytes if nbytes is None else nbytes)]

    def begin(self, index: int) -> None:
        """Mark slot `index` as being written. Whoever dies from here on leaves it torn."""
        self._store(_LINE * (1 + index), self.seq(index) | 1)

    def publish(self, index: int, generation: Generation, rank: int, world_size: int, nbytes: int) -> None:
        """Its `nbytes` are all there: slot `index` is `generation`'s from this store on."""
        line = _LINE * (1 + index)
        low, high = (int.from_bytes(half, "little") for half in _halves(uuid.UUID(hex=generation.run).bytes))
        fields = (generation.attempt, generation.step, nbytes, rank | world_size << 32, low, high)
        for offset, word in enumerate(fields, 1):
            self._store(line + offset, word)
        self._store(line, self.seq(index) + 1)

    def free(self, index: int) -> None:
        """Give slot `index` back, torn or whole. Keeper only, while no trainer writes it."""
        line = _LINE * (1 + index)
        self._store(line, self.seq(index) | 1)
        for offset in range(1, 7):
            self._store(line + offset, 0)
        self._store(line, self.seq(index) + 1)

    def _store(self, word: int, value: int) -> None:
        assert self._cells is not None, "this mapping is read-only"
        self._cells[word] = value


@functools.cache
def shared_folder() -> str | None:
    """Where this process must make its segments; None: nowhere, memfds do.

    Raises:
        OSError: it can make none at all.
    """
    try:
        os.close(_memfd("dlrover-hooks-trial"))
    except OSError as refused:
        for folder in ("/dev/shm", runtime_dir()):
            with contextlib.suppress(OSError):
                os.close(_nameless(folder))
                return folder
        raise refused
    return None


def _memfd(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def _nameless(folder: str) -> int:
    return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _halves(data: bytes) -> tuple[bytes, bytes]:
    return data[:8], data[8:]
