"""In-process recovery under `elastic_run`, and by Lightning's callback: two arms of `make bench-recovery`.

Three DDP workers over gloo with two DataLoader workers each, on one machine, saves to memory as `auto` makes them. One
kills (or stops) itself in the middle of a step. Times run from there to the end of the next step on the slowest
survivor. A hung worker is cut by its lease, of 1.5 s here. A newcomer has imported everything when it joins.

`growth` kills one of 8 and one of 16 workers, on however many cores the machine has: these load in the main process.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.report import Figures
from tests.elastic.crew import Crew, Zygote
from tests.waiting import until

LEASE_S = 1.5
AT = 12
_GROWN_S = 60.0
_SETTINGS = {"workers": 2, "pace_s": 0.02, "save_every": "auto"}


def lightning(rounds: int) -> Figures:
    """The same loss in a `Trainer` with an `ElasticCallback`."""
    with _zygote("tests.elastic.lightning_worker") as (zygote, jobs):
        killed = [_lost(zygote, next(jobs), victim=number % 3, what="kill") for number in range(rounds)]
    return {
        "lightning_next_step_s": statistics.median(seconds for seconds, _ in killed),
        "lightning_next_step_max_s": max(seconds for seconds, _ in killed),
        "lightning_steps_lost": float(sum(lost for _, lost in killed)),
    }


def growth(rounds: int) -> Figures:
    """The same loss in larger worlds: what the survivors of 8 and of 16 workers need, with one model and machine."""
    found = Figures()
    with _zygote("tests.elastic.worker") as (zygote, jobs):
        for world in (8, 16):
            killed = [_one_of(world, zygote, next(jobs)) for _ in range(max(rounds // 2, 1))]
            found[f"survivor_next_step_w{world}_s"] = statistics.median(killed)
            found[f"survivor_next_step_w{world}_max_s"] = max(killed)
    return found


def _one_of(world: int, zygote: Zygote, folder: Path) -> float:
    """Seconds from a death to the end of the next step on the slowest of the other workers."""
    folder.mkdir()
    settings = {"pace_s": 0.02, "save_every": "auto", "workers": 0, "epochs": 1000, "batch": 2 * world}
    crew = Crew(zygote, folder, low=1, high=world, **settings)
    try:
        for rank in range(world):
            crew.start(rank, **({"at": ("fetched", AT), "what": "kill"} if rank == 1 else {}))
        others = {f"w{rank}" for rank in range(world)} - {"w1"}
        crew.ended("w1", timeout_s=_GROWN_S)

        def first() -> dict[str, float] | None:
            steps = {row["who"]: row["t"] for row in reversed(crew.events("step")) if row["world"] == world - 1}
            return steps if set(steps) == others else None

        steps = until(first, "a step of all others", _GROWN_S, diagnostic=crew.story, every_s=0.2)
        return max(steps.values()) - crew.events("trouble")[0]["t"]
    finally:
        crew.close()


def measure(rounds: int) -> Figures:
    """All figures of this arm."""
    with _zygote("tests.elastic.worker") as (zygote, jobs):
        killed = [_lost(zygote, next(jobs), victim=number % 3, what="kill") for number in range(rounds)]
        hung = [_lost(zygote, next(jobs), victim=1, what="stop", lease_s=LEASE_S) for _ in range(3)]
        stalls = [_stall(zygote, next(jobs)) for _ in range(3)]
    return {
        "survivor_next_step_s": statistics.median(seconds for seconds, _ in killed),
        "survivor_next_step_max_s": max(seconds for seconds, _ in killed),
        "hang_next_step_s": max(seconds for seconds, _ in hung),
        "steps_lost": float(sum(lost for _, lost in (*killed, *hung))),
        "newcomer_stall_s": max(stalls),
    }


@contextlib.contextmanager
def _zygote(target: str) -> Iterator[tuple[Zygote, Iterator[Path]]]:
    """And a folder for each job of it."""
    with tempfile.TemporaryDirectory() as name:
        runtime = Path(name) / "run"
        runtime.mkdir(mode=0o700)
        zygote = Zygote(Path(name), runtime, target)
        try:
            yield zygote, (Path(name) / f"{number}" for number in itertools.count())
        finally:
            zygote.close()


def _job(zygote: Zygote, folder: Path, low: int, then: Callable[[Crew], Any], **more: Any) -> Any:
    folder.mkdir()
    crew = Crew(zygote, folder, low=low, high=3, **_SETTINGS, **more)
    try:
        return then(crew)
    finally:
        crew.close()


def _lost(zygote: Zygote, folder: Path, *, victim: int, what: str, **more: Any) -> tuple[float, int]:
    """Seconds to the next step, and steps that were made and are not in the model any more."""

    def story(crew: Crew) -> tuple[float, int]:
        others = [f"w{rank}" for rank in range(3) if rank != victim]
        for rank in range(3):
            crew.start(rank, **({"at": ("fetched", AT), "what": what} if rank == victim else {}))
        rows = crew.stepped(AT + 1, *others)
        at = crew.events("trouble")[0]["t"]
        made = max(row["step"] for row in crew.events("step") if row["t"] < at)
        return max(row["t"] for row in rows) - at, made - next(iter(crew.restores().values()))[0]["step"]

    return _job(zygote, folder, 1, story, **more)


def _stall(zygote: Zygote, folder: Path) -> float:
    """Seconds between two steps of the survivors, the second one with the newcomer."""

    def story(crew: Crew) -> float:
        crew.start(0)
        crew.start(1)
        crew.stepped(5, "w0", "w1")
        crew.start(2)
        crew.stepped(1, "w0", "w1", world=3)
        steps = [row for row in crew.events("step") if row["who"] != "w2"]
        before = max(row["t"] for row in steps if row["world"] == 2)
        return min(row["t"] for row in steps if row["world"] == 3) - before

    return _job(zygote, folder, 2, story, epochs=40)
