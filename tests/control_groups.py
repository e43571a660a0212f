"""Control groups of the kernel with little memory, processor time or disk."""

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
    """A memory cgroup of `limit` bytes below this process's own. In it is another one, `inner`, without a limit.

    Skips the test if this user cannot make one.
    """
    with contextlib.ExitStack() as owned:
        try:
            folder = owned.enter_context(group_of_memory(limit))
            owned.enter_context(_new(folder / "inner"))
        except (OSError, StopIteration):
            pytest.skip("this user cannot make a memory cgroup here")
        yield folder


@contextlib.contextmanager
def group_of_memory(limit: int) -> Iterator[Path]:
    """The same without `inner`. Raises OSError or StopIteration if this user cannot make it."""
    with _group("memory") as folder:
        set_limit(folder, limit)
        yield folder


def set_limit(group: Path, limit: int) -> None:
    """Bytes for all processes of the group and of those inside."""
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(limit))


@contextlib.contextmanager
def throttled_processor(share: float) -> Iterator[Path]:
    """A cgroup whose processes get `share` of one processor. Raises OSError if this user cannot make it."""
    with _group("cpu") as folder:
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{share * 1e5:.0f} 100000")
        else:
            (folder / "cpu.cfs_period_us").write_text("100000")
            (folder / "cpu.cfs_quota_us").write_text(f"{share * 1e5:.0f}")
        yield folder


@contextlib.contextmanager
def throttled_disk(at: Path, reads_per_s: int) -> Iterator[Path]:
    """A cgroup whose processes may read so often from the disk that `at` is on, if they read past the page cache.

    Raises OSError if this user cannot make it, or if the disk is no block device.
    """
    number = at.stat().st_dev
    place = f"{os.major(number)}:{os.minor(number)}"
    with _group("blkio") as folder:
        if (folder / "io.max").exists():
            (folder / "io.max").write_text(f"{place} riops={reads_per_s}")
        else:
            (folder / "blkio.throttle.read_iops_device").write_text(f"{place} {reads_per_s}")
        yield folder


@contextlib.contextmanager
def within(group: Path, pid: int) -> Iterator[None]:
    """The process and its threads are in `group` meanwhile. It may end there."""
    (group / "cgroup.procs").write_text(str(pid))
    yield
    with contextlib.suppress(ProcessLookupError):
        (group.parent / "cgroup.procs").write_text(str(pid))


def _group(controller: str) -> contextlib.AbstractContextManager[Path]:
    """A cgroup below this process's own. Raises StopIteration if there is no such controller."""
    return _new(Path(next(cgroups.around(controller)).folder) / f"dlrover-hooks-test-{os.getpid()}")


@contextlib.contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """Removed at the end, when its processes have ended. Raises OSError."""
    folder.mkdir()
    try:
        (folder / "cgroup.procs").touch()
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), "an empty cgroup")
        folder.rmdir()
