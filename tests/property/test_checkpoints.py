"""Generations: complete and committed only by all ranks of the running attempt (design section 3)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import invariant

from dlrover_hooks import protocol as p
from tests.property.master_world import World


class Checkpoints(World):
    """Counts votes by hand, beside the core."""

    def __init__(self) -> None:
        super().__init__()
        self.votes: dict[tuple[p.Generation, p.VoteKind], set[int]] = {}
        self.worlds: dict[int, int] = {}
        self.newest: dict[int, p.Generation | None] = {}
        self.attempt = 0

    def send(self, event: p.Message, **more: object) -> p.Message | None:
        reply = super().send(event, **more)  # type: ignore[arg-type]
        if isinstance(event, p.Vote) and reply is not None:
            self.votes.setdefault((event.generation, event.kind), set()).add(event.rank)
            self.worlds[event.generation.attempt] = event.world_size
        return reply

    @invariant()
    def committed_only_by_all(self) -> None:
        for commit in self.commits:
            manifest = commit.manifest
            ranks = self.votes[manifest.generation, p.VoteKind.STORED]
            assert ranks == set(range(manifest.world_size))
            assert [file.rank for file in manifest.files] == list(range(manifest.world_size))

    @invariant()
    def complete_only_by_all(self) -> None:
        newest = self.job.saves.newest_complete if self.job else None
        if newest is None or self.job is None or newest.attempt != self.job.attempt:
            return
        assert self.votes[newest, p.VoteKind.MEMORY] == set(range(self.worlds[newest.attempt]))

    @invariant()
    def a_peer_is_another_node_that_takes_part(self) -> None:
        """And each rank that restores from memory can be told which node holds its image, which is one node."""
        if self.job is None:
            return
        plan, neighbours = self.job.plan, self.job.offers.neighbours
        assert all(node != to and to in neighbours for node, to in plan.replicas_to.items())
        assert all(plan.holders)
        answered = [rank for ranks in plan.answers.values() for rank in ranks]
        assert not answered or sorted(answered) == list(range(len(plan.holders)))

    @invariant()
    def newest_never_goes_back(self) -> None:
        if self.job is None:
            return
        attempt, newest = self.job.attempt, self.job.saves.newest_complete
        assert attempt >= self.attempt
        self.attempt = attempt
        before = self.newest.get(attempt)
        assert before is None or (newest is not None and newest >= before)
        self.newest[attempt] = newest

    @invariant()
    def bounded(self) -> None:
        if self.job is not None:
            assert len(self.job.saves.open) <= 8
            assert len(self.job.saves.committed) <= 2


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
