"""A keeper with a limit of memory that it is told, for users who can make no cgroup: python -m ... MODULE OPTIONS...

`KEEPER_LIMIT` bytes are all that there is. Its segments count as they lie in memory, the process as nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys

from dlrover_hooks.checkpoint.keeper import __main__ as keeper
from dlrover_hooks.checkpoint.storage import free_space
from dlrover_hooks.host.memory_limit import Free


def free(proc: str = "/proc") -> Free:
    del proc
    return Free(max(int(os.environ["KEEPER_LIMIT"]) - _segment_bytes(), 0), "the test")


def _segment_bytes() -> int:
    found = dict[int, int]()
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/memfd:dlrover-hooks"):
                there = os.stat(path)
                found[there.st_ino] = there.st_blocks * 512
    return sum(found.values())


if __name__ == "__main__":
    free_space.memory_of_machine = free
    sys.exit(keeper.main(sys.argv[2:]))
