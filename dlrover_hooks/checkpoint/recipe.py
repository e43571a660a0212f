"""How one set of tensors becomes an image: where each goes and how it is copied, made once for many saves.

A model is saved again and again with the same names, shapes and types. While they `fit`, a save looks only at what may
have moved, a few passes in C over all tensors (5000 of them cost about 2 ms instead of 20).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from dlrover_hooks.checkpoint import snapshot
from dlrover_hooks.checkpoint.copying import Copier, Pieces
from dlrover_hooks.checkpoint.image import RESERVE, Inside, Outgrown, header_bytes, plan

_LOOKS: tuple[Callable[[Any], Any], ...] = (type, attrgetter("shape"), attrgetter("dtype"))
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Sources(NamedTuple):
    """Where the bytes of a save lie now. `held` keeps copies alive that had to be made."""

    addresses: list[int]
    """By place; 0 for what lies on a device."""
    on_device: list[tuple[int, torch.Tensor]]
    """Place and tensor."""
    held: list[Any]


class Recipe:
    """The layout of `tensors` (by name), and the places to fill, in the order of the names.

    Raises:
        UnsupportedState: see `snapshot.specs`.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._specs = snapshot.specs(tensors)
        self._names, self._looks = list(tensors), self._look(tensors)
        self._lay_out(RESERVE)
        values = list(tensors.values())
        sizes = {spec.name: spec.nbytes for spec in self._specs}
        self._filled = [index for index, name in enumerate(self._names) if sizes[name]]
        alike = len(self._filled) == len(values) and _PLAIN.issuperset(map(type, values))
        self._plain = alike and not any(map(torch.is_complex, values))

    def _lay_out(self, reserve: int) -> None:
        self.layout = plan(self._specs, reserve)
        places = {
            spec.name: (start, spec.nbytes) for spec, start in zip(self.layout.specs, self.layout.starts, strict=True)
        }
        self.places = [places[name] for name in self._names if places[name][1]]
        """Offset in the image and bytes, without those that have none."""
        self._pieces: dict[tuple[int, ...] | None, Pieces] = {}

    def fits(self, tensors: Mapping[str, Any]) -> bool:
        """Do `tensors` have the names, shapes and types of before?"""
        return list(tensors) == self._names and self._look(tensors) == self._looks

    @staticmethod
    def _look(tensors: Mapping[str, Any]) -> list[list[Any]]:
        return [list(map(look, tensors.values())) for look in _LOOKS]

    def header(self, inside: Inside) -> bytes:
        """The header of an image; a new layout if `inside` has outgrown the old one."""
        try:
            return header_bytes(self.layout, inside)
        except Outgrown as outgrown:
            self._lay_out(RESERVE + self.layout.header_bytes + 2 * outgrown.needed)
            return header_bytes(self.layout, inside)

    def fill(self, image: memoryview, found: Sources, copier: Copier) -> None:
        """Copy what was `found` to its places in `image`. It must not change meanwhile."""
        for place, tensor in found.on_device:
            start, nbytes = self.places[place]
            snapshot.from_device(tensor, image[start : start + nbytes])
        devices = {place for place, _ in found.on_device}
        here = [place for place in range(len(self.places)) if place not in devices] if devices else None
        copier.fill(self.pieces(here), snapshot.place_of(image), pick(found.addresses, here))

    def pieces(self, places: Sequence[int] | None = None) -> Pieces:
        """The pieces of some `places` (None: of all); made once."""
        key = None if places is None else tuple(places)
        if key not in self._pieces:
            some = pick(self.places, places)
            self._pieces[key] = Pieces([start for start, _ in some], [nbytes for _, nbytes in some])
        return self._pieces[key]

    def sources(self, tensors: Mapping[str, Any]) -> Sources:
        """Where `tensors`, which fit, lie now; what does not lie as it reads is copied."""
        values = list(tensors.values())
        if self._plain and _lie_plainly(values):
            return Sources(list(map(torch.Tensor.data_ptr, values)), [], values)
        found = Sources([], [], [])
        for place, index in enumerate(self._filled):
            value = snapshot.plain(values[index])
            on_device = isinstance(value, torch.Tensor) and not value.is_cpu
            found.addresses.append(0 if on_device else snapshot.address(value))
            found.held.append(value)
            if on_device:
                found.on_device.append((place, value))
        return found


def pick(rows: list[Any], which: Sequence[int] | None) -> list[Any]:
    """Some `rows`, or all."""
    return rows if which is None else [rows[index] for index in which]


def _lie_plainly(values: list[torch.Tensor]) -> bool:
    """All on the CPU, contiguous, and as they read: nothing is left to be negated."""
    here = all(map(attrgetter("is_cpu"), values)) and all(map(torch.Tensor.is_contiguous, values))
    return here and not any(map(torch.Tensor.is_neg, values))
