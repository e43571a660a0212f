"""What a chaos test forks: a torch-free trainer on the real `Session`, the real keeper and the real master, with traps.

All that the trainer saves is a function of the step (its random state also of the rank), so that a restore is one whole
step of all ranks or it is wrong.
"""

from __future__ import annotations

import logging
import select
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from dlrover_hooks import config
from dlrover_hooks.checkpoint.keeper import __main__ as keeper_process
from dlrover_hooks.checkpoint.memory.segment import Slot
from dlrover_hooks.errors import HooksError, MasterAway
from dlrover_hooks.master.__main__ import command
from dlrover_hooks.protocol import Departure
from dlrover_hooks.session import Restored, Session
from tests.chaos import traps as places
from tests.chaos.board import NOTHING, Age, age
from tests.chaos.traps import Traps
from tests.e2e.session_life import Position
from tests.waiting import until

STEP_S = 0.015
LOST_S = 60.0
"""A rank that waits so long for the others is of no use any more."""
SMALL = 20


def keeper(folder: str, job: str, node: str, life_fd: int) -> int:
    places.in_keeper(Traps(folder, node))
    return keeper_process.main(["--job", job, "--node", node, "--life-fd", str(life_fd)])


def master(folder: str, fd: int, journal: str) -> None:
    places.in_master(Traps(folder, "master"))
    command(["--fd", str(fd), "--journal", journal, "--token", "secret"], prog_name="master")


class State:
    """The arrays of one rank: changed in place at each step, as weights are."""

    def __init__(self, nbytes: int) -> None:
        self._base = np.random.default_rng(7).integers(0, 1 << 62, max(nbytes // 8, 1), np.int64)
        self.w, self.small = self._base.copy(), [np.zeros(3, np.float32) for _ in range(SMALL)]
        self.now: Age = NOTHING

    def go(self, now: Age) -> None:
        self.now = now
        np.bitwise_xor(self._base, now[1] * 0x9E3779B9, out=self.w)
        for index, one in enumerate(self.small):
            one.fill(now[1] * SMALL + index)

    def tree(self) -> dict[str, Any]:
        return {"attempt": self.now[0], "step": self.now[1], "w": self.w, "small": self.small}

    def wrong(self, found: dict[str, Any], now: Age) -> str:
        """What in `found` is not of step `now`; empty if all is."""
        self.go(now)
        if (found["attempt"], found["step"]) != now:
            return f"loop of {found['attempt']}, {found['step']}"
        names = ["w"] if not np.array_equal(found["w"], self.w) else []
        names += [
            f"small.{i}" for i, (a, b) in enumerate(zip(found["small"], self.small, strict=True)) if (a != b).any()
        ]
        return ", ".join(names)


def seed(step: int, rank: int) -> None:
    """The random state belongs to step and rank, too."""
    np.random.seed(step * 31 + rank)


class Trainer:
    """One life of one rank. `settings` are the session's; it ends at `Board.last_step`."""

    def __init__(self, folder: str, place: dict[str, Any], settings: dict[str, Any], nbytes: int) -> None:
        self.traps = Traps(folder, f"rank {place['rank']}")
        places.in_trainer(self.traps)
        self.now: Age = NOTHING
        self.board, self.place = self.traps.board, config.Place(**place)
        self.state, self.data = State(nbytes), Position()
        self.session = Session(config.load({}, **settings), self.place)
        assert self.session._engine is not None
        self.engine = self.session._engine
        self._mark_overwritten()

    def _mark_overwritten(self) -> None:
        """While the master is away: what it has not heard of gives way, see `checkpoint.reuse`."""
        generations, rank = self.engine.generations, self.place.rank
        real = generations.choose_slot

        def choose_slot(slots: Sequence[Slot], *given: Any, **how: Any) -> int | None:
            away, index = generations.away, real(slots, *given, **how)
            if index is not None and (away or generations.away):
                self.board.overwrites(rank, age(slots[index].generation))
            return index

        generations.choose_slot = choose_slot

    def up(self) -> None:
        """Join, restore, and tell how that went."""
        self.session.join()
        restored = self.session.restore_plan()
        self.session.watch("train", self.data)
        self.now = (self.session.attempt, restored.generation.step if restored is not None else 0)
        source, held = (restored.source.value, age(restored.generation)) if restored is not None else ("", NOTHING)
        self.session.before_fetch(self.now[1])
        wrong = self._wrong(restored) if restored is not None else ""
        self.session.batch_requested(self.now[1])
        self.board.begin(self.place.rank, self.now, held)
        self.traps.say(restored=held, attempt=self.now[0], source=source, wrong=wrong, torch="torch" in sys.modules)

    def _wrong(self, restored: Restored) -> str:
        mine, step = self._random(), restored.generation.step
        wrong = self.state.wrong(restored.state, age(restored.generation))
        seed(step, self.place.rank)
        if mine != self._random():
            wrong += f" random state of rank {self.place.rank}"
        if self.data.committed != step:
            wrong += f" data at {self.data.committed}"
        return wrong

    @staticmethod
    def _random() -> list[int]:
        return np.random.get_state(legacy=False)["state"]["key"].tolist()  # pyright: ignore[reportArgumentType]

    def step(self) -> None:
        """One step, in lockstep with the other ranks."""
        rank, self.now = self.place.rank, (self.now[0], self.now[1] + 1)
        self._meet()
        self.state.go(self.now)
        seed(self.now[1], rank)
        self.session.stepped()
        self.session.before_fetch(self.now[1])
        if self.session.batch_requested(self.now[1]):
            before, blind = self.session.skipped_saves, self.engine.generations.away
            self.session.cut(self.now[1], self.state.tree())
            if self.session._cut_at == self.now[1]:
                self.board.published(rank, self.now, self.session.skipped_saves == before, blind)
        self.board.heard(rank, age(self.engine.generations.complete_here))

    def _meet(self) -> None:
        """Wait for the other ranks, as an all-reduce does, and for the time that a step takes."""
        select.select([], [], [], STEP_S)
        self.board.reach(self.place.rank, self.now)
        try:
            until(lambda: self.board.together(self.place.world_size, self.now), "the others", LOST_S, every_s=0.0005)
        except AssertionError as late:
            raise MasterAway(f"rank {self.place.rank} waited for the others") from late


def train(folder: str, place: dict[str, Any], settings: dict[str, Any], nbytes: int) -> int:
    logging.basicConfig(level=logging.WARNING, format=f"rank {place['rank']} %(name)s: %(message)s")
    trainer = Trainer(folder, place, settings, nbytes)
    try:
        trainer.up()
        while trainer.now[1] < (trainer.board.last_step or sys.maxsize):
            trainer.step()
        trainer.session.finish(trainer.now[1], trainer.state.tree())
    except HooksError as error:
        logging.error("%s: %s", type(error).__name__, error)
        trainer.session.leave(Departure.FAILED, trainer.now[1])
        return 2
    trainer.session.leave(Departure.DONE, trainer.now[1])
    trainer.traps.say(finished=trainer.now)
    return 0
