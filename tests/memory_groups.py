"""A control group of the kernel with little memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_hooks.host import cgroups
from tests.waiting import until


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A memory cgroup of `limit` bytes below this process's own. In it is another one, `inner`, without a limit."""
    folder = None
    with contextlib.suppress(OSError, StopIteration):
        folder = Path(next(cgroups.around("memory")).folder) / f"dlrover-hooks-test-{os.getpid()}"
        (folder / "inner").mkdir(parents=True)
        set_limit(folder, limit)
        (folder / "inner/cgroup.procs").touch()
    if folder is None or not (folder / "inner/cgroup.procs").exists():
        pytest.skip("this user cannot make a memory cgroup here")
    try:
        yield folder
    finally:
        for each in (folder / "inner", folder):
            until(lambda each=each: not (each / "cgroup.procs").read_text(), "an empty cgroup")
            each.rmdir()


def set_limit(group: Path, limit: int) -> None:
    """Bytes for all processes of the group and of those inside."""
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(limit))
