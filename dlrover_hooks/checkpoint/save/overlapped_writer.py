"""Saves torch tensors at once or overlapped with the next forward and backward; frozen ones are copied once.

Buffers, which forward and backward may change, are copied before `write` returns. Parameters and optimizer state follow
on a thread, and the optimizer waits for them (`optimizer_gate`). On CUDA the copy engine does both, and only the device
waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dlrover_hooks.checkpoint.memory.memcpy import place_of
from dlrover_hooks.checkpoint.save import cuda_copy
from dlrover_hooks.checkpoint.save.copy_thread import CopyThread
from dlrover_hooks.checkpoint.save.frozen_parameters import Frozen, Left
from dlrover_hooks.checkpoint.save.optimizer_gate import ByteSamples, MemoryHold, OptimizerGate, Traces, Unchanged
from dlrover_hooks.checkpoint.save.overlap_policy import LAZY, Mode
from dlrover_hooks.checkpoint.save.slot_writer import SlotSave, SlotTarget, Writer
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.checkpoint.tensors.layout_cache import pick
from dlrover_hooks.errors import CheckpointError, HooksError

_WALK_EVERY = 16
"""Number of saves between two searches for frozen parameters."""
_log = logging.getLogger("dlrover_hooks")


class Split(NamedTuple):
    """The places that only the next step changes (`later`), and the rest. `starts`: offsets of `later` in the image.

    `memory` keeps the storages that are read during the step: holding only the tensor is not enough, since `.data = `
    releases its storage. It is reused until a save finds other addresses: collecting it from 588 tensors at each save
    takes 0.2 ms.
    """

    later: Sequence[int]
    now: Sequence[int]
    which: np.ndarray[Any, Any]
    """`later`, and the addresses of those tensors, as bytes, since NumPy takes 50 us to compare two arrays."""
    addresses: bytes
    starts: np.ndarray[Any, Any]
    samples: ByteSamples
    memory: Sequence[torch.UntypedStorage]


class Rest(NamedTuple):
    """The remaining work of a save: copies in progress on devices, `places` to copy, and the `changed` check.

    `memory`: the storages of frozen tensors that are compared, kept like those of `Split`.
    """

    events: Sequence[torch.cuda.Event]
    places: Sequence[int]
    changed: Callable[[], int | None]
    """Index, in `later` of the split, of a tensor that has changed since the save began."""
    split: Split
    left: Left
    memory: Sequence[torch.UntypedStorage]


class LazyWriter(Writer):
    """Fills slots. Training thread.

    Args:
        mode: decides between eager and lazy saves.
        dropped: called on the copy thread with the error if a save that was begun does not count.
        parameters: those of the models. The frozen ones among them are not copied each time.
    """

    def __init__(
        self,
        mode: Mode,
        dropped: Callable[[HooksError], None],
        parameters: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        super().__init__()
        self.mode, self.aside = mode, CopyThread()
        self._dropped, self._parameters, self._kept = dropped, parameters, Frozen()
        self._walked, self._still = 0, list[torch.Tensor]()
        """How often the frozen parameters were requested, and those without a gradient at the last search."""
        self._thaws = False
        """Frozen parameters change without a version change: all of them are copied from now on."""
        self._gate = OptimizerGate(self._before_step)
        self._form: Any = None
        """The inputs for which `_split` was computed; they seldom change between saves."""
        self._split: Split | None = None
        self._side, self._events = cuda_copy.SideStream(), list[torch.cuda.Event]()
        self._traces: Traces | None = None
        """Of the tensors copied on devices. The host runs ahead of them into the step, so it has to check earlier."""

    def chooses_lazy(self) -> bool:
        """See `Writer`."""
        return self.mode.next() == LAZY

    def write(self, shot: SlotSave, target: SlotTarget, *, lazy: bool) -> None:
        """See `Writer`."""
        left = self._leave(shot, target)
        split = self._divide(shot, self._others(shot, left)) if lazy else None
        if split is not None and split.later:
            early = shot._replace(header=(), holds=None)  # `_finish` does both
            events = self._copy(early, target, split.now) if split.now else []
            cuda_copy.gate(events)  # the device reads what forward changes before forward runs
            rest = self._begin(shot, target, split, events, left)
            hold = MemoryHold(self.aside.drain, (*split.memory, *rest.memory))
            try:
                self.aside.begin(lambda: self._finish(shot, target, rest, hold), len(target.view))
            except BaseException:
                hold.end()
                raise
        else:
            if self._thawed(left, target) is not None:
                left = self._leave(shot, target)
            cuda_copy.finish(self._copy(shot, target, self._others(shot, left)))
            self._publish(target, left)

    def took(self, seconds: float) -> None:
        """See `Writer`."""
        if (line := self.mode.took(seconds)) is not None:
            _log.info("%s", line)

    def wait(self) -> None:
        """See `Writer`."""
        self.aside.wait()
        self._events, self._traces = [], None

    def check(self) -> None:
        """See `Writer`."""
        self.aside.check()

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
        self._split = None

    def _before_step(self) -> None:
        if self.aside.idle() and self._traces is None and not cuda_copy.capturing():
            return
        if not self.aside.here:  # a forked child has no CUDA, and copies nothing
            return
        captured = cuda_copy.capturing()
        if captured:
            self._say(self.mode.forbid("an optimizer's step is captured in a CUDA graph, whose replays no hook sees"))
        if self._traces is not None and not captured:
            self._traces.changed()
            cuda_copy.gate(self._events)
        else:
            self.aside.wait()

    def _publish(self, target: SlotTarget, left: Left) -> None:
        target.publish(left.whole)
        self._kept.filled(left)

    def _copy(self, shot: SlotSave, target: SlotTarget, places: Sequence[int]) -> list[torch.cuda.Event]:
        """Copy `places`. Copies from devices are only begun."""
        on_device = shot.found.on_device
        self.fill(shot, target, [place for place in places if place not in on_device] if on_device else places)
        if not on_device:
            return []
        self._side.pin(target.room)
        rows = [(on_device[place], shot.recipe.view(target.view, place)) for place in places if place in on_device]
        return self._side.copy(rows)

    # ---- overlapped with the step

    def _divide(self, shot: SlotSave, places: Sequence[int]) -> Split:
        """Divide `places`. If any of them is on a device, only those on a device are left for later."""
        left = list(places) if len(places) < len(shot.recipe.places) else None
        on_device = [one.data_ptr() for one in shot.found.on_device.values()]
        form = shot.recipe.number, self._gate.form, left, on_device
        split = self._split if form == self._form else None
        if split is None or shot.found.addresses[split.which].tobytes() != split.addresses:
            stable = self._gate.extents()
            among = [place for place in places if place in shot.found.on_device] if on_device else places
            later = [place for place in among if shot.extent(place) in stable]
            now = sorted(set(places).difference(later))  # the addresses of these need not stay the same
            starts, sizes = np.asarray(pick(shot.recipe.places, later), np.uint64).reshape(-1, 2).T.copy()
            which = np.asarray(later, np.intp)
            addresses = shot.found.addresses[which]
            samples = ByteSamples(addresses.tolist(), sizes, self.copier)
            memory = [] if on_device else torch_backend.memory(pick(shot.found.held, later))
            split = self._split = Split(later, now, which, addresses.tobytes(), starts, samples, memory)
            self._form = form
        return split

    def _begin(
        self, shot: SlotSave, target: SlotTarget, split: Split, events: list[torch.cuda.Event], left: Left
    ) -> Rest:
        tensors, kept = pick(shot.found.held, split.later), pick(shot.found.held, sorted(left.places))
        if shot.found.on_device:
            self._traces = Traces(tensors)
            self._events = self._copy(shot, target, split.later)
            return Rest(events + self._events, (), self._traces.changed, split, left, torch_backend.memory(kept))
        guard = Unchanged(tensors, split.samples)

        def changed() -> int | None:
            return guard.changed(place_of(target.view) + split.starts)

        return Rest((), split.later, changed, split, left, torch_backend.memory(kept))

    def _finish(self, shot: SlotSave, target: SlotTarget, rest: Rest, hold: MemoryHold) -> None:
        """On the copy thread: copy the rest, check that nothing changed during the copy, publish."""
        try:
            if (reason := self._thawed(rest.left, target)) is not None:
                raise CheckpointError(f"{shot.generation} was not saved: {reason}", hint="the next one is saved")
            cuda_copy.finish(rest.events)
            self.fill(shot, target, rest.places, alone=True)
            if (index := rest.changed()) is not None:
                self._refuse(shot, shot.recipe.name(rest.split.later[index]))
            if self.aside.given_up:
                raise CheckpointError(f"{shot.generation} was not saved: its copy was given up, and has ended now")
            self._publish(target, rest.left)
        except Exception as error:  # a failed copy loses this save, but never ends the run
            reason = f"{shot.generation} was not saved: {type(error).__name__}: {error}"
            self._dropped(error if isinstance(error, HooksError) else CheckpointError(reason))
        finally:
            hold.end()

    def _refuse(self, shot: SlotSave, name: str) -> None:
        reason = f"{name} was changed outside of an optimizer's step while it was copied"
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

    def _leave(self, shot: SlotSave, target: SlotTarget) -> Left:
        """What the slot appears to hold already. Never tensors on a device: comparing those costs too much."""
        frozen = self._frozen()
        places = range(len(shot.recipe.places)) if frozen else ()
        extents = ((place, shot.extent(place)) for place in places if place not in shot.found.on_device)
        marks = {place: (*extent, frozen[extent]) for place, extent in extents if extent in frozen}
        return self._kept.take((target.segment, target.slot), shot.recipe, marks)

    @staticmethod
    def _others(shot: SlotSave, left: Left) -> Sequence[int]:
        """The places that have to be copied."""
        places = range(len(shot.recipe.places))
        return [place for place in places if place not in left.places] if left.places else places

    def _thawed(self, left: Left, target: SlotTarget) -> str | None:
        """Copy all frozen tensors from now on if one changed although its version did not; returns the reason then."""
        place = self._kept.changed(left, target.view)
        if place is None:
            return None
        reason = f"{left.recipe.name(place)} was changed, and its version does not tell"
        self._kept.forget()
        self._thaws = True
        self._say(
            f"frozen parameters are copied at every save from here on: {reason} (it was written through .data?). "
            "Checkpoints since then may hold what it was before"
        )
        return reason

    def seldom(self, tensors: Mapping[str, Any]) -> Collection[str]:
        """See `Writer`."""
        frozen = self._frozen()
        found = (
            (name, torch_backend.part(one)) for name, one in tensors.items() if frozen and isinstance(one, torch.Tensor)
        )
        return frozenset(name for name, one in found if (one.data_ptr(), one.nbytes) in frozen)

    def _frozen(self) -> dict[tuple[int, int], int]:
        """Version by (address, bytes), of parameters without a gradient that no optimizer has.

        All parameters are searched only at every `_WALK_EVERY`-th save; those frozen in between are copied until then.
        """
        if self._thaws:
            return {}
        if not self._walked % _WALK_EVERY:
            self._still = [one for one in self._parameters() if not (one.requires_grad or one.is_inference())]
        self._walked += 1
        parts = (torch_backend.part(one) for one in self._still if not one.requires_grad)
        frozen = {(one.data_ptr(), one.nbytes): one._version for one in parts}
        for extent in self._gate.extents() if frozen else ():
            frozen.pop(extent, None)
        return frozen
