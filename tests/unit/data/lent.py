"""What tests of leased data share: samples, the real core as a master, and loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from dlrover_hooks import protocol as p
from dlrover_hooks.client.in_process_master import InProcessMaster
from dlrover_hooks.data.leased.leased_loader import LeasedLoader

JOB = "job"


class Ids(Dataset[int]):
    """n samples, each its own number; those in `bad` cannot be read."""

    def __init__(self, n: int, bad: Sequence[int] = ()) -> None:
        self.n, self.bad = n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError(f"sample {index} is torn")
        return index


class Master(InProcessMaster):
    """The real core, with a log of requests and a way to break answers."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[p.Message] = []
        self.spoil: Callable[[p.Message], None] = lambda _: None
        self.change: Callable[[Any], Any] = lambda reply: reply

    def call(self, request: p.Message, **options: Any) -> Any:
        self.spoil(request)
        self.log.append(request)
        return self.change(super().call(request, **options))

    def view(self) -> p.LedgerView:
        return super().call(p.ShowLedger(JOB, "train"))


def train(loader: LeasedLoader, epochs: int | None = None) -> list[tuple[int, int]]:
    """(epoch, sample) of everything trained on, a step for each batch."""
    seen: list[tuple[int, int]] = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            seen += [(epoch, int(sample)) for sample in batch]
            loader.mark()
    return seen


def gather(rows: Any, loader: LeasedLoader, seen: list[Any]) -> None:
    """Train on what comes, and keep it when an error ends the loop."""
    for batch in rows:
        seen += batch.tolist() if isinstance(batch, torch.Tensor) else batch
        loader.mark()


def once(n: int, epochs: int = 1) -> Counter[tuple[int, int]]:
    return Counter((epoch, sample) for epoch in range(epochs) for sample in range(n))


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True},
]


def marked(rows: Any, loader: LeasedLoader | None = None) -> Iterator[Any]:
    for batch in rows:
        yield batch
        (rows if loader is None else loader).mark()


class Log:
    """Two partitions of records; `b` turns out to end at 21."""

    def read(self, partition: str, lo: int, hi: int) -> Sequence[tuple[str, int]]:
        return [(partition, offset) for offset in range(lo, min(hi, {"a": 30, "b": 21}[partition]))]
