"""Is there room? A line for a person, from the smallest limit that holds; refused or warned before it hurts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrover_hooks.checkpoint.storage.free_space import at, disk, free_disk, free_memory, memory, size
from dlrover_hooks.host.memory_limit import Free

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("slot", "workers", "free", "fits", "tight", "line"),
    [
        (4.7, 2, 61, True, False, "3 slots of 4.7 GB for each of 2 workers need 28 GB; 61 GB are free: fits"),
        (14, 1, 61, True, False, "3 slots of 14 GB need 42 GB; 61 GB are free: fits"),
        (14, 1, 45, True, True, "3 slots of 14 GB need 42 GB; 45 GB are free: tight"),
        (14, 1, 42, True, True, "3 slots of 14 GB need 42 GB; 42 GB are free: tight"),
        (14, 1, 41.9, False, True, "3 slots of 14 GB need 42 GB; 42 GB are free: does not fit"),
    ],
)
def test_memory(slot: float, workers: int, free: float, fits: bool, tight: bool, line: str) -> None:
    verdict = memory(int(slot * GB), workers, Free(int(free * GB), "cgroup /pod"))
    assert (verdict.fits, verdict.tight, verdict.line) == (fits, tight, line)
    assert ("cgroup /pod" in verdict.hint) == tight
    assert ("fewer workers" in verdict.hint) == tight


def test_disk() -> None:
    verdict = disk(5 * GB, 3, Free(8 * GB, "/data"))
    assert not verdict.fits
    assert verdict.line == "3 more generations of 5.0 GB at /data need 15 GB; 8.0 GB are free: does not fit"
    assert "lower `keep`" in verdict.hint
    assert disk(GB, 3, Free(8 * GB, "/data")).hint == ""


def test_generations_that_lie_there_are_not_counted_twice(tmp_path: Path) -> None:
    """Retention makes room for those that follow; one is always to be written."""
    free = free_disk(str(tmp_path)).nbytes
    one = free // 3 - 1
    verdict = at(str(tmp_path / "new"), {}, one, 2)
    assert verdict is not None
    assert verdict.tight, "3 of a third each"
    for step in range(2):
        (tmp_path / f"step-{step:010d}-0000").mkdir()
    verdict = at(str(tmp_path), {}, one, 2)
    assert verdict is not None
    assert not verdict.tight
    assert verdict.line.startswith("1 more generation")
    assert at("memory://somewhere", {}, one, 2) is None


def test_sizes_are_short() -> None:
    assert [size(n) for n in (0, 999, 1000, 9_949_999, 999_600_000, 4_700_000_000, 10**16)] == [
        "0 bytes", "999 bytes", "1.0 KB", "9.9 MB", "1.0 GB", "4.7 GB", "10000 TB",
    ]  # fmt: skip


def tree(tmp_path: Path, group: str, mounts: str) -> str:
    """A /proc that says so, on a machine with 100 MB."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 200000 kB\nMemAvailable: 100000 kB\n")
    (proc / "self/cgroup").write_text(group)
    (proc / "self/mountinfo").write_text(mounts)
    return str(proc)


def put(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert free_memory(proc=tree(tmp_path, "", "")) == Free(102_400_000, "the machine")
    assert free_memory().nbytes > 1 << 20


@pytest.mark.parametrize("inner", ["max", 50_000_000])
def test_the_smallest_rest_up_the_tree_counts_v2(tmp_path: Path, inner: object) -> None:
    """A pod's limit lies above the container's; pages of files that were not used lately can be had back."""
    root = tmp_path / "cg"
    put(root)
    put(root / "pod", max=30_000_000, current=25_000_000, stat="anon 1\ninactive_file 15000000")
    put(root / "pod/box", max=inner, current=1_000_000, stat="inactive_file 0")
    mounts = f"30 24 0:26 / {root} rw,nosuid - cgroup2 cgroup2 rw\n"
    assert free_memory(proc=tree(tmp_path, "0::/pod/box\n", mounts)) == Free(20_000_000, f"cgroup {root}/pod")


def test_the_smallest_rest_up_the_tree_counts_v1(tmp_path: Path) -> None:
    root = tmp_path / "cg"
    put(root, limit_in_bytes=9223372036854771712, usage_in_bytes=5, stat="total_inactive_file 0")
    put(root / "pod", limit_in_bytes=9223372036854771712, usage_in_bytes=5, stat="total_inactive_file 0")
    put(root / "pod/box", limit_in_bytes=9_000_000, usage_in_bytes=7_000_000, stat="total_inactive_file 1000000")
    mounts = (
        f"35 31 0:32 / {root} rw,relatime - cgroup cgroup rw,memory\n"
        "36 31 0:33 / /cpu rw,relatime - cgroup cgroup rw,cpu\n41 31 0:38 / /unified rw - cgroup2 cgroup2 rw\n"
    )
    proc = tree(tmp_path, "4:memory:/pod/box\n1:cpu:/other\n0::/\n", mounts)
    assert free_memory(proc=proc) == Free(3_000_000, f"cgroup {root}/pod/box")


def test_a_tree_that_is_mounted_at_the_root(tmp_path: Path) -> None:
    """Nothing is above it, so that the walk up ends there."""
    proc = tree(tmp_path, "0::/pod\n", "30 24 0:26 / / rw,nosuid - cgroup2 cgroup2 rw\n")
    assert free_memory(proc=proc) == Free(102_400_000, "the machine")


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """Without a cgroup namespace the path is the host's, and the mount's root is that very group."""
    root = tmp_path / "cg"
    put(root, limit_in_bytes=9_000_000, usage_in_bytes=1_000_000, stat="total_inactive_file 0")
    mounts = f"35 31 0:32 /docker/abc {root} rw,relatime - cgroup cgroup rw,memory\n"
    assert free_memory(proc=tree(tmp_path, "4:memory:/docker/abc\n", mounts)).nbytes == 8_000_000


def test_the_file_systems_rest_counts_where_segments_are_files(tmp_path: Path) -> None:
    found = free_memory(str(tmp_path), proc=tree(tmp_path, "", ""))
    assert found == min(Free(102_400_000, "the machine"), free_disk(str(tmp_path)))
