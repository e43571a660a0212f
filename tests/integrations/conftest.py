"""Fixtures of tests with frameworks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc import keeper_connection
from dlrover_hooks.checkpoint.save import segment_client
from tests import keepers, ranks
from tests.integrations.keras_lives import BACKENDS, Lives, lives_of
from tests.integrations.ps_job import StartPS, ps_jobs
from tests.pace import WAIT_S, paced_save


@pytest.fixture(autouse=True)
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `tests.pace` and `tests.keepers`."""
    monkeypatch.setattr(keeper_connection, "_spawned", keepers.spawned)
    monkeypatch.setattr(Checkpointer, "save", paced_save)
    monkeypatch.setattr(segment_client, "PREPARE_WAIT_S", WAIT_S)


@pytest.fixture
def fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state in singletons."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Of Keras."""
    return request.param


@pytest.fixture
def lives(backend: str, tmp_path: Path) -> Iterator[Lives]:
    """Of a job with Keras."""
    with ranks.named_job("keras") as job:
        yield lives_of(backend, job, tmp_path)


@pytest.fixture
def start_ps(tmp_path: Path) -> Iterator[StartPS]:
    """See `ps_jobs`."""
    with ps_jobs(tmp_path) as start:
        yield start


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A step that reads it waits in the kernel, until its process is killed."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def one_ray_node() -> Iterator[None]:
    """A Ray cluster of one node, to which this process is connected."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, namespace="dlrover_hooks", log_to_driver=False)
    yield
    ray.shutdown()
