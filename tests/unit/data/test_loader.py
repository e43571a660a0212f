"""elastic_loader: counting, step boundaries, refusals, and the traps of frameworks."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dlrover_hooks.data.loader import ElasticLoader, elastic_loader, supports
from dlrover_hooks.data.sampler import ElasticSampler
from dlrover_hooks.errors import UsageError


class Ids(Dataset[int]):
    """n samples, each its own index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


def make(n: int = 10, b: int = 2, **options: Any) -> ElasticLoader:
    return elastic_loader(DataLoader(Ids(n), b, shuffle=True), **options)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)


def train(loader: ElasticLoader, step: torch.optim.Optimizer, epochs: int, stop: int = -1) -> list[tuple[int, int]]:
    """(epoch, id) of everything in the model: what was committed is cut from what was seen by the caller."""
    seen: list[tuple[int, int]] = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            if stop == 0:
                return seen
            stop -= 1
            seen += [(epoch, i) for i in batch.tolist()]
            step.step()
    return seen


def test_interrupted_epochs_add_up() -> None:
    """`epochs(n)` is exactly n epochs over restarts, wherever the run stops."""
    whole = train(make(optimizer=(step := optimizer())), step, 3)
    assert len(whole) == 30
    for stop in range(16):
        first = make(optimizer=(step := optimizer()))
        seen = train(first, step, 3, stop)
        state = json.loads(json.dumps(first.state_dict()))
        assert state["cursor"] == len(seen) if stop < 15 else 30
        second = make(optimizer=(step := optimizer()))
        second.load_state_dict(state)
        assert seen + train(second, step, 3) == whole
        assert list(second.epochs(3)) == []


def test_a_state_taken_right_after_a_step_includes_it() -> None:
    """A checkpoint of the user's own: model and data at the same step, before the next batch is requested."""
    whole = train(make(optimizer=(step := optimizer())), step, 1)
    loader = make(optimizer=(step := optimizer()))
    for count, batch in enumerate(loader, 1):
        assert loader.state_dict()["cursor"] == (count - 1) * len(batch), "the batch is not trained yet"
        step.step()
        assert loader.state_dict()["cursor"] == loader.sampler.cursor + len(batch) == count * len(batch)
        again = make(optimizer=(other := optimizer()))
        again.load_state_dict(loader.state_dict())
        assert train(again, other, 1) == whole[count * len(batch) :]


def test_a_loop_left_early_begins_the_next_epoch() -> None:
    """limit_train_batches: each epoch its own order; a restore at the step boundary before the next epoch agrees."""
    loader = make(optimizer=(step := optimizer()))
    seen: list[tuple[int, list[int]]] = []
    states: list[int] = []
    loader.before_batch.append(lambda: states.append(loader.state_dict()["cursor"]))
    for epoch in loader.epochs(3):
        for batch, _ in zip(loader, range(2), strict=False):
            seen.append((epoch, batch.tolist()))
            step.step()
    assert [e for e, _ in seen] == [0, 0, 1, 1, 2, 2]
    assert states == [0, 2, 4, 10, 12, 14, 20, 22, 24, 30]
    assert seen[0][1] != seen[2][1]


