"""Delays the interpreter's exit until gloo's threads have finished with the last collective. Import it to enable this.

Gloo's threads release a collective's tensors and a hook's callbacks after the waiting rank has continued, and they need
the interpreter for that. If a script exits at that moment, the process aborts with "terminate called without an active
exception". This happens to any script, also without dlrover-hooks (torch 2.13), now and then on a loaded machine.
`destroy_process_group` waits for the threads only if it drops the last reference to the group; DDP and device meshes
hold references.
"""

from __future__ import annotations

import atexit
import re
import sys
import time
from pathlib import Path

_THREAD = "Name:\tpt_gloo_runloop\n"
_STATE = re.compile(r"^(?:State|\w*voluntary_ctxt_switches):\s*(\w+)", re.MULTILINE)
_SETTLE_S = 2.0
"""A collective whose peer is gone may never end, so the wait is limited."""


@atexit.register
def settle() -> None:
    """Return once gloo's threads sleep.

    Polls at twice the switch interval, so that a thread that waits for the interpreter is seen to run in between.
    """
    until, look_s = time.monotonic() + _SETTLE_S, 2 * sys.getswitchinterval()
    now, before = _threads(), None
    while now and time.monotonic() < until and (now != before or any(state != "S" for state, *_ in now)):
        time.sleep(look_s)
        now, before = _threads(), now


def _threads() -> list[list[str]]:
    """The state and the context switch counts of each gloo thread in this process."""
    statuses = (_status(task) for task in Path("/proc/self/task").iterdir())
    return [_STATE.findall(status) for status in statuses if status.startswith(_THREAD)]


def _status(task: Path) -> str:
    try:
        return (task / "status").read_text()
    except OSError:  # the thread has ended
        return ""
