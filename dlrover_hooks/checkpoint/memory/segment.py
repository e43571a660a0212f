"""One worker's shared memory: a sealed memfd with a header page and three slots.

Where memfd_create is refused (by a seccomp filter), an unnamed file in /dev/shm or in the runtime folder is used. It
cannot be sealed, but like a memfd it disappears with its last user, however that ends.

    page 0    64 B: magic, slots, slot_bytes, number, note_bytes     then one line of 64 B per slot:
              seq u64 | attempt u64 | step u64 | image_len u64 | rank u32, world u32 | run 16 bytes | 8 spare
    notes     note_bytes each: seq u64 | length u64 | the trainer's data for its successor (`rng.rank_journal`)
    slot k    a safetensors image (`safetensors_layout`)

`seq` is odd while slot or note are being written; each store to it is one aligned 8-byte store. Of two images, the one
with the larger `seq` was written later. The trainer writes. The keeper owns the memory and frees torn slots once the
trainer is gone. On machines with a weak memory order the socket message that follows a publication is the barrier.
Linux only. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import uuid
from array import array

from dlrover_hooks.checkpoint.state.safetensors_layout import PAGE
from dlrover_hooks.config import runtime_dir
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation, Message
from dlrover_hooks.rng.rank_journal import NOTES

SLOTS = 3
_MAGIC = int.from_bytes(b"DLRHOOK3", "little")
_LINE = 8  # words
_COUNT = 1
"""Index of the word that holds the number of slots."""
NOTE_BYTES = 16 << 10
"""Minimum. Random states take 10 KB; more must be requested."""
_POPULATE_READ = 22
_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_PUNCH = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


class Slot(Message, frozen=True):
    """A consistent reading of one line of the slot table. `generation` None: free (never written, or freed)."""

    index: int
    seq: int
    generation: Generation | None = None
    image_bytes: int = 0
    rank: int = 0
    world_size: int = 0

    @property
    def torn(self) -> bool:
        """A write was started and not finished."""
        return self.seq % 2 == 1


class SharedSegment:
    """A mapping of one segment. One writer (the worker's trainer) at a time; any number of readers.

    The mapping lives until all views of slots are dropped, also after `close`.
    """

    def __init__(self, fd: int, *, writable: bool = True) -> None:
        self.fd = -1
        self.nbytes = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self._view = memoryview(self._map)
        magic, slots, self.slot_bytes, self.number, self.note_bytes = self._view[:40].cast("Q")
        """`number` distinguishes it from all other segments of its worker."""
        self._slots_at = PAGE + NOTES * self.note_bytes
        if magic != _MAGIC or self._slots_at + slots * self.slot_bytes > self.nbytes:
            raise Corrupt("this is no segment of a keeper")
        self._words = self._view[: self._slots_at].cast("Q")
        self._bodies = dict[int, tuple[int, bytes]]()
        """By note: the offset of its body, and the body."""
        self._cells = (ctypes.c_uint64 * (self._slots_at // 8)).from_buffer(self._map) if writable else None
        self.fd = fd  # from here on this object closes it

    @classmethod
    def create(
        cls, seat: int, slot_bytes: int, slots: int = SLOTS, note_bytes: int = 0, *, filled: int | None = None
    ) -> SharedSegment:
        """A new sealed segment with slots of at least `slot_bytes`, all its pages allocated. Takes 137 ms per GB.

        `filled`: only that many slots have pages, and are in the table, until `grow`.

        Its pages are not mapped in this process now: two processes that fill page tables at once take three times as
        long, and reading maps them cheaply (20 ms per GB).

        Raises:
            OSError: there is not enough memory.
        """
        size, note = (-(-wanted // PAGE) * PAGE for wanted in (slot_bytes, max(note_bytes, NOTE_BYTES)))
        total, number = PAGE + NOTES * note + slots * size, int.from_bytes(os.urandom(6), "little") | 1
        filled = slots if filled is None else filled
        folder = shared_folder()
        fd = _memfd(f"dlrover-hooks-seat-{seat}") if folder is None else _nameless(folder)
        try:
            os.ftruncate(fd, total)
            os.posix_fallocate(fd, 0, total - (slots - filled) * size)
            os.pwrite(fd, array("Q", (_MAGIC, filled, size, number, note)).tobytes(), 0)
            if folder is None:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, *, writable: bool = True) -> SharedSegment:
        """Map a segment received from the keeper; takes over `fd`. Page tables of writable mappings are filled now."""
        try:
            shared = cls(fd, writable=writable)
        except BaseException:
            os.close(fd)
            raise
        if writable:
            shared.populate()
        return shared

    def populate(self) -> None:
        """Map every page of the slots for writing, 123 ms per GB. Best effort: old kernels map them on first access."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _libc.madvise(address, self._slots_at + self.count * self.slot_bytes, _POPULATE_WRITE)

    @property
    def count(self) -> int:
        """Number of slots in the table."""
        return self._words[_COUNT]

    def grow(self) -> None:
        """Allocate the pages of one more slot, and add it to the table. Keeper only; the trainer reads the table.

        Raises:
            OSError: there is not enough memory.
        """
        count = self.count
        os.posix_fallocate(self.fd, self._slots_at + count * self.slot_bytes, self.slot_bytes)
        self._store(_COUNT, count + 1)

    def release(self, index: int) -> None:
        """Free slot `index` and its pages. Keeper only; no trainer may write the slot afterwards.

        Raises:
            OSError: the pages cannot be freed.
        """
        self.free(index)
        begin = self._slots_at + index * self.slot_bytes
        if _libc.fallocate(self.fd, _PUNCH, begin, self.slot_bytes):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def fault_in(self, index: int, nbytes: int) -> None:
        """Map the pages of an image for reading, at a fifth of the cost of page faults. Best effort.

        No other pages are mapped, because unmapping costs as much again.
        """
        with contextlib.suppress(OSError):
            self._map.madvise(_POPULATE_READ, self._slots_at + index * self.slot_bytes, nbytes)

    def close(self) -> None:
        """Unmap (once all views are dropped) and close the descriptor. Idempotent."""
        self._cells = None
        self._words.release()
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:  # the keeper drops segments while a thread may still read them
            os.close(self.fd)

    def serves(self, slot_bytes: int, note_bytes: int) -> bool:
        """Whether slots and notes are at least that large."""
        return self.slot_bytes >= slot_bytes and self.note_bytes >= note_bytes

    def slots(self) -> tuple[Slot, ...]:
        """The current slot table."""
        return tuple(self.slot(index) for index in range(self.count))

    def seq(self, index: int) -> int:
        """The sequence number of a slot: one load."""
        return self._words[_LINE * (1 + index)]

    def slot(self, index: int) -> Slot:
        """One line of the table; read again if it changed meanwhile."""
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
        start = self._slots_at + index * self.slot_bytes
        return self._view[start : start + (self.slot_bytes if nbytes is None else nbytes)]

    def begin(self, index: int) -> None:
        """Mark slot `index` as being written. It stays torn if the process dies before `publish`."""
        newest = max(self.seq(other) for other in range(self.count))
        self._store(_LINE * (1 + index), newest + 1 | 1)

    def publish(self, index: int, generation: Generation, rank: int, world_size: int, nbytes: int) -> None:
        """All `nbytes` are written: the last store makes slot `index` hold `generation`."""
        line = _LINE * (1 + index)
        low, high = (int.from_bytes(half, "little") for half in _halves(uuid.UUID(hex=generation.run).bytes))
        fields = (generation.attempt, generation.step, nbytes, rank | world_size << 32, low, high)
        for offset, word in enumerate(fields, 1):
            self._store(line + offset, word)
        self._store(line, self.seq(index) + 1)

    def free(self, index: int) -> None:
        """Free slot `index`, torn or complete. Keeper only, while no trainer writes it."""
        line = _LINE * (1 + index)
        self._store(line, self.seq(index) | 1)
        for offset in range(1, 7):
            self._store(line + offset, 0)
        self._store(line, self.seq(index) + 1)

    def note(self, index: int, data: bytes, body: bytes = b"") -> None:
        """Store `data + body` for the next trainer of this worker. If that is too long, the note is empty.

        `body`: not written again if it is the same object as in the last note there.
        """
        cells = self._cells
        assert cells is not None, "this mapping is read-only"
        word = (PAGE + index * self.note_bytes) // 8
        begin = 8 * word + 16
        middle = begin + len(data)
        end = middle + len(body)
        fits = end - begin <= self.note_bytes - 16
        cells[word] |= 1
        cells[word + 1] = end - begin if fits else 0
        if fits:
            self._view[begin:middle] = data
            at, before = self._bodies.get(index, (0, b""))
            if at != middle or before is not body:
                self._view[middle:end] = body
                self._bodies[index] = middle, body
        cells[word] += 1

    def notes(self) -> list[bytes]:
        """The notes that are complete."""
        return [note for index in range(NOTES) if (note := self._read_note(index))]

    def _read_note(self, index: int) -> bytes:
        word = (PAGE + index * self.note_bytes) // 8
        seq, length = self._words[word], self._words[word + 1]
        note = bytes(self._view[8 * word + 16 : 8 * word + 16 + min(length, self.note_bytes - 16)])
        return note if seq % 2 == 0 and self._words[word] == seq else b""

    def _store(self, word: int, value: int) -> None:
        assert self._cells is not None, "this mapping is read-only"
        self._cells[word] = value


@functools.cache
def shared_folder() -> str | None:
    """The folder in which this process must create its segments; None: it can use memfds.

    Raises:
        OSError: it can create none at all.
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
