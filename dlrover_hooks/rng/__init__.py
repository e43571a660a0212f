"""Random states of a process (Python, NumPy, torch): captured, restored, and recorded for each step.

It imports no framework by itself. Entry point: `from dlrover_hooks import rng`.
"""

from __future__ import annotations

from dlrover_hooks.rng.process_state import (
    Packed as Packed,
)
from dlrover_hooks.rng.process_state import (
    Taken as Taken,
)
from dlrover_hooks.rng.process_state import (
    capture as capture,
)
from dlrover_hooks.rng.process_state import (
    check as check,
)
from dlrover_hooks.rng.process_state import (
    pack as pack,
)
from dlrover_hooks.rng.process_state import (
    reseed as reseed,
)
from dlrover_hooks.rng.process_state import (
    restore as restore,
)
from dlrover_hooks.rng.process_state import (
    take as take,
)
from dlrover_hooks.rng.process_state import (
    unpack as unpack,
)
