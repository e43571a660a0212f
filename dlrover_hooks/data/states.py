"""The random state of this process at every step, as `rng.pack(rng.capture())` has it, at a tenth of its cost.

The public calls take 100 us, most of it for 624 words that are made Python numbers or copied one by one. So the words
are read where they lie (`generators`), and beside them the normal number that is left over of a pair.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dlrover_hooks import rng
from dlrover_hooks.data.generators import WORDS, NumpyGenerator, PythonGenerator, Words, torch_words

_numpy: Any = np.random
_python: Any = random


class States:
    """Reads them. Made once in a process; on the thread that draws, or while that waits."""

    def __init__(self) -> None:
        words = PythonGenerator().words
        self._python = words if isinstance(words, Words) else None
        self._engine = _numpy.get_bit_generator()
        self._numpy = _numpy_reader(self._engine)
        self._torch = torch_reader(torch.default_generator)
        self._seen: tuple[Any, ...] = ()
        self._taken: rng.Taken | None = None
        """Of `_seen`: most steps draw nothing here, and then it is the state of now."""

    def take(self) -> rng.Taken:
        """The state of now."""
        at_once = self._python is not None and self._numpy is not None and _numpy.get_bit_generator() is self._engine
        if not at_once:
            return rng.take()
        assert self._python is not None
        assert self._numpy is not None
        cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None
        seen = self._python.copy(), _python._inst.gauss_next, self._numpy(), self._torch(), cuda
        if self._taken is None or seen != self._seen:
            self._seen, self._taken = seen, _packed(*seen[:3], cuda)
        return self._taken


def _packed(words: bytes, gauss: float | None, numpy: tuple[bytes, int, float], cuda: bytes | None) -> rng.Taken:
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    python = (random.Random.VERSION, words[4:] + words[:4], gauss)
    key, has, value = numpy
    numpy_state = "MT19937", key[: 4 * WORDS], int.from_bytes(key[4 * WORDS :], sys.byteorder), has, value
    return rng.Taken(rng.Packed(python, numpy_state, torch_state, cuda))


def _numpy_reader(engine: Any) -> Callable[[], tuple[bytes, int, float]] | None:
    """Of NumPy's global generator: its words, and the number left over of a pair. None where these are not found."""
    if type(engine) is not np.random.MT19937:
        return None
    words, left = NumpyGenerator().words, _left_over(engine)
    if not isinstance(words, Words) or left is None:
        return None
    has, value = left
    return lambda: (words.copy(), has.value, value.value)


def _left_over(engine: np.random.BitGenerator) -> tuple[ctypes.c_int32, ctypes.c_double] | None:
    """NumPy's `RandomState` keeps `bitgen_t` and, behind it, `{bitgen_t *; int has_gauss; double gauss}`.

    The first begins with the address of the engine's state, the second with that of the first.
    """
    owner = _numpy.mtrand._rand
    count = type(owner).__basicsize__ // 8
    memory = list((ctypes.c_uint64 * count).from_address(id(owner)))
    if engine.ctypes.state_address not in memory:
        return None
    first = id(owner) + 8 * memory.index(engine.ctypes.state_address)
    if first not in memory or memory.index(first) + 2 >= count:
        return None
    at = id(owner) + 8 * memory.index(first)
    found = ctypes.c_int32.from_address(at + 8), ctypes.c_double.from_address(at + 16)
    return found if (found[0].value, found[1].value) == _numpy.get_state(legacy=True)[3:] else None


def torch_reader(generator: torch.Generator) -> Callable[[], bytes]:
    """What changes whenever the state of `generator` does: its memory, or its state where that is not understood.

    torch keeps the twister (`uint64_t seed; int left; bool seeded; uint32_t next; uint32_t state[624]`) and behind it
    what is left over of a pair of normal numbers, as `optional<float>` and `optional<double>`.
    """
    trial = _torch_memory(torch.Generator())
    memory = _torch_memory(generator)
    if trial is None or memory is None or not _tells_left_over(*trial):
        return lambda: generator.get_state().numpy().tobytes()
    address = memory[1]
    return lambda: ctypes.string_at(address, _TORCH_BYTES)


_TORCH_BYTES, _LEFT_OVER = 2544, 2520


def _torch_memory(generator: torch.Generator) -> tuple[torch.Generator, int] | None:
    words = torch_words(generator)
    return None if words is None else (generator, words.address - 8)


def _tells_left_over(generator: torch.Generator, address: int) -> bool:
    """Half a pair is seen to come and go, of either sort; `generator` is of no other use."""
    for kind in (torch.float32, torch.float64):
        empty = ctypes.string_at(address, _TORCH_BYTES)
        torch.randn((), generator=generator, dtype=kind)
        half = ctypes.string_at(address, _TORCH_BYTES)
        torch.randn((), generator=generator, dtype=kind)
        whole = ctypes.string_at(address, _TORCH_BYTES)
        if half[_LEFT_OVER:] in (empty[_LEFT_OVER:], whole[_LEFT_OVER:]) or half[:_LEFT_OVER] != whole[:_LEFT_OVER]:
            return False
    return True
