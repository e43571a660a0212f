"""Sharded state that could not be restored is refused before anything is trained for long, with what to do.

Lightning, Fabric and Accelerate with a sharded model; optimizers whose state is not sharded as their parameters are.
A user that asked for checkpoints must not find out after a crash that there are none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.errors import UsageError
from dlrover_hooks.host.ports import free_port
from dlrover_hooks.integrations.accelerate import ElasticAccelerator
from dlrover_hooks.integrations.fabric import ElasticFabric
from dlrover_hooks.integrations.lightning import ElasticCallback
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from dlrover_hooks.pytorch.even_batches import EvenLoader
from tests.integrations.torch_cases import Noisy

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = "and under {0} state is kept with .* only: nothing would be saved, and nothing resumed"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torchrun starts it, for strategies that need a process group."""
    given = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if dist.is_initialized():
        dist.destroy_process_group()


class Net(LightningModule):
    """Sharded where Lightning wants it to be."""

    def __init__(self, *, shards: bool) -> None:
        super().__init__()
        self.layer, self.shards, self.trained = nn.Linear(4, 1), shards, 0

    def configure_model(self) -> None:
        if self.shards:
            fully_shard(self.layer, mesh=self.mesh)

    @property
    def mesh(self) -> Any:
        return dist.init_device_mesh("cpu", (1,))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained += 1
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(net: Net, elastic: ElasticCallback, strategy: Any) -> None:
    trainer = Trainer(
        callbacks=[elastic], strategy=strategy, max_steps=2, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(net, DataLoader(Noisy(), batch_size=2))


def test_lightning_model_parallel(job: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Net(shards=True)
    with pytest.raises(UsageError, match="^ModelParallelStrategy .*" + WORDS.format("Lightning")) as refused:
        fit(net, ElasticCallback(str(tmp_path), job=job), ModelParallelStrategy())
    assert "fully_shard (FSDP2) and AsyncCheckpointer" in refused.value.hint
    assert net.trained == 0
    fit(net, ElasticCallback(str(tmp_path), job=job, on_error="warn"), ModelParallelStrategy())
    assert net.trained == 2
    (said,) = (one for one in caplog.records if "is inactive: ModelParallelStrategy" in one.getMessage())
    assert said.levelno == logging.WARNING
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_shards_itself_under_another_strategy(job: str) -> None:
    net = Net(shards=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(UsageError, match=r"not kept under this framework: .*layer\.weight"):
        fit(net, ElasticCallback(job=job), "auto")
    assert net.trained == 0


def test_fabric_model_parallel(job: str) -> None:
    fabric: Any = ElasticFabric(
        Fabric(accelerator="cpu", devices=1, strategy=FabricModelParallel(lambda model, mesh: model)), job=job
    )
    fabric.launch()
    with pytest.raises(UsageError, match="^ModelParallelStrategy .*" + WORDS.format("Fabric")):
        fabric.setup_module(nn.Linear(4, 1))


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_accelerate(job: str, kind: DistributedType) -> None:
    """Accelerate shards on devices only, so here it is told that it does."""
    inner, net = Accelerator(cpu=True), nn.Linear(4, 1)
    inner.state.distributed_type = kind
    with pytest.raises(UsageError, match=f"^{kind.value} .*" + WORDS.format("Accelerate")):
        ElasticAccelerator(inner, job=job).prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


class Factored(torch.optim.Optimizer):
    """Keeps a mean per row, as Adafactor does. (Torch's own refuses DTensors itself.)"""

    def __init__(self, parameters: Any, of: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.of = of

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = self.of(parameter.grad)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda grad: grad.square().mean(-1), "a DTensor"),
        (lambda grad: grad.to_local().mean(-1), "a tensor of this rank alone,"),
    ],
    ids=["rows", "own rows"],
)
def test_state_that_is_not_sharded_as_its_parameter(job: str, of: Callable[[Any], torch.Tensor], words: str) -> None:
    """At the first step, not at the restore after a crash."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model: Any = fully_shard(nn.Linear(4, 3, bias=False))
    optimizer = Factored(model.parameters(), of)
    loader = EvenLoader(elastic_loader(DataLoader(Noisy(), batch_size=2), optimizer=optimizer))

    def train() -> None:
        with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, job=job) as checkpoints:
            for x, _ in loader:
                assert checkpoints.step == 0
                model(x).sum().backward()
                optimizer.step()

    wanted = rf"rows of parameter weight is {words} of shape \[3\], the parameter is a DTensor of shape \[3, 4\]"
    with pytest.raises(UsageError, match=wanted) as refused:
        train()
    assert "AdamW" in refused.value.hint
