"""A drill in frameworks' own loops: each step is traced by the names of its tensors, and the last one ends the loop.

`dlrover-hooks rehearse` relies on it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader
from dlrover_hooks.testing import InjectedFault
from dlrover_hooks.testing.faults.step_trace import RunTrace

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
DATA = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunTrace:
    """Of a drill of four steps, in the second of which the backward raises once, in each loop below."""
    (tmp_path / "faults").write_text("step=2 exception\n")
    orders = {"FAULTS": tmp_path / "faults", "TRACE": tmp_path / "trace", "LAST_STEP": 4}
    for name, value in orders.items():
        monkeypatch.setenv(f"DLROVER_HOOKS_{name}", str(value))
    return RunTrace(tmp_path / "trace")


def plain(job: str) -> None:
    model: Any = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader: Any = elastic_loader(DataLoader(DATA, 4, shuffle=True), optimizer=optimizer)
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, job=job, save_every=1):
        for _ in loader.epochs(1):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()


def lightning(job: str) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from dlrover_hooks.integrations.lightning import ElasticCallback

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ElasticCallback(job=job, save_every=1)],
    ).fit(Net(), DataLoader(DATA, 4, shuffle=True))  # fmt: skip


@pytest.mark.parametrize(("loop", "names"), [(plain, ("weight", "bias")), (lightning, ("layer.weight", "layer.bias"))])
def test_the_loop_is_struck_traced_and_ended(loop: Any, names: tuple[str, ...], trace: RunTrace, job: str) -> None:
    """First it is struck in a backward; the second life goes on behind the checkpoint, is not struck, and ends."""
    with pytest.raises(InjectedFault, match="step=2"):
        loop(job)
    with pytest.raises(SystemExit) as ended:
        loop(job)
    assert ended.value.code == 0
    first, second = trace.read().lives
    assert [row.step for row in first.rows] == [0, 1], "the step that was struck is not over"
    assert second.head.begin in (0, 1), "the first save may still have been under way"
    assert [row.step for row in second.rows] == [*range(second.head.begin, 5)]
    assert second.names == names
    assert [len(row.losses) for row in second.rows[1:]] == [1] * (4 - second.head.begin)
    told = trace.told(2, second.head.begin, 0)
    assert told is not None
    assert told.hashes == second.rows[0].hashes or second.head.begin == 0
    states = [row.data["train"]["cursor"] for row in second.rows]
    assert states == [4 * row.step for row in second.rows]
