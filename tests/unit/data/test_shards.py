"""ShardDataset and LeasedLoader on the real core: exactly once, acknowledged in order, loud about what is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler

from dlrover_hooks import protocol as p
from dlrover_hooks.alone import Alone
from dlrover_hooks.data import feed
from dlrover_hooks.data.leased import LeasedLoader
from dlrover_hooks.data.leases import Held
from dlrover_hooks.data.order import Order
from dlrover_hooks.data.shards import Read, ShardDataset
from dlrover_hooks.data.sources import Files, Stream, Table, TextRecords
from dlrover_hooks.data.tally import Piece
from dlrover_hooks.errors import (
    BadRequest,
    DataMismatch,
    HooksError,
    MasterAway,
    ShardsFailed,
    Stale,
    UnknownDataset,
    UsageError,
)
from dlrover_hooks.ranges import Ranges

JOB = "job"


class Ids(Dataset[int]):
    """n samples, each its own number; those in `bad` cannot be read."""

    def __init__(self, n: int, bad: Sequence[int] = ()) -> None:
        self.n, self.bad = n, bad

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError(f"sample {index} is torn")
        return index


class Master(Alone):
    """The real core, with a log of requests and a way to break answers."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[p.Message] = []
        self.spoil: Callable[[p.Message], None] = lambda _: None
        self.change: Callable[[Any], Any] = lambda reply: reply

    def call(self, request: p.Message, **options: Any) -> Any:
        self.spoil(request)
        self.log.append(request)
        return self.change(super().call(request, **options))

    def view(self) -> p.LedgerView:
        return super().call(p.ShowLedger(JOB, "train"))


class Records:
    """A stream of numbers without end; the partition `empty` has none."""

    def __init__(self, empty: str) -> None:
        self.empty = empty

    def read(self, partition: str, lo: int, hi: int) -> Sequence[int]:
        return range(lo, lo if partition == self.empty else hi)


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def make(master: Master) -> Iterator[Callable[..., LeasedLoader]]:
    made: list[LeasedLoader] = []

    def loader(dataset: Any, b: int = 4, *, loader: dict[str, Any] | None = None, **options: Any) -> LeasedLoader:
        shards = ShardDataset(dataset, **{"shard_size": 8, **options})
        one = LeasedLoader(DataLoader(shards, b, **(loader or {})))
        one.connect(master, JOB, f"worker{len(made)}", free=True, rank=len(made))
        made.append(one)
        return one

    yield loader
    for one in made:
        one.close()


def train(loader: LeasedLoader, epochs: int | None = None) -> list[tuple[int, int]]:
    """(epoch, sample) of everything trained on, a step for each batch."""
    seen: list[tuple[int, int]] = []
    for epoch in loader.epochs(epochs):
        for batch in loader:
            seen += [(epoch, int(sample)) for sample in batch]
            loader.mark()
    return seen


def gather(rows: Any, loader: LeasedLoader, seen: list[Any]) -> None:
    """Train on what comes, and keep it when an error ends the loop."""
    for batch in rows:
        seen += batch.tolist() if isinstance(batch, torch.Tensor) else batch
        loader.mark()


def once(n: int, epochs: int = 1) -> Counter[tuple[int, int]]:
    return Counter((epoch, sample) for epoch in range(epochs) for sample in range(n))


WORKERS = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True},
]


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_every_sample_once_in_every_epoch(
    make: Callable[..., LeasedLoader], master: Master, options: dict[str, Any]
) -> None:
    """DL-63..69: all of each epoch, whatever the DataLoader prefetches; the books say so too."""
    assert Counter(train(make(Ids(50), epochs=2, loader=options))) == once(50, 2)
    view = master.view()
    assert (view.done, view.todo, view.leases) == (100, 0, 0)


def test_the_order_is_that_of_the_epoch(make: Callable[..., LeasedLoader]) -> None:
    """DL-64: positions travel, the worker knows which samples they are; each epoch is shuffled anew."""
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


