"""Groups that this process makes; those of v2 on a plain folder, for a kernel shows only one of the two."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlrover_hooks.host import cgroups
from dlrover_hooks.host.cgroups import Group, OwnGroup


def proc_of(folder: Path, own: str, controllers: str) -> str:
    """A /proc whose process is in group `own` of a tree of v2 at `folder`/tree."""
    proc = folder / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(f"0::{own}\n")
    (proc / "mountinfo").write_text(f"30 25 0:26 / {folder}/tree rw - cgroup2 cgroup2 rw\n")
    for group in (folder / f"tree{own}", *(folder / f"tree{own}").parents):
        if str(group).startswith(f"{folder}/tree"):
            group.mkdir(parents=True, exist_ok=True)
            (group / "cgroup.subtree_control").write_text(controllers)
    return f"{folder}/proc"


def test_the_files_of_a_group_of_v2(tmp_path: Path) -> None:
    group = OwnGroup(Group("cgroup2", str(tmp_path)), "node")
    group.limit_memory(64 << 20)
    group.limit_cpu(0.5)
    folder = tmp_path / "node"
    assert {name: (folder / name).read_text() for name in os.listdir(folder)} == {
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "cpu.max": "50000 100000",
    }
    group.limit_memory(0)
    group.limit_cpu(0.0)
    assert ((folder / "memory.max").read_text(), (folder / "cpu.max").read_text()) == ("max", "max 100000")


def test_a_quota_is_never_less_than_the_kernel_takes(tmp_path: Path) -> None:
    group = OwnGroup(Group("cgroup2", str(tmp_path)), "node")
    group.limit_cpu(0.001)
    assert (tmp_path / "node/cpu.max").read_text() == "1000 100000"


def test_no_group_of_v2_is_made_outside_a_limited_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder does not fill a new group with files, as the kernel does: the test does so, below /tree/user only."""
    proc, make = proc_of(tmp_path, "/user/own", "cpu memory"), os.mkdir
    remove = os.rmdir

    def mkdir(path: str, mode: int = 0o777) -> None:
        make(path, mode)
        if os.path.dirname(path) == f"{tmp_path}/tree/user":
            for name in ("memory.max", "cgroup.procs"):
                Path(path, name).touch()

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "rmdir", lambda path: [*map(os.unlink, Path(path).iterdir()), remove(path)])
    own = tmp_path / "tree/user/own/memory.max"
    own.write_text("max\n")
    found = cgroups.parent_for("memory", proc)
    assert found == Group("cgroup2", f"{tmp_path}/tree/user")
    own.write_text("1000000\n")
    assert cgroups.parent_for("memory", proc) is None
    assert sorted(os.listdir(tmp_path / "tree/user")) == ["cgroup.subtree_control", "own"]


def test_no_controller_no_group(tmp_path: Path) -> None:
    assert cgroups.parent_for("memory", proc_of(tmp_path, "/", "")) is None
    assert cgroups.parent_for("memory", f"{tmp_path}/none") is None
