"""Arrays out of images without torch."""

from __future__ import annotations

import numpy as np

from dlrover_hooks.checkpoint.tensors import numpy_backend
from dlrover_hooks.checkpoint.tensors.generation_images import Stored, TensorPart


class Held:
    """An image whose bytes are these."""

    def __init__(self, data: bytes) -> None:
        self.view = memoryview(bytearray(data))

    def need(self, spans: list[tuple[int, int]]) -> None:
        """They are all there."""


def test_arrays_of_any_number_of_axes() -> None:
    """One without axes, too: Keras' counters, learning rates and metrics."""
    arrays = {"none": np.array(7.5, "float32"), "one": np.arange(3, dtype="int64"), "two": np.ones((2, 3), "float32")}
    stored: list[Stored] = []
    for name, array in arrays.items():
        image, dtype = Held(array.tobytes()), numpy_backend.NAMES[array.dtype]
        part = TensorPart(image, (0,) * array.ndim, array.shape, 0, array.nbytes)  # type: ignore[arg-type]
        stored.append(Stored(name, dtype, array.shape, False, (part,)))
    loaded = numpy_backend.load(stored)
    for name, array in arrays.items():
        assert loaded[name].shape == array.shape
        assert (loaded[name] == array).all()
