"""Traces a run step by step, so that two runs can be compared: one file per session, one line per step.

When a step is over, a session writes its data positions, a hash of each parameter and the losses. When read back, the
sessions of a run are merged into the *lineage*: for each step the rows that count in the end, because later attempts
undo earlier ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """First line: identifies the session, and the step that it began after."""

    job: str
    run: str
    rank: int
    world: int
    attempt: int
    begin: int
    pid: int
    at: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Step `step` is over. `data`: position in each dataset; `hashes`: of the parameters; `names`: theirs, once."""

    step: int
    at: float
    data: dict[str, Any] = {}
    hashes: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()
    leased: bool = False
    names: tuple[str, ...] = ()


class Trace:
    """Writes the trace of one session. Training thread only."""

    def __init__(self, folder: str | os.PathLike[str], head: Head) -> None:
        os.makedirs(folder, exist_ok=True)
        self._path = Path(folder) / f"{time.time_ns()}-{head.rank}.jsonl"
        self._named = False
        self._write(head)

    def step(
        self, step: int, parameters: Callable[[], Iterable[Any]], data: dict[str, Any], losses: Iterable[float]
    ) -> None:
        """`step` is over. Hashes all parameters."""
        found = _named(parameters)
        row = Row(
            step=step,
            at=time.time(),
            data=data.get("data", {}),
            leased="leases" in data,
            hashes=tuple(_digest(tensor) for _, tensor in found),
            losses=tuple(losses),
            names=() if self._named else tuple(name for name, _ in found),
        )
        self._named = True
        self._write(row)

    def _write(self, line: Head | Row) -> None:
        with open(self._path, "ab") as file:
            file.write(msgspec.json.encode(line, enc_hook=repr) + b"\n")


def _named(parameters: Callable[[], Iterable[Any]]) -> list[tuple[str, Any]]:
    """The parameters and buffers by name, if the module is available; else the parameters by number."""
    module = getattr(parameters, "__self__", None)
    if hasattr(module, "named_parameters") and hasattr(module, "named_buffers"):
        return [*module.named_parameters(), *module.named_buffers()]  # pyright: ignore[reportOptionalMemberAccess]
    return [(f"parameter {number}", tensor) for number, tensor in enumerate(parameters())]


def _digest(tensor: Any) -> str:
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if hasattr(tensor, "detach"):
        import torch

        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(tensor).data)[:10]


# ---- reading --------------------------------------------------------------------------------------------------------


class SessionTrace(msgspec.Struct):
    """One session's file, as far as it is written."""

    head: Head
    rows: list[Row]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return next((row.names for row in self.rows if row.names), ())


class RunTrace:
    """The sessions found in a folder, ordered by attempt. `read` may be called while they grow."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.lives: list[SessionTrace] = []

    def read(self) -> RunTrace:
        """Read all files again; an incomplete last line is left out."""
        found = []
        for path in sorted(self.folder.glob("*.jsonl")):
            head, *rows = path.read_bytes().rpartition(b"\n")[0].split(b"\n")
            if head:
                lines = [msgspec.json.decode(row, type=Row) for row in rows]
                found.append(SessionTrace(msgspec.json.decode(head, type=Head), lines))
        self.lives = sorted(found, key=lambda life: (life.head.attempt, life.head.at))
        return self

    @property
    def step(self) -> int:
        """The last step of the newest session."""
        return max((row.step for life in self.lives[-1:] for row in life.rows), default=0)

    def begins(self) -> dict[int, int]:
        """For each attempt, the step that it began after."""
        return {life.head.attempt: life.head.begin for life in self.lives}

    def lineage(self) -> dict[int, dict[int, Row]]:
        """The rows that count in the end, by step and rank."""
        steps: dict[int, dict[int, Row]] = {}
        for attempt, begin in sorted(self.begins().items()):
            for step in [step for step in steps if step >= begin]:
                del steps[step]
            for life in self.lives:
                if life.head.attempt == attempt:
                    for row in life.rows:
                        steps.setdefault(row.step, {})[life.head.rank] = row
        return dict(sorted(steps.items()))

    def told(self, attempt: int, step: int, rank: int) -> Row | None:
        """The last row of `rank` for `step` before `attempt` (of any rank, if that one has none)."""
        rows = [
            (life.head.attempt, life.head.rank == rank, row)
            for life in self.lives
            if life.head.attempt < attempt
            for row in life.rows
            if row.step == step
        ]
        return max(rows, key=lambda found: found[:2])[2] if rows else None

    def again_at(self, at: float, step: int, rank: int) -> float | None:
        """When `step` was over on `rank` for the first time after the moment `at`; None: never."""
        mine = [life for life in self.lives if life.head.rank == rank]
        return min((row.at for life in mine for row in life.rows if row.at > at and row.step >= step), default=None)

    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return next((life.names for life in self.lives if life.names), ())
