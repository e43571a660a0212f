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
from dlrover_hooks.data.generators import WORDS, NumpyGenerator, PythonGenerator, Words

_numpy: Any = np.random
_python: Any = random


class States:
    """Reads them. Made once in a process; on the thread that draws, or while that waits."""

    def __init__(self) -> None:
        words = PythonGenerator().words
        self._python = words if isinstance(words, Words) else None
        self._engine = _numpy.get_bit_generator()
        self._numpy = _numpy_reader(self._engine)

    def take(self) -> rng.Taken:
        """The state of now."""
        at_once = self._python is not None and self._numpy is not None and _numpy.get_bit_generator() is self._engine
        if not at_once:
            return rng.take()
        assert self._python is not None
        assert self._numpy is not None
        words = self._python.copy()
        python = (random.Random.VERSION, words[4:] + words[:4], _python._inst.gauss_next)
        cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None
        return rng.Taken(rng.Packed(python, self._numpy(), torch.default_generator.get_state().numpy().tobytes(), cuda))


def _numpy_reader(engine: Any) -> Callable[[], tuple[str, bytes, int, int, float]] | None:
    """Of NumPy's global generator: what `get_state` says. None where that cannot be read in memory."""
    if type(engine) is not np.random.MT19937:
        return None
    words, left = NumpyGenerator().words, _left_over(engine)
    if not isinstance(words, Words) or left is None:
        return None
    has, value = left

    def read() -> tuple[str, bytes, int, int, float]:
        found = words.copy()
        return "MT19937", found[: 4 * WORDS], int.from_bytes(found[4 * WORDS :], sys.byteorder), has.value, value.value

    return read


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
