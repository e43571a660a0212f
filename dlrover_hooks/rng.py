"""The random state of this process: Python, NumPy and torch, of those that are loaded. Per rank, part of every cut."""

from __future__ import annotations

import array
import random
import sys
from typing import Any

import msgspec


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """What `capture` returned, as bytes: 10 KB. None: it was not loaded."""

    python: tuple[int, bytes, float | None]
    numpy: tuple[str, bytes, int, int, float] | None = None
    torch: bytes | None = None
    cuda: bytes | None = None


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


def pack(state: dict[str, Any]) -> Packed:
    """Of what `capture` returned. A generator of NumPy's that is not its default (`set_bit_generator`) is left out."""
    version, words, gauss = state["python"]
    found = state.get("numpy")
    numpy = (found[0], found[1].tobytes(), *found[2:]) if isinstance(found, tuple) else None
    tensors = (state[name].numpy().tobytes() if name in state else None for name in ("torch", "cuda"))
    return Packed((version, array.array("I", words).tobytes(), gauss), numpy, *tensors)


def unpack(packed: Packed) -> dict[str, Any]:
    """What `restore` takes."""
    version, words, gauss = packed.python
    state: dict[str, Any] = {"python": (version, tuple(array.array("I", words)), gauss)}
    if packed.numpy is not None and (numpy := sys.modules.get("numpy")):
        name, key, *rest = packed.numpy
        state["numpy"] = (name, numpy.frombuffer(key, numpy.uint32), *rest)
    if torch := sys.modules.get("torch"):
        for name, data in (("torch", packed.torch), ("cuda", packed.cuda)):
            if data is not None:
                state[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return state


def reseed(*parts: int) -> None:
    """Seed every generator from `parts`: for a new world size, where no rank has a state of its own to put back."""
    seed = random.Random(repr(parts)).getrandbits(63)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
