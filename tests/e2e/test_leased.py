"""What cannot be recovered in process falls back to a whole restart, by the launcher, and loses nothing.

With Accelerate and Fabric the leased loader comes after the seat is taken: the master is told before the loop begins.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.launched import Launched

SAMPLES, EPOCHS = 48, 2
SCRIPT = """
    import select
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from dlrover_hooks import ShardDataset, elastic_run
    from dlrover_hooks.integrations.accelerate import ElasticAccelerator

    @elastic_run(fault_s=2.0)
    def train():
        net = torch.nn.Linear(1, 1)
        accelerator = ElasticAccelerator(Accelerator(cpu=True), save_every=2)
        lent = DataLoader(ShardDataset(range(SAMPLES), shard_size=4, epochs=EPOCHS), batch_size=2)
        model, optimizer, lent = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.01), lent)
        loop = accelerator.loop
        note(restored=loop.step, life=os.environ["TORCHELASTIC_RESTART_COUNT"])
        for epoch in accelerator.epochs(EPOCHS):
            for ids in lent:
                said = ids.tolist() if lent.weight else []
                note(step=loop.step, attempt=loop.session.attempt, epoch=epoch, ids=said)
                select.select([], [], [], 0.05)
                accelerator.backward(model(ids.float().unsqueeze(1)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.end_training()
        note(end=loop.step)

    train()
    """


def visited(lives: list[dict[str, Any]]) -> Counter[tuple[int, int]]:
    """Samples in the model that is left: of each step only the attempt that made it last counts."""
    made = dict[int, int]()
    rows = [life for life in lives if "ids" in life]
    for row in rows:
        made[row["step"]] = max(row["attempt"], made.get(row["step"], 0))
    begun = {row["attempt"]: min(one["step"] for one in rows if one["attempt"] == row["attempt"]) for row in rows}
    last = [row for row in rows if not any(begun[later] <= row["step"] for later in begun if later > row["attempt"])]
    return Counter((row["epoch"], index) for row in last for index in row["ids"])


@pytest.mark.requirement("ED-39")
@pytest.mark.deep
@pytest.mark.timeout(200)
def test_a_worker_with_leased_data_is_lost(launch: Callable[..., Launched]) -> None:
    """Both workers are started again, once, and the master's books are complete."""
    script = SCRIPT.replace("SAMPLES", str(SAMPLES)).replace("EPOCHS", str(EPOCHS))
    run = launch(script, "--nproc-per-node", "1:2", OMP_NUM_THREADS="1")
    lives = run.wait_for(lambda lives: sum("step" in life and life["step"] >= 6 for life in lives) >= 2, timeout_s=90)
    os.kill(next(life["pid"] for life in lives if life["rank"] == 1), signal.SIGKILL)
    code, errors = run.end(timeout_s=90)
    assert code == 0, errors
    lives = run.read()
    begun = [life for life in lives if "restored" in life]
    assert [life["life"] for life in begun] == ["0", "0", "1", "1"], errors
    assert len({life["pid"] for life in begun}) == 4, "a survivor has gone on"
    assert begun[-1]["restored"] > 0
    assert visited(lives) == Counter((epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES))
    assert "elastic_run cannot recover leased dataset 'train' in process" in errors
