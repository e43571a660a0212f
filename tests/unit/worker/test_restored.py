"""`Restored`: what a start resumed."""

import numpy

from dlrover_hooks.protocol import Generation, Source
from dlrover_hooks.worker.startup import Restored


def test_it_is_printed_without_its_tensors() -> None:
    found = Restored(Generation(attempt=2, step=17, run="r"), Source.MEMORY, {"w": numpy.zeros(9)}, {}, {}, None)
    assert repr(found) == "Restored(step=17, attempt=2, run='r', source='memory')"
