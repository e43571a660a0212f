"""Where a thread of this process is: its stack as text, the line of the user's code, the collective it waits in."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from typing import NamedTuple

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USERS = tuple(
    f"{folder}{os.sep}" for folder in {_ROOT, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))}
)
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_BACKWARD = "_engine_run_backward"
"""torch's entry into the C++ engine, in which DistributedDataParallel reduces gradients and waits for other ranks."""
_LONGEST = 300
"""Most characters of a line that is sent to the master."""


_DUMPED = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A frame, as CPython's `faulthandler` writes it."""


class ThreadStack(NamedTuple):
    """`where`: the innermost line of the user's own code, such as `train.py:41, in load`.

    `waits_in`: the outermost function of torch.distributed in the stack, `backward` within torch's backward pass, where
    DistributedDataParallel waits for other ranks, else empty.
    """

    text: str
    where: str
    waits_in: str


def stack_of(ident: int) -> ThreadStack | None:
    """The stack of the thread with that `threading.get_ident()`; None if it has ended. Any thread."""
    frame = sys._current_frames().get(ident)
    if frame is None:
        return None
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame))
    frames.reverse()  # the innermost one last, as in a traceback
    own = [one for one in frames if not one.filename.startswith((*_NOT_THE_USERS, "<"))]
    at = own[-1] if own else frames[-1]
    return ThreadStack(
        "".join(frames.format()),
        f"{os.path.basename(at.filename)}:{at.lineno}, in {at.name}"[:_LONGEST],
        _waits_in(frames)[:_LONGEST],
    )


def line_of_dump(text: str) -> str:
    """The user's innermost line in the main thread's part of a `faulthandler` dump, as `ThreadStack.where`; or empty.

    The main thread is the last one of the dump, and its innermost frame is the first one.
    """
    frames = _DUMPED.findall(text.rpartition("most recent call first")[2])
    own = [one for one in frames if not one[0].startswith((*_NOT_THE_USERS, "<"))]
    if not (at := next(iter(own or frames), None)):
        return ""
    return f"{os.path.basename(at[0])}:{at[1]}, in {at[2]}"[:_LONGEST]


def _waits_in(frames: traceback.StackSummary) -> str:
    names = (one.name for one in frames if one.filename.endswith(_COLLECTIVES))
    if (collective := next(names, "")) or not any(one.name == _BACKWARD for one in frames):
        return collective
    return "backward"
