"""The contract's trial in a plain PyTorch loop."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.integrations.torch import AsyncCheckpointer
from dlrover_hooks.pytorch.even_batches import leader
from tests.contracts.trial import Crash, Given, Report, Setup, joint_loss, keywords


def train(given: Given, crash: int | None) -> Report:
    """See `Trial`."""
    made, report = Setup(given), Report()
    ddp = DistributedDataParallel(made.net) if dist.is_initialized() else None
    model = ddp or made.net
    size = given.shared.get("global_batch_size") or given.batch * given.accumulate * given.world
    how: dict[str, Any] = {"optimizer": made.optimizer, "global_batch_size": size, "accumulation": "manual"}
    loader = elastic_loader(made.train, **how)
    micro_batches = 1 if given.leased else loader.sampler.plan.micro_batches
    loaders = [loader]
    if made.second is not None:
        loaders.append(elastic_loader(made.second, name="second", **how))
    feeds = [*loaders, *([made.own] if made.own is not None else [])]
    checkpoints = AsyncCheckpointer(
        model=model, optimizer=made.optimizer, loader=loaders, extra=[made.schedule, *feeds[len(loaders) :]],
        **keywords(given),
    )  # fmt: skip
    report.restored = checkpoints.restored.generation.step if checkpoints.restored else None
    report.active = checkpoints.session is not None
    with contextlib.suppress(Crash), checkpoints:
        report.crashed = True
        for epoch in loader.epochs(given.epochs):
            for batches in zip(*feeds, strict=False):
                if checkpoints.step == crash:
                    raise Crash
                (x, ids), *others = batches
                lead = leader(loaders)
                if lead.weight:
                    report.note(epoch, checkpoints.step, "train", ids)
                if made.own is not None:
                    report.own += others.pop().tolist()
                if others and lead.weight:
                    report.note(epoch, checkpoints.step, "second", others[0][1])
                weight = 1.0 if ddp is not None else lead.weight  # DDP's hook has it
                scale = weight * lead.loss_scale / micro_batches
                by_hand = epoch == 1 and not lead.step_ends  # in the other epochs the checkpointer sees to it
                with ddp.no_sync() if ddp is not None and by_hand else contextlib.nullcontext():
                    loss = joint_loss(given, model, [(x, ids), *others])
                    (loss * scale).backward()
                if lead.step_ends:
                    made.optimizer.step()
                    made.schedule.step()
                    made.optimizer.zero_grad()
                if given.leave and checkpoints.step == (epoch + 1) * given.leave:
                    break
            report.evaluated.append([one for _, ids in made.evaluation for one in ids.tolist()])
        report.crashed = False
    report.step = checkpoints.step
    report.end(made.net, made.optimizer, made.schedule)
    return report
