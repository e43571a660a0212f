"""What saves cost a training step, eager and lazy, and whether `auto` is ever worse than eager."""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from dlrover_hooks.checkpoint.memory.memcpy import Copier, Pieces, place_of
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.checkpoint.restore.generation_loader import Opening
from dlrover_hooks.checkpoint.save.overlap_policy import MOST_PAIRS, WARM_UP
from dlrover_hooks.checkpoint.save.overlapped_writer import LazyWriter
from dlrover_hooks.checkpoint.state.pytree import flatten
from dlrover_hooks.pytorch.tensor_loading import Filling
from tests.benchmarks.saver import Engine, Gpt, engine, timed

Row = tuple[float, float, float]
"""Wall and CPU seconds of a step, and how long a save held it up."""


def lazy(pairs: int) -> dict[str, float]:
    """One torch thread, so that a core is idle: blocked time of a lazy save, and its CPU time beyond the copy.

    `bare`: in the place of a save a thread that does nothing but the same copy. What that costs a step, in its own CPU
    time and because both go to the same memory, no save can avoid: it is the copy itself. `lazy_cpu_beyond_thread_pct`
    takes away no more than the CPU time of that thread.
    """
    _keep_heap()
    gpt = Gpt()
    rows: dict[str, list[Row]] = {"plain": [], "bare": [], "eager": [], "lazy": []}
    with engine("lazy") as late, engine("eager") as soon:
        for ours in (late, soon):
            ours.prepare(gpt.state())
            ours.save(gpt.state(), behind=True)
            gpt.step()
        bare = Bare(gpt.state())
        for _ in range(4 * pairs):  # single steps differ by ten times what is looked for
            rows["plain"].append(_step(gpt, None))
            rows["lazy"].append(_step(gpt, late))
            rows["bare"].append(_step(gpt, bare))
            rows["eager"].append(_step(gpt, soon))
    cpu = statistics.median(row[1] for row in rows["plain"])
    wall = {name: statistics.median(row[0] for row in found) for name, found in rows.items()}
    return {
        "lazy_exposed_ms": 1e3 * min(row[2] for row in rows["lazy"]),
        "lazy_exposed_median_ms": 1e3 * statistics.median(row[2] for row in rows["lazy"]),
        "eager_exposed_ms": 1e3 * statistics.median(row[2] for row in rows["eager"]),
        "lazy_cpu_overhead_pct": 100 * (_more_cpu(rows, "lazy") - _more_cpu(rows, "bare")) / cpu,
        "lazy_cpu_beyond_thread_pct": 100 * (_more_cpu(rows, "lazy") - statistics.median(bare.taken)) / cpu,
        "step_ms": 1e3 * wall["plain"],
        **{f"{name}_step_pct": 100 * (wall[name] / wall["plain"] - 1) for name in ("lazy", "bare", "eager")},
    }


def _keep_heap() -> None:
    """Have glibc keep what is freed.

    Else the gradients of a step are given back and faulted in again, which takes 0 to 80 ms of CPU, as it happens: a
    percent of a step is not to be seen beside that.
    """
    m_trim_threshold, m_mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    assert libc.mallopt(m_mmap_max, 0)
    assert libc.mallopt(m_trim_threshold, -1)


class Bare:
    """A copy into shared memory by a thread, and nothing else. `taken`: CPU seconds of each."""

    def __init__(self, state: dict[str, Any]) -> None:
        tensors = list(flatten(state).tensors.values())
        sizes = [tensor.nbytes for tensor in tensors]
        self._shared = SharedSegment.create(9, sum(sizes))
        self._shared.populate()
        self._pieces = Pieces(list(itertools.accumulate(sizes, initial=0))[:-1], sizes)
        self._where = place_of(self._shared.view(0)), [tensor.data_ptr() for tensor in tensors]
        self.taken: list[float] = []

    def begin(self) -> threading.Thread:
        thread = threading.Thread(target=self._copy)
        thread.start()
        return thread

    def _copy(self) -> None:
        Copier(1).fill(self._pieces, *self._where)
        self.taken.append(time.thread_time())  # of this thread, which lives for one copy


def _more_cpu(rows: dict[str, list[Row]], name: str) -> float:
    return statistics.median(one[1] - plain[1] for one, plain in zip(rows[name], rows["plain"], strict=True))


def _step(gpt: Gpt, ours: Engine | Bare | None) -> Row:
    state = gpt.state()
    if isinstance(ours, Engine):
        ours.hashed()
        _behind(ours).waited_s = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    blocked, thread = 0.0, ours.begin() if isinstance(ours, Bare) else None
    if isinstance(ours, Engine):
        blocked = timed(lambda: ours.save(state, behind=True))
    gpt.step()
    if thread is not None:
        thread.join()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, blocked + (_behind(ours).waited_s if isinstance(ours, Engine) else 0.0)


def _behind(ours: Engine) -> Any:
    writer = ours.checkpointer._writer
    assert isinstance(writer, LazyWriter)
    return writer.aside


def auto(pairs: int) -> dict[str, float]:
    """All cores busy: steps that save in mode `auto`, its trial included, beside steps that save eagerly."""
    torch.set_num_threads(torch.get_num_interop_threads() if torch.get_num_interop_threads() > 1 else 2)
    try:
        return _auto(pairs)
    finally:
        torch.set_num_threads(1)


def _auto(pairs: int) -> dict[str, float]:
    gpt, times = Gpt(width=232, layers=8), list[tuple[float, float]]()
    with engine("auto") as choosing, engine("eager") as soon:
        for ours in (choosing, soon):
            ours.prepare(gpt.state())
            ours.save(gpt.state(), behind=True)
            gpt.step()
        for turn in range(WARM_UP + 2 * MOST_PAIRS + 4 * pairs):
            order = (choosing, soon) if turn % 2 else (soon, choosing)
            taken = {ours: _step(gpt, ours)[0] for ours in order}
            choosing.checkpointer.took(taken[choosing])
            times.append((taken[choosing], taken[soon]))
        mode = _mode(choosing)
    worse = sorted(100 * (one / other - 1) for one, other in times)
    return {
        "auto_never_worse_pct": worse[_upper_rank(len(worse))],
        "auto_median_pct": statistics.median(worse),
        "auto_chose_lazy": float(mode == "lazy"),
    }


def _mode(ours: Engine) -> str:
    writer = ours.checkpointer._writer
    assert isinstance(writer, LazyWriter)
    return writer.mode.chosen


def _upper_rank(count: int) -> int:
    """Index of the upper 95 % bound of the median of so many sorted values."""
    below, rank = 0.0, 0
    while below < 0.95:
        below += math.comb(count, rank) / 2**count
        rank += 1
    return rank - 1


def in_place(state: dict[str, Any]) -> Callable[[Opening], Filling]:
    """The way of a restore into the tensors of `state` themselves."""
    targets = flatten(state).tensors
    return lambda opening: Filling(opening, targets)