def test_epochs_notice_a_body_that_does_not_iterate() -> None:
    with pytest.raises(UsageError, match="did not iterate"):
        list(make().epochs(2))


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("workers", [0, 1])
def test_to_look_at_a_batch_begins_no_epoch(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """`next(iter(loader))` for a shape, twice, ahead of the loop and ahead of each epoch, and after a restore."""
    inner, step = DataLoader(Ids(10), 2, shuffle=True, num_workers=workers), optimizer()
    loader = elastic_loader(inner, optimizer=step)
    whole = train(make(optimizer=(other := optimizer())), other, 3)
    first = next(iter(loader)).tolist()
    assert next(iter(loader)).tolist() == first
    seen: list[tuple[int, int]] = []
    for epoch in loader.epochs(3):
        next(iter(loader))
        for batch in loader:
            if epoch == 1 and len(seen) == 14:
                break
            seen += [(epoch, i) for i in batch.tolist()]
            step.step()
        if epoch == 1:
            break
    loader.finish()
    again = make(optimizer=(step := optimizer()))
    again.load_state_dict(loader.state_dict())
    next(iter(again))
    assert seen + train(again, step, 3) == whole
    assert warnings_in(caplog) == []


def test_an_epoch_that_is_left_in_the_middle_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = make(optimizer=(step := optimizer()))
    for _ in loader.epochs(3):
        for _batch, _ in zip(loader, range(2), strict=False):
            step.step()
    assert warnings_in(caplog) == [
        "loader 'train': epoch 0 was left at position 4 of 10: the rest of it counts as trained (said once)"
    ]


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_range_instead_of_epochs_after_a_resume_is_said(stop: int, caplog: pytest.LogCaptureFixture) -> None:
    first = make(optimizer=(step := optimizer()))
    train(first, step, 3, stop)
    again = make(optimizer=(step := optimizer()))
    again.load_state_dict(first.state_dict())
    for _ in range(3):
        for _batch in again:
            step.step()
    (line,) = warnings_in(caplog)
    assert "write `for epoch in loader.epochs(n):`" in line
    assert f"restored in epoch {2 * stop // 10} begins" in line
    caplog.clear()
    right = make(optimizer=(step := optimizer()))
    right.load_state_dict(first.state_dict())
    train(right, step, 3)
    assert warnings_in(caplog) == []


def test_quiet_point_is_before_the_fetch_and_after_the_commit() -> None:
    loader = make(4, optimizer=(step := optimizer()))
    told: list[Any] = []
    loader.before_batch.append(lambda: told.append(loader.sampler.cursor))
    for _ in loader:
        told.append("batch")
        step.step()
    assert told == [0, "batch", 2, "batch"]  # the end of the epoch is not one: its validation is still to come
    loader.finish()
    assert told[-1] == 4
    for _ in loader:
        break
    assert told[-2:] == [4, 4]


def test_commit_is_never_ahead_of_the_optimizer() -> None:
    """Accumulation 2, two workers' worth of prefetch: the cursor is what whole, stepped batches hold."""
    inner, step = DataLoader(Ids(16), 2, num_workers=2), optimizer()
    loader = elastic_loader(inner, global_batch_size=4, optimizer=step, accumulation="manual")
    stepped = 0
    cursors: list[tuple[int, int]] = []
    loader.before_batch.append(lambda: cursors.append((loader.sampler.cursor, stepped)))
    for _ in loader:
        if loader.step_ends:
            stepped += 4
            step.step()
    assert cursors == [(0, 0), (0, 0), (4, 4), (4, 4), (8, 8), (8, 8), (12, 12), (12, 12)]


@pytest.mark.parametrize("workers", [0, 1])
def test_making_an_iterator_spends_no_random_numbers(workers: int) -> None:
    """`iter(DataLoader)` draws from the global generator: a restored run that makes one more would drift."""
    plain = DataLoader(Ids(4), 2, num_workers=workers)
    before = torch.get_rng_state()
    iter(plain)
    assert not torch.equal(before, torch.get_rng_state())  # the trap exists
    loader, before = elastic_loader(plain), torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(before, torch.get_rng_state())
    loader.close()


def test_length_is_the_whole_epoch_after_a_resume() -> None:
    """Lightning compares `batch_progress` with it: with what remains, runs ended early without an error."""
    loader = make(11, optimizer=optimizer())
    loader.load_state_dict(loader.state_dict() | {"cursor": 6})
    assert len(loader) == 6
    assert len(list(loader)) == 3
    assert len(loader) == 6


def test_state_is_refused_while_iterating_and_old_iterators_end() -> None:
    loader = make()
    source = iter(loader)
    next(source)
    with pytest.raises(UsageError, match="being iterated"):
        loader.load_state_dict(loader.state_dict())
    loader.close()
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match="ended"):
        next(source)


def test_persistent_workers_can_be_left_and_restored() -> None:
    loader = elastic_loader(DataLoader(Ids(8), 2, num_workers=1, persistent_workers=True))
    for _ in loader:
        break
    loader.load_state_dict(loader.state_dict() | {"cursor": 4})
    assert torch.cat(list(loader)).tolist() == [4, 5, 6, 7]
    assert torch.cat(list(loader)).tolist() == list(range(8))


