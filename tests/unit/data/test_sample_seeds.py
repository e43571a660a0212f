"""A sample's random numbers come from its position: whichever process loads it, wherever, and again after a restore.

Real DataLoaders; a sample here is the numbers it drew.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from dlrover_hooks.data.loader import ElasticLoader, elastic_loader
from dlrover_hooks.data.order import Order
from dlrover_hooks.data.sampler import ElasticSampler

N = 26
Rows = dict[tuple[int, int], list[float]]


class Augmented(Dataset[torch.Tensor]):
    """[id, then a number of each generator]."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()]
        return torch.tensor([index, *drawn, torch.randn(1).item()], dtype=torch.float64)


class Still(Dataset[torch.Tensor]):
    """Only the samples that come `late` in epoch 0 draw; counts what it was asked for."""

    def __init__(self, *late: int) -> None:
        self.draws = set(Order(N, 3).indices(0, np.array(late, dtype=np.int64)).tolist())
        self.asked: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        drawn = [random.random(), torch.rand(1).item()] if index in self.draws else [0.0, 0.0]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Whole(Augmented):
    """A batch at a time, one draw for all of it."""

    def __getitems__(self, ids: list[int]) -> list[torch.Tensor]:
        drawn = torch.rand(1).item()
        return [torch.tensor([i, drawn], dtype=torch.float64) for i in ids]


def mixed(rows: list[torch.Tensor]) -> torch.Tensor:
    """Draws in the collate function, as mix-up does."""
    return torch.cat([torch.stack(rows), torch.full((len(rows), 1), random.random(), dtype=torch.float64)], 1)


def load(data: Any, b: int = 2, *, world: int = 1, rank: int = 0, G: int = 4, **options: Any) -> ElasticLoader:
    return elastic_loader(
        DataLoader(data, b, shuffle=True, **options), global_batch_size=G, seed=3, num_replicas=world, rank=rank
    )


def rows(loader: ElasticLoader, epochs: int = 2, disturb: Callable[[], object] = lambda: None) -> Rows:
    """What was drawn for (epoch, id), ghosts left out; `disturb` is what the loop draws between batches."""
    seen: Rows = {}
    for epoch in loader.epochs(epochs):
        for batch in loader:
            disturb()
            if loader.weight:
                seen |= {(epoch, int(row[0])): row[1:].tolist() for row in batch}
    return seen


def noise() -> None:
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        draw()


def reseed() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)


def test_augmentation_is_that_of_the_position() -> None:
    """Workers 0 and 2, other prefetching, a loop that draws or not, started from any random state: all alike."""
    want = rows(load(Augmented()))
    assert len(want) == 2 * N
    assert len({tuple(row) for row in want.values()}) == 2 * N
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    assert rows(load(Augmented()), disturb=noise) == want
    assert rows(load(Augmented(), num_workers=2), disturb=noise) == want
    assert rows(load(Augmented(), num_workers=1, persistent_workers=True, prefetch_factor=5)) == want


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_replays_after_a_restore_in_mid_epoch_at_another_world_size(workers: int) -> None:
    """At W = 1 until the crash, then at W = 2; with other sizes of micro-batches, too."""
    want = rows(load(Augmented()))
    first = load(Augmented(), num_workers=workers)
    seen: Rows = {}
    for batch in first:
        seen |= {(0, int(row[0])): row[1:].tolist() for row in batch}
        if first.step_ends and len(seen) == 12:
            first.sampler.mark()
            break
    first.finish()
    state = first.state_dict()
    assert state["cursor"] == 12
    for b in (1, 2):
        again = dict(seen)
        for rank in range(2):
            second = load(Augmented(), b, world=2, rank=rank, num_workers=workers)
            second.load_state_dict(state)
            again |= rows(second)
        assert again == want


def test_the_loops_own_random_state_is_not_touched() -> None:
    """With 0 workers the dataset draws from the same generators: they are put back behind each fetch."""
    for data in (Augmented(), Still(), Still(5), Still(0, 3)):
        loader, drawn = load(data), []
        source = iter(loader)
        reseed()
        for _ in range(4):
            next(source)
            drawn.append((random.gauss(0, 1), np.random.randn(), torch.randn(1).item()))
        loader.close()
        reseed()
        assert drawn == [(random.gauss(0, 1), np.random.randn(), torch.randn(1).item()) for _ in range(4)]


