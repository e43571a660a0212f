"""The PrimeMaster and an HTTP master that ends at a bad moment: it is started again before anything waits for it."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import MasterAway, UsageError
from dlrover_hooks.job import DLJobBuilder
from dlrover_hooks.job.prime_master import PrimeMaster, Submission, journal_of

SPEC = DLJobBuilder("job").role("main").run("os:getpid").build()


class EndingMaster:
    """A client of an HTTP master that ends after its first answer to `after`; `look` starts it again."""

    incarnation = "prime"

    def __init__(self, after: type[p.Message]) -> None:
        self._after, self._up = {after}, True
        self.asked: list[type[p.Message]] = []

    def key(self, channel: str) -> str:
        return channel

    def look(self) -> None:
        self._up = True

    def call(self, request: p.Message, *, timeout_s: float, **_: Any) -> p.Message:
        if not self._up:
            assert timeout_s <= 5.0, f"{type(request).__name__} waits for a master that nothing starts again"
            raise MasterAway("it has ended")
        self.asked.append(type(request))
        if type(request) in self._after:
            self._up, self._after = False, set()
        if isinstance(request, p.MasterRestarted):
            return p.Done()
        phase = p.JobPhase.RUNNING if isinstance(request, p.StartRoles) else p.JobPhase.DONE
        return p.Roles(1, phase, events=(p.RoleEvent(0.0, "started"), p.RoleEvent(0.0, "lost")))


class NoProcesses:
    """A `MasterPlatform` without processes."""

    def __init__(self) -> None:
        self.result: p.Roles | None = None
        self._never = queue.SimpleQueue[str]()

    def begin(self) -> bool:
        return True

    def missing(self) -> str:
        return ""

    def restarted(self, timeout_s: float) -> list[str]:
        try:
            return [self._never.get(timeout=timeout_s)]
        except queue.Empty:
            return []

    def finish(self, roles: p.Roles) -> None:
        self.result = roles


@pytest.mark.parametrize("after", [p.StartRoles, p.MasterRestarted, p.AwaitRoles])
def test_a_master_that_ends_is_started_again_whatever_is_asked_next(after: type[p.Message]) -> None:
    http, platform = EndingMaster(after), NoProcesses()
    roles = PrimeMaster(Submission(SPEC, "first", ""), cast("MasterClient", http), platform, http.look).run()
    assert platform.result == roles
    assert roles.phase is p.JobPhase.DONE
    assert http.asked == [p.StartRoles, p.MasterRestarted, p.AwaitRoles, p.ShowRoles]


def test_a_folder_of_the_journal_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = msgspec.structs.replace(SPEC, state=f"file://{tmp_path}/file/x")
    with pytest.raises(UsageError, match=r"(?s)job job: the folder of its journal cannot be created.*state\(\)"):
        journal_of(spec, str(tmp_path))
    assert journal_of(SPEC, str(tmp_path / "new")) == str(tmp_path / "new" / "job.journal")
