"""Where a rank's random generators stood, step by step: so that who goes on for it draws the same numbers.

Every save has the random state of its rank in it. What the survivors of a round save when it breaks does not: it is the
same for all ranks, and a dead one has no say any more. So each rank notes its random state as it goes: behind a step
and, ahead of what binds the others to it, in the step that is under way. Notes lie in the memory that the keeper holds
for a seat, and outlive the process however it ends. Whoever has that rank in the next round goes on from there: the
oldest survivor has rank 0, so that need not be who replaces the dead one. What is noted within a step is told to
another node, which has it if this one is lost. Rank 0 notes its batch statistics, too, which all go on with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from dlrover_hooks.protocol import Generation
from dlrover_hooks.rng import process_state

NOTES = 4
"""The last two steps, since survivors may be one behind; the one under way, since they may be one ahead; and the one
that this life began from, as another rank may have left it."""
_AHEAD, _BEGUN = 2, 3
Statistics = tuple[tuple[str, bytes], ...]
"""Small buffers: a name and its bytes for each."""


class Drawn(msgspec.Struct, frozen=True, array_like=True):
    """One rank's random state behind the step of `generation`, or within the next one (`ahead`).

    `statistics`: of batches, at the same moment; rank 0 has them.
    """

    generation: Generation
    rank: int
    world_size: int
    ahead: bool
    state: process_state.Packed
    statistics: Statistics = ()


_FIELDS = b"\x96"
"""How msgpack begins an array of six."""
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Drawn).decode


class Draws:
    """The notes of one process, over all rounds that it lives through.

    `write(place, head, body)` puts one, `head + body`, where it outlives the process. The body has the random state: it
    is the same object as long as nothing is drawn. Training thread, or another one while that waits.
    """

    def __init__(self, write: Callable[[int, bytes, bytes], object]) -> None:
        self._write, self._turn = write, 0
        self._notes = [(b"", b"")] * NOTES
        self._body: tuple[process_state.Packed | None, Statistics, bytes] = (None, (), b"")
        """What is encoded, and as what."""
        self._seat: tuple[Generation, int, int] | None = None
        self._over: Generation | None = None
        """The step of this life that was noted last."""
        self._bound = False
        self._told = dict[int, tuple[bytes, ...]]()
        self.statistics: Callable[[], Statistics] = tuple
        """What rank 0 has, of the life that is on."""
        self.take: Callable[[], process_state.Taken] = process_state.take
        """The random state of now."""

    @property
    def notes(self) -> list[bytes]:
        return [head + body for head, body in self._notes if head]

    @property
    def within(self) -> bytes:
        """The newest one of within a step."""
        return b"".join(self._notes[_AHEAD])

    @property
    def told(self) -> list[bytes]:
        """What ranks of another node noted within the last two steps."""
        return [note for notes in self._told.values() for note in notes]

    def heard(self, notes: Iterable[bytes]) -> None:
        """Ranks of another node have told what they noted within the step that is under way here, too."""
        if self._seat is not None:
            step = self._seat[0].step
            before = max((one for one in self._told if one < step), default=step)
            self._told = {one: told for one, told in self._told.items() if one == before} | {step: tuple(notes)}

    def heard_begun(self, notes: Iterable[bytes]) -> None:
        """They have told what their life begins from: until a step is made all may have to go on from there again."""
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
        """A life begins in this seat: behind the step of `here`, whose attempt and run are the life's.

        `restored`: what it goes on from, with the random state of `found`, if one was. Until a step is made all may
        have to go on from there again: so that is noted, and what this process knew of it before stays.
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
        """The random state that this life begins from came from elsewhere, as `found`."""
        self._put(_BEGUN, found, b"")

    def over(self, step: int, random: process_state.Packed) -> None:
        """`step` is over, with `random`. The newest word on a step counts."""
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
        """The forward of the next step is over, and others may take that step, whatever becomes of this process.

        `unless_noted`: only where this was not said of that step before.
        """
        if self._seat is not None and not (unless_noted and self._bound):
            self._bound = True
            self._note(_AHEAD, self.take().packed)

    def _note(self, place: int, random: process_state.Packed) -> None:
        assert self._seat is not None
        statistics = self.statistics() if self._seat[1] == 0 else ()
        if self._body[0] is not random or self._body[1] != statistics:
            self._body = random, statistics, _encode(random) + _encode(statistics)
        self._put(place, _head(*self._seat, place == _AHEAD), self._body[2])

    def _put(self, place: int, head: bytes, body: bytes) -> None:
        self._notes[place] = head, body
        self._write(place, head, body)


def _head(*fields: Any) -> bytes:
    """The encoding of a `Drawn` up to its state; what follows is encoded by itself."""
    return _FIELDS + _encode(fields)[1:]


def state(note: bytes) -> dict[str, Any]:
    """What `rng.restore` takes, of one that was found."""
    return process_state.unpack(_decode(note).state)


def by_rank(notes: Iterable[bytes], generation: Generation, world_size: int) -> dict[int, bytes]:
    """What `find` finds, for each rank of which there is something."""
    notes = list(notes)
    read = (_read(note) for note in notes)
    ranks = {note.rank for note in read if note is not None and note.world_size == world_size}
    found = ((rank, find(notes, generation, rank, world_size)) for rank in ranks)
    return {rank: note for rank, note in found if note is not None}


def statistics(notes: Iterable[bytes], generation: Generation) -> Statistics:
    """Those of rank 0 behind the step of `generation`, of whatever world; empty if no note has any."""
    found = find(notes, generation, 0, None)
    return _decode(found).statistics if found is not None else ()


def find(notes: Iterable[bytes], generation: Generation, rank: int, world_size: int | None) -> bytes | None:
    """The one that has the random state of `rank` behind the step of `generation`; others are passed over.

    Where that step was not over for it, that of within the step counts: between the last gradient and the end of a step
    hardly anybody draws. That is the newest one of its sort: memory that was given up may still show older ones.
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
    """A step may count as several: that of several optimizers."""
    return (one.run, one.attempt) == (other.run, other.attempt) and one.step < other.step


def _read(note: bytes) -> Drawn | None:
    try:
        return _decode(note)
    except msgspec.DecodeError:  # of another version of this library
        return None
