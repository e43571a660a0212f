"""Samples and files that cannot be read: what is lost is said, and nothing else is (ShardDataset)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.data.leased.leased_loader import LeasedLoader
from dlrover_hooks.data.leased.sources import Files, Stream, TextRecords
from dlrover_hooks.errors import (
    DataMismatch,
    ShardsFailed,
)
from tests.unit.data.lent import WORKERS, Ids, Master, gather, marked, train


class Records:
    """A stream of numbers without end; the partition `empty` has none."""

    def __init__(self, empty: str) -> None:
        self.empty = empty

    def read(self, partition: str, lo: int, hi: int) -> Sequence[int]:
        return range(lo, lo if partition == self.empty else hi)


# ---- what cannot be read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_a_torn_sample_costs_itself_only(
    make: Callable[..., LeasedLoader], master: Master, options: dict[str, Any]
) -> None:
    """Reported, tried three times, quarantined, and told loudly at the end; everything else exactly once."""
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
        list(marked(loader))
    assert [(one.lo, one.hi) for one in caught.value.quarantined] == [(4, 8)]


def test_a_bug_in_the_dataset_is_not_quarantine(make: Callable[..., LeasedLoader]) -> None:
    """When nothing at all can be read it is not the data: stop, with the traceback."""
    with pytest.raises(ShardsFailed, match=r"none succeeded(.|\n)*Traceback"):
        list(marked(make(Ids(10_000, bad=range(10_000)))))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_changed_stops_training(make: Callable[..., LeasedLoader], tmp_path: Path, workers: int) -> None:
    """Bad input: no quarantine for it, training on other data is refused."""
    path = tmp_path / "text"
    path.write_text("a\n" * 40)
    loader = make(TextRecords(path), loader={"num_workers": workers})
    path.write_text("b\n" * 41)
    with pytest.raises(DataMismatch, match="changed since it was split"):
        list(marked(loader))


def test_unreadable_files_are_listed(make: Callable[..., LeasedLoader], tmp_path: Path) -> None:
    """Bad input: an unreadable file in a list."""
    paths = [tmp_path / f"f{number}" for number in range(6)]
    for number, path in enumerate(paths):
        if number != 4:
            path.write_bytes(b"%d" % number)
    loader = make(Files(paths), loader={"collate_fn": list})
    seen: list[Any] = []
    with pytest.raises(ShardsFailed, match=r"f4: FileNotFoundError"):
        gather(loader, loader, seen)
    assert sorted(seen) == [b"0", b"1", b"2", b"3", b"5"]
