"""A script may end right behind its last collective: its end waits until gloo's threads are done with that.

They let go of a collective's tensors, and of a hook's callbacks, after the rank that waits for it went on, and need the
interpreter for that. Where it ends just then, the process aborts with "terminate called without an active exception":
any script's, also without us (torch 2.13), now and then on a loaded machine. `destroy_process_group` waits for the
threads only where nobody else holds the group; DDP and device meshes do. Whoever imports this module is safe.
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
"""A collective whose peer is gone may never end."""


@atexit.register
def settle() -> None:
    """Return once gloo's threads sleep, for longer than one that wants the interpreter sleeps before it asks again."""
    until, look_s = time.monotonic() + _SETTLE_S, 2 * sys.getswitchinterval()
    now, before = _threads(), None
    while now and time.monotonic() < until and (now != before or any(state != "S" for state, *_ in now)):
        time.sleep(look_s)
        now, before = _threads(), now


def _threads() -> list[list[str]]:
    """Of each of gloo's threads in this process: its state, and how often it began and ceased to run."""
    statuses = (_status(task) for task in Path("/proc/self/task").iterdir())
    return [_STATE.findall(status) for status in statuses if status.startswith(_THREAD)]


def _status(task: Path) -> str:
    try:
        return (task / "status").read_text()
    except OSError:  # it has ended
        return ""
