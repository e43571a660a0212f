"""What the checkpoint benches save: a GPT with Adam, thousands of small tensors. And with what: their own keeper."""

from __future__ import annotations

import contextlib
import os
import queue
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.memory.memcpy import Copier
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.protocol import Generation

WAIT_S = 120.0


class Gpt:
    """12 layers, width 536: 500 MB with Adam's moments after one step, in 588 tensors."""

    def __init__(self, width: int = 536, layers: int = 12, tokens: int = 64) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Embedding(256, width), body, nn.Linear(width, 256))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-4)
        self._batch = torch.randint(0, 256, (1, tokens))
        self.step()

    def step(self, batch: torch.Tensor | None = None) -> None:
        """Forward, backward, optimizer."""
        batch = self._batch if batch is None else batch
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch)[0], batch[0])
        loss.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def small_state(count: int = 5000) -> dict[str, Any]:
    """41 MB in tensors of 8 KB."""
    return {"model": {f"layer.{i}.weight": torch.full((2048,), float(i)) for i in range(count)}}


def nbytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(map(nbytes, tree.values()))
    return sum(map(nbytes, tree)) if isinstance(tree, list | tuple) else 0


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Memcpy:
    """One thread's copy of so many bytes into shared memory that is mapped already: the floor."""

    def __init__(self, size: int) -> None:
        self._shared = SharedSegment.create(9, size)
        self._source = np.ones(size, np.uint8)
        self._target = np.frombuffer(self._shared.view(0, size), np.uint8)

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


class Engine:
    """A `Checkpointer` with a keeper of its own, as one worker has it."""

    def __init__(self, mode: str = "eager", **options: Any) -> None:
        self.notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.checkpointer = Checkpointer(
            f"bench-{uuid.uuid4().hex[:8]}", "node", 0, linger_s=0.0, notify=self.notices.put, mode=mode, **options
        )
        self.checkpointer.begin(uuid.uuid4().hex, 1, 0, 1)
        self.checkpointer.held()  # the keeper is up
        self.saves = 0

    def prepare(self, state: dict[str, Any]) -> float:
        """Have memory for `state`, as a session does after its first step; seconds until it was there."""
        began = time.perf_counter()
        self.checkpointer.prepare(self.checkpointer.image_bytes({"state": state}))
        while not self.checkpointer.ready:
            os.sched_yield()
        return time.perf_counter() - began

    def save(self, state: dict[str, Any], *, behind: bool = False) -> None:
        self.saves += 1
        saved = self.checkpointer.save(self.saves, {"state": state}, behind=behind)
        assert saved is not None, self.checkpointer.error

    def saved(self, state: dict[str, Any]) -> float:
        """Seconds that a save takes; the keeper is idle again, so that what is timed next has the machine to itself."""
        seconds = timed(lambda: self.save(state))
        self.hashed()
        return seconds

    def notice(self, kind: type[Any]) -> Any:
        while True:
            if isinstance(got := self.notices.get(timeout=WAIT_S), kind):
                return got

    def hashed(self) -> Generation:
        """The last save is complete, and the keeper idle again."""
        generation = self.notice(keeper_messages.Hashed).generation
        self.checkpointer.complete(generation)
        return generation

    def use(self, copier: Copier) -> None:
        self.checkpointer._writer.copier = copier

    def keeper(self) -> psutil.Process:
        reply, _ = self.checkpointer._line.ask(lambda ref: keeper_messages.Inventory(ref=ref))
        return psutil.Process(reply.pid)

    def close(self) -> None:
        self.checkpointer.close(finished=True)


@contextlib.contextmanager
def engine(mode: str = "eager", **options: Any) -> Iterator[Engine]:
    made = Engine(mode, **options)
    try:
        yield made
    finally:
        made.close()