def test_workers_of_different_speed_share_the_work(make: Callable[..., LeasedLoader], master: Master) -> None:
    """DL-71, DL-72, EZ-11, EZ-12: whoever is faster does more, all is done once, nobody waits for a fixed part."""
    loaders = [make(Ids(200), epochs=2) for _ in range(3)]
    seen: list[list[tuple[int, int]]] = [[], [], []]
    steps = threading.Semaphore(10)  # what the slow ones may do

    def work(number: int) -> None:
        for epoch in loaders[number].epochs():
            for batch in loaders[number]:
                if number:
                    steps.acquire(timeout=0.02)
                seen[number] += [(epoch, sample) for sample in batch.tolist()]
                loaders[number].mark()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert Counter(seen[0] + seen[1] + seen[2]) == once(200, 2)
    assert len(seen[0]) > max(len(seen[1]), len(seen[2]))
    assert master.view().done == 400


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_nothing_is_acknowledged_before_its_step_is_over(
    make: Callable[..., LeasedLoader], master: Master, options: dict[str, Any]
) -> None:
    """DL-68, DL-69: received is not done, nor is marked; done is what was marked when the next batch is asked for."""
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
    with pytest.raises(UsageError, match="nobody says when the optimizer steps"):
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
    """DL-73: graceful scale-down: what was done stays done, in mid-lease too, and the rest is somebody else's."""
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
    """As every DataLoader: the next `iter` is the next epoch; one too many is an error that says what to do."""
    loader = make(Ids(32), epochs=2)
    assert next(iter(loader)) is not None
    assert len(list(_marked(loader))) == 8
    assert loader.state_dict()["epoch"] == 2
    with pytest.raises(UsageError, match="lent out for 2 epochs, and they are over"):
        iter(loader)
    with pytest.raises(UsageError, match="did not iterate the loader in epoch 0"):
        list(make(Ids(32), name="other", epochs=2).epochs())
    with pytest.raises(UsageError, match="lent out for 2 epochs, not 3"):
        list(loader.epochs(3))


def _marked(rows: Any, loader: LeasedLoader | None = None) -> Iterator[Any]:
    for batch in rows:
        yield batch
        (rows if loader is None else loader).mark()


def test_a_late_worker_skips_what_is_finished(make: Callable[..., LeasedLoader]) -> None:
    """EZ-15: started when epoch 0 is over, it begins with what is left."""
    first = make(Ids(32), epochs=2)
    for _ in _marked(first):
        pass
    assert list(dict(train(make(Ids(32), epochs=2)))) == [1]


def test_the_state_is_what_is_committed(make: Callable[..., LeasedLoader]) -> None:
    """ED-25, issue 3: the cut of a rank; the union over the ranks is what the checkpoint holds."""
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


# ---- what cannot be read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_a_torn_sample_costs_itself_only(
    make: Callable[..., LeasedLoader], master: Master, options: dict[str, Any]
) -> None:
    """Issue 3: reported, tried three times, quarantined, and told loudly at the end; everything else exactly once."""
    loader = make(Ids(50, bad=(13, 37)), loader=options, shuffle=False)
    seen: list[Any] = []
    with pytest.raises(ShardsFailed, match=r"2 samples of this epoch could not be read[^H]*is torn") as caught:
        gather(loader, loader, seen)
    assert Counter(seen) == Counter(sample for sample in range(50) if sample not in (13, 37))
    assert [(one.lo, one.hi) for one in caught.value.quarantined] == [(13, 14), (37, 38)]
    assert "row 13: OSError" in caught.value.quarantined[0].reason
    assert (master.view().done, master.view().leases) == (48, 0)
    failed = [ack.failed for one in master.log if isinstance(one, p.TakeLeases) for ack in one.acks if ack.failed]
    assert len(failed) == 6


@pytest.mark.parametrize(
    "lent",
    [
        Ids(9, bad=[0]),
        Stream(Records(empty="a"), ["a", "b"]),
        Stream(Records(empty="a"), [p.Partition("none", 0, 0), "a", "b"]),
    ],
)
def test_a_rank_without_data_takes_any_sample_that_can_be_read(make: Callable[..., LeasedLoader], lent: Any) -> None:
    """One torn sample must not end the ranks that train on the others."""
    assert len(make(lent)._stand_in()) == 1


def test_a_rank_without_data_says_that_there_is_none(make: Callable[..., LeasedLoader]) -> None:
    with pytest.raises(ShardsFailed, match="no sample to stand in on a rank without data: row 8: OSError"):
        make(Ids(9, bad=range(9)))._stand_in()


def test_on_error_warn_goes_on(make: Callable[..., LeasedLoader]) -> None:
    """on_error="warn": said as loudly, but the run goes on."""
    loader = make(Ids(20, bad=(3,)), on_error="warn")
    with pytest.warns(RuntimeWarning, match="1 samples of this epoch"):
        assert len(train(loader)) == 19


