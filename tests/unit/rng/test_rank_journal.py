"""Which note of a random state counts for the process that goes on with a rank."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dlrover_hooks import rng
from dlrover_hooks.protocol import Generation
from dlrover_hooks.rng import process_state, rank_journal

RUN = "5e" * 16


def at(step: int, attempt: int = 1, run: str = RUN) -> Generation:
    return Generation(attempt, step, run)


class Source:
    """A random state and batch statistics; without a state, that of this process."""

    def __init__(self, statistics: rank_journal.Statistics = (), state: rng.Taken | None = None) -> None:
        self._statistics, self._state = statistics, state

    def random_state(self) -> rng.Taken:
        return rng.take() if self._state is None else self._state

    def statistics(self) -> rank_journal.Statistics:
        return self._statistics


class Kept:
    """What a process left behind, as if it had been killed at this moment."""

    def __init__(self, rank: int = 1, world_size: int = 3, begun: int = 0) -> None:
        self.notes: dict[int, bytes] = {}
        self.draws = rank_journal.RngJournal(self._write)
        self.draws.begin(at(begun), rank, world_size)

    def _write(self, place: int, head: bytes, body: bytes) -> None:
        self.notes[place] = head + body

    def find(self, generation: Generation, rank: int = 1, world_size: int = 3) -> dict[str, Any] | None:
        found = rank_journal.find(self.notes.values(), generation, rank, world_size)
        return rank_journal.state(found) if found is not None else None


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Random states with names; the one that is captured next is `now`."""
    made = {name: {"python": (3, (number,), None)} for number, name in enumerate(("five", "six", "seven", "now"))}
    monkeypatch.setattr(process_state, "capture", lambda: made["now"])
    return made


def test_the_last_two_steps_are_known(states: dict[str, Any]) -> None:
    kept = Kept()
    for step, name in ((5, "five"), (6, "six"), (7, "seven")):
        kept.draws.over(step, rng.pack(states[name]))
    assert [kept.find(at(step)) for step in (5, 6, 7)] == [None, states["six"], states["seven"]]


def test_what_stays_is_encoded_once() -> None:
    """A note is written in two parts; the second one is the same object until something is drawn."""
    written: list[tuple[bytes, bytes]] = []
    draws = rank_journal.RngJournal(lambda _, head, body: written.append((head, body)))
    draws.begin(at(0), 0, 2)
    state = rng.take()
    draws.read(Source(state=state))
    for step in (1, 70_000):
        draws.over(step, state.packed)
        draws.ahead()
    assert len({id(body) for _, body in written}) == 1
    state, statistics = rng.take(), (("0.mean", b"1234"),)
    draws.read(Source(statistics, state))
    draws.ahead()
    notes = [msgspec.msgpack.decode(head + body, type=rank_journal.RngEntry) for head, body in written]
    assert notes[:4] == [
        rank_journal.RngEntry(at(step), 0, 2, ahead, state.packed) for step in (1, 70_000) for ahead in (False, True)
    ]
    assert notes[4] == rank_journal.RngEntry(at(70_000), 0, 2, ahead=True, state=state.packed, statistics=statistics)


def test_the_newest_word_on_a_step_counts(states: dict[str, Any]) -> None:
    """A validation begins behind a step, and is over: the step before stays."""
    kept = Kept()
    for step, name in ((5, "five"), (6, "six"), (6, "seven")):
        kept.draws.over(step, rng.pack(states[name]))
    assert [kept.find(at(step)) for step in (5, 6)] == [states["five"], states["seven"]]


def test_within_a_step_that_the_others_made(states: dict[str, Any]) -> None:
    """Also where a step counts as two, and in the first one of a life; not for the step before."""
    kept = Kept(begun=4)
    kept.draws.ahead()
    assert [kept.find(at(step)) for step in (4, 5, 6)] == [None, states["now"], states["now"]]
    kept.draws.over(5, rng.pack(states["five"]))
    assert kept.find(at(5)) == states["five"], "it came to the end of the step"


def test_older_notes_in_memory_that_was_given_up(states: dict[str, Any]) -> None:
    """Of within a step, wherever they come among the others."""
    kept = Kept()
    kept.draws.over(4, rng.pack(states["five"]))
    kept.draws.ahead()
    old = list(kept.notes.values())
    states["now"] = states["seven"]
    kept.draws.over(5, rng.pack(states["six"]))
    kept.draws.ahead()
    for notes in ([*old, *kept.notes.values()], [*kept.notes.values(), *old]):
        found = rank_journal.find(notes, at(6), 1, 3)
        assert found is not None
        assert rank_journal.state(found) == states["seven"]


@pytest.mark.parametrize(
    ("generation", "rank", "world_size"),
    [(at(5, attempt=2), 1, 3), (at(6, attempt=2), 1, 3), (at(5, run="ab" * 16), 1, 3), (at(5), 0, 3), (at(5), 1, 2)],
)
def test_of_another_attempt_run_rank_or_world(
    states: dict[str, Any], generation: Generation, rank: int, world_size: int
) -> None:
    kept = Kept()
    kept.draws.over(5, rng.pack(states["five"]))
    kept.draws.ahead()
    assert kept.find(generation, rank, world_size) is None


