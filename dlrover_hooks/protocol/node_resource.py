"""What one node or task has."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol.base_messages import Rank

Mebibytes = Annotated[int, msgspec.Meta(ge=0, le=(1 << 43) - 1)]


class NodeResource(msgspec.Struct, frozen=True):
    """Of one node: CPU cores, MiB of memory, GPUs. 0: not limited, or not known.

    Raises `UsageError` if an amount is negative or not a finite number.
    """

    cpu: float = 0.0
    memory: Mebibytes = 0
    gpu_type: str = ""
    gpu_num: Rank = 0
    priority: str = ""

    def __post_init__(self) -> None:
        for name in ("cpu", "memory", "gpu_num"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise UsageError(f"node resource: {name} is {value}", hint="give a finite amount of at least 0")
