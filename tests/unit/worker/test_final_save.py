"""What an interrupted run says of its checkpoints."""

from __future__ import annotations

import pytest

from dlrover_hooks import config, protocol as p
from dlrover_hooks.worker.final_save import FinalSaveOutcome, farewell


@pytest.mark.parametrize(
    ("linger_s", "said"),
    [
        (None, "step 7 is in memory for 10 min (no save_to is set); start the same command to go on"),
        (300.0, "step 7 is in memory for 5 min (no save_to is set); this worker goes on there at its next start"),
    ],
)
def test_a_worker_that_ray_train_starts_again_asks_nobody_to_do_so(linger_s: float | None, said: str) -> None:
    """The keeper's own time is the sign of it."""
    kept = p.Generation(attempt=1, step=7, run="run")
    assert farewell(config.load({}, job="job"), kept, None, FinalSaveOutcome.DURABLE, 7, linger_s) == said
