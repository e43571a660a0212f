"""Rounds keep their invariants, whatever comes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant

from dlrover_hooks.protocol import Phase
from tests.property.master_world import HIGH, LOW, World


class Rounds(World):
    """One world per round; ranks 0..n-1; nobody twice; numbers only up; rank 0 to the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds: dict[int, list[tuple[str, int]]] = {}
        self.number = 0
        self.finished = False
        self.plan = 0

    @invariant()
    def one_world_per_round(self) -> None:
        if self.job is None:
            return
        assert self.job.rounds.number >= self.number
        assert self.job.plan.number >= self.plan
        self.number, self.plan = self.job.rounds.number, self.job.plan.number
        current = self.job.rounds.round
        if current is None:
            return
        world = [(name, member.rank) for name, member in sorted(current.members.items())]
        assert sorted(rank for _, rank in world) == list(range(len(world)))
        assert LOW <= len(world) <= HIGH
        assert len(current.members) == sum(len(names) for names in current.agents.values())
        if current.number not in self.worlds:
            self._oldest_first(world)
        assert self.worlds.setdefault(current.number, world) == world
        assert current.store_prefix == f"job/{current.store_prefix.split('/')[1]}/{current.number}"

    def _oldest_first(self, world: list[tuple[str, int]]) -> None:
        """Rank 0 goes to the oldest survivor, and the others keep theirs."""
        before = dict(self.worlds[max(self.worlds)]) if self.worlds else {}
        survivors = sorted((before[name], rank) for name, rank in world if name in before)
        if survivors:
            assert survivors[0][1] == 0
            assert all(rank == old for old, rank in survivors[1:] if old < len(world))

    @invariant()
    def nobody_trains_alone(self) -> None:
        """RESTORING and TRAINING only with every seat taken; a dead member only in a broken round."""
        current = self.job.rounds.round if self.job else None
        if current is None:
            return
        if current.phase in (Phase.RESTORING, Phase.TRAINING):
            assert current.attached == current.world_size
        if current.phase is not Phase.BROKEN:
            assert all(member.gone in (None, "done", "exited") for member in current.members.values())

    @invariant()
    def the_end_is_remembered(self) -> None:
        if self.job is not None:
            assert self.job.finished or not self.finished
            self.finished = self.job.finished


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
