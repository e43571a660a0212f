"""Whether a process that makes no steps does something."""

from __future__ import annotations

import time
from pathlib import Path

from dlrover_hooks.worker.process_activity import ProcessActivity


def test_a_process_that_computes_is_active() -> None:
    activity = ProcessActivity()
    activity.look(100.0)
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert activity.look(101.0), "0.2 s of CPU within a second"
    assert not activity.look(111.0), "next to none within ten"


def test_a_process_that_writes_is_active(tmp_path: Path) -> None:
    activity = ProcessActivity()
    activity.look(100.0)
    (tmp_path / "file").write_bytes(bytes(32 << 20))
    assert activity.look(110.0), "3.2 MiB per second, for little CPU"
    assert not activity.look(120.0)
