# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
# (Keras has no annotations that a checker could rely on.)
"""Where adapters see the parts of a step. Time is a counter that each part of the step moves by seconds of its own."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks import AsyncCheckpointer, ShardDataset, elastic_loader
from dlrover_hooks.integrations.keras import ElasticCallback as KerasCallback
from dlrover_hooks.integrations.lightning import ElasticCallback
from dlrover_hooks.protocol import StepPhases
from dlrover_hooks.pytorch import step_phases
from dlrover_hooks.worker import reporter
from dlrover_hooks.worker.step_clock import WINDOW_STEPS, StepClock
from tests.integrations.test_lightning_private_api import Net, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = WINDOW_STEPS + 4
"""The first one is left out, and the last one may not be over."""
DATA_S, COMPUTE_S, NETWORK_S, OPTIMIZER_S = 3.0, 5.0, 7.0, 11.0


class Clocks:
    """The clock of each session, and the time that they read."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, list[StepClock]()

    def make(self) -> StepClock:
        self.made.append(StepClock(lambda: self.now))
        return self.made[-1]

    def phases(self) -> StepPhases:
        found = self.made[-1].window(STEPS, time.monotonic() + 1e6) or self.made[-1].window(
            STEPS, time.monotonic() + 2e6
        )
        assert found is not None
        return found


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(reporter, "StepClock", made.make)
    return made


@pytest.fixture
def own_group() -> Iterator[None]:
    """The process group that Lightning makes, and its variables, end with the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Samples(Dataset[Any]):
    def __init__(self, clocks: Clocks, length: int = STEPS) -> None:
        self.clocks, self.length = clocks, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clocks.now += DATA_S
        return torch.ones(1)


class Slow(Net):
    """Of which each part of the step takes its time."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clocks.now += COMPUTE_S
        return self.layer(batch).sum()

    def on_after_backward(self) -> None:
        self.clocks.now += NETWORK_S

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clocks.now += OPTIMIZER_S


