"""The random state of this process: Python, NumPy and torch, of those that are loaded. Per rank, part of every cut."""

from __future__ import annotations

import random
import sys
from typing import Any


def capture() -> dict[str, Any]:
    """The generators' states as plain values, arrays and tensors."""
    state: dict[str, Any] = {"python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    if torch := sys.modules.get("torch"):
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` returned, exactly."""
    random.setstate(state["python"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])
    if torch := sys.modules.get("torch"):
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def reseed(*parts: int) -> None:
    """Seed every generator from `parts`: for a new world size, where no rank has a state of its own to put back."""
    seed = random.Random(repr(parts)).getrandbits(63)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
