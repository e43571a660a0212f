"""How a save gets into a slot. Plain arrays at once; torch's tensors also behind the step (`lazy`). No torch here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrover_hooks.checkpoint.memory.memcpy import Copier, place_of
from dlrover_hooks.checkpoint.save.frozen_parameters import Range
from dlrover_hooks.checkpoint.state.safetensors_writer import Outgrown
from dlrover_hooks.checkpoint.tensors.layout_cache import Recipe, Sources
from dlrover_hooks.errors import CheckpointError
from dlrover_hooks.protocol import Generation


class Changed(CheckpointError):
    """The tensors, or the state beside them, are no longer what the recipe takes them for: lay them out anew."""


class Shot(NamedTuple):
    """One save, laid out. `found`: where its tensors lie now."""

    generation: Generation
    recipe: Recipe
    header: Iterable[bytes]
    """To be gone through once, see `Recipe.header`."""
    found: Sources
    holds: Callable[[], bool] | None = None
    """Still to be asked before a copy counts: are the tensors what the recipe takes them for?"""

    def extent(self, place: int) -> tuple[int, int]:
        """Address and bytes of what goes to a place."""
        address = int(self.found.addresses[place]) or self.found.on_device[place].data_ptr()
        return address, self.recipe.places[place][1]


class SlotTarget(NamedTuple):
    """A slot that was begun. `publish(unchanged)` says that it is whole; any thread.

    `view`: the bytes of the image; `room`: all that the slot has.
    """

    segment: int
    slot: int
    view: memoryview
    room: memoryview
    publish: Callable[[tuple[Range, ...]], None]

    def head(self, shot: Shot) -> None:
        """Write the header."""
        at = 0
        for part in shot.header:
            self.view[at : at + len(part)] = part
            at += len(part)


class Writer:
    """Fills slots at once. Training thread."""

    def __init__(self) -> None:
        self.copier = Copier()

    def chooses_lazy(self) -> bool:
        """A step follows the next save: is it to be made behind it?"""
        return False

    def write(self, shot: Shot, target: SlotTarget, *, lazy: bool) -> None:
        """Fill `target` with `shot` and publish it, behind the step if `lazy`.

        Raises:
            HooksError, OSError: from `publish`.
        """
        del lazy
        self.fill(shot, target, range(len(shot.recipe.places)))
        target.publish(())

    def fill(self, shot: Shot, target: SlotTarget, places: Sequence[int], *, alone: bool = False) -> None:
        """Copy what goes to `places` (sorted). `alone`: by this thread only, after `prove`; else `prove` meanwhile."""
        sources = shot.found.addresses
        some = sources if len(places) == len(sources) else sources[np.asarray(places, np.intp)]
        where = shot.recipe.pieces(places), place_of(target.view), some
        if alone:
            self.prove(shot, target)
            Copier(1, native=self.copier.native).fill(*where)
        else:
            self.copier.fill(*where, lambda: self.prove(shot, target))

    def prove(self, shot: Shot, target: SlotTarget) -> None:
        """Write the header and ask whether the tensors are what it says. Raises Changed."""
        try:
            target.head(shot)
        except Outgrown:
            raise Changed(f"{shot.generation} was not saved: it is larger", hint="the next one is saved") from None
        if shot.holds is not None and not shot.holds():
            raise Changed(f"{shot.generation} was not saved: a tensor has another form", hint="the next one is saved")

    def seldom(self, tensors: Mapping[str, Any]) -> Collection[str]:
        """Names of those that will not be copied at every save."""
        del tensors
        return ()

    def took(self, seconds: float) -> None:
        """The step that began with the last save took so long."""

    def wait(self) -> None:
        """Return when nothing is being copied."""

    def check(self) -> None:
        """Before a slot is chosen. Raises CheckpointError while a copy that was given up still writes."""

    def unmapped(self) -> None:
        """Memory of slots is about to be unmapped."""

    def damaged(self) -> None:
        """A slot does not hold what it was filled with."""

    def close(self) -> None:
        """Idempotent."""
