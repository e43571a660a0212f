"""Saves of torch's tensors, at once or behind the next forward and backward; frozen ones are copied once.

What forward and backward may change (buffers) is copied before `write` returns; parameters and optimizer state follow
on a thread, and the optimizer waits for them (`gate`). On CUDA the copy engine does both, and only the device waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dlrover_hooks.checkpoint import device, snapshot
from dlrover_hooks.checkpoint.aside import Aside
from dlrover_hooks.checkpoint.copying import place_of
from dlrover_hooks.checkpoint.frozen import Frozen, Range, inside, ranges
from dlrover_hooks.checkpoint.gate import Gate, Samples, Unchanged
from dlrover_hooks.checkpoint.mode import LAZY, Mode
from dlrover_hooks.checkpoint.recipe import pick
from dlrover_hooks.checkpoint.saving import Shot, Target, Writer
from dlrover_hooks.errors import CheckpointError, HooksError

_log = logging.getLogger("dlrover_hooks")


class Rest(NamedTuple):
    """What is left to do of a save: copies under way on devices, or places to copy and a guard of them."""

    events: Sequence[torch.cuda.Event]
    places: Sequence[int]
    guard: Unchanged | None
    unchanged: tuple[Range, ...]


class LazyWriter(Writer):
    """Fills slots. Training thread.

    Args:
        mode: decides which way.
        dropped: told why a save that was begun does not count; called on the copying thread.
        parameters: those of the models. The frozen ones among them are not copied each time.
    """

    def __init__(
        self,
        mode: Mode,
        dropped: Callable[[HooksError], None],
        parameters: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        super().__init__()
        self.mode, self.aside = mode, Aside()
        self._dropped, self._parameters, self._kept = dropped, parameters, Frozen()
        self._gate = Gate(self._before_step)
        self._found: Any = None
        """What `_split` was found for: it seldom changes from save to save."""
        self._split: tuple[Sequence[int], Sequence[int]] = ([], [])
        self._samples = Samples([], [], self.copier)
        self._side, self._events = device.SideStream(), list[torch.cuda.Event]()

    def chooses_lazy(self) -> bool:
        """See `Writer`."""
        return self.mode.next() == LAZY

    def write(self, shot: Shot, target: Target, *, lazy: bool) -> None:
        """See `Writer`."""
        skipped, unchanged = self._skip(shot, target)
        count = range(len(shot.recipe.places))
        places = [place for place in count if place not in skipped] if skipped else count
        later, now = self._later(shot, places) if lazy else ([], places)
        if later:
            early = shot._replace(header=(), holds=None)  # `_finish` sees to both
            events = self._copy(early, target, now) if now else []
            device.gate(events)  # what forward changes is read before it does
            rest = self._begin(shot, target, later, events, unchanged)
            self.aside.begin(lambda: self._finish(shot, target, rest))
        else:
            device.finish(self._copy(shot, target, places))
            target.publish(unchanged)

    def took(self, seconds: float) -> None:
        """See `Writer`."""
        self._say(self.mode.took(seconds))

    def wait(self) -> None:
        """See `Writer`."""
        self.aside.wait()
        self._events = []

    def unmapped(self) -> None:
        """See `Writer`."""
        self._side.unpin()

    def damaged(self) -> None:
        """See `Writer`."""
        self._kept.forget()

    def close(self) -> None:
        """See `Writer`."""
        self.aside.close()
        self._gate.close()
        self._side.unpin()

    def _before_step(self) -> None:
        if self._events:
            device.gate(self._events)
        else:
            self.aside.wait()

    def _copy(self, shot: Shot, target: Target, places: Sequence[int]) -> list[torch.cuda.Event]:
        """Copy `places`; those on devices are only begun."""
        on_device = shot.found.on_device
        self.fill(shot, target, [place for place in places if place not in on_device] if on_device else places)
        if not on_device:
            return []
        self._side.pin(target.view)
        rows = [(on_device[place], shot.recipe.view(target.view, place)) for place in places if place in on_device]
        return self._side.copy(rows)

    # ---- behind the step

    def _later(self, shot: Shot, places: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Of `places`, those that only the next step changes, and the rest. With a device, only what lies on it."""
        left = len(places) < len(shot.recipe.places)
        found = (shot.recipe.number, self._gate.form, shot.found.addresses, list(places) if left else None)
        if found != self._found:
            stable, on_device = self._gate.extents(), shot.found.on_device
            among = [place for place in places if place in on_device] if on_device else places
            later = [place for place in among if shot.extent(place) in stable]
            self._found, self._split = found, (later, sorted(set(places).difference(later)))
            sizes = [nbytes for _, nbytes in pick(shot.recipe.places, later)]
            self._samples = Samples(pick(shot.found.addresses, later), sizes, self.copier)
        return self._split

    def _begin(
        self,
        shot: Shot,
        target: Target,
        later: Sequence[int],
        events: list[torch.cuda.Event],
        unchanged: tuple[Range, ...],
    ) -> Rest:
        held, on_device = shot.found.held, shot.found.on_device
        if not on_device:
            guard = Unchanged(pick(held, later), self._samples)
            return Rest([], later, guard, unchanged)
        self._events = self._copy(shot, target, later)
        return Rest(events + self._events, [], None, unchanged)

    def _finish(self, shot: Shot, target: Target, rest: Rest) -> None:
        """On the copying thread: the rest of the copy, the proof that nothing changed meanwhile, the publication."""
        try:
            device.finish(rest.events)
            self.fill(shot, target, rest.places, alone=True)
            if rest.guard is not None:
                self._check(shot, target, rest.places, rest.guard)
            target.publish(rest.unchanged)
        except (HooksError, OSError) as error:
            self._kept.forget((target.segment, target.slot))
            self._dropped(error if isinstance(error, HooksError) else CheckpointError(f"not published: {error}"))

    def _check(self, shot: Shot, target: Target, places: Sequence[int], guard: Unchanged) -> None:
        base = place_of(target.view)
        index = guard.changed([base + shot.recipe.places[place][0] for place in places])
        if index is not None:
            reason = f"{shot.recipe.name(places[index])} was changed outside of an optimizer's step while it was copied"
            self._say(self.mode.forbid(reason))
            raise CheckpointError(
                f"{shot.generation} was not saved: {reason}",
                hint='call wait_copied() before you change weights yourself, or use snapshot="eager"',
            )

    @staticmethod
    def _say(line: str | None) -> None:
        if line is not None:
            _log.warning("%s", line)

    # ---- frozen

    def _skip(self, shot: Shot, target: Target) -> tuple[Collection[int], tuple[Range, ...]]:
        """The places that the slot holds already, and the byte ranges that they make up."""
        frozen = self._frozen()
        if not frozen:
            return (), ()
        extents = ((place, shot.extent(place)) for place in range(len(shot.recipe.places)))
        marks = {place: (*extent, frozen[extent]) for place, extent in extents if extent in frozen}
        held = self._kept.held((target.segment, target.slot), shot.recipe.number, marks)
        whole = ranges(sorted(shot.recipe.range(place) for place in held))
        return {place for place in held if inside(shot.recipe.range(place), whole)}, whole

    def seldom(self, tensors: Mapping[str, Any]) -> Collection[str]:
        """See `Writer`."""
        frozen = self._frozen()
        found = (
            (name, snapshot.part(one)) for name, one in tensors.items() if frozen and isinstance(one, torch.Tensor)
        )
        return frozenset(name for name, one in found if (one.data_ptr(), one.nbytes) in frozen)

    def _frozen(self) -> dict[tuple[int, int], int]:
        """Version by address and bytes, of parameters without a gradient that no optimizer has."""
        parts = (snapshot.part(one) for one in self._parameters() if not one.requires_grad)
        frozen = {(one.data_ptr(), one.nbytes): one._version for one in parts}
        for extent in self._gate.extents() if frozen else ():
            frozen.pop(extent, None)
        return frozen