def test_the_loader_is_kept_as_it_was() -> None:
    generator = torch.Generator()
    options: dict[str, Any] = {
        "num_workers": 1,
        "collate_fn": list,
        "timeout": 9.0,
        "worker_init_fn": print,
        "multiprocessing_context": "fork",
        "generator": generator,
        "prefetch_factor": 3,
        "persistent_workers": True,
    }
    given = DataLoader(Ids(7), 2, shuffle=True, **options)
    loader = elastic_loader(given)
    kept = ["dataset", "batch_size", "pin_memory", "pin_memory_device", "in_order", *options]
    assert all(getattr(loader, name) == getattr(given, name) for name in kept)
    assert isinstance(loader.sampler, ElasticSampler)
    assert not isinstance(given.sampler, ElasticSampler)
    assert elastic_loader(loader) is loader
    assert supports(loader) is None
    own = DataLoader(Ids(7), 2, sampler=loader.sampler)
    assert elastic_loader(own).sampler is loader.sampler


def test_shuffle_seed_and_tail_are_read_off_the_loader() -> None:
    assert make().sampler.shuffle
    assert not elastic_loader(DataLoader(Ids(4), 2)).sampler.shuffle
    assert elastic_loader(DataLoader(Ids(5), 2, drop_last=True)).sampler.plan.tail == "drop"
    torchs = DistributedSampler(Ids(9), num_replicas=3, rank=2, shuffle=False, seed=4)
    plan = (sampler := elastic_loader(DataLoader(Ids(9), 1, sampler=torchs)).sampler).plan
    assert (plan.world_size, plan.rank, sampler.shuffle, sampler.seed) == (3, 2, False, 4)


class Stateful(DataLoader[int]):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: object) -> None: ...


@pytest.mark.parametrize(
    ("loader", "word"),
    [
        (Stateful(Ids(4)), "state of its own"),
        ([1, 2], "not a torch DataLoader"),
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(Ids(4), num_workers=1, in_order=False), "in_order"),
        (DataLoader(Ids(4), batch_size=None), "batch_size=None"),
        (DataLoader(Ids(4), batch_sampler=BatchSampler(SequentialSampler(Ids(4)), 2, False)), "batch_sampler"),
        (DataLoader(Ids(4), batch_sampler=[[0, 1], [2, 3]]), "batch_sampler"),
        (DataLoader(Ids(4), sampler=WeightedRandomSampler([1.0] * 4, 4)), "sampler of your own"),
        (DataLoader(Ids(4), sampler=SubsetRandomSampler([1, 2])), "sampler of your own"),
        (DataLoader(Ids(4), sampler=torch.utils.data.RandomSampler(Ids(4), replacement=True)), "sampler of your own"),
        (DataLoader(Ids(4), 3, sampler=ElasticSampler(4, batch_size=2)), "batch_size or drop_last"),
    ],
)
def test_what_cannot_be_promised_is_refused(loader: Any, word: str) -> None:
    """Each refusal names the promise and a way out."""
    with pytest.raises(UsageError, match=word) as caught:
        elastic_loader(loader)
    assert caught.value.hint
    assert caught.value.hint in str(supports(loader))


def test_detach_stops_marking() -> None:
    loader = make(optimizer=(step := optimizer()))
    loader.detach()
    for _ in loader:
        step.step()
        break
    loader.finish()
    assert loader.sampler.cursor == 0


def test_resize_goes_on_at_the_commit() -> None:
    loader = elastic_loader(DataLoader(Ids(16), 2), global_batch_size=4, optimizer=(step := optimizer()))
    for batch in loader:
        step.step()
        if batch[0] == 6:
            break
    loader.finish()
    loader.resize(2, 1)
    assert torch.cat(list(loader)).tolist() == [10, 11, 14, 15]
    assert loader.weight == 0.5


