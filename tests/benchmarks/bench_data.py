"""What exact data costs beside the samplers and loaders people use: `make bench-data`.

Every ratio is the median of interleaved pairs, so that a busy machine hurts both alike. Peers run in the same process
in the same minute: torch's DistributedSampler and torchdata's StatefulDataLoader. Writes build/bench/data.json.
BENCH_ARGS: `--pairs N` (at least 15), `--only NAME`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from dlrover_hooks import protocol as p
from dlrover_hooks.client.in_process_master import InProcessMaster
from dlrover_hooks.data.leased.leased_loader import LeasedLoader
from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.data.loader import elastic_loader
from dlrover_hooks.data.sampler import ElasticSampler
from tests.benchmarks import ledger_load
from tests.benchmarks.report import REPOSITORY, report

SAMPLES, BATCH, WORLD = 20_000, 32, 8
TRIP_S, SHARD, SAMPLE_S, LEASED = 0.002, 512, 50e-6, 100_000
WALK = 1 << 12
_OPERAND = torch.zeros(64, 64)
BARS = {
    "first_index_ms_1e9": 20.0,
    "extra_rss_mib_1e9": 16.0,
    "seek_ms_1e9": 20.0,
    "loader_vs_distributed_sampler": 1.15,
    "batched_vs_distributed_sampler": 0.5,
    "lease_overhead_pct": 2.0,
    "uneven_grad_rel_error": 1e-12,
    "cut_bytes_1e9_10k_workers": 16384.0,
    "ack_us_10k_workers": 20.0,
}
"""What each figure must not exceed."""


class Floats(Dataset[Any]):
    """Samples of 16 floats in memory, one at a time."""

    def __init__(self, n: int) -> None:
        self.rows = torch.arange(16 * n, dtype=torch.float32).reshape(n, 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Batches(Floats):
    """The same, a batch at a time."""

    def __getitems__(self, indices: Any) -> torch.Tensor:
        return self.rows[torch.as_tensor(indices)]


class Length:
    """A dataset of which only the length is asked."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


# ---- indices --------------------------------------------------------------------------------------------------------


def ours(n: int) -> ElasticSampler:
    return ElasticSampler(Length(n), batch_size=BATCH, global_batch_size=BATCH * WORLD, num_replicas=WORLD, rank=3)


def first_index_ms(make: Callable[[], Any], repeats: int) -> float:
    return 1e3 * statistics.median(_timed(lambda: next(iter(make()))) for _ in range(repeats))


