"""What a checkpoint costs beside memcpy and beside other savers, in one run: `make bench-checkpoint`.

Every ratio is the median of interleaved pairs, so that a busy machine hurts both alike; `eager_*`, `first_save_*`,
`vs_*` and `lazy_exposed_ms` are or compare minima. Each group of figures has a process to itself, as a training run
has. Writes build/bench/checkpoint.json. BENCH_ARGS: `--pairs N` (at least 15), `--only GROUP`,
`--with-dlrover [PYTHON]`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.memory.memcpy import Copier
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.protocol import Manifest, Restore, Source
from tests.benchmarks import dlrover, loop, peers, steps
from tests.benchmarks.report import REPOSITORY, report
from tests.benchmarks.saver import Gpt, Memcpy, engine, nbytes, small_state, timed

BARS = {
    "eager_1t_over_memcpy": 1.2,
    "eager_mt_over_memcpy": 0.8,
    "eager_plain_mt_over_memcpy": 1.1,
    "small5000_over_memcpy": 2.0,
    "first_save_over_memcpy": 1.3,
    "lazy_exposed_ms": 1.0,
    "lazy_cpu_overhead_pct": 2.0,
    "auto_never_worse_pct": 5.0,
    "restore_over_memcpy": 2.0,
    "restore_storage_over_torch_load": 1.0,
    "restore_storage_cold_over_torch_load": 1.0,
    "keeper_cpu_s_per_gb": 0.25,
    "vs_torch_save": 0.1,
    "vs_dcp_async": 0.75,
    "vs_lightning_async": 0.9,
}
"""What each figure must not exceed."""
Figures = dict[str, float]


def least(seconds: dict[str, list[float]], name: str) -> float:
    """Minimum over that of memcpy."""
    return min(seconds[name]) / min(seconds["memcpy"])


def median(seconds: dict[str, list[float]], name: str, base: str) -> float:
    """Median of the ratios of the pairs."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def eager(pairs: int) -> Figures:
    """A whole `save`, with and without the C helper, beside memcpy."""
    state = Gpt().state()
    memcpy = Memcpy(nbytes(state))
    ways = {
        "1t": Copier(1, native=True),
        "mt": Copier(native=True),
        "plain_1t": Copier(1, native=False),
        "plain_mt": Copier(native=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", *ways)}
    with engine() as ours:
        ours.prepare(state)
        ours.saved(state)
        for _ in range(pairs):
            for name, copier in ways.items():
                ours.use(copier)
                seconds[name].append(ours.saved(state))
            seconds["memcpy"].append(timed(memcpy))
    return {f"eager_{name}_over_memcpy": least(seconds, name) for name in ways} | {
        "memcpy_gb_s": nbytes(state) / 1e9 / min(seconds["memcpy"]),
        "state_mb": nbytes(state) / 1e6,
    }


def small(pairs: int) -> Figures:
    """5000 tensors of 8 KB: what Python costs per tensor."""
    state = small_state()
    memcpy = Memcpy(nbytes(state))
    seconds: dict[str, list[float]] = {"memcpy": [], "C": [], "plain": []}
    with engine() as ours:
        ours.prepare(state)
        ours.saved(state)
        for _ in range(3 * pairs):
            for name, native in (("C", True), ("plain", False)):
                ours.use(Copier(native=native))
                seconds[name].append(ours.saved(state))
            seconds["memcpy"].append(timed(memcpy))
    return {
        "small5000_over_memcpy": median(seconds, "C", "memcpy"),
        "small5000_plain_over_memcpy": median(seconds, "plain", "memcpy"),
    }


def first(pairs: int) -> Figures:
    """The first save of a life, its memory made ready in the background before."""
    state = Gpt().state()
    memcpy = Memcpy(nbytes(state))
    seconds: dict[str, list[float]] = {"memcpy": [], "first": []}
    ready: list[float] = []
    for _ in range(pairs):
        with engine() as ours:
            ready.append(ours.prepare(state))
            seconds["first"].append(ours.saved(state))
            seconds["memcpy"].append(timed(memcpy))
    return {"first_save_over_memcpy": least(seconds, "first"), "prepare_s": statistics.median(ready)}


def restore(pairs: int) -> Figures:
    """Out of memory into live tensors: the copy alone, and with the keeper's verification and all else."""
    gpt = Gpt()
    state = gpt.state()
    memcpy = Memcpy(nbytes(state))
    seconds: dict[str, list[float]] = {"memcpy": [], "copy": [], "all": []}
    with engine() as ours:
        ours.prepare(state)
        ours.save(state)
        generation = ours.hashed()
        checkpointer = ours.checkpointer
        fitting = steps.in_place(state)
        for _ in range(pairs):
            opened = timed(lambda: checkpointer.load(Restore(generation, 1, Source.MEMORY), fitting))
            seconds["copy"].append(timed(checkpointer.fill))
            seconds["all"].append(opened + seconds["copy"][-1])
            seconds["memcpy"].append(timed(memcpy))
    return {
        "restore_over_memcpy": median(seconds, "copy", "memcpy"),
        "restore_all_over_memcpy": median(seconds, "all", "memcpy"),
    }


def restore_storage(pairs: int) -> Figures:
    """Out of a local disk into live tensors, beside `torch.load` of the same state into fresh ones; each file once out
    of the page cache (warm) and once from the disk (cold).
    """
    gpt = Gpt()
    state = gpt.state()
    seconds: dict[str, list[float]] = {f"{who}_{how}": [] for who in ("ours", "torch") for how in ("warm", "cold")}
    with tempfile.TemporaryDirectory(dir=REPOSITORY / "build") as folder, engine(save_to=f"{folder}/saved") as ours:
        theirs = Path(folder, "state.pt")
        torch.save(state, theirs)
        ours.prepare(state)
        ours.save(state)
        generation = ours.hashed()
        ours.checkpointer.persist(generation)
        file = ours.notice(keeper_messages.Persisted).file
        manifest = Manifest(ours.checkpointer.job, generation, 1, (file,), time.time())
        generations.commit(f"{folder}/saved", {}, manifest, 2)
        os.sync()
        fitting = steps.in_place(state)

        def load() -> None:
            ours.checkpointer.load(Restore(generation, 1, Source.STORAGE), fitting)
            ours.checkpointer.fill()

        ways: dict[str, Callable[[], object]] = {
            "ours": load,
            "torch": lambda: torch.load(theirs, weights_only=True),
        }
        for turn in range(pairs + 1):
            for how in ("warm", "cold"):
                for who, way in ways.items():
                    _out_of_cache(Path(folder), read=how == "warm")
                    taken = timed(way)
                    if turn:  # the first one warms up
                        seconds[f"{who}_{how}"].append(taken)
    return {
        "restore_storage_over_torch_load": median(seconds, "ours_warm", "torch_warm"),
        "restore_storage_cold_over_torch_load": median(seconds, "ours_cold", "torch_cold"),
        **{f"restore_storage_{name}_ms": 1e3 * statistics.median(taken) for name, taken in seconds.items()},
    }


def _out_of_cache(folder: Path, *, read: bool) -> None:
    """Have the files in `folder` in the page cache (`read`), or not."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while read and file.read(16 << 20):
                    pass


def keeper(pairs: int) -> Figures:
    """CPU seconds of the keeper for each GB that it hashes and writes to a local disk."""
    state = Gpt().state()
    with tempfile.TemporaryDirectory(dir=REPOSITORY / "build") as folder, engine(save_to=folder) as ours:
        ours.prepare(state)
        ours.save(state)
        ours.hashed()
        process, rounds = ours.keeper(), min(pairs, 8)
        began, before = time.perf_counter(), sum(process.cpu_times()[:2])
        for _ in range(rounds):
            ours.save(state)
            ours.checkpointer.persist(ours.hashed())
            ours.notice(keeper_messages.Persisted)
        seconds, readable = sum(process.cpu_times()[:2]) - before, rounds * nbytes(state) / 1e9
    return {
        "keeper_cpu_s_per_gb": seconds / readable,
        "persist_gb_s": readable / (time.perf_counter() - began),
    }


def others(pairs: int) -> Figures:
    """How long a save holds up the training thread, ours and theirs, of the same state in turn.

    Each saves twice, and the second time counts: the first one pays for what all the others have done to caches and
    page tables, which no trainer has in its process.
    """
    state = Gpt().state()
    with tempfile.TemporaryDirectory(dir=REPOSITORY / "build") as name, engine() as ours:
        folder = Path(name)
        them = {
            "torch_save": peers.TorchSave(state, folder),
            "dcp_async": peers.DcpAsync(state, folder),
            "lightning_async": peers.LightningAsync(state, folder),
            "our_dcp_async": peers.FlashDcp(state, folder),
            "our_lightning_io": peers.FlashIO(state, folder),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ("ours", *them)}
        ours.prepare(state)
        for turn in range(pairs + 1):
            os.sync()  # what the one before has left to be written is nobody's but its own
            ours.saved(state)
            row = {"ours": ours.saved(state)}
            for title, peer in them.items():
                for _ in range(2):
                    os.sync()
                    row[title] = timed(peer.save)
                    peer.settle()
            for title, taken in row.items() if turn else ():  # the first turn warms up
                seconds[title].append(taken)
        for peer in them.values():
            peer.close()
    pairs_of = {
        "vs_torch_save": ("ours", "torch_save"),
        "vs_dcp_async": ("our_dcp_async", "dcp_async"),
        "vs_lightning_async": ("our_lightning_io", "lightning_async"),
    }
    least_of = {title: min(seconds[mine]) / min(seconds[theirs]) for title, (mine, theirs) in pairs_of.items()}
    medians = {f"{title}_median": median(seconds, *pair) for title, pair in pairs_of.items()}
    return least_of | medians | {f"{title}_ms": 1e3 * statistics.median(times) for title, times in seconds.items()}


GROUPS: dict[str, Callable[[int], Figures]] = {
    "eager": eager,
    "small": small,
    "first": first,
    "restore": restore,
    "restore_storage": restore_storage,
    "keeper": keeper,
    "others": others,
    "lazy": steps.lazy,
    "session": loop.session,
    "auto": steps.auto,
    "dlrover": dlrover.against,
}


def measure(group: str, pairs: int, out: Path) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    out.write_text(json.dumps(GROUPS[group](pairs)))


def measured(group: str, pairs: int, python: str) -> Figures:
    """`measure` elsewhere; an interrupt ends it, too."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        here = [python, "-m", "tests.benchmarks.bench_checkpoint"]
        command = [*here, "--pairs", str(pairs), "--only", group, "--measure", str(out)]
        subprocess.run(command, env=os.environ | {"XDG_RUNTIME_DIR": folder}, check=True)
        return json.loads(out.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", choices=GROUPS, help="one group of figures, such as lazy")
    parser.add_argument(
        "--with-dlrover",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="beside DLRover's flash checkpoint, too; PYTHON: one that has dlrover and this package",
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.only, given.pairs, given.measure)
        return 0
    (REPOSITORY / "build" / "bench").mkdir(parents=True, exist_ok=True)
    console, found = Console(), Figures()
    for group in [given.only] if given.only else GROUPS:
        python = sys.executable
        if group == "dlrover":
            python = given.with_dlrover or python
            if given.with_dlrover is None and given.only is None:
                continue
            if why := dlrover.missing(python):
                console.print(f"dlrover: {why}", markup=False, soft_wrap=True)
                continue
        began = time.perf_counter()
        with console.status(group):
            found |= measured(group, given.pairs, python)
        console.print(f"{group}: measured in {time.perf_counter() - began:.0f} s")
    if not found:
        return 0
    conditions: dict[str, Any] = {
        "pairs": given.pairs,
        "cores": psutil.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "native": Copier().native,
    }
    return report("checkpoint", "Checkpoints: what they cost", conditions, found, BARS)


if __name__ == "__main__":
    sys.exit(main())
