"""Several training loaders under Lightning, combined in each of its modes."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader

from dlrover_hooks.data.loader import ElasticLoader, elastic_loader
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.lightning import ElasticCallback
from dlrover_hooks.integrations.lightning.combined_loader import check_short_steps
from dlrover_hooks.pytorch.even_batches import leader
from tests.contracts.spawn import plan, spawn
from tests.contracts.trial import Numbers
from tests.e2e.master_process import LiveMaster

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Crash(Exception):
    pass


class Net(LightningModule):
    """`seen`: (epoch, step, loader, id)."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        self.layer, self.crash_at, self.seen = nn.Linear(4, 1).double(), crash_at, list[tuple[int, int, int, int]]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.crash_at:
            raise Crash
        given = [(number, one) for number, one in enumerate(batch) if one is not None]
        for number, (_, ids) in given:
            self.seen += [(self.current_epoch, self.global_step, number, index) for index in ids.tolist()]
        return sum((self.layer(x).square().mean() for _, (x, _) in given), torch.zeros(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(
    job: str, mode: Any, sizes: tuple[int, ...], crash_at: int | None = None, accumulate: int = 1, **given: Any
) -> Net:
    seed_everything(1, verbose=False)
    model = Net(crash_at)
    trainer = Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=accumulate,
                      callbacks=[ElasticCallback(job=job, save_every=1, **given)])  # fmt: skip
    with contextlib.suppress(Crash):
        trainer.fit(model, CombinedLoader([DataLoader(Numbers(n, True), 2, shuffle=True) for n in sizes], mode))
    return model


@pytest.mark.parametrize(
    ("mode", "sizes", "crash_at"),
    [("max_size", (6, 11), 4), ("max_size", (11, 6), 3), ("max_size_cycle", (6, 11), 4), ("min_size", (6, 11), 2)],
)
def test_broken_off_in_mid_epoch_it_is_the_undisturbed_run(
    job: str, mode: str, sizes: tuple[int, ...], crash_at: int
) -> None:
    """Bit for bit. One loader's epoch is over by then: it waits for the next one, or goes round, as before."""
    calm = fit(f"{job}-calm", mode, sizes)
    before, after = fit(job, mode, sizes, crash_at), fit(job, mode, sizes)
    assert before.seen + after.seen == calm.seen
    assert torch.equal(after.layer.weight, calm.layer.weight)


def test_both_loaders_are_read_to_their_ends(job: str) -> None:
    seen = fit(job, "max_size", (8, 11), accumulate=2).seen
    visits = Counter((epoch, number, index) for epoch, _, number, index in seen)
    assert visits == Counter(
        (epoch, number, i) for epoch in (0, 1) for number, n in enumerate((8, 11)) for i in range(n)
    )


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(("mode", "ends"), [("min_size", 24), ("max_size", 32), ("max_size_cycle", 32)])
def test_an_epoch_begun_with_another_global_batch_is_read_to_its_end(job: str, mode: str, ends: int, size: int) -> None:
    """It has another number of batches, this once: those of the loader that ends it."""
    before = fit(job, mode, (24, 32), 4, global_batch_size=4)
    after = fit(job, mode, (24, 32), global_batch_size=size)
    number = 0 if mode == "min_size" else 1
    visits = Counter((epoch, index) for epoch, _, one, index in before.seen + after.seen if one == number)
    assert visits == Counter((epoch, index) for epoch in range(2) for index in range(ends))


def test_a_short_step_beside_a_full_one_is_refused_with_a_way_out(job: str) -> None:
    """Lightning would step in the middle of the other loader's step, and a restore train samples twice."""
    with pytest.raises(UsageError, match=r"'train.0' ends its epoch of 10 with a step of 2 samples") as refused:
        fit(job, "max_size_cycle", (10, 23), accumulate=2)
    assert "drop_last=True" in refused.value.hint


def made(*sizes: int, rank: int = 0, drop: bool = False, total: int = 2) -> dict[str, ElasticLoader]:
    return {
        f"train.{number}": elastic_loader(
            DataLoader(Numbers(n, False), 2, drop_last=drop), global_batch_size=2 * total, num_replicas=2, rank=rank
        )
        for number, n in enumerate(sizes)
    }


@pytest.mark.parametrize(
    ("mode", "sizes", "fine"),
    [
        ("min_size", (9, 23), True),
        ("min_size", (23, 9), True),
        ("min_size", (9, 11), False),
        ("min_size", (9, 9), True),
        ("max_size", (8, 23), True),
        ("max_size", (23, 8), True),
        ("max_size", (9, 24), False),
        ("max_size_cycle", (8, 24), True),
        ("max_size_cycle", (9, 9), True),
        ("max_size_cycle", (8, 23), False),
        ("max_size_cycle", (9, 24), False),
    ],
)
def test_where_no_weight_is_right_for_all_loaders(mode: str, sizes: tuple[int, ...], fine: bool) -> None:
    """Two ranks, four samples a step; left out, short steps trouble nobody."""
    with contextlib.nullcontext() if fine else pytest.raises(UsageError, match="no weight"):
        check_short_steps(mode, made(*sizes))
    check_short_steps(mode, made(*sizes, drop=True))


def test_who_leads() -> None:
    """The first; a short one before it; behind its end, the next."""
    loaders = made(8, 11)
    first, second = (iter(one) for one in loaders.values())
    assert next(first) is not next(second)
    assert leader(list(loaders.values())) is loaders["train.0"]
    assert next(first) is not next(second)
    assert list(first) == []
    next(second)
    assert leader(list(loaders.values())) is loaders["train.1"]
    loaders = made(11, 7)
    for one in [iter(one) for one in loaders.values()]:
        assert next(one) is not next(one)
    assert leader(list(loaders.values())) is loaders["train.1"]


@pytest.mark.deep  # the adapter contract has this proof for each framework
@pytest.mark.slow
def test_the_short_step_of_the_second_loader_has_its_weights(job: str, live_master: LiveMaster) -> None:
    """Two ranks, float64: as one process that accumulates. The first loader is over long before."""
    given: dict[str, Any] = {"noise": False, "samples": 12, "second": 23, "options": {"mode": "max_size"}}
    (one,) = spawn(1, [plan("one", job, given | {"accumulate": 2}, [None])], None, ["lightning"])
    two = spawn(2, [plan("two", job, given, [None])], live_master, ["lightning"])
    assert sorted(tuple(seen) for life in two for seen in life["seen"]) == sorted(map(tuple, one["seen"]))
    assert max(abs(a - b) for a, b in zip(two[0]["weights"], one["weights"], strict=True)) < 1e-12


class Endless:
    """Without a length, as streams are."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


@pytest.mark.parametrize(("mode", "fine"), [("min_size", True), ("max_size", False)])
def test_a_loader_without_a_length_that_ends_the_epoch_is_refused(job: str, mode: Any, fine: bool) -> None:
    """Lightning fetches a batch ahead there, and each cut counted it as trained: its samples were lost by a restart."""

    class First(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[:1], batch_idx)

    loaders = CombinedLoader([DataLoader(Numbers(8, False), 2, shuffle=True), Endless()], mode)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[ElasticCallback(job=job)],
    )  # fmt: skip
    refused = (
        contextlib.nullcontext() if fine else pytest.raises(UsageError, match="a training loader without a length")
    )
    with refused:
        trainer.fit(First(), loaders)
    assert trainer.global_step == (4 if fine else 0)
