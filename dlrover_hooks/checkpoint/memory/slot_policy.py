"""Decides which slot a save may overwrite, so that a restore is never older than one save interval. Pure.

A generation that is complete on all ranks, or may become so, stays on all of them until a newer one is complete:

- The master reports the newest complete generation. Slots with older ones are free.
- A newer one is free only if some rank skipped it (`Vote.passed`), so that it never becomes complete. The master
  reports that, too: ranks skip different saves, as a slot that is being persisted may cost one a save that others make.
- A slot that is being persisted is never free.
- A generation can be saved twice: on schedule, and at the end of the run. The keeper uses the copy that was published
  last (`memory.slot_states`). The older copies are free, unless one of them is being persisted.

While the master is unreachable, a rank does not learn what the others skipped. A generation that it has not voted for
is not complete, and never will be once its vote is withdrawn. Saves overwrite these, the oldest first.

With a single rank the generation published last is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dlrover_hooks.checkpoint.memory.segment import Slot
from dlrover_hooks.checkpoint.memory.slot_states import image_identity
from dlrover_hooks.errors import CheckpointError
from dlrover_hooks.protocol import Generation

MEETING = 8
"""If each rank has one slot left for new saves, some could fill it at odd steps and others at even ones, forever. So
after two saves in a row did not become complete, the last free slot is filled only at steps divisible by this number,
the same ones on all ranks. If news of a save takes longer than that many steps, ranks may still miss each other. So the
distance is doubled until it reaches the number of steps since the slot was filled, or `FARTHEST`.
"""
FARTHEST = 32


NO_SLOT = (
    "nothing is lost, and the next save takes the next free one; where saves follow each other faster than they are "
    "hashed and written, a larger save_every leaves out fewer"
)


class NoSlot(CheckpointError):
    """All slots are needed: this save is skipped."""


class Heard(NamedTuple):
    """What a rank knows about the others."""

    newest_complete: Generation | None = None
    hopeless: frozenset[Generation] | None = None
    """This rank's newer generations that never become complete. None: there are no other ranks."""
    unvoted: frozenset[Generation] = frozenset()
    """The master is unreachable, and has no vote for these."""


def choose_slot(
    slots: Sequence[Slot], heard: Heard, persisting: Collection[Generation], saved: Generation, *, last: bool = False
) -> int | None:
    """The slot that the save of `saved` may overwrite: torn and free ones first, then the oldest.

    None: there is none now, so skip this save. `last`: no save follows, so all ranks wait until they can make this one.
    Slots of another run count as older than all of this run.
    """
    whole = [slot for slot in slots if not slot.torn and slot.generation is not None]
    latest = {image_identity(slot): slot for slot in sorted(whole, key=lambda slot: slot.seq)}.values()
    newest = max(latest, key=lambda slot: _age(slot, saved.run), default=None)
    needed = [slot for slot in latest if _needed(slot, newest, heard, saved)]
    usable = [slot for slot in slots if slot not in needed and (slot.torn or slot.generation not in persisting)]
    if not usable:
        given = heard.unvoted.difference((heard.newest_complete, *persisting))
        usable = [slot for slot in slots if slot.generation in given]
    if len(usable) == 1 and not last and saved.step % _distance(heard, usable[0], saved):
        return None
    return min(usable, key=lambda slot: _age(slot, saved.run)).index if usable else None


def _distance(heard: Heard, slot: Slot, saved: Generation) -> int:
    """Distance between steps at which the last free `slot` may be filled."""
    if heard.hopeless is None or len(heard.hopeless) < 2:
        return 1
    distance, filled = MEETING, slot.generation
    while filled is not None and filled in heard.hopeless and distance < min(saved.step - filled.step, FARTHEST):
        distance *= 2
    return distance


def _needed(slot: Slot, newest: Slot | None, heard: Heard, saved: Generation) -> bool:
    generation = slot.generation
    if generation == heard.newest_complete:
        return True
    if heard.hopeless is None:
        return slot is newest
    return generation not in heard.hopeless and _may_complete(generation, heard.newest_complete, saved)


def _may_complete(generation: Generation | None, complete: Generation | None, saved: Generation) -> bool:
    """It was saved after the restore, which only uses what all ranks held, and is newer than the complete one."""
    if generation is None or (generation.run, generation.attempt) != (saved.run, saved.attempt):
        return False
    return complete is None or complete.run != saved.run or generation > complete


def _age(slot: Slot, run: str) -> tuple[bool, bool, int, int]:
    if slot.torn or slot.generation is None:
        return (False, False, 0, 0)
    return (True, slot.generation.run == run, slot.generation.attempt, slot.generation.step)