def test_a_sample_that_another_worker_can_read_is_not_lost(make: Callable[..., LeasedLoader]) -> None:
    """A disk that only one node cannot read: the others do its share."""
    torn, sound = make(Ids(40, bad=(5,)), shuffle=False), make(Ids(40), shuffle=False)
    rows = iter(torn)
    mine: list[int] = []
    while 4 not in mine:
        mine += next(rows).tolist()
        torn.mark()
    torn.finish()
    assert Counter(mine + [sample for _, sample in train(sound)]) == Counter(range(40))


def test_a_batch_that_cannot_be_collated_fails_as_a_whole(make: Callable[..., LeasedLoader]) -> None:
    """It is not known which of its samples is to blame."""

    def collate(samples: list[int]) -> list[int]:
        if 6 in samples:
            raise ValueError("odd one out")
        return samples

    loader = make(Ids(20), shuffle=False, loader={"collate_fn": collate})
    with pytest.raises(ShardsFailed, match="collate_fn: ValueError: odd one out") as caught:
        list(_marked(loader))
    assert [(one.lo, one.hi) for one in caught.value.quarantined] == [(4, 8)]


def test_a_bug_in_the_dataset_is_not_quarantine(make: Callable[..., LeasedLoader]) -> None:
    """When nothing at all can be read it is not the data: stop, with the traceback."""
    with pytest.raises(ShardsFailed, match=r"none succeeded(.|\n)*Traceback"):
        list(_marked(make(Ids(10_000, bad=range(10_000)))))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_changed_stops_training(make: Callable[..., LeasedLoader], tmp_path: Path, workers: int) -> None:
    """Issue 3, bad input: no quarantine for it, training on other data is refused."""
    path = tmp_path / "text"
    path.write_text("a\n" * 40)
    loader = make(TextRecords(path), loader={"num_workers": workers})
    path.write_text("b\n" * 41)
    with pytest.raises(DataMismatch, match="changed since it was split"):
        list(_marked(loader))


def test_unreadable_files_are_listed(make: Callable[..., LeasedLoader], tmp_path: Path) -> None:
    """Issue 3, bad input: an unreadable file in a list."""
    paths = [tmp_path / f"f{number}" for number in range(6)]
    for number, path in enumerate(paths):
        if number != 4:
            path.write_bytes(b"%d" % number)
    loader = make(Files(paths), loader={"collate_fn": list})
    seen: list[Any] = []
    with pytest.raises(ShardsFailed, match=r"f4: FileNotFoundError"):
        gather(loader, loader, seen)
    assert sorted(seen) == [b"0", b"1", b"2", b"3", b"5"]


# ---- streams --------------------------------------------------------------------------------------------------------


class Log:
    """Two partitions of records; `b` turns out to end at 21."""

    def read(self, partition: str, lo: int, hi: int) -> Sequence[tuple[str, int]]:
        return [(partition, offset) for offset in range(lo, min(hi, {"a": 30, "b": 21}[partition]))]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_until_its_end(make: Callable[..., LeasedLoader], master: Master, workers: int) -> None:
    """Issue 3 item 3: partitions and offsets, an end that is known and one that is found out."""
    stream = Stream(Log(), [p.Partition(name="a", begin=10, end=30), "b"])
    loader = make(stream, loader={"collate_fn": list, "num_workers": workers})
    seen: list[tuple[str, int]] = []
    for batch in loader:
        seen += batch
        loader.mark()
    assert Counter(seen) == Counter([("a", q) for q in range(10, 30)] + [("b", q) for q in range(21)])
    assert (master.view().done, master.view().todo) == (41, 0)


# ---- the master -----------------------------------------------------------------------------------------------------


def test_without_a_master_the_leases_at_hand_are_trained_on(make: Callable[..., LeasedLoader], master: Master) -> None:
    """Issue 3: the master away: what is held is worked off, then a clear error."""
    loader = make(Ids(64), patience_s=0.2)
    rows = iter(loader)

    def away(request: p.Message) -> None:
        raise MasterAway(f"no answer to {type(request).__name__}")

    master.spoil = away
    seen: list[Any] = []
    with pytest.raises(MasterAway, match="no lease to train on"):
        gather(rows, loader, seen)
    assert len(seen) == 16