def test_the_state_is_put_back_when_a_sample_raises() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            super().__getitem__(index)
            raise KeyError(index)

    source = iter(load(Broken()))
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(KeyError):
        next(source)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("late", [(0,), (2,), (11, 12, 20), (25,)])
def test_a_dataset_that_draws_late_is_noticed(late: tuple[int, ...]) -> None:
    """Only some samples draw: the batch that was fetched unseeded is fetched once more, and only that one."""
    data = Still(*late)
    want = rows(load(Still(*late), num_workers=1))
    assert len({tuple(row) for row in want.values()}) == 2 * len(late) + 1
    assert rows(load(data), disturb=noise) == want
    assert len(data.asked) == 2 * N + (2 if late[0] > 1 else 0)
    still = Still()
    assert rows(load(still)) == rows(load(Still(), num_workers=1))
    assert len(still.asked) == 2 * N


@pytest.mark.parametrize("workers", [0, 2])
def test_subsets_are_seeded_by_sample(workers: int) -> None:
    """`random_split` makes them; their `__getitems__` takes the ids one by one."""
    want = rows(load(Subset(Augmented(), range(N))))
    assert want == rows(load(Augmented()))
    assert rows(load(Subset(Augmented(), range(N)), num_workers=workers), disturb=noise) == want


@pytest.mark.parametrize("options", [{}, {"collate_fn": mixed}])
def test_what_is_drawn_for_a_batch_is_seeded_by_the_batch(options: dict[str, Any]) -> None:
    """`__getitems__` and collate functions: alike for any number of workers, and in full steps at any world size."""
    data = Augmented() if options else Whole()
    want = rows(load(data, **options))
    assert rows(load(data, num_workers=2, **options), disturb=noise) == want
    full = {key: row for key, row in want.items()}
    for rank in range(2):
        for key, row in rows(load(data, world=2, rank=rank, **options)).items():
            full[key] = row
    different = [key for key in want if full[key] != want[key]]
    assert len(different) <= 2 * (N % 4)  # of the short last step


@pytest.mark.parametrize("workers", [0, 1])
def test_arrays_are_seeded_by_the_batch(workers: int) -> None:
    class Table(Augmented):
        def __getitem__(self, index: Any) -> torch.Tensor:
            assert type(index) is np.ndarray
            return torch.cat([torch.from_numpy(index)[:, None].double(), torch.rand(len(index), 2).double()], 1)

    def arrays(workers: int) -> ElasticLoader:
        sampler = ElasticSampler(N, batch_size=2, seed=3, yield_batches=True)
        return elastic_loader(DataLoader(Table(), batch_size=None, sampler=sampler, num_workers=workers))

    want = rows(arrays(0))
    assert len({tuple(row) for row in want.values()}) == 2 * N
    assert rows(arrays(workers), disturb=noise) == want


def test_seeding_can_be_left_out() -> None:
    """The dataset then draws on from the loop's own state, as without us."""
    loader = elastic_loader(DataLoader(Augmented(), 2, shuffle=True), seed_samples=False)
    source = iter(loader)
    torch.manual_seed(4)
    first = next(source)
    torch.manual_seed(4)
    assert first[0, 3] == torch.rand(1).double()
    loader.close()


def test_the_dataset_is_handed_over_as_it_is() -> None:
    """No wrapper around it: `loader.dataset` and `get_worker_info().dataset` are the user's."""
    told: list[Any] = []

    class Asks(Still):
        def __getitem__(self, index: int) -> torch.Tensor:
            info = get_worker_info()
            assert info is not None
            return torch.tensor([index, type(info.dataset) is Asks], dtype=torch.float64)

    data = Asks()
    loader = load(data, num_workers=1)
    assert loader.dataset is data
    told += [row[1].item() for row in next(iter(loader))]
    loader.close()
    assert told == [1, 1]