@pytest.mark.deep
def test_lightning_leaves_the_sampler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap: under DDP Lightning wraps or replaces every sampler that is not a DistributedSampler."""
    pytest.importorskip("lightning")
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.states import RunningStage

    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    connector = trainer._data_connector
    ours = DataLoader(Ids(8), 2, sampler=ElasticSampler(8, batch_size=2))
    others = DataLoader(Ids(8), 2, sampler=torch.utils.data.SequentialSampler(Ids(8)))
    elastic = make()
    assert not connector._requires_distributed_sampler(ours)
    assert connector._requires_distributed_sampler(others)
    for loader in (ours, elastic):
        assert connector._prepare_dataloader(loader, shuffle=True, mode=RunningStage.TRAINING) is loader


@pytest.mark.parametrize("workers", [0, 1])
def test_a_live_loop_goes_on_in_another_world(workers: int) -> None:
    """Resized from the loop's body and from a step boundary; prefetched batches of the old world are dropped."""
    data = DataLoader(Ids(24), 2, num_workers=workers)
    loader = elastic_loader(data, global_batch_size=4, optimizer=(step := optimizer()), accumulation="manual")
    got: list[list[int]] = []
    at = {8: (2, 1), 16: (1, 0)}
    loader.before_batch.append(lambda: loader.resize(*at.pop(8)) if loader.sampler.cursor == 8 and 8 in at else None)
    for batch in loader:
        got.append(batch.tolist())
        if loader.step_ends:
            step.step()
            if loader.sampler.progress.marked == 16:
                loader.resize(*at.pop(16))
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7], [10, 11], [14, 15], *([i, i + 1] for i in range(16, 24, 2))]
    loader.finish()
    assert loader.sampler.cursor == 24


def test_a_live_loop_is_not_resized_in_mid_step() -> None:
    loader = elastic_loader(DataLoader(Ids(24), 2), global_batch_size=4)
    for _ in loader:
        with pytest.raises(UsageError, match="middle of a step"):
            loader.resize(2, 0)
        break


def test_a_loop_of_epochs_goes_on_after_a_resize_between() -> None:
    loader = make(8, 2, global_batch_size=4, optimizer=(step := optimizer()), accumulation="manual")
    seen: list[tuple[int, int]] = []
    for epoch in loader.epochs(2):
        for batch in loader:
            seen += [(epoch, i) for i in batch.tolist()]
            if loader.step_ends:
                step.step()
                if len(seen) == 4:
                    break
        if len(seen) == 4:
            loader.resize(1, 0)
    assert Counter(seen) == Counter((epoch, i) for epoch in range(2) for i in range(8))


def test_after_a_crash_the_loader_rolls_back() -> None:
    loader = elastic_loader(DataLoader(Ids(12), 2), optimizer=(step := optimizer()))
    for batch in loader:
        step.step()
        if batch[0] == 4:
            break
    loader.rollback()
    loader.resize(1, 0)
    assert torch.cat(list(loader)).tolist() == [*range(4, 12)]


def test_carry_is_refused_where_a_length_is_needed() -> None:
    """Lightning compares counts with `len(loader)`: an adapter asks for a fixed length."""
    carried = make(10, 4, tail="carry")
    assert not carried.fixed_length
    with pytest.raises(UsageError, match="carry") as caught:
        elastic_loader(carried, fixed_length=True)
    assert "ghost" in str(caught.value.hint)
    assert elastic_loader(make(12, 4, tail="carry"), fixed_length=True).fixed_length


def test_epochs_of_carried_steps_add_up() -> None:
    loader = elastic_loader(DataLoader(Ids(10), 4), tail="carry", optimizer=(step := optimizer()))
    counts: list[tuple[int, int]] = []
    for epoch in loader.epochs(3):
        length = len(loader)
        counts.append((epoch, sum(1 for batch in loader if (step.step(), len(batch) == 4)[1])))
        assert counts[-1][1] == length
    assert counts == [(0, 3), (1, 2), (2, 3)]
    assert loader.sampler.cursor == 32


class Table(Dataset[torch.Tensor]):
    """Takes an array of ids at once, in one of three ways."""

    def __init__(self, n: int) -> None:
        self.rows = torch.arange(n) * 10

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> torch.Tensor:
        assert isinstance(index, np.ndarray)
        return self.rows[index]


