"""The contract's trial under `ElasticFabric`: a loop without accumulation, whatever the number of micro-batches."""

from __future__ import annotations

import logging
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricDataLoader

from dlrover_hooks import protocol as p
from dlrover_hooks.integrations.fabric import ElasticFabric
from dlrover_hooks.pytorch.even_batches import leader
from tests.contracts.trial import Crash, Given, Report, Setup, joint_loss, keywords

logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


def train(given: Given, crash: int | None) -> Report:
    """See `Trial`."""
    made, report = Setup(given), Report()
    inner = Fabric(accelerator="cpu", devices=given.world, strategy="ddp" if given.world > 1 else "auto")
    inner.launch()
    shared: dict[str, Any] = keywords(given)
    if given.accumulate > 1:
        shared.setdefault("global_batch_size", given.batch * given.accumulate * given.world)
    fabric = ElasticFabric(inner, **shared)
    model, optimizer, schedule = fabric.setup(made.net, made.optimizer, scheduler=made.schedule)
    feeds = fabric.setup_dataloaders(*made.loaders, made.evaluation)
    evaluation = feeds.pop()
    report.active = fabric.loop is not None
    report.restored = fabric.restored.generation.step if fabric.restored else None
    report.untouched = (made.own is None or feeds[-1] is made.own) and isinstance(evaluation, _FabricDataLoader)
    step, elastic = report.restored or 0, [feed for feed in feeds if feed is not made.own]
    try:
        for epoch in fabric.epochs(given.epochs):
            for batches in zip(*feeds, strict=False):
                if step == crash:
                    raise Crash
                (x, ids), *others = batches
                if fabric.loop is None or leader(elastic).weight:
                    report.note(epoch, step, "train", ids)
                if made.own is not None:
                    report.own += others.pop().tolist()
                if others and (fabric.loop is None or leader(elastic).weight):
                    report.note(epoch, step, "second", others[0][1])
                optimizer.zero_grad()
                fabric.backward(joint_loss(given, model, [(x, ids), *others]))
                optimizer.step()
                schedule.step()
                step += fabric.loop is None or leader(elastic).step_ends
                if given.leave and step == (epoch + 1) * given.leave:
                    break
            report.evaluated.append([one for _, ids in evaluation for one in ids.tolist()])
        fabric.finish()
    except Crash:
        report.crashed = True
        fabric.close(p.Departure.FAILED)
    report.step = step
    report.end(made.net, made.optimizer, made.schedule)
    return report
