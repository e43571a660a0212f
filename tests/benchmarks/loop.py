"""How long a training loop with the plain hook waits for its next batch, with a save there and without one."""

from __future__ import annotations

import statistics
import time
import uuid

import torch
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader
from tests.benchmarks.saver import Gpt

WARM_UP = 6


def session(pairs: int) -> dict[str, float]:
    """A lazy save every second step. All counts that happens there: states are gathered, random generators, too."""
    gpt, steps = Gpt(), 2 * pairs + WARM_UP
    loader = elastic_loader(
        DataLoader(TensorDataset(torch.randint(0, 256, (steps, 64))), batch_size=1), optimizer=gpt.optimizer
    )
    waits, skipped = list[float](), 0
    with AsyncCheckpointer(
        job=f"bench-{uuid.uuid4().hex[:8]}",
        model=gpt.model,
        optimizer=gpt.optimizer,
        loader=loader,
        snapshot="lazy",
        save_every=2,
    ) as checkpointer:
        batches = iter(loader)
        assert checkpointer.session is not None
        for step in range(steps):
            if step == WARM_UP:  # memory was being made ready until now
                skipped = checkpointer.session.skipped_saves
            began = time.perf_counter()
            (batch,) = next(batches)
            waits.append(time.perf_counter() - began)
            gpt.step(batch)
        assert checkpointer.session.skipped_saves == skipped
    plain, saving = waits[WARM_UP + 1 :: 2], waits[WARM_UP::2]
    return {
        "session_exposed_ms": 1e3 * (min(saving) - min(plain)),
        "session_exposed_median_ms": 1e3 * (statistics.median(saving) - statistics.median(plain)),
    }
