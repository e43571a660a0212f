"""Any sequence of resizes, crashes and prefetches visits each index exactly once per epoch, at any world size.

Rows ED-25 (the unprocessed data of the epoch is redistributed), DL-64, DL-87, DL-88.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
        del self.ids


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


def run(
    n: int, b: int, N: int, tail: str, shuffle: bool, segments: list[tuple[int, int, int, int, bool]], epochs: int
) -> None:
    options = {
        "dataset_or_len": n,
        "batch_size": b,
        "global_batch_size": b * N,
        "tail": tail,
        "shuffle": shuffle,
        "seed": 11,
    }
    state, q, workers = None, 0, list[Worker]()
    seen: Counter[tuple[int, int]] = Counter()
    order, G = Order(n, 11, shuffle), b * N
    for world, steps, extra, ahead, survive in segments:
        world = min(world, N)
        if survive and workers:
            workers = workers[:world]
            for rank, worker in enumerate(workers):
                worker.leave()
                worker.sampler.close()
                worker.sampler.resize(world, rank)
        else:
            workers = []
        for rank in range(len(workers), world):
            workers.append(Worker(state, rank, world, **options))
        assert len({w.sampler.cursor for w in workers}) == 1
        assert all(len(w.sampler) == w.sampler.plan.samples() for w in workers)
        for worker in workers:
            worker.start(ahead)
        for _ in range(steps):
            epoch, place = divmod(q, n)
            if n - place < (G if tail == "drop" else 1):
                epoch, place = epoch + 1, 0
            if place == 0 and workers[0].sampler.progress.finished:
                for worker in workers:
                    worker.start(ahead)
            parts = [w.step() for w in workers]
            ids = sorted(i for part, ghost in parts if not ghost for i in part)
            end = min(place + G, n)
            assert ids == sorted(order.indices(epoch, np.arange(place, end)).tolist())  # the same set at every W
            seen.update((epoch, i) for i in ids)
            q = epoch * n + end
            if n - end < (G if tail == "drop" else 1):
                q = (epoch + 1) * n
            assert {w.sampler.commit() for w in workers} == {q}  # equal on all ranks, and what is in the model
        state = workers[0].sampler.state_dict()
        assert state["cursor"] == q
        assert all(w.sampler.state_dict() == state for w in workers)
        for worker in workers:  # work that a crash loses: received, part of it even marked, none of it committed
            for _ in range(
                min(
                    extra,
                    worker.sampler.plan.length(worker.sampler.progress.base % n) - worker.sampler.progress.yielded,
                )
            ):
                worker.batch()
            worker.sampler.mark()
        assert {w.sampler.cursor for w in workers} == {q}
    whole = n if tail == "ghost" else n // G * G
    for epoch in range(q // n):
        assert sum(seen[epoch, i] for i in range(n)) == whole
    assert all(count == 1 for count in seen.values())


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1, 120),
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from(["ghost", "drop"]),
    st.booleans(),
    st.lists(SEGMENT, min_size=1, max_size=25),
)
def test_small_epochs(n: int, b: int, N: int, tail: str, shuffle: bool, segments: list[Any]) -> None:
    run(n if tail == "ghost" else max(n, b * N), b, N, tail, shuffle, segments, 0)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers((1 << 17) + 1, (1 << 17) + 5000),
    st.integers(5000, 9000),
    st.integers(3, 4),
    st.sampled_from(["ghost", "drop"]),
    st.lists(SEGMENT, min_size=2, max_size=5),
)
def test_large_epochs(n: int, b: int, N: int, tail: str, segments: list[Any]) -> None:
    """Above 2**17 the order is the Feistel walk."""
    run(n, b, N, tail, True, segments, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1 << 17, 1 << 18, 1 << 20]), st.integers(-3, 3), st.integers(0, 2**64 - 1), st.integers(0, 10**6)
)
def test_order_is_a_bijection_near_powers_of_two(power: int, off: int, seed: int, epoch: int) -> None:
    n = power + off
    got = Order(n, seed, True).indices(epoch, np.arange(n))
    assert np.array_equal(np.bincount(got, minlength=n), np.ones(n, dtype=int))
