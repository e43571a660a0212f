"""The random state of this process: Python, and NumPy and torch if loaded. Per rank, part of every consistent cut."""

from __future__ import annotations

import array
import random
import sys
from typing import Any, NamedTuple

import msgspec

from dlrover_hooks.errors import Corrupt


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """The result of `capture` as bytes: 10 KB. None: that library was not loaded."""

    python: tuple[int, bytes, float | None]
    numpy: tuple[str, bytes, int, int, float] | None = None
    torch: bytes | None = None
    cuda: bytes | None = None


class Taken(NamedTuple):
    """The state of one moment. `foreign`: NumPy's state in its own form, if its generator is not the default one."""

    packed: Packed
    foreign: Any = None

    def state(self) -> dict[str, Any]:
        """The argument for `restore`."""
        found = unpack(self.packed)
        return found if self.foreign is None else found | {"numpy": self.foreign}


def take() -> Taken:
    """The current state. `rng.fast_capture` is faster."""
    state = capture()
    numpy = state.get("numpy")
    return Taken(pack(state), None if isinstance(numpy, tuple) else numpy)


def capture() -> dict[str, Any]:
    """The generators' states as plain values, arrays and tensors."""
    state: dict[str, Any] = {"python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = _of_numpy(numpy.random.get_state(legacy=False))
    if torch := sys.modules.get("torch"):
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state()
    return state


def _of_numpy(found: dict[str, Any]) -> Any:
    """A tuple for the default generator only: for other generators NumPy warns of tuples."""
    if found["bit_generator"] != "MT19937":
        return found
    return "MT19937", found["state"]["key"], found["state"]["pos"], found["has_gauss"], found["gauss"]


def restore(state: dict[str, Any]) -> None:
    """Restore exactly what `capture` returned."""
    random.setstate(state["python"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])
    if torch := sys.modules.get("torch"):
        if "torch" in state:
            torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def check(state: Any) -> None:
    """Try `state` on temporary generators, so that `restore` does not fail with it.

    Raises:
        Corrupt: it is not a result of `capture`.
    """
    try:
        random.Random().setstate(state["python"])
        if "numpy" in state and isinstance(state["numpy"], tuple) and (numpy := sys.modules.get("numpy")):
            numpy.random.RandomState().set_state(state["numpy"])
        if "torch" in state and (torch := sys.modules.get("torch")):
            torch.Generator().set_state(state["torch"])
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise Corrupt(f"the saved random state cannot be used: {type(error).__name__}: {error}") from error


def pack(state: dict[str, Any]) -> Packed:
    """Packs a result of `capture`, without NumPy's generator if that is not the default one (`set_bit_generator`)."""
    version, words, gauss = state["python"]
    found = state.get("numpy")
    numpy = (found[0], found[1].tobytes(), *found[2:]) if isinstance(found, tuple) else None
    tensors = (state[name].numpy().tobytes() if name in state else None for name in ("torch", "cuda"))
    return Packed((version, array.array("I", words).tobytes(), gauss), numpy, *tensors)


def unpack(packed: Packed) -> dict[str, Any]:
    """The argument for `restore`."""
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
    """Seed every generator from `parts`: for a new world size, where no rank has a saved state of its own."""
    seed = random.Random(repr(parts)).getrandbits(63)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
