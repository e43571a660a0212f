"""ElasticSampler alone."""

from __future__ import annotations

import json
import logging
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from dlrover_hooks.data.marks import mark_on_step
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
    """ED-34: `train_loader.sampler.set_epoch(epoch)` works; Lightning leaves the type alone."""
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
    """The cursor moves at a quiet point, to what the optimizer has finished; never ahead of it."""
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
    """ED-25. Lightning compares restored counts with `__len__`."""
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
    assert "nobody calls on_batch" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"n": 9},
        {"seed": 1},
        {"shuffle": False},
        {"algo": "feistel6"},
        {"v": 2},
        {"cursor": -1},
        {"cursor": "4"},
        {"G": 0},
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any]) -> None:
    sampler = ElasticSampler(8, batch_size=2)
    state = sampler.state_dict() | {"cursor": 4}
    with pytest.raises(DataMismatch, match=next(iter(change))) as caught:
        sampler.load_state_dict(state | change)
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


def test_world_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    sampler = ElasticSampler(40, batch_size=2)
    assert (sampler.num_replicas, sampler.rank, sampler.plan.global_batch_size) == (4, 3, 8)


def test_weight_and_scale_follow_the_received_batch() -> None:
    """DL-88: N = 5 on 3 ranks, 46 samples: two full steps, then 6 left as 2, 2, 2 in proportion to m = 2, 2, 1."""
    sampler = ElasticSampler(46, batch_size=4, global_batch_size=20, num_replicas=3, rank=0)
    sampler.begin()
    seen = []
    for _ in range(sampler.plan.length()):
        sampler.on_batch()
        seen.append((sampler.weight, sampler.step_ends))
    assert seen[:4] == [(0.4, False), (0.4, True)] * 2
    assert seen[4][1]
    assert sampler.progress.finished


@pytest.mark.parametrize("bad", [{"seed": -1}, {"batch_size": 0}, {"tail": "carry"}])
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
