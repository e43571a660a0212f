"""A worker of the tests of in-process recovery: DDP over gloo under `elastic_run` and `AsyncCheckpointer`.

All that it learns depends on the samples, on a buffer that every forward changes, and on the numbers that dropout
draws: a fault that is not rolled back exactly shows in the weights.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import select
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks import AsyncCheckpointer, elastic_loader, elastic_run
from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.save.overlapped_writer import LazyWriter
from dlrover_hooks.elastic.in_process_recovery import Recovery
from dlrover_hooks.launcher.warm import worker_bootstrap
from dlrover_hooks.protocol import Generation
from dlrover_hooks.session import Preempted
from dlrover_hooks.worker import surviving_process as regroup
from tests.waiting import until

SAMPLES = 48


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x = torch.full((6,), index / SAMPLES) + 0.05 * torch.randn(6)
        return x, x.sum().sin(), index


class Counting(nn.Module):
    """Counts forwards in a buffer, on which its output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return x * (1 + 0.01 * self.count)


class Worker:
    """One process. `trouble`: what to do to itself, when; `lives` counts the calls of the training function."""

    def __init__(self, name: str, folder: str, trouble: dict[str, Any], **settings: Any) -> None:
        self.name, self.path, self.trouble, self.settings = name, Path(folder) / f"{name}.jsonl", trouble, settings
        self.lives, self.step, self.pace_s = 0, 0, settings.pop("pace_s", 0.0)
        self.model: Any = lambda: None
        self.kind = settings.pop("kind", "train")
        self.copy_held = settings.pop("copy_held", None)
        if self.copy_held is not None:
            self.hold_copy(self.copy_held)
        self.hook, self.norm = settings.pop("hook", False), settings.pop("norm", False)
        self.draws = settings.pop("draws", False)
        self.seeded = settings.pop("seeded", False)
        if self.seeded:  # by the script, outside of the function
            torch.manual_seed(11)
        self.calls = settings.pop("calls", 1)
        self.epochs, self.workers = settings.pop("epochs", 4), settings.pop("workers", 0)
        self.batch = settings.pop("batch", 12)

    def note(self, event: str, **more: Any) -> None:
        facts = {"t": time.time(), "who": self.name, "life": self.lives, "event": event, **more}
        line = json.dumps(facts | {"round": int(os.environ.get("DLROVER_HOOKS_ROUND", "0"))})
        with self.path.open("a") as file:
            file.write(line + "\n")

    def hear(self) -> None:
        """Wait until the master has said that the round is broken."""
        membership = regroup.current()
        assert membership is not None
        assert membership.hears_break(20.0)

    def reach(self, place: str, step: int) -> None:
        """Trouble is one of kill, stop, raise, fail, own, exit, hold, hear, at a place of a step, once (or in
        each life).
        """
        wanted = self.trouble.get("at")
        if wanted is None or (place, step) != tuple(wanted) or self.lives not in self.trouble.get("lives", [1]):
            return
        what = self.trouble["what"]
        select.select([], [], [], self.trouble.get("after_s", 0.0))
        self.note("trouble", what=what, step=step)
        if what in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        elif what == "raise":
            raise ValueError("a user's error")
        elif what == "fail":  # as a collective does once a peer is gone, whose connections may still be open here
            self.hear()
            raise RuntimeError("Connection closed by peer")
        elif what == "own":
            raise RuntimeError("a user's error, of torch's class")
        elif what == "exit":
            sys.exit(0)
        elif what == "hear":
            self.hear()
        elif what == "hold":
            until((self.path.parent / "go").exists, "the order to go on", 300.0, every_s=0.005)

    def hold_copy(self, step: int) -> None:
        """What a save of `step` copies behind the step is half copied when the round breaks, and a while longer."""
        whole = LazyWriter.fill

        def fill(writer: LazyWriter, shot: Any, target: Any, places: Any, **how: Any) -> None:
            if how and shot.generation == Generation(1, step, shot.generation.run):
                half = len(places) // 2
                whole(writer, shot, target, places[:half], **how)
                self.note("copying", step=step)
                membership = regroup.current()
                assert membership is not None
                membership.hears_break(20.0)
                select.select([], [], [], 0.2)
                places = places[half:]
                self.note("copied", step=step)
            whole(writer, shot, target, places, **how)

        LazyWriter.fill = fill  # pyright: ignore[reportAttributeAccessIssue]

    def begin(self) -> None:
        self.lives += 1
        alive = self.model() is not None if self.lives > 1 else False
        self.note("begin", pid=os.getpid(), incarnation=os.environ["DLROVER_HOOKS_INCARNATION"],
                  rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]), alive=alive)  # fmt: skip
        self.reach("begin", 0)

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=0.02)

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
        if not self.seeded:
            torch.manual_seed(11)
        norm = nn.BatchNorm1d(16) if self.norm else nn.Identity()
        net = nn.Sequential(nn.Linear(6, 16), Counting(), nn.Tanh(), norm, nn.Dropout(0.1), nn.Linear(16, 1))
        optimizer = self.optimizer(net)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return net, optimizer, schedule, DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=self.workers)

    def live(self) -> None:
        """One call of the training function."""
        self.begin()
        try:
            if hasattr(self, self.kind):
                getattr(self, self.kind)()
            else:
                getattr(importlib.import_module("tests.elastic.kinds"), self.kind)(self)
        finally:
            self.reach("left", self.step)

    def restored(self, step: int, net: nn.Module, optimizer: torch.optim.Optimizer, cursor: Any) -> None:
        self.model = weakref.ref(net)
        told = {"step": step, "world": dist.get_world_size(), "cursor": cursor}
        self.note("restored", state=state(net, optimizer), **told)

    def fetched(self, step: int) -> None:
        self.step = step
        self.reach("fetched", step)

    def stepped(self, step: int) -> None:
        self.note("step", step=step, world=dist.get_world_size())
        select.select([], [], [], self.pace_s)

    def trained(self, step: int, net: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
        told = {"step": step, "world": dist.get_world_size(), "rank": dist.get_rank()}
        self.note("trained", state=state(net, optimizer), **told, **more)

    def train(self) -> None:
        dist.init_process_group("gloo")
        self.note("grouped")
        self.reach("grouped", 0)
        net, optimizer, schedule, inner = self.parts()
        model = DistributedDataParallel(net)
        if self.hook:
            model.register_comm_hook(None, allreduce_hook)
        loader = elastic_loader(inner, optimizer=optimizer, global_batch_size=self.batch)
        with AsyncCheckpointer(
            model=model,
            optimizer=optimizer,
            loader=loader,
            extra=[schedule],
            on_preempt=self.left,
            **self.settings | {"global_batch_size": None},
        ) as checkpoints:
            self.restored(checkpoints.step, net, optimizer, loader.sampler.cursor)
            for epoch in loader.epochs(self.epochs):
                for x, y, index in loader:
                    if checkpoints.step + 1 == self.copy_held:  # without memory, that save would be skipped
                        until(lambda: engine_of(checkpoints).ready, "the memory for saves")
                    self.fetched(checkpoints.step)
                    ids = index.tolist() if loader.weight > 0 else []
                    (model(x).squeeze(1) - y).square().mean().backward()
                    self.reach("backward", self.step)
                    self.note("micro", step=self.step, epoch=epoch, ids=ids, world=dist.get_world_size())
                    if loader.step_ends:
                        self.reach("reduced", self.step)
                    optimizer.step()
                    if loader.step_ends:
                        self.reach("stepped", self.step)
                    schedule.step()
                    optimizer.zero_grad()
                    if loader.step_ends:
                        if self.draws:
                            torch.rand(1)
                        self.stepped(checkpoints.step)
            self.trained(checkpoints.step, net, optimizer, lr=schedule.get_last_lr())
        dist.destroy_process_group()

    def accelerate(self) -> None:
        from accelerate import Accelerator

        from dlrover_hooks.integrations.accelerate import ElasticAccelerator

        accelerator = ElasticAccelerator(Accelerator(cpu=True), on_preempt=self.left, **self.settings)
        self.note("grouped")
        model, optimizer, schedule, inner = self.parts()
        net = model
        model, optimizer, inner, schedule = accelerator.prepare(model, optimizer, inner, schedule)
        loop = accelerator.loop
        assert loop is not None
        self.restored(loop.step, net, optimizer.optimizer, inner.elastic.sampler.cursor)
        for epoch in accelerator.epochs(self.epochs):
            for x, y, index in inner:
                self.fetched(loop.step)
                ids = index.tolist() if inner.elastic.weight > 0 else []
                accelerator.backward((model(x).squeeze(1) - y).square().mean())
                self.note("micro", step=loop.step, epoch=epoch, ids=ids, world=dist.get_world_size())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if inner.elastic.step_ends:
                    self.stepped(loop.step)
        self.trained(loop.step, net, optimizer.optimizer)
        accelerator.end_training()

    def left(self, gone: Preempted) -> None:
        self.note("preempted", step=gone.step, mine=gone.mine, durable=gone.durable, reason=gone.reason)

    def told(self, what: str, news: Recovery) -> None:
        self.note(what, step=news.step, world=news.world_size, before=news.world_size_before, reason=news.reason)


def engine_of(checkpoints: AsyncCheckpointer) -> Checkpointer:
    assert checkpoints._driver is not None
    assert checkpoints._driver.session._engine is not None
    return checkpoints._driver.session._engine


def state(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Parameters, buffers and optimizer state, bit for bit."""
    moments = [value for one in optimizer.state.values() for value in one.values()]
    digest = hashlib.sha256()
    for tensor in (*net.state_dict().values(), *moments):
        digest.update(tensor.detach().double().numpy().tobytes())
    return digest.hexdigest()[:16]


def main(name: str, folder: str, env: dict[str, str], trouble: dict[str, Any], options: dict[str, Any],
         settings: dict[str, Any]) -> int:  # fmt: skip
    os.environ.update(env)
    worker_bootstrap.take_place()
    logging.basicConfig(level=logging.INFO, format=f"%(relativeCreated)d {name} %(name)s: %(message)s")
    torch.set_num_threads(1)
    worker = Worker(name, folder, trouble, **settings)
    run = elastic_run(
        worker.live,
        on_recover=lambda news: worker.told("recover", news),
        on_resize=lambda news: worker.told("resize", news),
        **options,
    )
    try:
        for _ in range(worker.calls):
            run()
    except SystemExit as end:
        worker.note("exit", code=end.code)
        raise
    except Exception as error:
        worker.note("failed", error=type(error).__name__, text=str(error))
        raise
    worker.note("end")
    return 0
