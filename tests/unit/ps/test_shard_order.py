"""The order of shards: each once in an epoch, the same after a restore, and refused for other data."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.errors import DataMismatch, UsageError
from dlrover_hooks.ps.shard_order import ShardOrder


def taken(order: ShardOrder) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while (shard := order.take()) is not None:
        found.append((shard.begin, shard.end))
    return found


@given(samples=st.integers(1, 200), size=st.integers(1, 50), epochs=st.integers(1, 3), shuffle=st.booleans())
def test_each_sample_is_handed_out_once_in_an_epoch(samples: int, size: int, epochs: int, shuffle: bool) -> None:
    order = ShardOrder(samples, size, epochs, shuffle=shuffle)
    found = taken(order)
    per_epoch = len(found) // epochs
    assert len(found) == order.total
    for epoch in range(epochs):
        part = found[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(one for begin, end in part for one in range(begin, end)) == list(range(samples))


def test_the_shards_of_each_epoch_have_another_order() -> None:
    order = ShardOrder(100, 1, 2)
    found = taken(order)
    assert found[:100] != found[100:]
    assert taken(ShardOrder(100, 1, 2, shuffle=False))[:3] == [(0, 1), (1, 2), (2, 3)]


@given(st.data())
def test_after_a_restore_exactly_the_other_shards_follow(data: st.DataObject) -> None:
    """Whatever was handed out behind the checkpoint is handed out again."""
    whole = taken(ShardOrder(50, 3, 2))
    saved_at = data.draw(st.integers(0, len(whole)))
    further = data.draw(st.integers(0, len(whole) - saved_at))
    order = ShardOrder(50, 3, 2)
    before = [order.take() for _ in range(saved_at)]
    state = msgspec.json.decode(msgspec.json.encode(order.state_dict()))
    order.commit()
    for _ in range(further):
        order.take()
    order.rollback()
    fresh = ShardOrder(50, 3, 2)
    fresh.load_state_dict(state)
    for one in (order, fresh):
        assert one.committed == saved_at
        assert [(s.begin, s.end) for s in before if s is not None] + taken(one) == whole


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (ShardOrder(51, 3, 2), "samples=50"),
        (ShardOrder(50, 4, 2), "shard_size=3"),
        (ShardOrder(50, 3, 2, seed=1), "seed=0"),
        (ShardOrder(50, 3, 2, shuffle=False), "order='shuffle'"),
    ],
)
def test_a_state_of_other_data_is_refused(other: ShardOrder, word: str) -> None:
    with pytest.raises(DataMismatch, match=word):
        other.load_state_dict(ShardOrder(50, 3, 2).state_dict())


def test_more_epochs_go_on_behind_a_finished_training() -> None:
    order = ShardOrder(50, 3, 1)
    taken(order)
    longer = ShardOrder(50, 3, 2)
    longer.load_state_dict(order.state_dict())
    assert len(taken(longer)) == order.total


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_are_positive(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="must be 1 or more"):
        ShardOrder(*sizes)
