"""Marks the data position when an optimizer steps."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class Marked(Protocol):
    """An ElasticSampler or a LeasedLoader."""

    def mark(self) -> object: ...


def mark_on_step(optimizer: Optimizer, sampler: Marked) -> RemovableHandle:
    """Mark `sampler` after each `optimizer.step()`; the handle removes it. Holds the sampler weakly.

    Only a mark: the hook fires before schedulers, scaler, EMA and validation. A step that GradScaler skips does not
    fire it; the next one marks both.
    """
    held = weakref.ref(sampler)

    def mark(*_: Any) -> None:
        found = held()
        if found is not None:
            found.mark()

    return optimizer.register_step_post_hook(mark)
