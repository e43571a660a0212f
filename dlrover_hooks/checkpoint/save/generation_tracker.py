"""The state of each of this rank's generations in the trainer's process, from the save to the file. Pure.

One lock makes each method atomic, so that each may be called on any thread. The column "thread" says where the event
happens. Two parts of the state change independently, as an image can be in storage before its vote is sent.

    its vote for memory                                   thread     from -> to
    the keeper has hashed it: `hashed`                    reporter   (a vote may be sent)
    the vote is about to be sent: `sending`               reporter   none -> sent; refused if withdrawn
    it was not answered: `not_delivered`                  reporter   sent -> none, or -> doubtful if it may have arrived
    it was answered: `replied`                            reporter   sent, doubtful -> counted
    its slot is overwritten, master away: `choose_slot`   training   none -> withdrawn
    its waiting vote is dropped: `drop_vote`              reporter   withdrawn -> none

    its file                                              thread     from -> to
    it is due or the last one: `plan`                     reporter   none, failed, refused -> planned, or -> failed
    `plan` finds it hashed, or that it never will be      reporter   planned -> ordered, or -> failed
    the keeper still writes an earlier one: `allocated`   memory     none -> ordered
    the keeper has written it, or cannot: `ended`         keeper     any -> stored or failed, or -> refused by storage
    it is to be saved again: `retry`                      training   failed -> none

A slot is reused only if its generation is neither planned nor ordered, and cannot be the newest complete one
(`memory.slot_policy`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dlrover_hooks.checkpoint.memory.segment import SLOTS, Slot
from dlrover_hooks.checkpoint.memory.slot_policy import Heard, choose_slot
from dlrover_hooks.protocol import Cadence, Generation

REMEMBERED = 16
"""Generations whose state is kept at least; those with a pending file or a vote that matters are kept anyway."""


MemoryVote = Literal["none", "sent", "doubtful", "counted", "withdrawn"]
FileState = Literal["none", "planned", "ordered", "stored", "failed", "refused"]
_PENDING = ("planned", "ordered")


class PersistOrders(NamedTuple):
    """What the keeper is to write now, and what cannot be written any more, each with the reason."""

    ordered: tuple[Generation, ...]
    failed: tuple[tuple[Generation, str], ...]


@dataclass
class _State:
    saved: bool = False
    hashed: bool = False
    vote: MemoryVote = "none"
    file: FileState = "none"


class GenerationTracker:
    """See the module. One for each session. `run` and `attempt`: those of the saves to come."""

    def __init__(self) -> None:
        self.run, self.attempt = "", 0
        self.away = False
        """The master is unreachable."""
        self.votes = False
        """A reporter votes for this rank. Without one, the generation published last counts as complete."""
        self.newest_complete: Generation | None = None
        """As reported by the master."""
        self.complete_here: Generation | None = None
        """The newest complete one that this node's keeper holds: restored, or reported since."""
        self._may_complete: Collection[int] = ()
        self._states: dict[Generation, _State] = {}
        self._newest_step = 0
        self._served: int | None = None
        self._lock = threading.RLock()

    def _of(self, generation: Generation) -> _State:
        if generation not in self._states:
            for old in [one for one, state in self._states.items() if self._forgettable(one, state)][: 1 - REMEMBERED]:
                del self._states[old]
            self._states[generation] = _State()
        return self._states[generation]

    def _forgettable(self, generation: Generation, state: _State) -> bool:
        if state.file in _PENDING or state.vote in ("sent", "doubtful", "withdrawn"):
            return False
        newer = self.newest_complete is None or generation > self.newest_complete
        return not (state.vote == "counted" and newer and generation.step in self._may_complete)

    def next_session(self) -> GenerationTracker:
        """The tracker of the next session in this process, whose keeper holds the same memory, and writes the same.

        Votes and due generations of this session's attempt end with it: the master would refuse them.
        """
        with self._lock:
            made = GenerationTracker()
            made.run, made.attempt, made.complete_here = self.run, self.attempt, self.complete_here
            for generation, state in self._states.items():
                if state.file == "ordered":
                    made.ordered(generation)
            return made

    # ---- saves

    def begin(self, run: str, attempt: int) -> None:
        """Saves from now on belong to this attempt."""
        self.run, self.attempt = run, attempt

    def at(self, step: int) -> Generation:
        """The generation of a save of `step`."""
        return Generation(self.attempt, step, self.run)

    def current(self, generation: Generation) -> bool:
        """Whether it belongs to this attempt. Nothing else is reported to the master."""
        return (generation.run, generation.attempt) == (self.run, self.attempt)

    def saved(self, generation: Generation) -> None:
        """It was saved: its vote will follow, or has been sent already."""
        with self._lock:
            self._newest_step = max(self._newest_step, generation.step)
            self._of(generation).saved = True

    def skipped(self, generation: Generation) -> None:
        """It was not saved: there will be no vote for it."""
        with self._lock:
            self._newest_step = max(self._newest_step, generation.step)

    def hashed(self, generation: Generation) -> None:
        """The keeper has hashed it. The vote created next reports this progress, and none before it."""
        with self._lock:
            self.saved(generation)
            self._of(generation).hashed = True

    @property
    def passed(self) -> int:
        """`Vote.passed`: no further vote follows for steps before this one.

        A save that was never hashed, because the keeper died or its copy failed, is forgotten once newer ones fill all
        slots.
        """
        with self._lock:
            newest = sorted((one.step, state.hashed) for one, state in self._states.items() if state.saved)[-SLOTS:]
            return min((step for step, hashed in newest if not hashed), default=self._newest_step + 1)

    # ---- slots

    def heard(self, *, alone: bool) -> Heard:
        """What this rank knows of the others. `alone`: there are none."""
        with self._lock:
            if alone or not self.votes:
                return Heard(self.complete_here)
            counted = (one for one, state in self._states.items() if state.vote == "counted")
            newer = (one for one in counted if self.newest_complete is None or one > self.newest_complete)
            return Heard(self.complete_here, frozenset(one for one in newer if one.step not in self._may_complete))

    def choose_slot(self, slots: Sequence[Slot], heard: Heard, saved: Generation, *, last: bool = False) -> int | None:
        """As the function `choose_slot`. If the slot's generation could still get a vote, rules that out first."""
        with self._lock:
            unvoted = frozenset[Generation]()
            if self.away and heard.hopeless is not None:  # a single rank has no others to consider
                held = (slot.generation for slot in slots if slot.generation is not None)
                unvoted = frozenset(one for one in held if self._unvoted(one))
            index = choose_slot(slots, heard._replace(unvoted=unvoted), self.pending, saved, last=last)
            before = slots[index].generation if index is not None else None
            if before is not None and before in unvoted:
                self._of(before).vote = "withdrawn"
            return index

    def _unvoted(self, generation: Generation) -> bool:
        state = self._states.get(generation)
        return state is None or state.vote in ("none", "withdrawn")

    # ---- votes

    def sending(self, generation: Generation) -> bool:
        """Its vote is about to be sent: its slot stays until the master reports. False: the slot was overwritten."""
        with self._lock:
            state = self._of(generation)
            if state.vote == "none":
                state.vote = "sent"
            return state.vote != "withdrawn"

    def not_delivered(self, generation: Generation, *, may_have_arrived: bool) -> None:
        """A vote of any kind was not answered. A memory vote that certainly did not arrive no longer keeps its slot."""
        with self._lock:
            state = self._states.get(generation)
            if state is not None and state.vote == "sent":
                state.vote = "doubtful" if may_have_arrived else "none"

    def drop_vote(self, generation: Generation) -> bool:
        """True once if its slot was overwritten before its vote was sent: there will be no vote for it."""
        with self._lock:
            gone = generation in self._states and self._states[generation].vote == "withdrawn"
            if gone:
                self._states[generation].vote = "none"
            return gone

    def replied(
        self, newest: Generation | None, may_complete: Collection[int], counted: Generation | None = None
    ) -> Generation | None:
        """The master replied, to the memory vote for `counted` if any. Returns a new newest complete one."""
        with self._lock:
            if counted is not None:
                self._of(counted).vote = "counted"
            self._may_complete = may_complete
            before, self.newest_complete = self.newest_complete, newest or self.newest_complete
            return newest if newest != before else None

    # ---- files

    def plan(self, cadence: Cadence, last: Generation | None = None) -> PersistOrders:
        """What is to be persisted now: due generations, and `last`, which no save follows.

        Due is the first saved one at or after `Cadence.persist_from`. Ranks receive that at different moments but pick
        the same generation, because the choice depends on the saved steps alone. If it arrives too late, the slot was
        overwritten, the rank votes FAILED and the master retries.
        """
        with self._lock:
            wanted = ((last, True), (self._due(cadence), False))
            failed = [(one, "an older one is still being written") for one, is_last in wanted
                      if one is not None and not self._plan(one, last=is_last)]  # fmt: skip
            newest = max((one for one, state in self._states.items() if state.hashed), default=None)
            ordered = list[Generation]()
            for one, state in self._states.items():
                if state.file == "planned" and state.hashed:
                    state.file = "ordered"
                    ordered.append(one)
                elif state.file == "planned" and newest is not None and newest > one:
                    state.file = "failed"
                    failed.append((one, "its slot was used again before it was hashed"))
            return PersistOrders(tuple(ordered), tuple(failed))

    def _due(self, cadence: Cadence) -> Generation | None:
        start = cadence.persist_from
        if start is None or start == self._served:
            return None
        due = next((one for one, state in self._states.items() if state.saved and one.step >= start), None)
        self._served = start if due is not None else self._served
        return due

    def _plan(self, generation: Generation, *, last: bool) -> bool:
        """Plan its file. False: another one is pending, and two reserved slots would stop the saves."""
        state = self._of(generation)
        if state.file not in (*_PENDING, "stored"):
            state.file = "planned" if last or not self.pending else "failed"
        return state.file != "failed"

    def ordered(self, generation: Generation) -> None:
        """The keeper is asked to write its file."""
        with self._lock:
            self._of(generation).file = "ordered"

    def allocated(self, complete: Generation | None, persisting: Iterable[Generation]) -> None:
        """Take over what the keeper holds and still writes. Its notices may have come before this list of them."""
        with self._lock:
            self.complete_here = self.complete_here or complete
            for generation in persisting:
                if (state := self._of(generation)).file == "none":
                    state.file = "ordered"

    def ended(self, generation: Generation, *, stored: bool, refused: bool = False) -> None:
        """The keeper has written its file, or it cannot. `refused`: because of the storage."""
        with self._lock:
            self._of(generation).file = "stored" if stored else "refused" if refused else "failed"

    def retry(self, generation: Generation) -> bool:
        """True once after its file has failed, unless the storage refused it: it may be saved again."""
        with self._lock:
            if failed := generation in self._states and self._states[generation].file == "failed":
                self._states[generation].file = "none"
            return failed

    def failed(self, generation: Generation) -> bool:
        """Its file could not be written."""
        with self._lock:
            return generation in self._states and self._states[generation].file in ("failed", "refused")

    @property
    def pending(self) -> tuple[Generation, ...]:
        """Those whose file is planned or being written."""
        with self._lock:
            return tuple(one for one, state in self._states.items() if state.file in _PENDING)
