"""Writes a save into a slot. Plain arrays at once; torch tensors also overlapped with the step (`lazy`). No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrover_hooks.checkpoint.memory.memcpy import Copier, place_of
from dlrover_hooks.checkpoint.save.frozen_parameters import Range
from dlrover_hooks.checkpoint.state.safetensors_layout import Outgrown
from dlrover_hooks.checkpoint.tensors.layout_cache import CachedLayout, Sources
from dlrover_hooks.errors import CheckpointError
from dlrover_hooks.protocol import Generation


class Changed(CheckpointError):
    """The tensors or the other state no longer match the recipe: lay out the image again."""


class SlotSave(NamedTuple):
    """One save, laid out. `found`: the current addresses of its tensors."""

    generation: Generation
    recipe: CachedLayout
    header: Iterable[bytes]
    """Can be iterated once, see `CachedLayout.header`."""
    found: Sources
    holds: Callable[[], bool] | None = None
    """To be called before a copy counts: whether the tensors still match the recipe."""

    def extent(self, place: int) -> tuple[int, int]:
        """Address and bytes of the tensor for a place."""
        address = int(self.found.addresses[place]) or self.found.on_device[place].data_ptr()
        return address, self.recipe.places[place][1]


class SlotTarget(NamedTuple):
    """A slot that is being written. `publish(unchanged)` marks it as complete; any thread.

    `view`: the bytes of the image; `room`: all bytes of the slot.
    """

    segment: int
    slot: int
    view: memoryview
    room: memoryview
    publish: Callable[[tuple[Range, ...]], None]

    def head(self, shot: SlotSave) -> None:
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
        """Whether the next save, which a step follows, is to be overlapped with that step."""
        return False

    def write(self, shot: SlotSave, target: SlotTarget, *, lazy: bool) -> None:
        """Fill `target` with `shot` and publish it; overlapped with the step if `lazy`.

        Raises:
            HooksError, OSError: from `publish`.
        """
        del lazy
        self.fill(shot, target, range(len(shot.recipe.places)))
        target.publish(())

    def fill(self, shot: SlotSave, target: SlotTarget, places: Sequence[int], *, alone: bool = False) -> None:
        """Copy the tensors of `places` (sorted). `alone`: on this thread only, after `prove`; else during `prove`."""
        sources = shot.found.addresses
        some = sources if len(places) == len(sources) else sources[np.asarray(places, np.intp)]
        where = shot.recipe.pieces(places), place_of(target.view), some
        if alone:
            self.prove(shot, target)
            Copier(1, native=self.copier.native).fill(*where)
        else:
            self.copier.fill(*where, lambda: self.prove(shot, target))

    def prove(self, shot: SlotSave, target: SlotTarget) -> None:
        """Write the header and check that the tensors match it. Raises Changed."""
        try:
            target.head(shot)
        except Outgrown:
            raise Changed(f"{shot.generation} was not saved: it is larger", hint="the next one is saved") from None
        if shot.holds is not None and not shot.holds():
            raise Changed(f"{shot.generation} was not saved: a tensor has another form", hint="the next one is saved")

    def seldom(self, tensors: Mapping[str, Any]) -> Collection[str]:
        """Names of the tensors that will not be copied at every save."""
        del tensors
        return ()

    def took(self, seconds: float) -> None:
        """The step that began with the last save took `seconds`."""

    def wait(self) -> None:
        """Return when no copy is in progress."""

    def check(self) -> None:
        """To be called before a slot is chosen. Raises CheckpointError while an abandoned copy still writes."""

    def unmapped(self) -> None:
        """Memory of slots is about to be unmapped."""

    def damaged(self) -> None:
        """A slot does not hold what was written to it."""

    def close(self) -> None:
        """Idempotent."""
