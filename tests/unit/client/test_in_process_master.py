"""One process without a master: what storage refuses at the very end is said, as a master says it."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.testing import MasterFake
from dlrover_hooks.testing.fakes import StorageFake
from tests.e2e.job_script import attach, join, vote


class Refuses(StorageFake):
    """Its disk is full when the end is to be written."""

    def finish(self, *_: Any, **__: Any) -> None:
        raise StorageFailed("No space left on device")


def test_a_failed_finish_is_said(caplog: pytest.LogCaptureFixture) -> None:
    master = MasterFake(storage=Refuses())
    master.call(join())
    for name in ("w1", "w0"):
        master.call(attach(name, save_to="/tree", persist_every=1))
    for rank in range(2):
        master.call(vote(rank, 1))
    for rank in range(2):
        master.call(vote(rank, 1, p.VoteKind.STORED))
    for name in ("w0", "w1"):
        master.call(p.Leave("job", name, p.Departure.DONE, 1))
    view = master.call(p.ShowJob("job"))
    assert view.finished
    assert view.newest_committed is not None
    assert "job job is finished, but that could not be recorded at" in caplog.text
    assert "No space left on device; started again, it restores step" in caplog.text
