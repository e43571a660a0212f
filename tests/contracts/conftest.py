"""Every master, for one suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlrover_hooks.client.in_process_master import InProcessMaster
from dlrover_hooks.testing import MasterFake, StorageFake
from tests.contracts.masters import CallerOf
from tests.e2e.master_process import LiveMaster


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMaster]:
    master = LiveMaster(tmp_path_factory.mktemp("master"))
    yield master
    master.close()


@pytest.fixture(params=["alone", "fake", "process"])
def caller_of(request: pytest.FixtureRequest) -> Iterator[CallerOf]:
    """Gives a caller for an incarnation. Each test has jobs of its own: the process is shared."""
    if request.param == "process":
        yield request.getfixturevalue("process").client
        return
    master = InProcessMaster(storage=StorageFake()) if request.param == "alone" else MasterFake()
    yield lambda incarnation: master
    master.close()
