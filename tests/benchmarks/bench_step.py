"""What the hooks cost a training step that saves as `auto` has it: `make bench-step`.

A tiny model whose step takes about 1.5 ms, so that what is added to it shows. Each way of training (`step_worker.ARMS`)
has processes of its own, of two workers over gloo under the launcher or of one alone; all live at once and train in
turn, so that a busy machine hurts them alike. Each way is there twice: where a process happens to lie in memory
shifts its steps by some 50 us, for as long as it lives. Each core is kept awake by a process that runs where nothing
else does (SCHED_IDLE): a virtual core that sleeps comes back with cold caches, and that is charged to the next thread.
A figure is CPU time of the training thread per step, beyond that of the same loop without hooks: round by round, then
the median; of two ranks the one that costs more counts.
Writes build/bench/step.json. BENCH_ARGS: `--rounds N` (11; at least 7), `--steps N` of each turn, `--only ARM` (several
times), `--profile DIR` (cProfile's figures of each worker; costs are then those under the profiler).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from rich.console import Console

from tests.benchmarks import step_worker
from tests.benchmarks.report import REPOSITORY, Figures, report

WORLD, TIMES, START_S, TURN_S = 2, 2, 120.0, 60.0
COSTS = {
    "hook": ("hooks", "plain"),
    "elastic": ("elastic", "plain"),
    "lightning_callback": ("lightning_hooks", "lightning"),
    "alone": ("hooks_alone", "plain_alone"),
}
"""Which way of training is compared with which."""
BARS = {"hook_cpu_us": 150.0, "elastic_cpu_us": 250.0, "lightning_callback_cpu_us": 300.0, "alone_cpu_us": 100.0}
"""Microseconds of the training thread's CPU time per step that must not be exceeded."""
Turn = list[dict[str, float]]
"""By rank, `cpu_s` and `wall_s` of a step."""


class World:
    """The processes of one way of training, and the lines to their training threads."""

    def __init__(self, arm: str, number: int, folder: Path, profile: str | None) -> None:
        self.arm, self._folder, self._lines = arm, folder / f"{arm}-{number}", dict[int, IO[str]]()
        self._folder.mkdir()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(START_S)
        path = str(self._folder / "turns")
        self._listener.bind(path)
        self._listener.listen()
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self._folder), "OMP_NUM_THREADS": "1"}
        env |= {"DLROVER_HOOKS_JOB": f"bench-step-{arm}-{number}"}
        if profile is not None:
            env["BENCH_STEP_PROFILE"] = str(Path(profile).resolve())
        self._world = 1 if arm.endswith("alone") else WORLD
        launcher = ["-m", "dlrover_hooks", "run", "--nproc-per-node", str(WORLD), "--standby", "0"]
        command = [sys.executable, *(launcher if self._world > 1 else []), step_worker.__file__, arm, path]
        self._log = (self._folder / "log").open("w+")
        self._process = subprocess.Popen(command, env=env, cwd=self._folder, stdout=self._log, stderr=self._log)

    def arrive(self) -> None:
        """Wait until all workers train. Raises RuntimeError with their log if they do not."""
        try:
            while len(self._lines) < self._world:
                line = self._listener.accept()[0]
                line.settimeout(TURN_S)
                file = line.makefile("rw")
                self._lines[json.loads(file.readline())["rank"]] = file
        except TimeoutError as error:
            raise RuntimeError(self._said()) from error

    def turn(self, steps: int) -> Turn:
        """Train so many steps. Raises RuntimeError with the log if that fails."""
        self._tell(steps)
        try:
            return [json.loads(self._lines[rank].readline()) for rank in range(self._world)]
        except (TimeoutError, ValueError) as error:
            raise RuntimeError(self._said()) from error

    def end(self) -> None:
        """Let the training end as it should. Raises RuntimeError with the log if it does not."""
        self._tell(0)
        try:
            code = self._process.wait(TURN_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"it does not end: {self._said()}") from error
        if code:
            raise RuntimeError(self._said())

    def close(self) -> None:
        """End whatever still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            for line in self._lines.values():
                line.close()  # a worker that waits for its turn ends
            try:
                self._process.wait(TURN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._listener.close()
        self._log.close()

    def _tell(self, steps: int) -> None:
        for line in self._lines.values():
            line.write(json.dumps({"steps": steps}) + "\n")
            line.flush()

    def _said(self) -> str:
        self._log.seek(0)
        return f"{self.arm}:\n{self._log.read()}"


_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def _awake() -> Iterator[None]:
    """No core of this machine sleeps."""
    with contextlib.ExitStack() as stack:
        for core in os.sched_getaffinity(0):
            spinning = subprocess.Popen([sys.executable, "-c", _SPIN, str(core)])
            stack.callback(spinning.wait)
            stack.callback(spinning.kill)
        yield


@contextlib.contextmanager
def _worlds(arms: list[str], profile: str | None) -> Iterator[list[World]]:
    with tempfile.TemporaryDirectory(prefix="bench-step-") as name, contextlib.ExitStack() as stack:
        worlds = list[World]()
        for number, arm in itertools.product(range(TIMES), arms):  # one by one: all at once would hit deadlines
            worlds.append(World(arm, number, Path(name), profile))
            stack.callback(worlds[-1].close)
            worlds[-1].arrive()
        yield worlds
        for world in worlds:
            world.end()


def measure(arms: list[str], rounds: int, steps: int, profile: str | None) -> dict[str, list[Turn]]:
    """By way of training its turns, `TIMES` in a round. The first round is not counted; every other runs backwards."""
    found: dict[str, list[Turn]] = {arm: [] for arm in arms}
    with _worlds(arms, profile) as worlds, _awake():
        for number in range(rounds + 1):
            for world in worlds if number % 2 else worlds[::-1]:
                turn = world.turn(steps)
                if number:
                    found[world.arm].append(turn)
    return found


def figures(found: dict[str, list[Turn]]) -> Figures:
    """What each way costs, and what a step takes without hooks."""
    made = Figures()
    for name, (ours, theirs) in COSTS.items():
        if ours in found and theirs in found:
            made[f"{name}_cpu_us"] = _more(found[ours], found[theirs], "cpu_s")
            made[f"{name}_wall_us"] = _more(found[ours], found[theirs], "wall_s")
    for arm, turns in found.items():
        for what in ("cpu", "wall"):
            made[f"{arm}_step_{what}_ms"] = 1e3 * max(_by_rank(turns, f"{what}_s"))
    return made


def _more(ours: list[Turn], theirs: list[Turn], what: str) -> float:
    pairs = [zip(one, other, strict=True) for one, other in zip(ours, theirs, strict=True)]
    return 1e6 * max(
        map(statistics.median, zip(*([a[what] - b[what] for a, b in pair] for pair in pairs), strict=True))
    )


def _by_rank(turns: list[Turn], what: str) -> list[float]:
    return [statistics.median(row[what] for row in rows) for rows in zip(*turns, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=step_worker.ARMS, action="append", help="a way of training, such as hooks")
    parser.add_argument("--profile", metavar="DIR", help="leave cProfile's figures of each worker there")
    given = parser.parse_args()
    console = Console()
    with console.status("training in turns"):
        found = measure(given.only or list(step_worker.ARMS), given.rounds, given.steps, given.profile)
    conditions: dict[str, Any] = {
        "rounds": given.rounds,
        "steps": given.steps,
        "cores": psutil.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    return report("step", "Step: what the hooks cost the training thread", conditions, figures(found), BARS)


if __name__ == "__main__":
    sys.exit(main())