def test_the_last_reduction_of_a_step_counts_and_its_beginning_only_without_one(states: dict[str, Any]) -> None:
    """Gradients may be reduced in each micro-batch. A loop that reduces by itself has the optimizer's step alone."""
    kept = Kept()
    for name in ("five", "six"):
        states["now"] = states[name]
        kept.draws.ahead()
    states["now"] = states["seven"]
    kept.draws.ahead(unless_noted=True)
    assert kept.find(at(1)) == states["six"]
    kept.draws.over(1, rng.pack(states["five"]))
    kept.draws.ahead(unless_noted=True)
    assert kept.find(at(2)) == states["seven"]


def test_what_a_life_began_from_is_known_until_its_first_step_is_over(states: dict[str, Any]) -> None:
    """Whichever process had that rank before; and what this one knew of its own rank, if only from within the step."""
    kept = Kept(rank=1)
    kept.draws.over(4, rng.pack(states["five"]))
    kept.draws.ahead()
    other = Kept(rank=0)
    other.draws.over(5, rng.pack(states["six"]))
    for attempt in (2, 3):
        begun = rank_journal.find([*kept.draws.notes, *other.draws.notes], at(5), 0, 3)
        kept.draws.begin(at(5, attempt), 0, 3, at(5), begun)
        states["now"] = states["seven"]
        kept.draws.ahead()
        assert kept.find(at(5), rank=0) == states["six"]
        assert kept.find(at(5), rank=1) == {"python": (3, (3,), None)}
    kept.draws.over(6, rng.pack(states["seven"]))
    assert kept.find(at(6, 3), rank=0) == states["seven"]
    assert kept.find(at(5), rank=0) == states["six"]


def test_nothing_is_noted_before_a_life_begins(states: dict[str, Any]) -> None:
    notes: dict[int, bytes] = {}
    draws = rank_journal.RngJournal(lambda place, head, body: notes.__setitem__(place, head + body))
    draws.over(5, rng.pack(states["five"]))
    draws.ahead()
    assert not notes
    assert not draws.notes


def test_what_cannot_be_read_is_passed_over(states: dict[str, Any]) -> None:
    """Of another version, or torn by a way that was not thought of."""
    kept = Kept()
    kept.draws.over(5, rng.pack(states["five"]))
    (whole,) = kept.draws.notes
    damaged = [b"\x00", whole[:40], msgspec.msgpack.encode([1, 2])]
    assert rank_journal.find([*damaged, whole], at(5), 1, 3) == whole
    assert rank_journal.find(damaged, at(5), 1, 3) is None


def test_it_comes_back_exactly() -> None:
    state = rng.capture()
    kept = Kept()
    kept.draws.over(5, rng.pack(state))
    found = kept.find(at(5))
    assert found is not None
    assert found["python"] == state["python"]
    assert np.array_equal(found["numpy"][1], state["numpy"][1])
    assert torch.equal(found["torch"], state["torch"])


def test_batch_statistics_are_those_of_rank_0_in_whatever_world(states: dict[str, Any]) -> None:
    """Behind a step, or within it; other ranks note none."""
    kept, other = Kept(rank=0, world_size=3), Kept(rank=1)
    for one, first in ((kept, b"zero"), (other, b"one")):
        one.draws.read(Source((("0.mean", first),)))
        one.draws.over(5, rng.pack(states["five"]))
        one.draws.read(Source((("0.mean", first + b" newer"),)))
        one.draws.ahead()
    notes = [*other.notes.values(), *kept.notes.values()]
    assert rank_journal.statistics(notes, at(5)) == (("0.mean", b"zero"),)
    assert rank_journal.statistics(notes, at(6)) == (("0.mean", b"zero newer"),)
    assert (
        rank_journal.statistics(other.notes.values(), at(5)) == rank_journal.statistics(notes, at(5, attempt=2)) == ()
    )


def test_all_ranks_of_which_there_is_a_note(states: dict[str, Any]) -> None:
    """Of this step and world; each has the note that `find` finds."""
    kept = [Kept(rank=rank) for rank in (0, 1, 2)] + [Kept(rank=1, world_size=2)]
    for one, step in zip(kept, (5, 6, 4, 5), strict=True):
        one.draws.over(step, rng.pack(states["five"]))
    kept[2].draws.ahead()
    notes = [note for one in kept for note in one.notes.values()]
    found = rank_journal.by_rank(notes, at(5), 3)
    assert {rank: rank_journal.state(note) for rank, note in found.items()} == {0: states["five"], 2: states["now"]}


def test_what_another_node_told_of_the_last_two_steps(states: dict[str, Any]) -> None:
    """Of a step that is made again, in the next attempt, the newest: the one that all go on from stays."""
    kept, other = Kept(rank=0), Kept(rank=1)

    def told(generation: Generation) -> dict[str, Any] | None:
        found = rank_journal.find(kept.draws.told, generation, 1, 3)
        return rank_journal.state(found) if found is not None else None

    for step, name in ((4, "five"), (5, "six"), (6, "seven")):
        for one in (kept, other):
            one.draws.over(step, rng.pack(states["now"]))
        states["now"] = states[name]
        other.draws.ahead()
        kept.draws.heard([other.draws.within])
    assert [told(at(step)) for step in (5, 6, 7)] == [None, states["six"], states["seven"]]
    for one in (kept, other):
        one.draws.begin(at(6, attempt=2), int(one is other), 3)
    states["now"] = states["five"]
    other.draws.ahead()
    kept.draws.heard([other.draws.within])
    assert [told(generation) for generation in (at(6), at(7, attempt=2))] == [states["six"], states["five"]]
    assert len(kept.draws.told) == 2


def test_nothing_is_heard_before_a_life_begins() -> None:
    draws = rank_journal.RngJournal(lambda *_: None)
    draws.heard([b"early"])
    assert not draws.told
