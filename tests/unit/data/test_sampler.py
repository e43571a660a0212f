"""ElasticSampler alone."""

from __future__ import annotations

import json
import logging
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from dlrover_hooks.data.optimizer_step_hook import mark_on_step
from dlrover_hooks.data.sampler import ElasticSampler
from dlrover_hooks.errors import DataMismatch, UsageError


def take(sampler: ElasticSampler, batches: int) -> list[int]:
    """Receive some micro-batches as a loop would, and leave."""
    ids, source = [], iter(sampler)
    for _ in range(batches):
        ids += [next(source) for _ in range(sampler.plan.batch_size)]
        sampler.on_batch()
    del source
    return ids


def test_it_reads_like_a_distributed_sampler() -> None:
    """`train_loader.sampler.set_epoch(epoch)` works; Lightning leaves the type alone."""
    sampler = ElasticSampler(10, batch_size=2, global_batch_size=6, num_replicas=2, rank=1)
    assert isinstance(sampler, DistributedSampler)
    assert len(sampler.dataset) == 10
    assert (sampler.num_replicas, sampler.rank, sampler.epoch, sampler.drop_last) == (2, 1, 0, False)
    assert (sampler.num_samples, sampler.total_size) == (len(sampler), 10)


def test_set_epoch_does_not_rewind() -> None:
    """Accelerate counts epochs from 0 again after a resume."""
    sampler = ElasticSampler(8, batch_size=2)
    sampler.load_state_dict(ElasticSampler(8, batch_size=2).state_dict() | {"cursor": 12})
    sampler.set_epoch(0)
    assert sampler.epoch == 1
    assert len(list(sampler)) == 4


def test_mark_then_commit() -> None:
    """The cursor moves at a step boundary, to what the optimizer has finished; never ahead of it."""
    sampler = ElasticSampler(20, batch_size=2, global_batch_size=4)
    take(sampler, 3)
    sampler.commit()
    assert sampler.cursor == 0
    sampler.mark()
    assert sampler.cursor == 0
    sampler.commit()
    assert sampler.cursor == 4
    assert sampler.state_dict()["cursor"] == 4


def test_optimizer_hook_marks_and_is_weak() -> None:
    sampler, model = ElasticSampler(20, batch_size=2), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = mark_on_step(optimizer, sampler)
    take(sampler, 1)
    optimizer.step()
    assert sampler.commit() == 2
    handle.remove()
    sampler.on_batch()
    optimizer.step()
    assert sampler.commit() == 2
    mark_on_step(optimizer, sampler)
    held = weakref.ref(sampler)
    del sampler
    optimizer.step()
    assert held() is None


def test_skipped_step_is_marked_by_the_next() -> None:
    """GradScaler skips a step: its samples count as consumed at the next one."""
    sampler = ElasticSampler(20, batch_size=2)
    take(sampler, 3)
    sampler.mark()
    assert sampler.commit() == 6


