"""A relaunch saves as a first start does: in memory and in storage, whatever step it begins at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.save.generation_tracker import GenerationTracker
from dlrover_hooks.checkpoint.save.schedule import save_due
from dlrover_hooks.testing import MasterFake
from tests.e2e.job_script import attach, held, join, stored, vote

STEP_S, COPY_S = 0.5, 0.07
STEPS = 400
SETTINGS = (
    ("auto", "20s", 4),
    ("4s", "20s", 8),
    ("30s", "20s", 60),
    (7, "20s", 7),
    (7, 20, 7),
    ("auto", 50, 4),
)
"""`save_every`, `persist_every`, and how many steps that is between two saves."""
LATE_S = 1.0 + STEP_S
"""A heartbeat and a step may pass until a rank hears that something is due."""


class Launch:
    """Two workers that train under a new master, or (`again`) in the next attempt of the same one."""

    def __init__(self, settings: Mapping[str, Any], life: str, *, again: Launch | None = None, **more: Any) -> None:
        self.master = again.master if again is not None else MasterFake()
        self.names = [f"{life}{rank}" for rank in range(2)]
        self.saved: list[int] = []
        self.durable: list[int] = []
        if again is not None:
            for name in again.names:
                self.master.call(p.Exited("job", "agent", name, -9))
        self.master.call(join(lives=life))
        for name in reversed(self.names):
            self.master.call(attach(name, save_to="/tree", **settings, **more))
        self.plan = self.master.call(p.AwaitPlan("job", self.names[0]))
        if self.plan.restore is not None:
            for name in self.names:
                self.master.call(p.Loaded("job", name, self.plan.round, True))
            self.plan = self.master.call(p.AwaitPlan("job", self.names[0], after=self.plan.number or 0))
        assert self.plan.phase is p.Phase.TRAINING
        self.begun = self.plan.restore.generation.step if self.plan.restore is not None else 0

    @property
    def offsets(self) -> list[int]:
        """Steps that were saved, counted from the start of the attempt."""
        return [step - self.begun for step in self.saved]

    def train(self) -> Iterator[int]:
        """Each step. Both ranks save what is due and make durable what the master has announced."""
        picks, cadence = GenerationTracker(), self.plan.cadence
        for step in range(self.begun + 1, self.begun + STEPS):
            self.master.advance(STEP_S)
            if step % 2 == 0:
                beats = [self.master.call(p.Heartbeat("job", name, step)) for name in self.names]
                cadence = beats[0].cadence
            if save_due(cadence, step):
                self.saved.append(step)
                picks.hashed(p.Generation(self.plan.attempt, step, self.plan.run))
                cadence = self.vote(step, p.VoteKind.MEMORY)
            for generation in picks.plan(cadence).ordered:
                picks.ended(generation, stored=True)
                self.durable.append(generation.step)
                cadence = self.vote(generation.step, p.VoteKind.STORED)
            yield step

    def vote(self, step: int, kind: p.VoteKind) -> p.Cadence:
        known, cadence = STEP_S if step > self.begun + 1 else 0.0, p.Cadence()
        for rank, name in enumerate(self.names):
            one = vote(rank, step, kind, attempt=self.plan.attempt, step_s=known, copy_s=COPY_S)
            cadence = self.master.call(msgspec.structs.replace(one, incarnation=name)).cadence
        return cadence

    def never_late(self, interval: int) -> None:
        """Saves are at most `interval` steps apart, and the first one after `persist_every` is made durable."""
        every = self.master.state.jobs["job"].settings.persist_every
        due = every if isinstance(every, int) else (float(every[:-1]) + LATE_S) / STEP_S
        saved = durable = self.begun
        for step in self.train():
            assert step - saved <= interval, f"step {step}: {saved} is the newest one in memory"
            if step in self.saved:
                saved, older = step, durable
                durable = max([durable, *self.durable])
                assert durable == step or step - older < due, f"step {step}: {durable} is the newest durable one"


@pytest.mark.parametrize(("save_every", "persist_every", "interval"), SETTINGS)
def test_each_launch_saves_as_the_first_one(save_every: int | str, persist_every: int | str, interval: int) -> None:
    """By a new master each time, from storage, at steps that are near to no power of two."""
    settings = {"save_every": save_every, "persist_every": persist_every}
    first = Launch(settings, "a")
    first.never_late(interval)
    assert first.durable
    for attempt, step in enumerate((1098, 600_000, 603_294), 2):
        again = Launch(settings, f"life{attempt}-", stored=(stored(step, attempt=attempt - 1),))
        assert (again.begun, again.plan.attempt) == (step, attempt)
        again.never_late(interval)
        assert len(again.saved) == pytest.approx(len(first.saved), abs=1)
        assert len(again.durable) == pytest.approx(len(first.durable), abs=1)


@pytest.mark.parametrize(("save_every", "persist_every", "interval"), SETTINGS)
def test_a_failure_does_not_put_off_what_was_due(
    save_every: int | str, persist_every: int | str, interval: int
) -> None:
    """What is restored from memory is not durable yet: the time until it has to be does not begin again.

    A job that fails more often than `persist_every` would otherwise never have a durable generation.
    """
    settings = {"save_every": save_every, "persist_every": persist_every}
    due = persist_every if isinstance(persist_every, int) else (float(persist_every[:-1]) + LATE_S) / STEP_S
    launch, durable, most = Launch(settings, "a"), 0, min(12, interval)
    for attempt in range(1, 13):
        for step in launch.train():
            if launch.saved and step - launch.begun >= most:
                break
        newest, durable = max(launch.saved), max([durable, *launch.durable])
        assert newest - durable <= due + most + interval, f"attempt {attempt}: {durable} is the newest durable one"
        slots = tuple(held(newest, rank, attempt=attempt) for rank in range(2))
        launch = Launch(settings, f"life{attempt}-", again=launch, held=slots)
        assert launch.begun == newest


def test_a_new_master_makes_durable_at_once_what_lies_in_memory_alone() -> None:
    slots = tuple(held(1150, rank) for rank in range(2))
    for more, wanted in (((), 1151), ((stored(1000),), 1151), ((stored(1000), stored(1150)), None)):
        launch = Launch({"persist_every": "600s"}, "a", held=slots, stored=more)
        assert launch.begun == 1150
        assert launch.plan.cadence == p.Cadence(persist_from=wanted, begun_step=1150)


@pytest.mark.parametrize(("save_every", "persist_every", "interval"), SETTINGS)
def test_a_launch_that_was_given_an_older_checkpoint_saves_as_the_first_one(
    save_every: int | str, persist_every: int | str, interval: int
) -> None:
    """The job's own newest generation is not used, and is far ahead."""
    settings = {"save_every": save_every, "persist_every": persist_every}
    first = Launch(settings, "a")
    first.never_late(interval)
    again = Launch(settings, "b", stored=(stored(600_000, attempt=1),))
    again.begun = 1098
    again.never_late(interval)
    assert len(again.saved) == pytest.approx(len(first.saved), abs=2)
    assert len(again.durable) == pytest.approx(len(first.durable), abs=2)
