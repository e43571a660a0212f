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
from dlrover_hooks.errors import HooksError
from dlrover_hooks.pytorch import collective_calls
from dlrover_hooks.pytorch.skipped_ghosts import SkippedGhosts
from dlrover_hooks.pytorch.step_phases import time_passes
from dlrover_hooks.worker.step_clock import StepClock
from tests.contracts.trial import Numbers


@pytest.fixture(params=["gloo", "cpu:gloo,cuda:gloo"])
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def ddp(group: None) -> DistributedDataParallel:
    """With a buffer, and timed."""
    del group
    net = nn.Linear(1, 1)
    net.register_buffer("frequencies", torch.ones(1))
    return timed(net)


def timed(net: nn.Module) -> DistributedDataParallel:
    made = DistributedDataParallel(net)
    time_passes(StepClock(), made)
    return made


def ghosts(ddp: DistributedDataParallel, shares: tuple[int, ...] = ()) -> SkippedGhosts:
    """Of rank 0 of two, of a step of five micro-batches."""
    data = DataLoader(Numbers(40, False), 2)
    loader = elastic_loader(data, global_batch_size=10, num_replicas=2, rank=0)
    if shares:
        loader.sampler.progress.replan(msgspec.structs.replace(loader.sampler.plan, shares=shares))
    return SkippedGhosts(loader, ddp)


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


@pytest.mark.parametrize("call", CALLS)
def test_a_collective_call_within_a_step_is_seen(ddp: DistributedDataParallel, call: str) -> None:
    """Also in the first step, and outside of the training step, as in a callback."""
    found = ghosts(ddp)
    for _ in range(2):
        found.begins(last=False)
        found.begins(last=True)
        CALLS[call]()  # with the last micro-batch of a step, or between two steps, all ranks come together anyway
    assert found.micro_batches() == (3, 5, False)
    found.begins(last=False)
    CALLS[call]()
    found.begins(last=True)
    assert not found.possible
    found.begins(last=False)
    found.begins(last=True)
    assert found.micro_batches() == (0, 0, False), "it stays so"


def test_a_collective_call_within_a_rebalanced_step_is_an_error(ddp: DistributedDataParallel) -> None:
    """Other ranks wait in theirs: without the error, for ever."""
    found = ghosts(ddp, (2, 3))
    found.begins(last=False)
    reduced()
    with pytest.raises(HooksError, match="distributed by the speed of the ranks"):
        found.begins(last=True)


def test_calls_of_ddp_are_not_those_of_the_loop(ddp: DistributedDataParallel) -> None:
    """It agrees on the order of its buckets after the first step, and broadcasts buffers in each."""
    found = ghosts(ddp)
    for _ in range(4):
        with ddp.no_sync():
            found.begins(last=False)
            ddp(torch.ones(1, 1)).sum().backward()
        found.begins(last=True)
        ddp(torch.ones(1, 1)).sum().backward()
    assert found.possible
    assert ddp._has_rebuilt_buckets


def test_a_ghost_that_is_left_out_makes_the_calls_of_ddp(ddp: DistributedDataParallel) -> None:
    """In the same batch as on other ranks, once in a step: a call of the loop may come before the first real batch."""
    found, calls = ghosts(ddp, (1, 4)), list[int]()

    def made() -> int:
        return collective_calls._made() or 0

    for _ in range(4):
        before = made()
        for last in (False, False, True):
            found.begins(last=last)
            if last:
                calls.append(made() - before)
                before = made()
                ddp(torch.ones(1, 1)).sum().backward()
            else:
                found.skips()
        calls.append(made() - before)
    other = DistributedDataParallel(ddp.module)
    expected = list[int]()
    for _ in range(4):
        before = made()
        with other.no_sync():
            other(torch.ones(1, 1)).sum().backward()
        expected.append(made() - before)
        before = made()
        other(torch.ones(1, 1)).sum().backward()
        expected.append(made() - before)
    assert calls == expected
    assert calls[2] > calls[0] > 0, "buffers, and once the order of the buckets"


@pytest.mark.parametrize("backend", [None, "fake"])
def test_without_a_group_and_with_a_backend_that_does_not_count_its_calls(
    ddp: DistributedDataParallel, backend: str | None
) -> None:
    found = ghosts(ddp)
    dist.destroy_process_group()
    if backend is not None:
        dist.init_process_group(backend, rank=0, world_size=2, store=FakeStore())
    found.begins(last=False)
    found.begins(last=True)
    assert found.possible == (backend is None)


def test_what_is_computed_of_a_step(ddp: DistributedDataParallel) -> None:
    """Ghosts that are not left out take as long as real batches. Of a rebalanced step they are left out."""
    assert ghosts(ddp).micro_batches() == (3, 5, False)
    rebalanced = ghosts(ddp, (1, 4))
    assert rebalanced.micro_batches() == (1, 5, True)
    assert rebalanced.rebalanced
