"""ShardDataset and LeasedLoader on the real core: exactly once, acknowledged in order, loud about what is lost."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

from dlrover_hooks.data.leased import leased_loader as leased_module, loader_feed
from dlrover_hooks.data.leased.leased_loader import LeasedLoader
from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.data.leased.sources import Stream, Table
from dlrover_hooks.data.order import Order
from dlrover_hooks.errors import (
    BadRequest,
    DataMismatch,
    UsageError,
)
from dlrover_hooks.protocol.ranges import Ranges
from tests.unit.data.lent import WORKERS, Ids, Log, Master, marked, once, train


@pytest.mark.requirement("DL-62", "DL-63")
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_every_sample_once_in_every_epoch(
    make: Callable[..., LeasedLoader], master: Master, options: dict[str, Any]
) -> None:
    """All of each epoch, whatever the DataLoader prefetches; the books say so too."""
    assert Counter(train(make(Ids(50), epochs=2, loader=options))) == once(50, 2)
    view = master.view()
    assert (view.done, view.todo, view.leases) == (100, 0, 0)


@pytest.mark.requirement("DL-64", "DL-66")
def test_the_order_is_that_of_the_epoch(make: Callable[..., LeasedLoader]) -> None:
    """Positions travel, the worker knows which samples they are; each epoch is shuffled differently."""
    seen = train(make(Ids(50), seed=7), 2)
    for epoch in range(2):
        order = Order(50, 7, True).indices(epoch, torch.arange(50).numpy()).tolist()
        assert [sample for at, sample in seen if at == epoch] == order
    assert [sample for _, sample in train(make(Ids(50), name="plain", shuffle=False))] == list(range(50))


def test_batches_end_with_their_lease(make: Callable[..., LeasedLoader]) -> None:
    """A lease's last batch may be short, and is counted as what it is."""
    loader = make(Ids(20), b=3, shard_size=7)  # the master makes leases of 6, and the last of 2
    sizes = []
    for batch in loader:
        sizes.append(len(batch))
        loader.mark()
    assert sizes == [3, 3, 3, 3, 3, 3, 2]


@pytest.mark.requirement("EZ-11")
def test_workers_of_different_speed_share_the_work(make: Callable[..., LeasedLoader], master: Master) -> None:
    """A faster worker does more, all is done once, none waits for a fixed part."""
    loaders = [make(Ids(200), epochs=2) for _ in range(3)]
    seen: list[list[tuple[int, int]]] = [[], [], []]
    ahead = threading.Event(), threading.Event()  # slow: the rest of an epoch comes when half of it is done by another

    def work(number: int) -> None:
        for epoch in loaders[number].epochs():
            for batch in loaders[number]:
                seen[number] += [(epoch, sample) for sample in batch.tolist()]
                if number:
                    assert ahead[epoch].wait(60)
                elif sum(at == epoch for at, _ in seen[0]) > 100:
                    ahead[epoch].set()
                loaders[number].mark()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Counter(seen[0] + seen[1] + seen[2]) == once(200, 2)
    assert len(seen[0]) > max(len(seen[1]), len(seen[2]))
    assert master.view().done == 400


@pytest.mark.requirement("DL-68")
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_nothing_is_acknowledged_before_its_step_is_over(
    make: Callable[..., LeasedLoader], master: Master, options: dict[str, Any]
) -> None:
    """Received is not done, nor is marked; done is what was marked when the next batch is asked for."""
    loader = make(Ids(64), loader=options)
    received = marked = 0
    for number, batch in enumerate(loader):
        assert master.view().done <= marked
        assert loader.tally.done.get("", Ranges()).size == marked
        received += len(batch)
        if number % 3 == 2:
            loader.mark()
            marked = received
            assert loader.tally.done.get("", Ranges()).size < marked
    assert master.view().done == 64


def test_the_last_window_without_a_step_does_not_hang(
    make: Callable[..., LeasedLoader], caplog: pytest.LogCaptureFixture
) -> None:
    """Ten micro-batches at accumulation four: two are left over, and said."""
    loader = make(Ids(40))
    for number, _ in enumerate(loader):
        if number % 4 == 3:
            loader.mark()
    assert "the last 2 micro-batches had no optimizer step" in caplog.text


def test_somebody_must_mark(make: Callable[..., LeasedLoader]) -> None:
    """Without marks nothing could ever be acknowledged: say so instead of waiting for ever."""
    with pytest.raises(UsageError, match="the optimizer's steps are not reported"):
        list(make(Ids(20)))


def test_the_optimizer_marks(make: Callable[..., LeasedLoader], master: Master) -> None:
    """One line: elastic_loader(loader, optimizer=optimizer)."""
    loader = make(Ids(20))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    loader.attach(optimizer)
    for _ in loader:
        optimizer.step()
    assert master.view().done == 20


# ---- leaving, closing, restoring ------------------------------------------------------------------------------------


def test_a_loop_left_early_gives_the_rest_to_others(make: Callable[..., LeasedLoader], master: Master) -> None:
    """Graceful scale-down: what was done stays done, in mid-lease too, and the rest is somebody else's."""
    first = make(Ids(64))
    mine: list[int] = []
    for batch in first:
        mine += batch.tolist()
        first.mark()
        if len(mine) == 12:
            break
    first.finish()
    view = master.view()
    assert (view.done, view.leases, view.todo) == (12, 0, 52)
    other = [sample for _, sample in train(make(Ids(64)))]
    assert Counter(mine + other) == Counter(range(64))


