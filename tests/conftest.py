"""Fixtures of several rooms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.master_process import LiveMaster
from tests.ranks import named_job


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[str]:
    """See `named_job`."""
    with named_job(request.path.stem.removeprefix("test_")) as name:
        yield name


@pytest.fixture
def live_master(tmp_path: Path) -> Iterator[LiveMaster]:
    """A real master process with a token and a journal; `.url .token .pid .kill() .restart()`."""
    master = LiveMaster(tmp_path)
    yield master
    master.close()