def test_restore_continues_and_length_stays_whole() -> None:
    """Lightning compares restored counts with `__len__`."""
    whole = list(ElasticSampler(21, batch_size=2, seed=3))
    first = ElasticSampler(21, batch_size=2, seed=3)
    seen = take(first, 4)
    first.mark()
    first.commit()
    second = ElasticSampler(21, batch_size=2, seed=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert len(second) == 21
    loader = DataLoader(range(21), 2, sampler=second)  # type: ignore[arg-type]
    assert len(loader) == 11
    assert seen + list(second) == whole
    assert len(second) == 21


def test_epochs_advance_by_consumption() -> None:
    sampler = ElasticSampler(8, batch_size=2)
    zero = take(sampler, 0) + list(iter(sampler))[:0]
    assert zero == []
    assert sampler.progress.base == 0
    take(sampler, 0)
    assert sampler.progress.base in (0, 8)  # uncounted: what was issued decides
    counted = ElasticSampler(8, batch_size=2)
    counted.progress.counted = True
    for _ in range(2):
        iter(counted)
    assert counted.begin() == 0
    take(counted, 4)
    assert counted.begin() == 8
    take(counted, 1)
    assert counted.begin() == 8  # to look at a batch begins no epoch
    take(counted, 1)
    counted.mark()
    assert counted.begin() == 16
    assert counted.mark() == 16


def test_alone_in_a_plain_loader_the_epochs_still_differ(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody counts: epochs advance all the same, and asking for a state warns that it does not move."""
    sampler = ElasticSampler(50, batch_size=5)
    loader = DataLoader(range(50), 5, sampler=sampler)  # type: ignore[arg-type]
    epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    with caplog.at_level(logging.WARNING):
        assert sampler.state_dict()["cursor"] == 0
    assert "are not called" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"n": 9},
        {"seed": 1},
        {"order": "sequential"},
        {"block": 64},
        {"window": 8},
        {"algo": "feistel6"},
        {"v": 1},
        {"cursor": -1},
        {"cursor": "4"},
        {"G": 0},
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any]) -> None:
    sampler = ElasticSampler(8, batch_size=2)
    state = sampler.state_dict() | {"cursor": 4}
    (field, there), here = next(iter(change.items())), state[next(iter(change))]
    with pytest.raises(DataMismatch, match=f"{field}={there!r}") as caught:
        sampler.load_state_dict(state | change)
    assert field in ("cursor", "G") or repr(here) in caught.value.message  # both values are named
    assert caught.value.hint
    assert sampler.cursor == 0
    with pytest.raises(DataMismatch):
        sampler.load_state_dict({k: v for k, v in state.items() if k not in change})


def test_state_is_refused_while_an_iterator_is_live() -> None:
    sampler = ElasticSampler(8, batch_size=2)
    source = iter(sampler)
    next(source)
    for call in (lambda: sampler.load_state_dict(sampler.state_dict()), lambda: sampler.resize(1, 0)):
        with pytest.raises(UsageError, match="live"):
            call()
    sampler.close()
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(UsageError, match="ended"):
        next(source)


def test_global_batch_comes_from_the_state_unless_given(caplog: pytest.LogCaptureFixture) -> None:
    state = ElasticSampler(40, batch_size=2, global_batch_size=16).state_dict()
    heir = ElasticSampler(40, batch_size=4, num_replicas=2, rank=0)
    heir.load_state_dict(state)
    assert heir.plan.global_batch_size == 16
    assert heir.plan.micro_batches == 2
    explicit = ElasticSampler(40, batch_size=2, global_batch_size=4)
    explicit.load_state_dict(state)
    assert explicit.plan.global_batch_size == 4
    assert "not used" in caplog.text


def test_default_global_batch_is_that_of_the_first_start() -> None:
    sampler = ElasticSampler(40, batch_size=2, num_replicas=1)
    sampler.resize(4, 1)
    assert sampler.plan.global_batch_size == 8
    sampler.begin()
    sampler.resize(2, 1)
    assert sampler.plan.global_batch_size == 8
    assert sampler.plan.micro_batches == 2


def test_shares_of_the_round_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """For steps of so many micro-batches, also once a state has told the global batch; even in another world."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("DLROVER_HOOKS_SHARES", '{"total":8,"ranks":[{"rank":1,"micro_batches":2}]}')
    state = ElasticSampler(40, batch_size=2, global_batch_size=16).state_dict()
    seen = list[int]()
    for rank, share in ((0, 6), (1, 2)):
        monkeypatch.setenv("RANK", str(rank))
        sampler = ElasticSampler(40, batch_size=2)
        assert sampler.plan.shares == (1, 1)
        sampler.load_state_dict(state)
        assert (sampler.plan.shares, sampler.plan.micro_batches) == ((6, 2), share)
        seen += list(sampler)
        assert ElasticSampler(40, batch_size=2, num_replicas=1, global_batch_size=16).plan.shares == (8,)
    assert sorted(seen) == list(range(40))
    sampler.resize(2, 1)
    assert sampler.plan.shares == (4, 4)


def test_world_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    sampler = ElasticSampler(40, batch_size=2)
    assert (sampler.num_replicas, sampler.rank, sampler.plan.global_batch_size) == (4, 3, 8)


def test_weight_and_scale_follow_the_received_batch() -> None:
    """N = 5 on 3 ranks, 46 samples: two full steps, then 6 left as 2, 2, 2 in proportion to m = 2, 2, 1."""
    sampler = ElasticSampler(46, batch_size=4, global_batch_size=20, num_replicas=3, rank=0)
    sampler.begin()
    seen = []
    for _ in range(sampler.plan.length()):
        sampler.on_batch()
        seen.append((sampler.weight, sampler.step_ends))
    assert seen[:4] == [(0.4, False), (0.4, True)] * 2
    assert seen[4][1]
    assert sampler.progress.finished


@pytest.mark.parametrize("bad", [{"seed": -1}, {"batch_size": 0}, {"tail": "pad"}, {"order": "odd"}, {"block": 3}])
def test_bad_arguments(bad: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"batch_size": 2} | bad
    with pytest.raises(UsageError):
        ElasticSampler(8, **arguments)
    with pytest.raises(UsageError, match="0 samples"):
        ElasticSampler([], batch_size=2)


def test_a_billion_samples_start_at_once() -> None:
    sampler = ElasticSampler(10**9, batch_size=32, num_replicas=8, rank=5)
    ids = take(sampler, 3)
    assert len(set(ids)) == 96
    assert sampler.order.algo == "feistel6"


def test_drop_never_gives_a_short_step() -> None:
    sampler = ElasticSampler(11, batch_size=4, tail="drop")
    take(sampler, 2)
    assert sampler.progress.finished
    assert sampler.mark() == 11
    assert len(sampler) == 8
    with pytest.raises(UsageError, match="drop all"):
        ElasticSampler(3, batch_size=4, tail="drop")


def test_a_larger_batch_may_end_the_epoch_at_once() -> None:
    """Tail "drop", 3 of 11 samples left: with the old batch a step, with the new one none."""
    sampler = ElasticSampler(11, batch_size=4, global_batch_size=4, tail="drop")
    sampler.load_state_dict(sampler.state_dict() | {"cursor": 8, "G": 3})
    assert sampler.begin() == 11


def test_every_kind_of_order_keeps_its_place() -> None:
    """Blocks and sequential continue at a position like the shuffle does, and say what they are."""
    kinds: list[dict[str, Any]] = [
        {"order": "blocks", "block": 3, "window": 2},
        {"order": "sequential"},
        {"shuffle": False},
    ]
    for options in kinds:
        whole = list(ElasticSampler(41, batch_size=2, **options))
        first = ElasticSampler(41, batch_size=2, **options)
        seen = take(first, 5)
        first.mark()
        first.commit()
        second = ElasticSampler(41, batch_size=2, **options)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert seen + list(second) == whole
        assert sorted(whole) == list(range(41))
    state = ElasticSampler(41, batch_size=2, order="blocks", block=3, window=2).state_dict()
    assert (state["order"], state["block"], state["window"], state["algo"]) == ("blocks", 3, 2, "blocks12")
    with pytest.raises(DataMismatch, match="block=3, here it is 4"):
        ElasticSampler(41, batch_size=2, order="blocks", block=4, window=2).load_state_dict(state)


def test_carry_fills_the_last_step_with_the_next_epoch() -> None:
    """Every step is full and each sample comes once an epoch; the length of an epoch says so."""
    sampler = ElasticSampler(10, batch_size=4, tail="carry", shuffle=False)
    assert not sampler.fixed_length
    seen, lengths = [], []
    for _ in range(2):
        lengths.append((len(sampler), sampler.micro_batches()))
        seen.append(take(sampler, sampler.micro_batches()))
        sampler.mark()
    assert lengths == [(12, 3), (8, 2)]
    assert seen == [[*range(10), 0, 1], [*range(2, 10)]]
    assert sampler.commit() == 20
    assert len(sampler) == 12


def test_carry_over_a_restore() -> None:
    first = ElasticSampler(10, batch_size=4, tail="carry", seed=5)
    seen = take(first, 3)
    first.mark()
    first.commit()
    second = ElasticSampler(10, batch_size=2, global_batch_size=4, tail="carry", seed=5, num_replicas=2, rank=0)
    second.load_state_dict(first.state_dict())
    assert (second.epoch, second.micro_batches()) == (1, 2)
    other = ElasticSampler(10, batch_size=2, global_batch_size=4, tail="carry", seed=5, num_replicas=2, rank=1)
    other.load_state_dict(first.state_dict())
    assert sorted(seen[10:] + list(second) + list(other)) == list(range(10))


def test_batches_come_as_arrays() -> None:
    """`yield_batches`: the same ids in the same micro-batches, and a length in micro-batches."""
    for n, world in ((21, 1), (46, 3)):
        for rank in range(world):
            options: dict[str, Any] = {"batch_size": 4, "global_batch_size": 4 * world, "num_replicas": world}
            plain = ElasticSampler(n, rank=rank, **options)
            arrays = ElasticSampler(n, rank=rank, yield_batches=True, **options)
            got = list(arrays)
            assert all(part.dtype == np.int64 and 1 <= len(part) <= 4 for part in got)
            assert np.concatenate(got).tolist() == list(plain)
            assert len(arrays) == len(got) == plain.plan.length()


@pytest.mark.parametrize(("n", "b", "N", "world"), [(46, 4, 5, 3), (7, 2, 4, 4), (3, 4, 4, 4), (41, 3, 3, 2)])
def test_sample_weights_are_the_global_mean(n: int, b: int, N: int, world: int) -> None:
    """Per step, over all ranks and micro-batches: 1 / samples each, a ghost 0.0."""
    samplers = [
        ElasticSampler(n, batch_size=b, global_batch_size=b * N, num_replicas=world, rank=r) for r in range(world)
    ]
    sources = [iter(sampler) for sampler in samplers]
    for start in range(0, n, b * N):
        losses = 0.0
        for sampler, source in zip(samplers, sources, strict=True):
            sampler.on_batch()
            while True:
                weights = sampler.sample_weights()
                ids = [next(source) for _ in weights]
                losses += float((weights * np.array(ids)).sum())
                if sampler.step_ends:
                    break
                sampler.on_batch()
        positions = np.arange(start, min(start + b * N, n))
        assert losses == pytest.approx(samplers[0].order.indices(0, positions).mean())


def test_resize_in_a_live_run_goes_on_behind_what_was_received() -> None:
    """Design 3: only a restore goes back to the commit. Here nothing was committed, and nothing is repeated."""
    sampler = ElasticSampler(20, batch_size=2, global_batch_size=4, shuffle=False)
    sampler.progress.counted = True
    assert take(sampler, 4) == [*range(8)]
    sampler.resize(2, 1)
    assert (sampler.cursor, sampler.plan.micro_batches) == (0, 1)
    assert take(sampler, 1) == [10, 11]
    sampler.mark()
    assert sampler.commit() == 12
    sampler.rollback()
    assert take(sampler, 1) == [14, 15]


def test_rollback_replays_what_was_not_committed() -> None:
    sampler = ElasticSampler(20, batch_size=2, shuffle=False)
    take(sampler, 2)
    sampler.mark()
    sampler.commit()
    sampler.close()
    take(sampler, 0)
    sampler.rollback()
    assert next(iter(sampler)) == 4


def test_resize_in_mid_step_is_refused() -> None:
    sampler = ElasticSampler(20, batch_size=2, global_batch_size=6)
    take(sampler, 2)
    with pytest.raises(UsageError, match="2 of its 3 micro-batches") as caught:
        sampler.resize(3, 0)
    assert "rollback" in str(caught.value.hint)
    sampler.rollback()
    sampler.resize(3, 0)


def test_a_dataset_without_a_length_is_refused() -> None:
    with pytest.raises(UsageError, match="no length"):
        ElasticSampler(iter([1]), batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [1, 3, 5])
def test_fewer_samples_than_workers_or_than_a_batch(world: int) -> None:
    """Tail "ghost" trains them once: workers without a sample run a ghost of weight 0."""
    samplers = [ElasticSampler(2, batch_size=4, num_replicas=world, rank=rank) for rank in range(world)]
    seen = []
    for sampler in samplers:
        sampler.begin()
        ids = list(sampler)
        sampler.on_batch()
        assert sampler.step_ends
        seen += ids if sampler.weight else []
    assert sorted(seen) == [0, 1]
    assert sum(sampler.weight for sampler in samplers) == pytest.approx(1)


@pytest.mark.parametrize(("batch_size", "world", "micro_batches"), [(32, 1, 16), (12, 1, 8), (16, 3, 4), (5, 2, 4)])
def test_the_global_batch_stays_when_the_batch_size_or_the_world_grows(
    batch_size: int, world: int, micro_batches: int
) -> None:
    """The first start had batches of 16 on one worker. What `batch_size` says is the most that a micro-batch has."""
    first = ElasticSampler(64, batch_size=16, num_replicas=1, rank=0)
    ranks = [ElasticSampler(64, batch_size=batch_size, num_replicas=world, rank=rank) for rank in range(world)]
    for sampler in ranks:
        sampler.load_state_dict(first.state_dict())
        assert (sampler.plan.global_batch_size, sampler.plan.batch_size) == (16, micro_batches)
    steps = [[next(found) for _ in range(sampler.plan.micro_batches * micro_batches)]
             for sampler in ranks for found in [iter(sampler)]]  # fmt: skip
    alone = iter(first)
    assert sorted(one for step in steps for one in step) == sorted(next(alone) for _ in range(16))
    back = ranks[0]
    back.close()
    back.rollback()
    back.resize(1, 0)
    assert back.plan.batch_size == max(size for size in range(1, batch_size + 1) if 16 % size == 0)


def test_more_workers_than_samples_in_a_step_are_refused() -> None:
    sampler = ElasticSampler(64, batch_size=4, num_replicas=5, rank=0)
    with pytest.raises(UsageError, match="use at most 4 workers"):
        sampler.load_state_dict(ElasticSampler(64, batch_size=4, num_replicas=1, rank=0).state_dict())
