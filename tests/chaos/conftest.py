"""How many rounds, and with which seed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BATCH = 20
"""Rounds of one cluster; batches may run side by side."""
WORLDS = 3
"""Batch b has 1 + b % 3 ranks."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "batch" in metafunc.fixturenames:
        rounds: int = metafunc.config.getoption("chaos_rounds")  # pyright: ignore[reportAssignmentType]
        batches = range(-(-rounds // BATCH))
        metafunc.parametrize("batch", batches)
    if "kills" in metafunc.fixturenames:
        kills: int = metafunc.config.getoption("chaos_real_rounds")  # pyright: ignore[reportAssignmentType]
        metafunc.parametrize("kills", [kills])


@pytest.fixture
def chaos_rounds(request: pytest.FixtureRequest, batch: int) -> int:
    """Of this batch."""
    rounds: int = request.config.getoption("chaos_rounds")  # pyright: ignore[reportAssignmentType]
    return min(BATCH, rounds - batch * BATCH)


@pytest.fixture
def chaos_seed(request: pytest.FixtureRequest) -> int:
    """Of this test: the one given and the number of the batch, or a new one each time. It is printed."""
    given: int | None = request.config.getoption("chaos_seed")  # pyright: ignore[reportAssignmentType]
    seed = time.time_ns() % 1_000_000 if given is None else given
    return seed + (request.getfixturevalue("batch") if given is not None and "batch" in request.fixturenames else 0)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for sockets, with a short path."""
    with tempfile.TemporaryDirectory(prefix="dh-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