@pytest.mark.parametrize("error", [Stale("fence 1 is over"), UnknownDataset("nobody has opened it")])
def test_a_stale_fence_is_an_error_and_not_the_end(
    make: Callable[..., LeasedLoader], master: Master, error: HooksError
) -> None:
    """Issue 3, bad input: never read as "finished"."""
    loader = make(Ids(64))
    rows = iter(loader)

    def refuse(request: p.Message) -> None:
        if isinstance(request, p.TakeLeases):
            raise error

    master.spoil = refuse
    with pytest.raises(type(error), match="dataset 'train'"):
        gather(rows, loader, [])


def test_a_lease_that_ran_out_is_not_trained_on(
    make: Callable[..., LeasedLoader], master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    """The master may have lent it to another worker already: what is left of it is dropped here, and done there."""

    def brief(reply: Any) -> Any:
        if isinstance(reply, p.Leases) and reply.leases:
            master.change = lambda reply: reply
            lent = (msgspec.structs.replace(reply.leases[0], within_s=0.0), *reply.leases[1:])
            return msgspec.structs.replace(reply, leases=lent)
        return reply

    master.change = brief
    seen = [sample for _, sample in train(make(Ids(40)))]
    assert Counter(seen) == Counter(range(40))
    assert "was not worked off in its time" in caplog.text


class Lender:
    """One lease, and what was said about it."""

    def __init__(self) -> None:
        self.held = Held(p.Lease(1, "", 0, 16, 600.0), time.monotonic() + 600.0)
        self.state, self.dry, self.ready, self.claim = p.LedgerState.OPEN, True, True, "dataset"
        self.stops: list[int] = []

    def take(self) -> Held:
        self.ready = False
        return self.held

    def stop(self, held: Held, at: int) -> None:
        held.end = at
        self.stops.append(at)


def test_a_batch_whose_lease_ran_out_on_its_way_is_dropped() -> None:
    """It was prefetched in time, but the master may have lent it to another worker since."""
    lender: Any = Lender()
    one = feed.Feed(lender, None, 4)
    picks = one.picks()
    assert [next(picks).lo for _ in range(4)] == [0, 4, 8, 12]
    one.rows = iter([Read(number, 4) for number in range(4)])
    assert one.pull(lambda: True) == feed.Delivery(Piece(lender.held, 0, 4), 0)
    lender.held.until = 0.0
    assert one.pull(lambda: True) is None
    assert lender.stops == [4]


def test_the_loop_does_not_wait_for_the_master(make: Callable[..., LeasedLoader], master: Master) -> None:
    """Issue 3: while the master thinks about the next lease the one ahead is trained on."""
    loader = make(Ids(64), lookahead=1)
    rows = iter(loader)
    thinking, think = threading.Event(), threading.Event()

    def slow(request: p.Message) -> None:
        if isinstance(request, p.TakeLeases):
            thinking.set()
            assert think.wait(10)

    master.spoil = slow
    for number in range(4):  # two leases of two batches
        next(rows)
        loader.mark()
        if number >= 2:
            assert thinking.wait(10)
    assert loader.waited_s < 1.0
    threading.Timer(0.05, think.set).start()
    assert len(list(_marked(rows, loader))) == 12


def test_a_worker_by_itself_keeps_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without master and session one process works alone; several are told what to do."""
    for name in ("DLROVER_HOOKS_MASTER", "DLROVER_HOOKS_JOB", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    loader = LeasedLoader(DataLoader(ShardDataset(Ids(20)), 4))
    assert Counter(train(loader)) == once(20)
    loader.close()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="2 workers need a master"):
        iter(LeasedLoader(DataLoader(ShardDataset(Ids(20)), 4)))


def test_a_master_without_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each worker would make a job of its own and train on everything."""
    for name in ("DLROVER_HOOKS_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DLROVER_HOOKS_MASTER", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match="the master is known but not the job"):
        iter(LeasedLoader(DataLoader(ShardDataset(Ids(20)), 4)))


# ---- use ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bare_dataloader_is_refused(workers: int) -> None:
    """It would silently train on everything, on every worker."""
    rows = iter(DataLoader(ShardDataset(Ids(8)), 4, num_workers=workers))
    with pytest.raises(UsageError, match="elastic_loader"):
        next(rows)
    feed.shut_down(rows)
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
    """Issue 3, bad input: an empty dataset, and numbers that mean nothing."""
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
    loader = make(Ids(64))

    def step() -> None:
        for _ in loader:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    loader.close()
    assert "dlrover-hooks-leases" not in [thread.name for thread in threading.enumerate()]
