"""Fixtures of several rooms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.master_process import LiveMaster


@pytest.fixture
def live_master(tmp_path: Path) -> Iterator[LiveMaster]:
    """A real master process with a token and a journal; `.url .token .pid .kill() .restart()`."""
    master = LiveMaster(tmp_path)
    yield master
    master.close()