def seek_ms(n: int, repeats: int) -> float:
    """From a saved state in the middle to the first index."""

    def seek(number: int) -> None:
        sampler = ours(n)
        sampler.load_state_dict(
            ours(n).state_dict() | {"cursor": n // 2 // (BATCH * WORLD) * BATCH * WORLD + number * n}
        )
        next(iter(sampler))

    return 1e3 * statistics.median(_timed(lambda number=number: seek(number)) for number in range(repeats))


def stateful_seek_ms(n: int) -> float:
    """The same with StatefulDataLoader, which walks there. Its batches are empty and large: only indices are made."""
    loader = _stateful(n)
    rows = iter(loader)
    for _ in range(n // 2 // WALK):
        next(rows)
    state = loader.state_dict()
    fresh = _stateful(n)
    fresh.load_state_dict(state)
    return 1e3 * _timed(lambda: next(iter(fresh)))


def _stateful(n: int) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Length(n), WALK, shuffle=True, collate_fn=len)  # pyright: ignore[reportArgumentType]


def extra_rss_mib(which: str, n: int) -> float:
    """Growth of a fresh process's peak memory by the first index."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_data", "--rss", which, str(n)],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    return float(done.stdout)


def _print_rss(which: str, n: int) -> None:
    before = _peak_kib()
    next(iter(_sampler(which, n)))
    print((_peak_kib() - before) / 1024)


def _peak_kib() -> int:
    """Of this process since its exec; `ru_maxrss` would begin with that of the process that forked it."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _sampler(which: str, n: int) -> Any:
    if which == "ours":
        return ours(n)
    return DistributedSampler(Length(n), WORLD, 3)  # pyright: ignore[reportArgumentType]


# ---- loaders --------------------------------------------------------------------------------------------------------


def loaders() -> dict[str, Any]:
    """One epoch of all samples each, one rank, no worker process."""
    rows, batches = Floats(SAMPLES), Batches(SAMPLES)
    plain = DataLoader(rows, BATCH, sampler=DistributedSampler(rows, 1, 0))
    stateful = StatefulDataLoader(rows, BATCH, shuffle=True)
    elastic = elastic_loader(DataLoader(rows, BATCH, shuffle=True), num_replicas=1, rank=0)
    sampler = ElasticSampler(batches, batch_size=BATCH, num_replicas=1, rank=0, yield_batches=True)
    batched = elastic_loader(DataLoader(batches, batch_size=None, sampler=sampler))
    return {"DistributedSampler": plain, "StatefulDataLoader": stateful, "elastic": elastic, "batched": batched}


def cpu_ratios(pairs: int) -> dict[str, float]:
    """Median of CPU seconds per epoch over those of DistributedSampler, round by round."""
    made, ratios = loaders(), dict[str, list[float]]()
    for _ in range(pairs + 1):
        seconds = {name: _cpu(lambda loader=loader: _drain(loader)) for name, loader in made.items()}
        for name, value in seconds.items():
            ratios.setdefault(name, []).append(value / seconds["DistributedSampler"])
    return {name: statistics.median(values[1:]) for name, values in ratios.items()}  # the first round warms up


def _drain(loader: Any) -> None:
    for _ in loader:
        pass


# ---- leases ---------------------------------------------------------------------------------------------------------


class Distant(InProcessMaster):
    """The core in this process, `TRIP_S` away."""

    never = threading.Event()

    def call(self, request: p.Message, *, channel: str = "main", timeout_s: float | None = None) -> Any:
        self.never.wait(TRIP_S)
        return super().call(request, channel=channel, timeout_s=timeout_s)


def lease_figures(pairs: int, samples: int, suffix: str = "") -> dict[str, float]:
    """What leases cost an epoch beyond a plain loader's, of the epoch's time; a sample's work takes `SAMPLE_S`.

    `lease_overhead_pct`: CPU time of all threads, but for the steps. `lease_wait_pct`: how long `next` was waited for
    without any; that depends on what else runs. The trips at an epoch's start and end are in it: about 8 ms, whatever
    its length.
    """
    costs, waits = list[float](), list[float]()
    for number in range(pairs):
        leased = elastic_loader(DataLoader(ShardDataset(Floats(samples), shard_size=SHARD, seed=number), BATCH))
        leased.connect(Distant(), f"bench-{number}", "bench", free=True)
        cpu, waited = _worked(leased)
        leased.close()
        plain_cpu, plain_waited = _worked(DataLoader(Floats(samples), BATCH, shuffle=True))
        whole = plain_cpu + SAMPLE_S * samples
        costs.append(100 * (cpu - plain_cpu) / whole)
        waits.append(100 * (waited - plain_waited) / whole)
    return {
        f"lease_overhead_pct{suffix}": statistics.median(costs),
        f"lease_wait_pct{suffix}": statistics.median(waits),
    }


def _worked(loader: Any) -> tuple[float, float]:
    """CPU seconds beside the steps, and seconds in `next` in which this thread did not run."""
    waited, steps_s, began, rows = 0.0, 0.0, time.process_time(), iter(loader)
    while True:
        asked, asked_cpu = time.perf_counter(), time.thread_time()
        batch = next(rows, None)
        now = time.thread_time()
        waited += time.perf_counter() - asked - (now - asked_cpu)
        if batch is None:
            return time.process_time() - began - steps_s, waited
        until = now + SAMPLE_S * len(batch)
        while time.thread_time() < until:  # the step: small operations of torch, as a model on a busy processor has
            torch.mm(_OPERAND, _OPERAND)
        steps_s += time.thread_time() - now
        if isinstance(loader, LeasedLoader):
            loader.mark()


# ---- gradients ------------------------------------------------------------------------------------------------------


def uneven_grad_rel_error() -> float:
    """Real DDP over gloo, float64, N = 5 micro-batches over 2 and 3 processes, against one process."""
    return max(_gradient_error(world) for world in (2, 3))


def _gradient_error(world: int) -> float:
    case = REPOSITORY / "tests" / "integrations" / "ddp_cases.py"
    done = subprocess.run(
        [sys.executable, str(case), "weights", str(world)], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    return max(found["46,4,20"] for found in json.loads(done.stdout.splitlines()[-1]))


# ---- all ------------------------------------------------------------------------------------------------------------


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _cpu(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def figures(pairs: int) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """Group by group: a title, and what measures it."""
    billion, many = 10**9, 10**7
    yield (
        "indices at 1e9",
        lambda: {
            "first_index_ms_1e9": first_index_ms(lambda: ours(billion), pairs),
            "extra_rss_mib_1e9": extra_rss_mib("ours", billion),
            "seek_ms_1e9": seek_ms(billion, pairs),
        },
    )
    yield (
        "peers at 1e7",
        lambda: {
            "first_index_ms_1e7": first_index_ms(lambda: ours(many), pairs),
            "extra_rss_mib_1e7": extra_rss_mib("ours", many),
            "distributed_sampler_first_index_ms_1e7": first_index_ms(lambda: _sampler("torch", many), 3),
            "distributed_sampler_rss_mib_1e7": extra_rss_mib("torch", many),
            "stateful_seek_ms_1e7": stateful_seek_ms(many),
        },
    )
    yield "loaders", lambda: _loader_figures(pairs)
    yield (
        "leases",
        lambda: {
            **lease_figures(pairs, LEASED),
            **lease_figures(pairs, SAMPLES, "_40_shards"),
            "cut_bytes_1e9_10k_workers": ledger_load.cut_bytes_1e9_10k_workers(),
            "ack_us_10k_workers": ledger_load.ack_us_10k_workers(),
        },
    )
    yield "gradients", lambda: {"uneven_grad_rel_error": uneven_grad_rel_error()}


def _loader_figures(pairs: int) -> dict[str, float]:
    ratios = cpu_ratios(pairs)
    return {
        "loader_vs_distributed_sampler": ratios["elastic"],
        "batched_vs_distributed_sampler": ratios["batched"],
        "stateful_vs_distributed_sampler": ratios["StatefulDataLoader"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", help="one group of figures, such as leases")
    parser.add_argument("--rss", nargs=2, metavar=("WHICH", "N"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rss:
        _print_rss(given.rss[0], int(given.rss[1]))
        return 0
    torch.set_num_threads(1)
    np.random.seed(0)
    console, found = Console(), dict[str, float]()
    for title, measure in figures(given.pairs):
        if given.only in (None, title):
            with console.status(title):
                found |= measure()
    return report("data", "Data: cost and exactness", {"pairs": given.pairs}, found, BARS)


if __name__ == "__main__":
    sys.exit(main())
