"""The data state that belongs to exactly one model state: named datasets, marked and committed together.

A *watched* dataset is one cursor, the same on every rank. Of a *leased* one each rank has only the positions that it
consumed itself. The union over all ranks is what the model was trained on, and is sent to the master with a restore. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Step
from dlrover_hooks.protocol.ranges import Ranges
from dlrover_hooks.protocol.restored_value_check import require


class DatasetPosition(Protocol):
    """A dataset's place in the run. `mark`: the optimizer stepped; `commit`: the step is entirely over."""

    def mark(self) -> object: ...
    def commit(self) -> object: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Leased(DatasetPosition, Protocol):
    """A dataset that the master lends out; see `dlrover_hooks.data.leased.leased_loader`."""

    def connect(self, caller: Any, job: str, incarnation: str, *, free: bool, rank: int | None = None) -> object: ...


class _LeaseForm(msgspec.Struct):
    """The part of a leased dataset's `state_dict` that `united` needs: encoded ranges by partition."""

    own: dict[str, str]
    base: dict[str, str] = {}
    epoch: Step = 0


class SessionDatasets:
    """The datasets of one session. Training thread only."""

    def __init__(self) -> None:
        self._watched: dict[str, DatasetPosition] = {}
        self._leased: dict[str, DatasetPosition] = {}

    def watch(self, name: str, source: DatasetPosition) -> None:
        self._watched[name] = source

    def lease(self, name: str, source: DatasetPosition) -> None:
        self._leased[name] = source

    def mark(self) -> None:
        for source in (*self._watched.values(), *self._leased.values()):
            source.mark()

    def commit(self) -> None:
        for source in (*self._watched.values(), *self._leased.values()):
            source.commit()

    def parts(self) -> dict[str, dict[str, Any]]:
        """This rank's parts of a checkpoint: `data`, and `leases` if anything is leased."""
        data = {name: source.state_dict() for name, source in self._watched.items()}
        leases = {name: source.state_dict() for name, source in self._leased.items()}
        return {"data": data} | ({"leases": leases} if leases else {})


def united(parts: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """By dataset and partition: all positions in the model according to the saved ranks' `leases` parts, encoded.

    Raises:
        Corrupt: a part is not a valid encoding of ranges, or two parts contain the same positions.
    """
    parts = list(parts)
    require(parts, list[dict[str, _LeaseForm]], "the leases of leased datasets")
    found: dict[str, dict[str, Ranges]] = {}
    for name, state in ((name, state) for part in parts for name, state in part.items()):
        rows = found.setdefault(name, {})
        for partition, text in (*state.get("base", {}).items(), *state["own"].items()):
            _unite(rows.setdefault(partition, Ranges()), text, f"leased dataset {name!r}, partition {partition!r}")
    return {name: {key: ranges.encode() for key, ranges in rows.items()} for name, rows in found.items()}


def _unite(all_: Ranges, text: str, where: str) -> None:
    try:
        more = Ranges.decode(text)
    except ValueError as error:
        raise Corrupt(f"{where}: {error}") from error
    twice = next((pair for pair in more if all_.overlaps(*pair)), None)
    if twice is not None:
        raise Corrupt(f"{where}: positions [{twice[0]}, {twice[1]}) were trained twice in this checkpoint")
    all_.update(more)
