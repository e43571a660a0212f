"""Crews of workers that recover in process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.kept import runtime_folder
from tests.elastic.crew import Crew, Zygote


@pytest.fixture(scope="module")
def zygote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """One for all tests of a file: to import torch takes longer than most of them. `WORKER` of the file names another
    module of workers.
    """
    target = getattr(request.module, "WORKER", "tests.elastic.worker")
    with pytest.MonkeyPatch.context() as patch, runtime_folder(patch) as runtime:
        made = Zygote(tmp_path_factory.mktemp("zygote"), runtime, target)
        yield made
        made.close()


@pytest.fixture
def crew(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    """Makes crews; nothing of them outlives the test."""
    made: list[Crew] = []

    def make(low: int, high: int, **settings: object) -> Crew:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Crew(zygote, folder, low=low, high=high, **settings))  # pyright: ignore[reportArgumentType]
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def calm(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What three workers that were left alone end with."""
    with contextlib.closing(Crew(zygote, tmp_path_factory.mktemp("calm"), low=3, high=3)) as one:
        for rank in range(3):
            one.start(rank)
        one.ended()
        return one.end()