def test_close_does_not_count_a_step_that_is_not_over(make: Callable[..., LeasedLoader], master: Master) -> None:
    """An exception in the middle of a step: its batch is trained again."""
    loader = make(Ids(64))
    rows = iter(loader)
    next(rows)
    loader.mark()
    next(rows)
    loader.close()
    assert (master.view().done, master.view().leases) == (4, 0)
    loader.mark()
    loader.commit()
    assert loader.tally.done[""].size == 4, "what went back is not done here"
    with pytest.raises(UsageError, match="this iterator ended"):
        next(rows)


def test_breaking_off_begins_the_next_epoch(make: Callable[..., LeasedLoader]) -> None:
    """As every DataLoader: the next `iter` is the next epoch; one too many is an error that says what to do. To look at
    a batch begins no epoch.
    """
    loader = make(Ids(32), epochs=2)
    for _ in range(2):
        assert next(iter(loader)) is not None
        assert loader.state_dict()["epoch"] == 0
    next(marked(loader), None)
    loader.mark()
    assert len(list(marked(loader))) == 8
    assert loader.state_dict()["epoch"] == 2
    with pytest.raises(UsageError, match="lent out for 2 epochs, and they are over"):
        iter(loader)
    with pytest.raises(UsageError, match="did not iterate the loader in epoch 0"):
        list(make(Ids(32), name="other", epochs=2).epochs())
    with pytest.raises(UsageError, match="lent out for 2 epochs, not 3"):
        list(loader.epochs(3))


def test_a_late_worker_skips_what_is_finished(make: Callable[..., LeasedLoader]) -> None:
    """Started when epoch 0 is over, it begins with what is left."""
    first = make(Ids(32), epochs=2)
    for _ in marked(first):
        pass
    assert list(dict(train(make(Ids(32), epochs=2)))) == [1]


def test_the_state_is_what_is_committed(make: Callable[..., LeasedLoader]) -> None:
    """The cut of a rank; the union over the ranks is what the checkpoint holds."""
    one, two = make(Ids(64), shuffle=False), make(Ids(64), shuffle=False)
    rows = [iter(one), iter(two)]
    held: list[list[int]] = [[], []]
    for step in (0, 1, 0, 0, 1):
        held[step] += next(rows[step]).tolist()
        (one, two)[step].mark()
    states = [msgspec.json.decode(msgspec.json.encode(loader.state_dict())) for loader in (one, two)]
    for state, mine in zip(states, held, strict=True):
        done = [q for lo, hi in Ranges.decode(state["own"][""]) for q in range(lo, hi)]
        assert sorted(done) == sorted(mine[:-4]), "the last batch's step is not over yet"
    assert "base" in states[0]
    assert "base" not in states[1]
    fresh = make(Ids(64), shuffle=False)
    fresh.load_state_dict(states[0])
    assert fresh.state_dict()["own"] == {}
    for wrong in ({"v": 2}, {"fingerprint": "table of 65"}):
        with pytest.raises(DataMismatch, match="data state has"):
            fresh.load_state_dict(states[0] | wrong)


def test_other_data_under_the_same_name_is_refused(make: Callable[..., LeasedLoader]) -> None:
    """All workers read the same samples in the same order, or none."""
    make(Ids(32)).holder.ledger  # noqa: B018
    for other in (make(Ids(31)), make(Ids(32), seed=1), make(Ids(32), shuffle=False)):
        with pytest.raises(BadRequest, match="is open"):
            iter(other)


# ---- use ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bare_dataloader_is_refused(workers: int) -> None:
    """It would silently train on everything, on every worker."""
    rows = iter(DataLoader(ShardDataset(Ids(8)), 4, num_workers=workers))
    with pytest.raises(UsageError, match="elastic_loader"):
        next(rows)
    loader_feed.shut_down(rows)
    with pytest.raises(UsageError, match="elastic_loader"):
        next(iter(DataLoader(ShardDataset(Stream(Log(), ["a"])), 4)))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"drop_last": True}, "drop_last"),
        ({"sampler": SubsetRandomSampler([1, 2])}, "sampler"),
        ({"batch_size": None}, "batch_size"),
    ],
)
def test_loaders_that_fight_with_leases_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        LeasedLoader(DataLoader(ShardDataset(Ids(8)), **{"batch_size": 2, **options}))
    with pytest.raises(UsageError, match="contradicts"):
        LeasedLoader(DataLoader(ShardDataset(Ids(8), shuffle=False), 2, shuffle=True))


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Table(0), {}),
        (Table(8), {"shard_size": -1}),
        (Table(8), {"epochs": 0}),
        (Table(8), {"on_error": "ignore"}),
        (Stream(Log(), ["a"]), {"epochs": 2}),
    ],
)
def test_bad_settings(dataset: Any, options: dict[str, Any]) -> None:
    """Bad input: an empty dataset, and numbers that mean nothing."""
    with pytest.raises(UsageError):
        ShardDataset(dataset, **options)


def test_how_many_batches_is_not_known(make: Callable[..., LeasedLoader]) -> None:
    loader: Any = make(Ids(8))
    with pytest.raises(TypeError, match="no len"):
        len(loader)
    assert loader.num_workers == 0
    assert len(ShardDataset(Ids(8))) == 8


def test_an_error_in_the_loop_leaves_no_thread(make: Callable[..., LeasedLoader]) -> None:
    """Every thread has an owner that ends it."""
    loader, before = make(Ids(64)), set(threading.enumerate())

    def step() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    loader.close()
    assert "dlrover-hooks-leases" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_the_master_knows_the_worker_without_assertions_too() -> None:
    """As under `python -O`: what an assertion says must not be what does the work."""
    source = inspect.getsource(leased_module)
    names: dict[str, Any] = {"__name__": leased_module.__name__}
    exec(compile(source, "leased.py", "exec", optimize=1, dont_inherit=True), names)
    loader = names["LeasedLoader"](DataLoader(ShardDataset(Ids(8)), 2))
    assert loader.holder.opened
    loader.close()
