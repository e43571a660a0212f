"""The random state of this process at every step, as `process_state` captures and packs it, at a tenth of its cost.

The public calls take 100 us, most of it for converting or copying 624 words one by one. This module reads the words
directly from memory (`generators`), and with them the pending second normal number of a pair.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from dlrover_hooks.rng import process_state
from dlrover_hooks.rng.generators import WORDS, NumpyGenerator, PythonGenerator, TwisterWords, torch_words

_raw = attrgetter("raw")
_numpy: Any = np.random
_python: Any = random


class RngCapture:
    """Reads the states. Create it once per process; use it on the thread that draws, or while that thread waits.

    Most steps draw nothing here, so the last state read is still current. A few bytes at both ends of each generator's
    words show whether it is: a draw changes the index next to the words or replaces all words, and so does seeding.
    """

    def __init__(self) -> None:
        self._engine = _numpy.get_bit_generator()
        python = PythonGenerator().words
        numpy = NumpyGenerator().words if type(self._engine) is np.random.MT19937 else None
        self._python = python if isinstance(python, TwisterWords) else None
        self._numpy = numpy if isinstance(numpy, TwisterWords) else None
        self._left_over = _left_over(self._engine) if self._numpy is not None else None
        self._torch = torch_glance(torch.default_generator)
        self._ends = [end for words in (self._python, self._numpy) if words is not None for end in _ends(words)]
        self._seen: tuple[Any, ...] = ()
        self._taken: process_state.Taken | None = None
        """The state that belongs to `_seen`."""

    def take(self) -> process_state.Taken:
        """The current state."""
        if self._python is None or self._left_over is None or _numpy.get_bit_generator() is not self._engine:
            return process_state.take()
        has, value = self._left_over
        cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None
        left = _python._inst.gauss_next, has.value, value.value
        seen = list(map(_raw, self._ends)), left, self._torch(), cuda
        if self._taken is None or seen != self._seen:
            self._seen, self._taken = seen, self._packed(*left, cuda)
        return self._taken

    def _packed(self, gauss: float | None, has: int, value: float, cuda: bytes | None) -> process_state.Taken:
        assert self._python is not None
        assert self._numpy is not None
        words, key = self._python.copy(), self._numpy.copy()
        python = random.Random.VERSION, words[4:] + words[:4], gauss
        numpy = "MT19937", key[: 4 * WORDS], int.from_bytes(key[4 * WORDS :], sys.byteorder), has, value
        return process_state.Taken(
            process_state.Packed(python, numpy, torch.default_generator.get_state().numpy().tobytes(), cuda)
        )


_Bytes = ctypes.Array[ctypes.c_char]


def _ends(words: TwisterWords) -> tuple[_Bytes, _Bytes]:
    return _at(words.address, 16), _at(words.address + words.nbytes - 16, 16)


def _at(address: int, nbytes: int) -> _Bytes:
    return (ctypes.c_char * nbytes).from_address(address)


def _left_over(engine: np.random.BitGenerator) -> tuple[ctypes.c_int32, ctypes.c_double] | None:
    """NumPy's `RandomState` holds `bitgen_t`, followed by `{bitgen_t *; int has_gauss; double gauss}`.

    The first begins with the address of the engine's state, the second with the address of the first.
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


def torch_glance(generator: torch.Generator) -> Callable[[], Any]:
    """A function whose result changes whenever the state of `generator` does: bytes of its memory, or its full state.

    torch stores the twister (`uint64_t seed; int left; bool seeded; uint32_t next; uint32_t state[624]`), followed by
    the pending normal numbers, as `optional<float>` and `optional<double>`. The full state is read if the memory layout
    is a different one.
    """
    trial = torch.Generator()
    known, words = torch_words(trial), torch_words(generator)
    if known is None or words is None or not _tells_left_over(trial, _behind(known)):
        return lambda: generator.get_state().numpy().tobytes()
    head, behind = _at(words.address - _SEED_BYTES, 16 + _SEED_BYTES), _behind(words)
    return lambda: (head.raw, behind.raw)


_SEED_BYTES, _LEFT_OVER_BYTES = 8, 24


def _behind(words: TwisterWords) -> _Bytes:
    """The last words of torch's twister, and the pending normal numbers after them."""
    end = words.address + words.nbytes
    return _at(end - 16, 16 + -end % 8 + _LEFT_OVER_BYTES)


def _tells_left_over(generator: torch.Generator, behind: _Bytes) -> bool:
    """Whether `behind` shows the pending number of a pair, of either type, come and go. Draws from `generator`."""
    for kind in (torch.float32, torch.float64):
        seen = [behind.raw]
        for _ in range(2):
            torch.randn((), generator=generator, dtype=kind)
            seen.append(behind.raw)
        if seen[1][16:] in (seen[0][16:], seen[2][16:]) or seen[1][:16] != seen[2][:16]:
            return False
    return True