class Fetched(Table):
    def __getitems__(self, ids: Any) -> Any:
        assert isinstance(ids, np.ndarray)
        return self.rows[ids]


class Listed(Table):
    def __getitems__(self, ids: Any) -> Any:
        return [self.rows[i] for i in ids]


@pytest.mark.parametrize("kind", [Table, Fetched, Listed])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_fetched_at_once(kind: type[Table], workers: int) -> None:
    """`yield_batches`: the dataset gets an array of ids; counting, marks and restores are as ever."""
    data = kind(11)
    options: dict[str, Any] = {"batch_size": None, "num_workers": workers}
    sampler = ElasticSampler(data, batch_size=4, yield_batches=True)
    loader = elastic_loader(DataLoader(data, sampler=sampler, **options), optimizer=(step := optimizer()))
    whole = elastic_loader(DataLoader(kind(11), 4, shuffle=True)).sampler
    assert len(loader) == 3
    got = []
    for batch in loader:
        step.step()
        got.append(batch.tolist())
    assert [i for part in got for i in part] == [10 * i for i in whole]
    loader.finish()
    assert loader.sampler.cursor == 11


class Rows(Dataset[torch.Tensor]):
    """Takes one id, or an array of them."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.as_tensor(index) * 10


class RowsAtOnce(Rows):
    def __getitems__(self, ids: Any) -> Any:
        return [torch.as_tensor(index) * 10 for index in ids]


class OwnIterator(DataLoader[Any]):
    made = 0

    def __iter__(self) -> Any:
        OwnIterator.made += 1
        return super().__iter__()


@pytest.mark.parametrize("kind", [Rows, RowsAtOnce])
@pytest.mark.parametrize("batched", [False, True])
def test_batches_without_workers_are_those_of_a_loaders_iterator(kind: type[Rows], batched: bool) -> None:
    """They are fetched without it; a subclass with an iterator of its own keeps it."""

    def batches(loader: type[DataLoader[Any]]) -> list[torch.Tensor]:
        data = kind()
        sampler = ElasticSampler(data, batch_size=4, seed=1, yield_batches=batched)
        options: dict[str, Any] = {"batch_size": None if batched else 4}
        return list(elastic_loader(loader(data, sampler=sampler, **options)))

    before = OwnIterator.made
    ours, theirs = batches(DataLoader), batches(OwnIterator)
    assert OwnIterator.made > before
    assert sorted(int(row) for batch in ours for row in batch) == [10 * row for row in range(11)]
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]


def test_batches_twice_are_refused() -> None:
    sampler = ElasticSampler(8, batch_size=2, yield_batches=True)
    for loader, word in (
        (DataLoader(Ids(8), 2, sampler=sampler), "once more"),
        (DataLoader(Ids(8), batch_size=None, sampler=ElasticSampler(8, batch_size=2)), "batch_size=None"),
    ):
        with pytest.raises(UsageError, match=word) as caught:
            elastic_loader(loader)
        assert caught.value.hint


def test_the_plan_is_logged_when_it_is_used_and_changes(caplog: pytest.LogCaptureFixture) -> None:
    """`m_i`, efficiency and what would be better, at more than one worker. Not the plan before a restore."""
    caplog.set_level(logging.INFO, logger="dlrover_hooks")
    state = make(70, global_batch_size=10).state_dict()
    loader = elastic_loader(DataLoader(Ids(70), 2, shuffle=True), num_replicas=4, rank=1)
    alone = elastic_loader(DataLoader(Ids(70), 2), num_replicas=1)
    assert caplog.messages == []
    loader.load_state_dict(state)
    for _ in range(2):
        next(iter(loader))
        next(iter(alone))
        loader.close()
    (line,) = caplog.messages
    assert "global batch 10): 1 x 2, 3 x 1; 62% busy" in line
    assert "batch_size=1" in line
    loader.resize(1, 0)
    next(iter(loader))
    assert "1 worker runs 5 micro-batches" in caplog.messages[1]


def test_blocks_are_asked_for_by_name() -> None:
    loader = elastic_loader(DataLoader(Ids(40), 2, shuffle=True), order="blocks", block=4, window=3)
    assert loader.sampler.order.fingerprint()["order"] == "blocks"
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(40))
