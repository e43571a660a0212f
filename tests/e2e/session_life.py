"""One life of a small trainer on `Session`: numpy state, one dataset, a cut after every step.

In a test's own process it is a class. As a script it is a real worker process, led by lines on its standard input
(`step`, `whole`, `draw`, `leave`) and answering each with one line of JSON.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from dlrover_hooks import config
from dlrover_hooks.checkpoint.save import segment_client
from dlrover_hooks.errors import HooksError
from dlrover_hooks.protocol import Departure, Generation, JobView, ShowJob
from dlrover_hooks.session import Restored, Session
from tests.waiting import WAIT_S, until


def work() -> None:
    """As long as a step's own work takes; here it is over in microseconds."""
    select.select([], [], [], 0.01)


class Position:
    """A data source whose place is the number of steps taken."""

    def __init__(self) -> None:
        self.committed = self.marked = 0

    def mark(self) -> None:
        self.marked += 1

    def commit(self) -> None:
        self.committed = self.marked

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.committed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.committed = self.marked = state["place"]


class Life:
    """Joins and restores when made; `step` trains one step and saves it."""

    def __init__(
        self, *, rank: int = 0, world_size: int = 1, size: int = 1000, node: str = "", domain: str = "", **given: Any
    ) -> None:
        """`node`: the rank is alone on it; without, all ranks share one."""
        given = {"save_every": 1, **given}
        env = {"DLROVER_HOOKS_NODE": node or "node", "DLROVER_HOOKS_DOMAIN": domain}
        env["LOCAL_RANK"] = "0" if node else str(rank)
        place = config.place(env, rank=rank, world_size=world_size)
        self.session = Session(config.load({}, **given), place)
        self.data, self.at, self.w = Position(), 0, np.zeros(size, np.float64)
        try:
            self.session.join()
            self.restored: Restored | None = self.session.restore_plan()
        except BaseException:
            self.session.leave(Departure.FAILED)
            raise
        self.session.watch("train", self.data)
        self.own_rng = self.restored is not None and self.restored.rng is not None
        if self.restored is not None:
            self.at, self.w = self.restored.state["step"], self.restored.state["w"]
        self.session.before_fetch(self.at)
        self.session.batch_requested(self.at)

    def step(self) -> None:
        """One optimizer step up to the step boundary behind it."""
        self.at += 1
        self.w = self.w * 1.5 + self.at
        self.session.stepped()
        self.session.before_fetch(self.at)
        if self.session.batch_requested(self.at):
            self.session.cut(self.at, {"step": self.at, "w": self.w})

    def step_until(self, true: Callable[[], Any], what: str, *, paced: bool = True) -> Any:
        """Train until `true` is; `paced`: at the speed of the saves, as if the model were larger."""

        def stepped() -> Any:
            self.step()
            if paced:
                until(self.heard, "a save in memory")
            else:
                work()
            return true()

        return until(stepped, what)

    def finish(self) -> None:
        """Make the newest step durable, as at the end of a training."""
        self.session.finish(self.at, {"step": self.at, "w": self.w})

    def draw(self) -> float:
        """The next random number of this rank, which NumPy was seeded for at its start."""
        return float(np.random.random())

    @property
    def generation(self) -> Generation:
        """Of the newest step."""
        return Generation(self.session.attempt, self.at, self.session.run)

    def view(self) -> JobView:
        return self.session._caller.call(ShowJob(self.session.config.job))

    def heard(self) -> bool:
        """The newest step is memory-complete, and the engine has heard of it: an older slot is free again."""
        engine = self.session._engine
        return self.view().newest_complete == self.generation == (engine and engine.generations.complete_here)

    def whole(self) -> None:
        """Wait until the newest step is memory-complete over all ranks, as the master says."""
        until(self.heard, f"{self.generation} in memory")

    def durable(self) -> None:
        """Wait until the newest step is committed."""
        until(lambda: self.view().newest_committed == self.generation, f"{self.generation} in storage")

    def unhindered(self) -> None:
        """Wait until nothing of the life before is being written: what is due meanwhile is left out."""
        engine = self.session._engine
        assert engine is not None
        until(lambda: not engine.generations.pending, "the end of what the life before left behind")

    def leave(self, reason: Departure = Departure.FAILED) -> None:
        self.session.leave(reason, self.at)

    def told(self) -> dict[str, Any]:
        """What the test wants to know."""
        source = self.restored.source.value if self.restored is not None else None
        return {"at": self.at, "w": float(self.w.sum()), "place": self.data.committed, "own_rng": self.own_rng,
                "source": source, "attempt": self.session.attempt,
                "incarnation": self.session._incarnation}  # fmt: skip


def main() -> None:
    given = json.loads(sys.argv[1])
    segment_client.PREPARE_WAIT_S = WAIT_S  # as in tests/e2e/conftest.py
    np.random.seed(1000 + given.get("rank", 0))
    life = Life(**given)
    print(json.dumps(life.told()), flush=True)
    for line in sys.stdin:
        try:
            answer = getattr(life, line.strip())()
            print(json.dumps(life.told() | {"answer": answer}), flush=True)
        except HooksError as error:
            print(json.dumps({"error": type(error).__name__, "text": str(error)}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