class Evaluates(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        args[1].clocks.now += 13.0


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.usefixtures("own_group")
def test_lightning(clocks: Clocks, tmp_path: Path, strategy: str, accumulate: int) -> None:
    """With DDP the wait for gradients begins at the end of the own backward pass. Other callbacks are no part of it."""
    loader = DataLoader(Samples(clocks, STEPS * accumulate), batch_size=1)
    options = {"strategy": strategy, "accumulate_grad_batches": accumulate, "default_root_dir": tmp_path}
    fit = trainer(ElasticCallback(snapshot="eager"), Evaluates(), **options)
    fit.fit(Slow(clocks), loader)
    found = clocks.phases()
    assert found.data_s == accumulate * DATA_S
    assert found.optimizer_s == OPTIMIZER_S
    assert found.network_s == (NETWORK_S if strategy == "ddp" else None)
    between = (accumulate - 1) * (NETWORK_S + 13.0)
    assert found.forward_s == accumulate * COMPUTE_S
    assert found.backward_s == between + (0.0 if strategy == "ddp" else NETWORK_S)
    assert found.compute_s == accumulate * COMPUTE_S + between + (0.0 if strategy == "ddp" else NETWORK_S)
    assert found.total_s == found.data_s + found.compute_s + found.optimizer_s + 13.0 + (found.network_s or 0.0)


class Doubles(torch.autograd.Function):
    """Its backward pass takes its time."""

    clocks: Clocks

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        Doubles.clocks.now += NETWORK_S
        return grads[0] * 2


class Timed(torch.nn.Linear):
    def __init__(self, clocks: Clocks) -> None:
        super().__init__(1, 1)
        Doubles.clocks = self.clocks = clocks

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.clocks.now += COMPUTE_S
        return Doubles.apply(super().forward(batch))  # type: ignore[return-value]


BROADCAST_S = 17.0
"""Of the buffers, at the beginning of each forward pass."""


@pytest.mark.parametrize("kind", ["plain", "compiled", "with buffers", "with unused parameters", "static"])
@pytest.mark.usefixtures("own_group")
def test_a_plain_loop_with_ddp(clocks: Clocks, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation between two steps is no part of the forward pass. A compiled model is not taken apart."""
    inner = inspect.unwrap(DistributedDataParallel._sync_buffers)  # an earlier test may have had it timed

    def broadcast(ddp: DistributedDataParallel) -> None:
        clocks.now += BROADCAST_S
        inner(ddp)

    monkeypatch.setattr(DistributedDataParallel, "_sync_buffers", broadcast)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net, buffers = Timed(clocks), kind == "with buffers"
    if buffers:
        net.register_buffer("frequencies", torch.ones(1))
    unused, static = kind == "with unused parameters", kind == "static"
    ddp = DistributedDataParallel(net, find_unused_parameters=unused, static_graph=static)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loader = elastic_loader(DataLoader(Samples(clocks), batch_size=1), optimizer=optimizer)
    call = torch.compile(ddp, backend="eager") if kind == "compiled" else ddp
    with AsyncCheckpointer(model=ddp, optimizer=optimizer, loader=loader):
        for batch in loader:
            optimizer.zero_grad()
            call(batch).sum().backward()
            optimizer.step()
            with torch.no_grad():
                (ddp if kind == "plain" else net)(batch)
    found, network_s = clocks.phases(), BROADCAST_S if buffers else 0.0
    assert found.compute_s == COMPUTE_S + NETWORK_S
    assert found.network_s == network_s
    assert (found.forward_s, found.backward_s) == ((None, None) if kind == "compiled" else (COMPUTE_S, NETWORK_S))
    assert found.total_s == found.data_s + found.compute_s + network_s + COMPUTE_S, "the last is the evaluation"


class TwoTowers(torch.nn.Module):
    """Its first parameter is used last, so that its gradient is the first one, as the temperature of CLIP."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(1))
        self.tower = Timed(clocks)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.tower(batch) * self.temperature


@pytest.mark.usefixtures("own_group")
def test_a_model_whose_first_parameter_is_used_last(clocks: Clocks) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(TwoTowers(clocks))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loader = elastic_loader(DataLoader(Samples(clocks), batch_size=1), optimizer=optimizer)
    with AsyncCheckpointer(model=ddp, optimizer=optimizer, loader=loader):
        for batch in loader:
            optimizer.zero_grad()
            ddp(batch).sum().backward()
            clocks.now += OPTIMIZER_S
            optimizer.step()
    found = clocks.phases()
    assert (found.forward_s, found.backward_s, found.network_s) == (COMPUTE_S, NETWORK_S, OPTIMIZER_S)


@pytest.mark.usefixtures("own_group")
def test_a_step_that_a_scaler_leaves_out_is_not_measured(clocks: Clocks) -> None:
    """Two backward passes and one step of the optimizer, as after an overflow."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(Timed(clocks))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loader = elastic_loader(DataLoader(Samples(clocks, STEPS + 4), batch_size=1), optimizer=optimizer)
    with AsyncCheckpointer(model=ddp, optimizer=optimizer, loader=loader):
        for number, batch in enumerate(loader):
            optimizer.zero_grad()
            ddp(batch).sum().backward()
            if number != STEPS // 2:
                optimizer.step()
    found = clocks.phases()
    assert (found.compute_s, found.network_s) == (COMPUTE_S + NETWORK_S, 0.0)


@pytest.mark.usefixtures("own_group")
def test_a_copy_of_a_model_outlives_it(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers are broadcast, and not those of the model."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = torch.nn.BatchNorm1d(1)
    ddp = DistributedDataParallel(net)
    clock = clocks.make()
    put = step_phases.time_passes(clock, ddp)
    best = copy.deepcopy(ddp)
    monkeypatch.setattr(clock, "waits", lambda: pytest.fail("the clock is that of the model"))
    assert best(torch.ones(4, 1)).shape == (4, 1)
    for one in put:
        one.remove()
    del ddp, put, net
    gc.collect()
    assert best(torch.ones(4, 1)).shape == (4, 1)
    assert "_sync_buffers" not in vars(best)


@pytest.mark.usefixtures("own_group")
def test_a_model_that_was_frozen_afterwards(clocks: Clocks) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(Timed(clocks))
    ddp.requires_grad_(False)
    for one in step_phases.time_passes(clocks.make(), ddp):
        one.remove()
    assert not ddp._forward_hooks


@pytest.mark.usefixtures("own_group")
def test_a_step_without_the_gradient_that_ends_the_backward_pass(clocks: Clocks) -> None:
    """It is not known then how long the rank waited for others."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = torch.nn.ModuleDict({"first": Timed(clocks), "second": Timed(clocks)})
    net.forward = lambda batch, first: net["second"](net["first"](batch) if first else batch)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loader = elastic_loader(DataLoader(Samples(clocks), batch_size=1), optimizer=optimizer)
    with AsyncCheckpointer(model=ddp, optimizer=optimizer, loader=loader) as saves:
        for batch in loader:
            optimizer.zero_grad()
            ddp(batch, first=saves.step != STEPS // 2).sum().backward()
            optimizer.step()
    found = clocks.phases()
    assert found.network_s is None
    most_s = 2 * (COMPUTE_S + NETWORK_S)
    assert 0.9 * most_s < found.compute_s < most_s


class SlowModel(torch.nn.Module):
    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.layer, self.clocks = torch.nn.Linear(1, 1), clocks

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.clocks.now += COMPUTE_S
        return {"loss": self.layer(x).mean()}


class Named(Samples):
    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)}


@pytest.mark.usefixtures("fresh_accelerate")
def test_transformers(clocks: Clocks, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from dlrover_hooks.integrations.transformers import elastic_trainer

    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=1, gradient_accumulation_steps=2, num_train_epochs=1,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(SlowModel(clocks), arguments, train_dataset=Named(clocks, 2 * STEPS))
    elastic_trainer(trainer).train()
    found = clocks.phases()
    assert (found.data_s, found.forward_s, found.backward_s) == (2 * DATA_S, 2 * COMPUTE_S, 0.0)


def test_a_hook_does_not_break_the_graph_of_a_compiled_model(clocks: Clocks) -> None:
    net = torch.nn.Linear(1, 1)
    net.register_forward_hook(step_phases.after_forward(clocks.make().forward_ended))
    whole = torch.compile(net, backend="eager", fullgraph=True)
    assert torch.equal(whole(torch.ones(1, 1)), net(torch.ones(1, 1)))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.usefixtures("own_group")
def test_leased_data(clocks: Clocks, world: int) -> None:
    """With several ranks each at its own speed no rank waits for another one: they are not to be compared."""
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    dataset = ShardDataset(Samples(clocks), name="leased", shard_size=8, synchronous=False)
    loader = elastic_loader(DataLoader(dataset, batch_size=1), optimizer=optimizer)
    with AsyncCheckpointer(model=net, optimizer=optimizer, loader=loader):
        if world > 1:  # only now: several workers would need a master
            dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        for batch in loader:
            clocks.now += COMPUTE_S
            optimizer.zero_grad()
            net(batch).sum().backward()
            optimizer.step()
    found = clocks.phases()
    assert (found.data_s, found.compute_s, found.network_s) == (DATA_S, COMPUTE_S, None)
    assert found.in_step == (world == 1)


class Rows(keras.utils.PyDataset):
    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self.clocks = clocks

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        self.clocks.now += DATA_S
        return np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)


class Pairs(Samples):
    def __getitem__(self, index: int) -> Any:
        self.clocks.now += DATA_S
        return np.ones(1, np.float32), np.ones(1, np.float32)


class Layer(keras.layers.Dense):
    def __init__(self, clocks: Clocks) -> None:
        super().__init__(1)
        self.clocks = clocks

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.clocks.now += COMPUTE_S if training else 0.0
        return super().call(inputs)


@pytest.mark.parametrize("leased", [False, True])
def test_keras(clocks: Clocks, leased: bool) -> None:
    """A callback sees data and the whole step."""
    model = keras.Sequential([Layer(clocks)])
    model.compile(optimizer="sgd", loss="mse")
    el = KerasCallback()
    data = (
        el.data(ShardDataset(Pairs(clocks), name="leased", shard_size=8), batch_size=1)
        if leased
        else el.data(Rows(clocks))
    )
    model.fit(data, callbacks=[el], verbose=0)
    found = clocks.phases()
    assert (found.data_s, found.compute_s, found.optimizer_s, found.network_s) == (DATA_S, COMPUTE_S, 0.0, None)
