"""Any sequence of live resizes, restores, crashes and prefetches visits each index exactly once per epoch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset

from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.data.order import Order
from dlrover_hooks.data.sampler import ElasticSampler


class Worker:
    """One rank as a training loop sees it: a loader that prefetches, micro-batches of ints, a mark per step."""

    def __init__(self, state: dict[str, Any] | None, rank: int, world: int, **options: Any) -> None:
        self.sampler = ElasticSampler(rank=rank, num_replicas=world, **options)
        if state is not None:
            self.sampler.load_state_dict(json.loads(json.dumps(state)))

    def start(self, ahead: int) -> None:
        self.ids, self.ahead, self.queue = iter(self.sampler), ahead, list[list[int]]()

    def batch(self) -> list[int]:
        while len(self.queue) <= self.ahead:
            self.queue.append(list(_take(self.ids, self.sampler.plan.batch_size)))
        self.sampler.on_batch()
        return self.queue.pop(0)

    def step(self) -> tuple[list[int], bool]:
        """All micro-batches of one step: (ids, ghost). Ends with a mark, as the optimizer's step does."""
        ids = self.batch()
        while not self.sampler.step_ends:
            ids += self.batch()
        self.sampler.mark()
        return ids, self.sampler.step.ghost

    def leave(self) -> None:
        """A crash that this process survives: the model goes back to the commit."""
        del self.ids
        self.sampler.close()
        self.sampler.rollback()


def _take(ids: Iterator[int], count: int) -> Iterator[int]:
    for _, index in zip(range(count), ids, strict=False):
        yield index


SEGMENT = st.tuples(
    st.integers(1, 6),  # world size
    st.integers(0, 9),  # steps committed
    st.integers(0, 3),  # micro-batches received but not committed
    st.integers(0, 4),  # prefetch
    st.booleans(),  # survivors resize in place, else all restore from JSON
)


BLOCKS = {"block": 7, "window": 3}
TAILS = st.sampled_from(["ghost", "drop", "carry"])
KINDS = st.sampled_from(["shuffle", "blocks", "sequential"])


def order_of(n: int, kind: str) -> Order:
    return Order(n, 11, kind, **(BLOCKS if kind == "blocks" else {}))  # type: ignore[arg-type]


def run(n: int, b: int, N: int, tail: str, kind: str, segments: list[tuple[int, int, int, int, bool]]) -> None:
    options = {
        "dataset_or_len": n,
        "batch_size": b,
        "global_batch_size": b * N,
        "tail": tail,
        "order": kind,
        "seed": 11,
    } | (BLOCKS if kind == "blocks" else {})
    state, q, workers = None, 0, list[Worker]()
    seen: Counter[tuple[int, int]] = Counter()
    order, G = order_of(n, kind), b * N
    for world, steps, extra, ahead, survive in segments:
        world = min(world, N)
        if survive and workers:
            workers = workers[:world]
            for rank, worker in enumerate(workers):
                worker.leave()
                worker.sampler.resize(world, rank)
        else:
            workers = []
        for rank in range(len(workers), world):
            workers.append(Worker(state, rank, world, **options))
        assert len({w.sampler.cursor for w in workers}) == 1
        assert tail == "carry" or all(len(w.sampler) == w.sampler.plan.samples() for w in workers)
        for worker in workers:
            worker.start(ahead)
        for _ in range(steps):
            epoch, place = divmod(q, n)
            if n - place < (G if tail == "drop" else 1):
                epoch, place = epoch + 1, 0
            if workers[0].sampler.progress.finished:
                for worker in workers:
                    worker.start(ahead)
            parts = [w.step() for w in workers]
            ids = sorted(i for part, ghost in parts if not ghost for i in part)
            end = place + G if tail == "carry" else min(place + G, n)
            want = order.onward(epoch, np.arange(place, end)).tolist()
            assert ids == sorted(want)  # the same set at every W
            seen.update((epoch + position // n, i) for position, i in zip(range(place, end), want, strict=True))
            q = epoch * n + end
            if tail != "carry" and n - end < (G if tail == "drop" else 1):
                q = (epoch + 1) * n
            assert {w.sampler.commit() for w in workers} == {q}  # equal on all ranks, and what is in the model
        state = workers[0].sampler.state_dict()
        assert state["cursor"] == q
        assert all(w.sampler.state_dict() == state for w in workers)
        for worker in workers:  # work that a crash loses: received, part of it even marked, none of it committed
            left = worker.sampler.plan.length(worker.sampler.progress.base % n) - worker.sampler.progress.yielded
            for _ in range(min(extra, left)):
                worker.batch()
            worker.sampler.mark()
        assert {w.sampler.cursor for w in workers} == {q}
    whole = n // G * G if tail == "drop" else n
    for epoch in range(q // n):
        assert sum(seen[epoch, i] for i in range(n)) == whole
    assert all(count == 1 for count in seen.values())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 120),
    st.integers(1, 5),
    st.integers(1, 8),
    TAILS,
    KINDS,
    st.lists(SEGMENT, min_size=1, max_size=25),
)
def test_small_epochs(n: int, b: int, N: int, tail: str, kind: str, segments: list[Any]) -> None:
    run(n if tail == "ghost" else max(n, b * N), b, N, tail, kind, segments)


@pytest.mark.deep
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers((1 << 17) + 1, (1 << 17) + 5000),
    st.integers(5000, 9000),
    st.integers(3, 4),
    TAILS,
    st.lists(SEGMENT, min_size=2, max_size=5),
)
def test_large_epochs(n: int, b: int, N: int, tail: str, segments: list[Any]) -> None:
    """Above 2**17 the order is the Feistel walk."""
    run(n, b, N, tail, "shuffle", segments)


