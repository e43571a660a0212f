"""Records a rank's random state at every step, so that a process that takes over the rank draws the same numbers.

Every save contains the random state of its rank. The state that survivors save after a round breaks does not: it is
shared by all ranks, and a dead rank cannot contribute. Each rank therefore writes notes of its random state: after each
step, and within the step in progress, before the operation that commits the other ranks to that step. Notes lie in the
keeper's memory for this rank, so they outlive the process however it ends. The process that has the rank in the next
round continues from them. That need not be the replacement of the dead process, since the oldest survivor gets rank 0.
Notes written within a step are also replicated to another node, in case this node is lost. Rank 0 adds its batch
statistics, which all ranks continue with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from dlrover_hooks.protocol import Generation
from dlrover_hooks.rng import process_state

NOTES = 4
"""The last two steps, since survivors may be one behind; the step in progress, since they may be one ahead; and the
state from which this process lifetime started, which another rank may have written."""
_AHEAD, _BEGUN = 2, 3
Statistics = tuple[tuple[str, bytes], ...]
"""Small buffers: a name and its bytes for each."""


class RngEntry(msgspec.Struct, frozen=True, array_like=True):
    """One rank's random state after the step of `generation`, or within the next one (`ahead`).

    `statistics`: batch statistics of the same moment; only rank 0 has them.
    """

    generation: Generation
    rank: int
    world_size: int
    ahead: bool
    state: process_state.Packed
    statistics: Statistics = ()


_FIELDS = b"\x96"
"""The first byte of a msgpack array of six elements."""
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(RngEntry).decode


class StateSource(Protocol):
    """What the notes of a round are made of. Methods are called by the threads that call `RngJournal`."""

    def random_state(self) -> process_state.Taken: ...
    def statistics(self) -> Statistics: ...


class ProcessState:
    """The random state of this process, without batch statistics."""

    def random_state(self) -> process_state.Taken:
        """Capture it now."""
        return process_state.take()

    def statistics(self) -> Statistics:
        """None are known."""
        return ()


class RngJournal:
    """The notes of one process, over all rounds in which it takes part.

    `write(place, head, body)` stores a note, `head + body`, in memory that outlives the process. The body holds the
    random state; it stays the same object as long as no number is drawn. Call on the training thread, or on another
    thread while the training thread waits for it.
    """

    def __init__(self, write: Callable[[int, bytes, bytes], object]) -> None:
        self._write, self._turn = write, 0
        self._notes = [(b"", b"")] * NOTES
        self._body: tuple[process_state.Packed | None, Statistics, bytes] = (None, (), b"")
        """State, statistics and their encoding, of the last note."""
        self._seat: tuple[Generation, int, int] | None = None
        self._over: Generation | None = None
        """The step noted last in this round."""
        self._bound = False
        self._told = dict[int, tuple[bytes, ...]]()
        self._source: StateSource = ProcessState()

    def read(self, source: StateSource) -> None:
        """From here on notes are made of `source`; rank 0 adds its statistics."""
        self._source = source

    @property
    def notes(self) -> list[bytes]:
        return [head + body for head, body in self._notes if head]

    @property
    def within(self) -> bytes:
        """The newest note written within a step."""
        return b"".join(self._notes[_AHEAD])

    @property
    def told(self) -> list[bytes]:
        """Notes received from ranks of another node within the last two steps."""
        return [note for notes in self._told.values() for note in notes]

    def heard(self, notes: Iterable[bytes]) -> None:
        """Store notes received from ranks of another node, written within the step in progress here, too."""
        if self._seat is not None:
            step = self._seat[0].step
            before = max((one for one in self._told if one < step), default=step)
            self._told = {one: told for one, told in self._told.items() if one == before} | {step: tuple(notes)}

    def heard_begun(self, notes: Iterable[bytes]) -> None:
        """Store the notes from which ranks of another node started: all may restart from them until a step is made."""
        if self._seat is not None:
            before = self._seat[0].step - 1
            self._told[before] = (*notes, *self._told.get(before, ()))

    def begin(
        self,
        here: Generation,
        rank: int,
        world_size: int,
        restored: Generation | None = None,
        found: bytes | None = None,
    ) -> None:
        """Start a round with this rank, after the step of `here`, which also has the round's run and attempt.

        `restored`: the generation from which it continues, with the random state of `found`, if there was a note. Until
        the first step is made, all ranks may have to restart from there; so this process's own note of it is kept.
        """
        if restored is not None and self._seat is not None:
            mine = find(self.notes, restored, *self._seat[1:])
            if mine is not None and mine != b"".join(self._notes[self._turn]):
                self._turn ^= 1
                self._put(self._turn, mine, b"")
        if found is not None:
            self.took(found)
        self._seat, self._bound, self._over = (here, rank, world_size), False, None

    def took(self, found: bytes) -> None:
        """Record `found`, from elsewhere, as the random state from which this round starts."""
        self._put(_BEGUN, found, b"")

    def over(self, step: int, random: process_state.Packed) -> None:
        """Note that `step` is over, with state `random`. A second note of the same step replaces the first."""
        if self._seat is None:
            return
        self._bound = False
        generation, rank, world_size = self._seat
        generation = msgspec.structs.replace(generation, step=step)
        if self._over != generation:
            self._turn ^= 1
        self._seat, self._over = (generation, rank, world_size), generation
        self._note(self._turn, random)

    def ahead(self, *, unless_noted: bool = False) -> None:
        """Note the state after the next step's forward pass: the others may now complete that step without this rank.

        `unless_noted`: do nothing if this step was noted already.
        """
        if self._seat is not None and not (unless_noted and self._bound):
            self._bound = True
            self._note(_AHEAD, self._source.random_state().packed)

    def _note(self, place: int, random: process_state.Packed) -> None:
        assert self._seat is not None
        statistics = self._source.statistics() if self._seat[1] == 0 else ()
        if self._body[0] is not random or self._body[1] != statistics:
            self._body = random, statistics, _encode(random) + _encode(statistics)
        self._put(place, _head(*self._seat, place == _AHEAD), self._body[2])

    def _put(self, place: int, head: bytes, body: bytes) -> None:
        self._notes[place] = head, body
        self._write(place, head, body)


def _head(*fields: Any) -> bytes:
    """The encoding of a `RngEntry` up to its state; the remaining fields are encoded separately."""
    return _FIELDS + _encode(fields)[1:]


def state(note: bytes) -> dict[str, Any]:
    """The argument for `rng.restore`, from a note that `find` returned."""
    return process_state.unpack(_decode(note).state)


def by_rank(notes: Iterable[bytes], generation: Generation, world_size: int) -> dict[int, bytes]:
    """The result of `find` for each rank that has one."""
    notes = list(notes)
    read = (_read(note) for note in notes)
    ranks = {note.rank for note in read if note is not None and note.world_size == world_size}
    found = ((rank, find(notes, generation, rank, world_size)) for rank in ranks)
    return {rank: note for rank, note in found if note is not None}


def statistics(notes: Iterable[bytes], generation: Generation) -> Statistics:
    """The statistics of rank 0 after the step of `generation`, of any world size; empty if no note has any."""
    found = find(notes, generation, 0, None)
    return _decode(found).statistics if found is not None else ()


def find(notes: Iterable[bytes], generation: Generation, rank: int, world_size: int | None) -> bytes | None:
    """The note with the random state of `rank` after the step of `generation`; None if there is none.

    If the rank had not finished that step, its newest note from within the step is returned: between the last gradient
    and the end of a step, numbers are hardly ever drawn. Memory that was released may still contain older notes.
    """
    within, newest = None, -1
    for given in notes:
        note = _read(given)
        if note is None or note.rank != rank or world_size not in (None, note.world_size):
            continue
        if note.generation == generation and not note.ahead:
            return given
        if note.ahead and _just_before(note.generation, generation) and note.generation.step > newest:
            within, newest = given, note.generation.step
    return within


def _just_before(one: Generation, other: Generation) -> bool:
    """True if `one` precedes `other` in the same attempt. A step of several optimizers may count as several."""
    return (one.run, one.attempt) == (other.run, other.attempt) and one.step < other.step


def _read(note: bytes) -> RngEntry | None:
    try:
        return _decode(note)
    except msgspec.DecodeError:  # written by another version of this library
        return None
