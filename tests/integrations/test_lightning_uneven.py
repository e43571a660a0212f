"""Lightning where the global batch is not evenly shareable: N = 5 micro-batches on 2, then on 3 workers.

Lightning counts batches on each rank; validation, schedulers and logging must all the same come together, after the
same optimizer steps as in one process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from dlrover_hooks.data.batch_plan import BatchPlan
from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.integrations.lightning.batch_unit_conversion import BatchUnits
from dlrover_hooks.pytorch.even_batches import EvenLoader, epoch_batches, is_uneven
from tests.contracts.spawn import by_step, plan, spawn, survived
from tests.contracts.trial import Numbers
from tests.e2e.master_process import LiveMaster
from tests.ranks import named_job

GIVEN: dict[str, Any] = {"noise": False, "epochs": 2, "samples": 43, "shared": {"global_batch_size": 10}}
STEPS = 5  # of an epoch: four full ones, and one of 3 samples
VARIANTS: dict[str, dict[str, Any]] = {
    "share": {"val_check_interval": 0.4, "frequency": 2},
    "count": {"val_check_interval": 2, "limit_train_batches": 3},
    "over epochs": {"val_check_interval": 1.0, "max_steps": 7},
}
EVALUATED_AT = {"share": [2, 4, 7, 9], "count": [2, 5], "over epochs": [5]}


@pytest.fixture(scope="module")
def job() -> Iterator[str]:
    with named_job("uneven") as name:
        yield name


@pytest.mark.deep
def test_resumed_from_two_to_three_ranks_it_is_the_single_run(job: str, live_master: LiveMaster) -> None:
    """Shares (3, 2), then (2, 2, 1). The script is the same everywhere; it counts in its own batches.

    Each batch logs with sync_dist: a rank with fewer batches would hang.
    """
    plans = {name: GIVEN | {"options": options} for name, options in VARIANTS.items()}
    alone = spawn(1, [plan(f"{name} 1", job, given, [None]) for name, given in plans.items()], None, ["lightning"])
    two = spawn(2, [plan(name, job, given, [3]) for name, given in plans.items()], live_master, ["lightning"])
    three = spawn(3, [plan(name, job, given, [None]) for name, given in plans.items()], live_master, ["lightning"])
    for name, given in plans.items():
        (single,) = [one for one in alone if one["plan"] == f"{name} 1"]
        lives = [one for one in (*two, *three) if one["plan"] == name]
        seen = survived(lives)
        assert by_step(seen) == by_step([tuple(one) for one in single["seen"]])
        assert set(Counter((epoch, one) for epoch, _, _, one in seen).values()) == {1}
        assert single["evaluated_at"] == EVALUATED_AT[name]
        for rank in range(3):
            ours = [at for life in three if (life["plan"], life["rank"]) == (name, rank) for at in life["evaluated_at"]]
            before = [at for life in two if (life["plan"], life["rank"]) == (name, 0) for at in life["evaluated_at"]]
            assert before + ours == EVALUATED_AT[name], rank
        for last in (life for life in three if life["plan"] == name):
            assert (last["step"], last["restored"]) == (single["step"], 3), given
            assert last["lr"] == single["lr"]
            assert max(abs(a - b) for a, b in zip(last["weights"], single["weights"], strict=True)) < 1e-12


@pytest.mark.parametrize(("n", "batch", "total", "world"), [(43, 2, 5, 3), (23, 2, 4, 3), (9, 4, 4, 2), (20, 4, 5, 5)])
def test_every_rank_gets_as_many_batches_and_only_its_own_samples(n: int, batch: int, total: int, world: int) -> None:
    """What a rank lacks in a step are ghosts at its beginning; real samples come once over all ranks, ghosts aside."""
    lengths, visits, ends = set(), Counter[int](), set()
    for rank in range(world):
        elastic = elastic_loader(
            DataLoader(Numbers(n, False), batch, shuffle=True),
            global_batch_size=batch * total,
            num_replicas=world,
            rank=rank,
        )
        loader = EvenLoader(elastic)
        got = [(ids.tolist(), loader.ghost, loader.step_ends, loader.weight) for _, ids in loader]
        lengths |= {len(got), len(loader)}
        visits.update(one for ids, ghost, _, weight in got if not ghost and weight for one in ids)
        ends.add(tuple(number for number, (_, _, over, _) in enumerate(got) if over))
        before = [(one, after) for one, after in pairwise(got) if one[1]]
        assert not got[-1][1]
        assert all(one[0] == after[0] for one, after in before), "a ghost is the first real batch of its step"
        assert not any(ghost and over for _, ghost, over, _ in got), "a step does not end with a ghost"
    assert len(lengths) == len(ends) == 1
    assert visits == Counter(range(n))


def test_a_ghost_is_not_the_object_that_the_loop_has_next() -> None:
    """A training step may empty the batch's dict, or scale a tensor in place."""
    elastic = elastic_loader(
        DataLoader([{"x": torch.tensor(i)} for i in range(8)], 2),  # pyright: ignore[reportArgumentType]
        global_batch_size=6,
        num_replicas=2,
        rank=1,
    )
    loader = EvenLoader(elastic)
    assert [batch.pop("x").mul_(10).tolist() for batch in loader] == [[40, 50], [40, 50], [70]]  # a ghost comes first


class Locked:
    """Cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_batch_with_something_that_cannot_be_copied() -> None:
    elastic = elastic_loader(
        DataLoader(range(8), 2, collate_fn=lambda ids: {"x": torch.tensor(ids), "lock": Locked()}),  # pyright: ignore[reportArgumentType]
        global_batch_size=6,
        num_replicas=2,
        rank=1,
    )
    assert [batch.pop("x").mul_(10).tolist() for batch in EvenLoader(elastic)] == [[40, 50], [40, 50], [70]]


@pytest.mark.parametrize(
    ("plan", "uneven", "batches"),
    [
        (BatchPlan(40, 2, 8, 0, 2), False, 10),
        (BatchPlan(43, 2, 10, 0, 3), True, 9),
        (BatchPlan(41, 4, 16, 0, 2), True, 6),  # 9 samples are left: 4 in one micro-batch, 5 in two
        (BatchPlan(41, 4, 16, 0, 2, "drop"), False, 4),
    ],
)
def test_where_ranks_differ(plan: BatchPlan, uneven: bool, batches: int) -> None:
    assert is_uneven(plan) == uneven
    assert epoch_batches(plan) == batches


@pytest.mark.parametrize(("total", "limit", "expected"), [(6, 4, 4), (5, 4, 3), (5, 5, 6)])
def test_limits_are_whole_steps_where_ranks_differ(total: int, limit: int, expected: int) -> None:
    """Lightning steps with what there is of a step. On a rank that has ghosts in it that may be ghosts only."""
    fit = Trainer(accumulate_grad_batches=3, limit_train_batches=limit, logger=False, enable_checkpointing=False)
    units = BatchUnits(fit)
    units.share(fit, BatchPlan(40, 2, 2 * total, 0, 2, "drop"))
    assert fit.limit_train_batches == expected
    units.restore(fit)
    assert fit.limit_train_batches == limit
