"""What messages share: their base, bounded numbers, exit codes, errors, the wire version, and resources of a node."""

from __future__ import annotations

import enum
import math
from typing import Annotated

import msgspec

from dlrover_hooks.errors import UsageError

PROTOCOL = 1
LEADER_HEADER = "X-Dlrover-Hooks-Leader"
"""Of a standby's refusal: the URL of the master that leads."""
"""Wire version. The master speaks this one and the one before; `X-Dlrover-Hooks-Protocol` carries it."""


AGAIN, REQUEUE, BAD_NODE = 74, 75, 76
"""Exit codes of workers with a meaning beyond failure. 74: the master declared the process dead by mistake, start it
again (only a launcher sees this code). 75: it was preempted and has left. 76: this node is bad, replace it."""


# Every number of a message is bounded, so that what the master computes from it fits the journal and any JSON reader.

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
"""Up to the greatest integer that every reader of JSON keeps exactly."""
LARGEST_STEP = 1 << 52
Step = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_STEP)]
"""An optimizer step or an attempt in a request. The master adds to it, and the sum is a `Count`."""
Passed = Annotated[int, msgspec.Meta(ge=-1, le=LARGEST_STEP)]
"""A step, or -1: none yet."""
LARGEST_EVERY = 1 << 40
Every = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_EVERY)]
"""Optimizer steps between two saves."""
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
"""A rank, or a number of workers."""
World = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
"""World size of a round that was formed."""
Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Bytes, or a position in a dataset."""
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
ExitCode = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 32) - 1)]
Status = Annotated[int, msgspec.Meta(ge=100, le=599)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]
"""Positions or bytes per second."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all data that crosses a package or a process: immutable and typed."""


class Phase(enum.Enum):
    """State of a round: workers with ranks attach, load the chosen generation, train; or the round broke."""

    ATTACHING = "attaching"
    RESTORING = "restoring"
    TRAINING = "training"
    BROKEN = "broken"


class Done(Message, frozen=True):
    """An empty success."""


class Problem(Message, frozen=True):
    """RFC 9457 body of every error. `type` is the error's name in `dlrover_hooks.errors`."""

    type: str
    title: str
    status: Status
    detail: str
    hint: str = ""


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
