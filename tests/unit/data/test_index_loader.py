"""ElasticIndices: steps of indices for loops without a DataLoader."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dlrover_hooks.data.index_loader import ElasticIndices
from dlrover_hooks.errors import UsageError


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)


def made(n: int = 10, world: int = 1, rank: int = 0, **options: Any) -> tuple[ElasticIndices, torch.optim.Optimizer]:
    step = optimizer()
    options = {"batch_size": 2, "global_batch_size": 6} | options
    return ElasticIndices(n, optimizer=step, num_replicas=world, rank=rank, **options), step


def trained(indices: ElasticIndices, step: torch.optim.Optimizer, steps: int) -> list[list[int]]:
    """The indices of each step, in order."""
    seen = []
    for _ in range(steps):
        seen.append([i for batch in indices for i in batch.tolist()])
        step.step()
    return seen


def flat(steps: Iterable[list[int]]) -> list[int]:
    return [index for step in steps for index in step]


def test_each_step_has_the_same_indices_at_any_world_size() -> None:
    alone = trained(*made(), steps=20)
    assert all(len(step) == 6 for step in alone)
    for world in (2, 3):
        parts = [trained(*made(world=world, rank=rank), steps=20) for rank in range(world)]
        assert [flat(step) for step in zip(*parts, strict=True)] == alone


def test_every_permutation_is_used_up_before_the_next() -> None:
    seen = flat(trained(*made(n=10), steps=10))
    assert [sorted(seen[k : k + 10]) for k in range(0, 60, 10)] == [list(range(10))] * 6


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_restored_loop_goes_on_where_the_steps_ended(world: int) -> None:
    """At another world size, too; a step whose optimizer step is not over is given again."""
    whole = trained(*made(), steps=12)
    first, step = made()
    seen = trained(first, step, 5)
    indices = iter(first)
    next(indices)  # the step boundary: step 5 is committed, step 6 has begun
    state = json.loads(json.dumps(first.state_dict()))
    parts = []
    for rank in range(world):
        again, step = made(world=world, rank=rank)
        again.load_state_dict(state)
        parts.append(trained(again, step, 7))
    assert seen + [flat(one) for one in zip(*parts, strict=True)] == whole


def test_a_look_at_the_first_batch_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    whole = trained(*made(), steps=6)
    indices, step = made()
    assert next(iter(indices)).tolist() == whole[0][:2]
    assert not caplog.records
    held = iter(indices)
    assert next(held).tolist() == whole[0][:2]
    assert "is given again" in caplog.text
    seen = trained(indices, step, 3)
    for _ in indices:
        break
    assert seen + trained(indices, step, 3) == whole


def test_a_step_in_the_middle_of_the_micro_batches_is_refused() -> None:
    indices, step = made()
    next(iter(indices))
    with pytest.raises(UsageError, match="after 1 of the 3 micro-batches"):
        step.step()


def test_the_number_of_micro_batches_is_that_of_this_worker() -> None:
    assert [len(made(world=2, rank=rank)[0]) for rank in range(2)] == [2, 1]
    assert len(made(global_batch_size=None)[0]) == 1


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError):
        made(n=4)
    with pytest.raises(UsageError):
        made(global_batch_size=5)
