"""What saves cost a training step, eager and lazy, and whether `auto` is ever worse than eager."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dlrover_hooks.checkpoint.copying import Copier
from dlrover_hooks.checkpoint.lazy import LazyWriter
from dlrover_hooks.checkpoint.mode import MOST_PAIRS, WARM_UP
from dlrover_hooks.checkpoint.restoring import Opening
from dlrover_hooks.checkpoint.tree import flatten
from dlrover_hooks.integrations.filling import Filling
from tests.benchmarks.saver import Engine, Gpt, engine, timed


def lazy(pairs: int) -> dict[str, float]:
    """One torch thread, so that a core is idle: blocked time of a lazy save, and its CPU time beyond the copy."""
    gpt = Gpt()
    rows: dict[str, list[tuple[float, float, float]]] = {"plain": [], "eager": [], "lazy": []}
    with engine("lazy") as late, engine("eager") as soon:
        for ours in (late, soon):
            ours.prepare(gpt.state())
            ours.save(gpt.state(), behind=True)
            gpt.step()
        for _ in range(pairs):
            rows["plain"].append(_step(gpt, None))
            rows["lazy"].append(_step(gpt, late))
            rows["eager"].append(_step(gpt, soon))
    more = statistics.median(late[1] - plain[1] for late, plain in zip(rows["lazy"], rows["plain"], strict=True))
    cpu = statistics.median(row[1] for row in rows["plain"])
    wall = {name: statistics.median(row[0] for row in found) for name, found in rows.items()}
    copy_s = statistics.median(row[2] for row in rows["eager"])
    return {
        "lazy_exposed_ms": 1e3 * min(row[2] for row in rows["lazy"]),
        "lazy_exposed_median_ms": 1e3 * statistics.median(row[2] for row in rows["lazy"]),
        "eager_exposed_ms": 1e3 * copy_s,
        "lazy_cpu_overhead_pct": 100 * (more - _copy_cpu(gpt, pairs)) / cpu,
        "step_ms": 1e3 * wall["plain"],
        "lazy_step_pct": 100 * (wall["lazy"] / wall["plain"] - 1),
        "eager_step_pct": 100 * (wall["eager"] / wall["plain"] - 1),
    }


def _step(gpt: Gpt, ours: Engine | None) -> tuple[float, float, float]:
    """Wall and CPU seconds of a step, with a save if there is an engine, and how long that held it up."""
    state = gpt.state() if ours is not None else {}
    if ours is not None:
        ours.hashed()
        _behind(ours).waited_s = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    blocked = timed(lambda: ours.save(state, behind=True)) if ours is not None else 0.0
    gpt.step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, blocked + (_behind(ours).waited_s if ours is not None else 0.0)


def _behind(ours: Engine) -> Any:
    writer = ours.checkpointer._writer
    assert isinstance(writer, LazyWriter)
    return writer.aside


def _copy_cpu(gpt: Gpt, pairs: int) -> float:
    """CPU seconds of the copy itself, by one thread, at once."""
    taken = []
    state = gpt.state()
    with engine("eager") as ours:
        ours.prepare(state)
        ours.save(state)
        ours.use(Copier(1))
        for _ in range(pairs):
            ours.hashed()
            began = time.process_time()
            ours.save(state)
            taken.append(time.process_time() - began)
    return statistics.median(taken)


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
