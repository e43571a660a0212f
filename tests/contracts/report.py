"""What a trial of the adapter contract is given and what it reports. No torch: Keras' other backends have none."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

EVALUATED = 9


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """One job. Sizes are chosen so that epochs end in short steps."""

    job: str
    world: int = 1
    rank: int = 0
    epochs: int = 2
    samples: int = 23
    batch: int = 2
    accumulate: int = 1
    """Micro-batches per step and rank, as the user of the framework writes it."""
    leave: int = 0
    """Steps after which the loop leaves each epoch (`break`, `limit_train_batches`); 0: never."""
    second: int = 0
    """Samples of a second training loader, zipped with the first; 0: there is none."""
    mute: bool = False
    """Only the last loader's samples have a loss."""
    own: bool = False
    """Beside them a loader that keeps its own state."""
    leased: bool = False
    """The data comes in shards that the master lends out."""
    noise: bool = True
    """Random numbers in data and model; without them runs at two world sizes can be compared."""
    shared: dict[str, Any] = {}
    """More shared keywords."""
    options: dict[str, Any] = {}
    """For the framework's own trainer, where it has one."""


class Report(msgspec.Struct):
    """What one life did. Ids are those with a weight, by (epoch, step, loader)."""

    seen: list[tuple[int, int, str, int]] = []
    evaluated: list[list[int]] = []
    evaluated_at: list[int] = []
    """The steps behind which a framework's own loop evaluated."""
    own: list[int] = []
    step: int = 0
    restored: int | None = None
    crashed: bool = False
    weights: list[float] = []
    moments: list[float] = []
    lr: list[float] = []
    untouched: bool = True
    """Evaluation loaders and loaders with a state of their own reached the loop as the objects that were given."""
    active: bool = True
    """Was there a session?"""

    def note(self, epoch: int, step: int, loader: str, ids: Any) -> None:
        """A batch is about to be trained on."""
        self.seen += [(epoch, step, loader, one) for one in ids.tolist()]

    def end(self, net: Any, optimizer: Any, schedule: Any) -> None:
        """Training is over: everything that must be equal."""
        self.weights = [value for tensor in net.state_dict().values() for value in tensor.flatten().tolist()]
        self.moments = [
            value for state in optimizer.state.values() for one in state.values() for value in one.flatten().tolist()
        ]
        self.lr = list(schedule.get_last_lr())


class Trial(Protocol):
    """Builds everything, resumes what the job has, trains; `crash`: an exception in that step's first forward."""

    def __call__(self, given: Given, crash: int | None) -> Report: ...


class Crash(Exception):
    pass


def keywords(given: Given) -> dict[str, Any]:
    """The shared keywords of every trial."""
    return {"job": given.job, "save_every": 1, **given.shared}
