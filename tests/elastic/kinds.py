"""Other training functions of the workers: Fabric's, and those with something that no survivor can put together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_hooks import AsyncCheckpointer, ShardDataset, elastic_loader
from dlrover_hooks.pytorch.even_batches import EvenLoader

if TYPE_CHECKING:
    from tests.elastic.worker import Worker


def fabric(worker: Worker, *, leased: bool = False) -> None:
    """Under `ElasticFabric`."""
    from lightning.fabric import Fabric

    from dlrover_hooks.integrations.fabric import ElasticFabric
    from tests.elastic.worker import Numbers

    world_size = dist_world()
    num_nodes = max(1, world_size // int(os.environ["LOCAL_WORLD_SIZE"]))
    bare = Fabric(accelerator="cpu", devices=world_size // num_nodes, num_nodes=num_nodes, strategy="ddp")
    bare.launch()
    elastic = ElasticFabric(bare, on_preempt=worker.left, **worker.settings)
    net, adam, schedule, inner = worker.parts()
    model, optimizer, _ = elastic.setup(net, adam, scheduler=schedule)
    loop = elastic.loop
    assert loop is not None
    if leased:
        inner = DataLoader(ShardDataset(Numbers(), shard_size=4, epochs=worker.epochs), batch_size=2)
    loader: Any = elastic.setup_dataloaders(inner)
    worker.restored(loop.step, net, adam, None if leased else loader.elastic.sampler.cursor)
    for epoch in elastic.epochs(worker.epochs):
        for x, y, index in loader:
            worker.fetched(loop.step)
            optimizer.zero_grad()
            elastic.backward((model(x).squeeze(1) - y).square().mean())
            ids = index.tolist() if loader.weight > 0 else []
            worker.note("micro", step=loop.step, epoch=epoch, ids=ids, world=dist.get_world_size())
            optimizer.step()
            schedule.step()
            if loader.step_ends:
                worker.stepped(loop.step)
    worker.trained(loop.step, net, adam)
    elastic.finish()


def dist_world() -> int:
    """As the launcher or a survivor's membership says it."""
    from dlrover_hooks import config

    return config.place().world_size


def leased_fabric(worker: Worker) -> None:
    """Its loader comes after the seat is taken."""
    fabric(worker, leased=True)


def leased(worker: Worker) -> None:
    """A ShardDataset under `AsyncCheckpointer`."""
    from tests.elastic.worker import Numbers

    dist.init_process_group("gloo")
    net, optimizer, _, _ = worker.parts()
    lent = DataLoader(ShardDataset(Numbers(), shard_size=4, epochs=worker.epochs), batch_size=2)
    _plain(worker, DistributedDataParallel(net), optimizer, elastic_loader(lent, optimizer=optimizer))


def sharded(worker: Worker) -> None:
    """FSDP2 under `AsyncCheckpointer`."""
    dist.init_process_group("gloo")
    net, _, _, inner = worker.parts()
    fully_shard(net, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = worker.optimizer(net)
    _plain(worker, net, optimizer, EvenLoader(elastic_loader(inner, optimizer=optimizer)))


def _plain(worker: Worker, model: Any, optimizer: Any, loader: Any) -> None:
    with AsyncCheckpointer(model=model, optimizer=optimizer, loader=loader, **worker.settings) as checkpoints:
        worker.note("restored", step=checkpoints.step)
        for _ in loader.epochs(worker.epochs):
            for x, y, _ in loader:
                worker.fetched(checkpoints.step)
                (model(x).squeeze(1) - y).square().mean().backward()
                if loader.step_ends:
                    optimizer.step()
                    optimizer.zero_grad()
                    worker.stepped(checkpoints.step)
    dist.destroy_process_group()
