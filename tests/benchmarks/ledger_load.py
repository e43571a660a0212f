"""The ledger under the load of 10 000 workers: 1e9 samples, shards of 8192, two leases each, random order.

Core only: `jobs.apply` with idempotency keys, no journal, no HTTP. Workers acknowledge whole leases.
"""

from __future__ import annotations

import random
import time

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import job_registry
from dlrover_hooks.master.core.events import Key

SAMPLES = 10**9
SHARD = 8192
WORKERS = 10_000
HELD = 2


class Load:
    """A job of free holders on one dataset. `turn` is one request: acknowledge the oldest lease, take another."""

    def __init__(self, seed: int = 0, samples: int = SAMPLES) -> None:
        self.state, self.now, self.requests = job_registry.Master(), 1000.0, 0
        self.names = [f"worker-{index}" for index in range(WORKERS)]
        self.held: dict[str, list[p.Lease]] = {}
        self._random = random.Random(seed)
        whole = (p.Partition(end=samples),)
        for name in self.names:
            self._send(
                p.OpenLedger("job", name, "data", "f", whole, samples, batch_size=32, shard_size=SHARD, free=True)
            )
            self.held[name] = list(self._send(p.TakeLeases("job", name, "data", 1, HELD)).leases)

    def _send(self, event: p.OpenLedger | p.TakeLeases) -> p.Leases:
        return job_registry.apply(self.state, event, self.now, self._key(event)).reply  # pyright: ignore[reportReturnType]

    def _key(self, event: p.OpenLedger | p.TakeLeases) -> Key:
        self.requests += 1
        self.now += 0.0005
        return Key(event.incarnation, "main", self.requests)

    def turn(self) -> int:
        """Some worker's request. Returns the first position that it got."""
        name = self._random.choice(self.names)
        return self._taken(name, self._send(self._request(name)))

    def batch_s(self, requests: int) -> float:
        """CPU seconds of the core for requests of so many workers; making them does not count."""
        names = self._random.sample(self.names, requests)
        events = [(event := self._request(name), self._key(event)) for name in names]
        began = time.process_time()
        replies = [job_registry.apply(self.state, event, self.now, key).reply for event, key in events]
        took_s = time.process_time() - began
        for name, reply in zip(names, replies, strict=True):
            self._taken(name, reply)  # pyright: ignore[reportArgumentType]
        return took_s

    def _request(self, name: str) -> p.TakeLeases:
        lease = self.held[name].pop(0)
        return p.TakeLeases("job", name, "data", 1, 1, acks=(p.Ack(lease.id, lease.hi),), rate=2000.0)

    def _taken(self, name: str, reply: p.Leases) -> int:
        self.held[name] += reply.leases
        return reply.leases[0].lo

    def half_way(self) -> None:
        """Go on until half of the samples were handed out."""
        while self.turn() < SAMPLES // 2:
            pass


_LOADS: list[Load] = []


def half_way() -> Load:
    """The state half way, made once in a process (some seconds)."""
    if not _LOADS:
        load = Load()
        load.half_way()
        _LOADS.append(load)
    return _LOADS[0]


def ack_us_10k_workers(requests: int = 10_000) -> float:
    """Microseconds of CPU for one acknowledgement and one new lease, in one request: the median of batches of 500."""
    load = half_way()
    batches = sorted(load.batch_s(500) / 500 for _ in range(max(1, requests // 500)))
    return 1e6 * batches[len(batches) // 2]


def cut_bytes_1e9_10k_workers() -> int:
    """Bytes of what is done half way, as it lies in a checkpoint."""
    (books,) = half_way().state.jobs["job"].ledgers.named["data"].books.values()
    return len(books.done.encode())


if __name__ == "__main__":
    print(f"ack_us_10k_workers {ack_us_10k_workers():.1f}")
    print(f"cut_bytes_1e9_10k_workers {cut_bytes_1e9_10k_workers()}")
    state = half_way().state
    began = time.perf_counter()
    print(
        f"snapshot {len(job_registry.encode(state)) / 2**20:.1f} MiB in {1000 * (time.perf_counter() - began):.0f} ms"
    )
