"""The SubMaster and a platform without room: what is asked again, and what is not."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.job import DLJobBuilder, EndedWorker
from dlrover_hooks.job.prime_master import Submission
from dlrover_hooks.job.sub_master import SubMaster

SPEC = DLJobBuilder("job").role("main").run("os:getpid").build()


class NoRoom:
    """A `WorkerPlatform` that never starts a worker."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []

    def lives(self) -> dict[int, int]:
        return {}

    def start(self, worker: p.RoleWorker, avoid: Collection[str], env: Mapping[str, str]) -> str:
        self.asked.append(dict(env))
        return "no room"

    def end(self, rank: int, life: int) -> None: ...

    def outcome(self, rank: int, life: int) -> EndedWorker:
        return EndedWorker(rank, life, p.WorkerCause.KILLED)

    def ended(self, timeout_s: float) -> list[EndedWorker]:
        return []


def test_a_plug_in_is_asked_once_for_each_life_however_long_that_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    info = tmp_path / "counts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counts\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[dlrover_hooks.plugins]\ncounts = plug_counts\n")
    (tmp_path / "plug_counts.py").write_text(
        "calls = []\ndef worker_env(spec, role, rank):\n  calls.append(rank)\n  return {'CALL': str(len(calls))}\n"
    )
    platform, used = NoRoom(), (p.RolePlugin("counts", ("worker_env",)),)
    master = SubMaster(Submission(SPEC, "first", "", used), "main", "http://127.0.0.1:1", platform)
    monkeypatch.setattr(master, "_tell", lambda event: None)
    for life in (1, 1, 1, 2, 2):
        master._start(p.RoleWorker("main", 0, life, p.WorkerState.INITIAL), ())
    assert platform.asked == [{"CALL": "1"}] * 3 + [{"CALL": "2"}] * 2
    del sys.modules["plug_counts"]
