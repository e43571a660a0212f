"""One bounded and traced run of a user's script under the launcher. All of its processes end with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import Progress, TaskID

from dlrover_hooks import config as settings
from dlrover_hooks.errors import HooksError
from dlrover_hooks.host.prepared_process import Preparation, prepared_command
from dlrover_hooks.rehearsal import duplicate_output
from dlrover_hooks.testing.faults import fault_plan as faults
from dlrover_hooks.testing.faults.fault_plan import Fault, Kind, Target
from dlrover_hooks.testing.faults.step_trace import RunTrace

_LOOK_S = 0.2
_END_S = 60.0
"""Seconds for a launcher to end: it waits for its keeper's last save."""
_TAIL = 15
_SPARE_RESTARTS = 10


class RehearsalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to rehearse: the given `faults`, and those of `menu` at steps drawn from `seed`. `timeout_s`: for one run.

    `relaunched`: workers of the second launch of the third run; 0: there is no third run.
    """

    command: tuple[str, ...]
    workers: int
    steps: int
    faults: tuple[Fault, ...]
    menu: tuple[tuple[Kind, Target], ...]
    seed: int
    timeout_s: float
    relaunched: int = 0

    def drawn(self, steps: int) -> tuple[Fault, ...]:
        """`faults`, and those on the menu, over a run of `steps` steps."""
        if not self.menu:
            return self.faults
        return self.faults + faults.random(self.seed, steps=steps, world=self.workers, menu=self.menu)


class Trial:
    """One of the runs, in `folder`: its trace, its checkpoints, its log. Main thread."""

    def __init__(self, name: str, folder: Path, plan: RehearsalPlan, struck: tuple[Fault, ...] = ()) -> None:
        self.name, self._plan, self.faults = name, plan, struck
        self.folder = folder / name.replace(" ", "-")
        self.folder.mkdir(parents=True)
        self.run = RunTrace(self.folder / "trace")
        self._file = self.folder / "faults"
        self._file.write_text(faults.written(struck))
        self._told = 0
        self._job = f"rehearsal-{uuid.uuid4().hex[:8]}"
        self.lines: dict[str, int] = {}
        self.code = -1

    @property
    def log(self) -> Path:
        """The output of the launcher and its workers."""
        return self.folder / "log.txt"

    def go(self, progress: Progress) -> None:
        """Run it to its end. If interrupted, none of its processes is left running."""
        bar, before = progress.add_task(self.name, total=self._plan.steps), duplicate_output.look(os.getcwd())
        with self._launched(self._plan.workers) as launcher:
            self.code = self._watch(launcher, progress, bar)
        if any(fault.of is Target.LAUNCHER for fault in self.faults) and self.struck():
            with self._launched(self._plan.relaunched) as launcher:
                self.code = self._watch(launcher, progress, bar)
        progress.update(bar, completed=self.run.read().step, total=self.run.step)
        self._tell(progress)
        self.lines = duplicate_output.added(os.getcwd(), before)

    @contextlib.contextmanager
    def _launched(self, workers: int) -> Iterator[subprocess.Popen[bytes]]:
        restarts = len(self.faults) + _SPARE_RESTARTS
        command = [sys.executable, "-m", "dlrover_hooks", "run", "-n", str(workers), "--job", self._job,
                   "--max-restarts", str(restarts), *self._plan.command]  # fmt: skip
        with self.log.open("ab") as log:
            launcher = subprocess.Popen(
                prepared_command(command, Preparation(death_signal=signal.SIGTERM)), env=self._environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            yield launcher
        finally:
            _end(launcher)

    def _environment(self) -> dict[str, str]:
        orders = {
            "FAULTS": self._file,
            "TRACE": self.run.folder,
            "REHEARSAL": self.folder,
            "LAST_STEP": self._plan.steps,
        }
        return settings.worker_environment(**{f"{settings.PREFIX}{name}": str(value) for name, value in orders.items()})

    def _watch(self, launcher: subprocess.Popen[bytes], progress: Progress, bar: TaskID) -> int:
        deadline = time.monotonic() + self._plan.timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return launcher.wait(_LOOK_S)
            progress.update(bar, completed=self.run.read().step)
            self._tell(progress)
        raise HooksError(
            f"run {self.name!r} did not end within {self._plan.timeout_s:g} s, at step {self.run.step}:\n{self.tail()}",
            hint="give it more with --timeout, or ask for fewer --steps",
        )

    def struck(self) -> list[dict[str, Any]]:
        """The faults injected so far."""
        rows = [line for path in self.folder.glob("faults.*.struck") for line in path.read_bytes().splitlines()]
        return sorted(map(msgspec.json.decode, rows), key=lambda row: row["at"])

    def _tell(self, progress: Progress) -> None:
        for row in self.struck()[self._told :]:
            progress.console.print(f"  {row['fault']}")
            self._told += 1

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL:])


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher with SIGINT first, so that it ends its workers, its master and its keeper."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_END_S)
    launcher.kill()
    launcher.wait()
