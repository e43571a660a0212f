"""How one set of tensors becomes an image: where each goes and how it is copied, made once for many saves.

A model is saved again and again with the same names, shapes and types. While they `fit`, a save looks only at what may
have moved, a few passes in C over all tensors (5000 of them cost about 2 ms instead of 20).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from dlrover_hooks.checkpoint.arrays import library
from dlrover_hooks.checkpoint.copying import Pieces
from dlrover_hooks.checkpoint.image import RESERVE, Inside, Outgrown, header_parts, plan

_LOOKS: tuple[Callable[[Any], Any], ...] = (type, attrgetter("shape"), attrgetter("dtype"))
_numbers = itertools.count(1)


class Sources(NamedTuple):
    """Where the bytes of a save lie now."""

    addresses: list[int]
    """By place; 0 for what lies on a device."""
    held: list[Any]
    """By place: the tensor, or a copy that had to be made."""
    on_device: dict[int, Any]
    """By place."""


class Recipe:
    """The layout of `tensors` (by name), and the places to fill, in the order of the names. `number`: its own.

    `apart`: names of those that lie together, because they are seldom copied.

    Raises:
        UnsupportedState: see `snapshot.specs`.
    """

    def __init__(self, tensors: Mapping[str, Any], apart: Collection[str] = ()) -> None:
        self._library = library()
        self._specs, self._apart = self._library.specs(tensors), apart
        self._names, self._looks = list(tensors), self._look(tensors)
        self._filled = [index for index, spec in enumerate(self._specs) if spec.nbytes]
        self._lay_out(RESERVE)
        values = list(tensors.values())
        alike = len(self._filled) == len(values) and self._library.PLAIN.issuperset(map(type, values))
        self._plain = alike and not any(value.is_complex() for value in values)
        self._sizes = [spec.nbytes for spec in self._specs]
        self._settled: list[int] = []
        """Addresses of the tensors that were looked at last."""
        self._single = [index for index, value in enumerate(values) if self._plain and value.numel() == 1]

    def _lay_out(self, reserve: int) -> None:
        self.layout, self.number = plan(self._specs, reserve, self._apart), next(_numbers)
        places = {
            spec.name: (start, spec.nbytes) for spec, start in zip(self.layout.specs, self.layout.starts, strict=True)
        }
        self.places = [places[self._names[index]] for index in self._filled]
        """Offset in the image and bytes, without those that have none."""
        self._pieces: dict[tuple[int, ...] | None, Pieces] = {}

    def fits(self, tensors: Mapping[str, Any]) -> bool:
        """Do `tensors` have the names, shapes and types of before?"""
        return list(tensors) == self._names and self._look(tensors) == self._looks

    def _look(self, tensors: Mapping[str, Any]) -> list[list[Any]]:
        looks = [list(map(look, tensors.values())) for look in _LOOKS]
        if not self._library.PLAIN.issuperset(looks[0]):
            looks.append(list(map(self._library.spread, tensors.values())))
        return looks

    def header(self, inside: Inside) -> tuple[bytes, ...]:
        """The header of an image, in parts; a new layout if `inside` has outgrown the old one."""
        try:
            return header_parts(self.layout, inside)
        except Outgrown as outgrown:
            self._lay_out(RESERVE + self.layout.header_bytes + 2 * outgrown.needed)
            return header_parts(self.layout, inside)

    def pieces(self, places: Sequence[int]) -> Pieces:
        """The pieces of some `places`; made once."""
        key = tuple(places) if len(places) < len(self.places) else None
        if key not in self._pieces:
            some = pick(self.places, places)
            self._pieces[key] = Pieces([start for start, _ in some], [nbytes for _, nbytes in some])
        return self._pieces[key]

    def range(self, place: int) -> tuple[int, int]:
        """Begin and end of a place in the image."""
        start, nbytes = self.places[place]
        return start, start + nbytes

    def view(self, image: memoryview, place: int) -> memoryview:
        """A place of `image`."""
        start, stop = self.range(place)
        return image[start:stop]

    def name(self, place: int) -> str:
        """Of the tensor that goes there."""
        return self._names[self._filled[place]]

    def settled(self, tensors: Mapping[str, Any]) -> Sources | None:
        """Where `tensors` lie, if they have the names, addresses and sizes of before: a look at no more than that.

        They may be read there, but `holds` has to say that they still are what they were before a copy counts.
        """
        values = list(tensors.values())
        if not self._plain or list(tensors) != self._names or not self._library.PLAIN.issuperset(map(type, values)):
            return None
        addresses = self._library.addresses(values)
        same = addresses == self._settled and self._library.sizes(values) == self._sizes
        return Sources(self._settled, values, {}) if same else None

    def holds(self, tensors: Mapping[str, Any]) -> bool:
        """Are `tensors`, which are settled, what they were in every respect? Any thread."""
        kept = self.fits(tensors) and self._library.lie_plainly(list(tensors.values()), self._single)
        if not kept:
            self._settled = []
        return kept

    def sources(self, tensors: Mapping[str, Any]) -> Sources:
        """Where `tensors`, which fit, lie now; what does not lie as it reads is copied."""
        values = list(tensors.values())
        if self._plain and self._library.lie_plainly(values, self._single):
            self._settled = self._library.addresses(values)
            return Sources(self._settled, values, {})
        found = Sources([], [], {})
        for place, index in enumerate(self._filled):
            value = self._library.plain(values[index])
            found.addresses.append(self._library.address(value))
            found.held.append(value)
            if not found.addresses[-1]:
                found.on_device[place] = value
        return found


def pick(rows: Sequence[Any], which: Sequence[int]) -> Sequence[Any]:
    """Some `rows`, in that order."""
    return rows if len(which) == len(rows) else [rows[index] for index in which]
