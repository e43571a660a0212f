"""Ray Train restarts the workers, and our hooks in them go on where the model was."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ray_trained import STEPS, train
from tests.waiting import json_lines, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import ray

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_worker_that_is_killed_costs_no_step_that_was_in_memory(tmp_path: Path, cluster: None) -> None:
    """Ray Train starts both again. The model goes on from memory, and each sample is in one step of it."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from dlrover_hooks.integrations.ray import RayTrainHooks

    hooks: Any = RayTrainHooks()  # Ray's annotation knows only one of its kinds of callbacks
    run = RunConfig(
        name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=3),
        callbacks=[hooks],
    )  # fmt: skip
    trainer = TorchTrainer(
        train, train_loop_config={"folder": str(tmp_path)}, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2), run_config=run,
    )  # fmt: skip
    fitted = threading.Thread(target=trainer.fit)
    fitted.start()
    notes = tmp_path / "steps-1"
    until(lambda: notes.exists() and len(json_lines(notes)) >= STEPS // 4, "a quarter is trained", 120.0)
    victim = json_lines(notes)[-1]
    os.kill(victim[1], signal.SIGKILL)
    fitted.join(180.0)
    assert not fitted.is_alive()
    for rank in range(2):
        lines = json_lines(tmp_path / f"steps-{rank}")
        first = min(step for step, pid, _ in lines if pid != lines[0][1])
        assert first > STEPS // 5, "it began with an old step"
        assert len({pid for _, pid, _ in lines}) == 2
    trained = {(rank, step): batch for rank in range(2) for step, _, batch in json_lines(tmp_path / f"steps-{rank}")}
    samples = sorted(one for batch in trained.values() for one in batch)
    assert samples == [float(one) for one in range(8 * STEPS)]
