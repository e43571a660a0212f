"""The three global random generators that datasets draw from: Python's, NumPy's legacy one, torch's on the CPU.

Each can be seeded, saved and restored, and can detect cheaply whether a number was drawn. Reading 2.5 kB of state
through the public calls takes 9 us (Python), 31 us (NumPy) and 2 us (torch), twice for every micro-batch: as long as
fetching a micro-batch of small samples. The 32-bit words of these Mersenne twisters are therefore read directly from
memory. They are never written there, and their address is checked against the public call when it is found. If it is
not found, the public calls are used.
"""

from __future__ import annotations

import _random
import ctypes
import random
import struct
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

_numpy: Any = np.random  # its annotations lack the engine
WORDS = 624  # of a Mersenne twister, the engine of all three
_TORCH = struct.Struct("<QiiQ")  # the head of torch's saved state: seed, left, seeded, next


class Mark(Protocol):
    """`value` changes whenever a number is drawn."""

    @property
    def value(self) -> Any: ...


class TwisterWords:
    """A twister's words in memory. The mark is the 8 bytes at offset `at`.

    A draw changes the index next to the words; every 624th replaces all words. Not detected: the second normal number
    of a pair, which was computed with the first one and is stored outside the words.
    """

    def __init__(self, address: int, count: int, at: int) -> None:
        self.address, self.nbytes = address, 4 * count
        self.mark: Mark = ctypes.c_uint64.from_address(address + at)
        self.copy: Callable[[], Any] = np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address)).tobytes


class Public:
    """Reads the complete state through the public call, if the words were not found. Slow."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.copy, self.mark = read, self

    @property
    def value(self) -> Any:
        return self.copy()


class Generator(Protocol):
    """One global generator. Call its methods only on the thread that draws from it."""

    words: TwisterWords | Public

    def seed(self, seed: int) -> None:
        """Start the sequence of `seed`, 64 bits."""
        ...

    def save(self) -> Any:
        """The complete state."""
        ...

    def restore(self, state: Any) -> None:
        """Restore what `save` or `words.copy` returned."""
        ...


class PythonGenerator:
    """The generator behind `random.random`."""

    def __init__(self) -> None:
        self.words = _python_words(random._inst) or Public(self.save)  # pyright: ignore[reportAttributeAccessIssue]

    def seed(self, seed: int) -> None:
        random.seed(seed)

    def save(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        if isinstance(state, bytes):
            index, *words = struct.unpack(f"i{WORDS}I", state)
            state = (random.Random.VERSION, (*words, index), None)
        random.setstate(state)


class NumpyGenerator:
    """The generator behind `numpy.random.rand`; `numpy.random.default_rng` has no global state."""

    def __init__(self) -> None:
        self._engine = _numpy.get_bit_generator()  # keeps it alive while its memory is read
        self.words = _numpy_words(self._engine) or Public(self.save)

    def seed(self, seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)

    def save(self) -> Any:
        name, words, *rest = _numpy.get_state(legacy=True)
        return name, words.tobytes(), *rest

    def restore(self, state: Any) -> None:
        if isinstance(state, bytes):
            state = ("MT19937", state[: 4 * WORDS], struct.unpack_from("i", state, 4 * WORDS)[0], 0, 0.0)
        np.random.set_state((state[0], np.frombuffer(state[1], dtype=np.uint32), *state[2:]))


class TorchGenerator:
    """The generator behind `torch.rand` on the CPU."""

    def __init__(self) -> None:
        self._one = torch.default_generator
        self.words = torch_words(self._one) or Public(lambda: self._one.get_state().tolist())

    def seed(self, seed: int) -> None:
        self._one.manual_seed(seed)  # torch.manual_seed would also seed every accelerator, and costs 90 us

    def save(self) -> Any:
        return self._one.get_state()

    def restore(self, state: Any) -> None:
        if isinstance(state, bytes):
            full = bytearray(_TORCH.size + 8 * WORDS + 40)  # 40 zero bytes: no pending normal number
            seed, _, seeded, _ = _TORCH.unpack_from(self._one.get_state().numpy().tobytes())
            left, _, after, *words = struct.unpack(f"<3i{WORDS}I", state)
            _TORCH.pack_into(full, 0, seed, left, seeded, after)
            struct.pack_into(f"<{WORDS}Q", full, _TORCH.size, *words)
            state = torch.frombuffer(full, dtype=torch.uint8)
        self._one.set_state(torch.as_tensor(state, dtype=torch.uint8))


def generators() -> list[Generator]:
    """Those of this process, without NumPy's if the program replaced its engine: such an engine cannot be seeded."""
    found: list[Generator] = [PythonGenerator(), TorchGenerator()]
    if type(_numpy.get_bit_generator()) is np.random.MT19937:
        found.append(NumpyGenerator())
    return found


def _python_words(one: random.Random) -> TwisterWords | None:
    """CPython stores `int index; uint32_t state[624]` after the object header."""
    head = object.__basicsize__
    if _random.Random.__basicsize__ < head + 4 * (1 + WORDS):
        return None
    words = TwisterWords(id(one) + head, 1 + WORDS, at=0)
    *rest, index = one.getstate()[1]
    return words if words.copy() == struct.pack(f"{1 + WORDS}I", index, *rest) else None


def _numpy_words(engine: np.random.BitGenerator) -> TwisterWords | None:
    """NumPy publishes the address of `uint32_t key[624]; int pos`."""
    words = TwisterWords(engine.ctypes.state_address, WORDS + 1, at=4 * (WORDS - 1))
    state: Any = _numpy.get_state(legacy=True)
    return words if words.copy() == state[1].astype(np.uint32).tobytes() + struct.pack("i", state[2]) else None


def torch_words(one: torch.Generator) -> TwisterWords | None:
    """On the CPU torch stores `int left; bool seeded; uint32_t next; uint32_t state[624]` after the object header."""
    state = one.get_state().numpy().tobytes()
    if not hasattr(one, "_cdata") or len(state) != _TORCH.size + 8 * WORDS + 40:
        return None
    _, left, _, after = _TORCH.unpack_from(state)
    state = np.frombuffer(state, dtype=np.uint64, count=WORDS, offset=_TORCH.size).astype(np.uint32).tobytes()
    start: int = one._cdata  # pyright: ignore[reportAttributeAccessIssue]
    for address in range(start + 64, start + 192, 4):
        if ctypes.string_at(address, 64) == state[:64] and ctypes.string_at(address, len(state)) == state:
            words = TwisterWords(address - 12, 3 + WORDS, at=8)
            found = struct.unpack_from("<iiI", words.copy())
            return words if (found[0], found[2]) == (left, after) else None
    return None
