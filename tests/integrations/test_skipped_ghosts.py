"""Whether ranks may compute different numbers of micro-batches: not if these make collective calls of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.pytorch.skipped_ghosts import SETTLED, SkippedGhosts
from dlrover_hooks.pytorch.step_phases import time_passes
from dlrover_hooks.worker.step_clock import StepClock
from tests.contracts.trial import Numbers


@pytest.fixture(params=["gloo", "cpu:gloo,cuda:gloo"])
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ghosts(shares: tuple[int, ...] = ()) -> SkippedGhosts:
    """Of rank 0 of two, of a step of five micro-batches."""
    data = DataLoader(Numbers(40, False), 2)
    loader = elastic_loader(data, global_batch_size=10, num_replicas=2, rank=0)
    if shares:
        loader.sampler.progress.replan(msgspec.structs.replace(loader.sampler.plan, shares=shares))
    return SkippedGhosts(loader)


def make_steps(found: SkippedGhosts, micro_batch: Callable[[], Any], steps: int) -> None:
    for _ in range(steps):
        found.run(micro_batch, last=False)
        found.run(micro_batch, last=True)


def reduced() -> torch.Tensor:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": reduced,
    "barrier": dist.barrier,
    "objects": lambda: dist.all_gather_object([None], 1),
    "another group": lambda: dist.all_reduce(torch.ones(1), group=dist.new_group([0])),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("call", CALLS)
def test_a_collective_call_within_a_micro_batch_is_seen(call: str) -> None:
    found = ghosts()
    make_steps(found, lambda: None, SETTLED + 1)
    assert found.micro_batches() == (3, 5, False)
    found.run(CALLS[call], last=True)
    assert found.possible, "with the last micro-batch of a step all ranks come together anyway"
    found.run(CALLS[call], last=False)
    assert not found.possible
    make_steps(found, lambda: None, 1)
    assert found.micro_batches() == (0, 0, False), "it stays so"


@pytest.mark.usefixtures("group")
def test_calls_of_ddp_are_not_those_of_the_loop() -> None:
    """It agrees on the order of its buckets after the first step, and broadcasts buffers in each."""
    net = nn.Linear(1, 1)
    net.register_buffer("frequencies", torch.ones(1))
    ddp, found = DistributedDataParallel(net), ghosts()
    for one in time_passes(StepClock(), ddp):
        assert one is not None

    def micro_batch() -> None:
        ddp(torch.ones(1, 1)).sum().backward()

    for _ in range(4):
        with ddp.no_sync():
            found.run(micro_batch, last=False)
        found.run(micro_batch, last=True)
    assert found.possible


def test_without_a_group_and_with_a_backend_that_does_not_count_its_calls() -> None:
    found = ghosts()
    make_steps(found, lambda: None, SETTLED + 1)
    assert found.possible
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        make_steps(found, lambda: None, 1)
        assert not found.possible
    finally:
        dist.destroy_process_group()


def test_what_is_computed_of_a_step() -> None:
    """Ghosts that are not left out take as long as real batches. Of a rebalanced step they are left out."""
    assert ghosts().micro_batches() == (3, 5, False)
    rebalanced = ghosts((1, 4))
    assert rebalanced.micro_batches() == (1, 5, True)
    assert rebalanced.rebalanced