class Ids(Dataset[Any]):
    """n samples, each its own index; many at once."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return torch.from_numpy(index)


class Rank:
    """One rank in a live run: a loader that is resized while its loop runs on."""

    def __init__(self, state: dict[str, Any] | None, rank: int, world: int, n: int, b: int, **options: Any) -> None:
        sampler = ElasticSampler(n, batch_size=b, rank=rank, num_replicas=world, yield_batches=True, **options)
        self.loader = elastic_loader(DataLoader(Ids(n), batch_size=None, sampler=sampler))
        if state is not None:
            self.loader.load_state_dict(json.loads(json.dumps(state)))
        self.loop: Iterator[Any] = iter(self.loader)

    def batch(self) -> list[int]:
        """The ids of one micro-batch, none of a ghost's."""
        batch = next(self.loop, None)
        if batch is None:  # the epoch ended: the next one
            self.loop = iter(self.loader)
            batch = next(self.loop)
        return batch.tolist() if self.loader.sample_weights().all() else []

    def step(self) -> list[int]:
        """The ids of one step, which is marked, as the optimizer does."""
        ids = self.batch()
        while not self.loader.step_ends:
            ids += self.batch()
        self.loader.sampler.mark()
        return ids


EVENT = st.tuples(
    st.sampled_from(["live", "recover", "restore"]),
    st.integers(1, 6),  # world size from then on
    st.integers(0, 7),  # steps in it
    st.integers(0, 3),  # micro-batches received behind them, before a crash
)


def run_live(n: int, b: int, N: int, tail: str, kind: str, events: list[tuple[str, int, int, int]]) -> None:
    """live: at a step border, committed or not, the loops go on in another world. recover: survivors go back to the
    commit. restore: all come back from a saved state.
    """
    options = {"global_batch_size": b * N, "tail": tail, "order": kind, "seed": 11}
    options |= BLOCKS if kind == "blocks" else {}
    ranks, trained, saved = list[Rank](), list[int](), None
    committed, kinds = 0, iter([event for event, *_ in events[1:]])
    for event, world, steps, extra in events:
        world = min(world, N)
        if event == "live" and ranks:
            state = ranks[0].loader.state_dict()
        else:
            state, trained = saved, trained[:committed]
            ranks = ranks if event == "recover" else []
        ranks = ranks[:world]
        for rank, one in enumerate(ranks):
            if event == "recover":
                one.loader.rollback()
                one.loop = iter(one.loader)
            one.loader.resize(world, rank)
        ranks += [Rank(state, rank, world, n, b, **options) for rank in range(len(ranks), world)]
        for _ in range(steps):
            parts = [one.step() for one in ranks]
            trained += sorted(i for part in parts for i in part)
            assert len({one.loader.sampler.progress.marked for one in ranks}) == 1
        following = next(kinds, "")
        if following != "live" or extra:  # else the last step stays a mark: a live resize may come before its commit
            for one in ranks:
                one.loader.sampler.commit()
            saved, committed = ranks[0].loader.state_dict(), len(trained)
            assert all(one.loader.state_dict() == saved for one in ranks)
        for one in ranks if following in ("recover", "restore") else []:
            for _ in range(0 if one.loader.sampler.progress.finished else extra):
                one.batch()
                if one.loader.sampler.progress.finished:  # beginning the next epoch would say: this one is trained
                    break
    check_prefix(trained, n, b * N, tail, kind)


def check_prefix(trained: list[int], n: int, G: int, tail: str, kind: str) -> None:
    """What was trained is the order from its start, step by step, nothing left out and nothing twice."""
    order, q, at = order_of(n, kind), 0, 0
    while at < len(trained):
        epoch, place = divmod(q, n)
        end = place + G if tail == "carry" else min(place + G, n)
        want = sorted(order.onward(epoch, np.arange(place, end)).tolist())
        assert trained[at : at + len(want)] == want
        at += len(want)
        q = epoch * n + end
        if tail == "drop" and n - end < G and end < n:
            q = (epoch + 1) * n


@pytest.mark.requirement("ED-25")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 120), st.integers(1, 5), st.integers(1, 8), TAILS, KINDS, st.lists(EVENT, min_size=1, max_size=15)
)
def test_small_live_runs(n: int, b: int, N: int, tail: str, kind: str, events: list[Any]) -> None:
    run_live(n if tail == "ghost" else max(n, b * N), b, N, tail, kind, events)


@pytest.mark.deep
@pytest.mark.requirement("ED-25")
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers((1 << 17) + 1, (1 << 17) + 5000),
    st.integers(5000, 9000),
    st.integers(3, 4),
    TAILS,
    st.sampled_from(["shuffle", "blocks"]),
    st.lists(EVENT, min_size=2, max_size=5),
)
def test_large_live_runs(n: int, b: int, N: int, tail: str, kind: str, events: list[Any]) -> None:
    run_live(n, b, N, tail, kind, events)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1 << 17, 1 << 18, 1 << 20]), st.integers(-3, 3), st.integers(0, 2**64 - 1), st.integers(0, 10**6)
)
def test_order_is_a_bijection_near_powers_of_two(power: int, off: int, seed: int, epoch: int) -> None:
    n = power + off
    got = Order(n, seed, True).indices(epoch, np.arange(n))
    assert np.array_equal(np.bincount(got, minlength=n), np.ones(n, dtype=int))
