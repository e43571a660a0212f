"""What it costs each step that notes are told to another node: an arm of `make bench-recovery`.

Two ranks over gloo on this machine, as if each had a node of its own: the messages are there, the wire between two
nodes is not. Beside it, in turn, the smallest all-reduce of the same group: what it takes for the ranks to meet at all.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from dlrover_hooks import rng
from dlrover_hooks.config import Place
from dlrover_hooks.elastic.batch_statistics import ALL_BYTES
from dlrover_hooks.elastic.rng_journal_replication import told
from dlrover_hooks.host.ports import free_port
from dlrover_hooks.protocol import Generation
from dlrover_hooks.rng.rank_journal import ProcessState, RngJournal, Statistics
from tests.benchmarks.report import Figures

PAIRS_PER_ROUND = 30


def measure(rounds: int) -> Figures:
    """Medians of the first rank; and where it tells as many batch statistics as it may."""
    tell, meet = _medians(rounds * PAIRS_PER_ROUND, 0)
    most, _ = _medians(rounds * PAIRS_PER_ROUND, ALL_BYTES)
    return {"tell_ms": tell * 1e3, "tell_over_all_reduce": tell / meet, "tell_2_mib_ms": most * 1e3}


def _medians(pairs: int, statistics_bytes: int) -> tuple[float, float]:
    context, port = multiprocessing.get_context("spawn"), free_port()
    ours, theirs = context.Pipe(duplex=False)
    ranks = [context.Process(target=_rank, args=(rank, port, pairs, statistics_bytes, theirs)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    try:
        assert ours.poll(120), "the ranks did not come to an end"
        tell, meet = map(statistics.median, ours.recv())
    finally:
        for rank in ranks:
            rank.join(20)
            rank.kill()
    return tell, meet


class Source(ProcessState):
    """Batch statistics of a given size."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def statistics(self) -> Statistics:
        return (("all", bytes(self._nbytes)),) if self._nbytes else ()


def _rank(rank: int, port: int, pairs: int, statistics_bytes: int, line: Connection) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    draws = RngJournal(lambda *_: None)
    draws.begin(Generation(1, 0, "00" * 16), rank, 2)
    draws.read(Source(statistics_bytes))
    way = told(draws, Place(rank=rank, world_size=2, node=f"node {rank}"), statistics_bytes + 64)
    assert way is not None
    word = torch.zeros(1)
    times: list[tuple[float, float]] = []
    for step in range(pairs):
        draws.over(step, rng.take().packed)
        draws.ahead()
        dist.all_reduce(word)
        begun = time.perf_counter()
        way.tell(2)
        told_at = time.perf_counter()
        dist.all_reduce(word)
        times.append((told_at - begun, time.perf_counter() - told_at))
    if rank == 0:
        line.send([list(column) for column in zip(*times, strict=True)])
    dist.destroy_process_group()
