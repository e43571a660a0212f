"""Fixtures of several rooms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.master_process import LiveMaster
from tests.ranks import named_job


def pytest_addoption(parser: pytest.Parser) -> None:
    chaos = parser.getgroup("chaos", "rounds of tests/chaos")
    chaos.addoption("--chaos-rounds", type=int, default=200, metavar="N", help="with torch-free trainers (200)")
    chaos.addoption("--chaos-real-rounds", type=int, default=10, metavar="N", help="with real ones (10)")
    chaos.addoption("--chaos-seed", type=int, metavar="S", help="of the first batch; the seed is printed")


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
