"""Kill processes of a training run three times, and compare it with an undisturbed run.

It (a) trains the Lightning example undisturbed; (b) trains it again, and kills a worker, then another worker, then the
master with SIGKILL at random steps; (c) compares samples and weights. Exit code 1 if any promise is broken.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import requests
from evidence import Run, compare, plot, table
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent


@dataclass
class Shot:
    """One kill: at optimizer step `step`, of worker `rank` (None: the master)."""

    step: int
    rank: int | None
    at: float = 0.0
    recovery_s: float = 0.0

    @property
    def target(self) -> str:
        return "master" if self.rank is None else f"worker {self.rank}"


@dataclass
class Trial:
    """One run of the example under the launcher, observed through its records."""

    name: str
    folder: Path
    options: argparse.Namespace
    shots: list[Shot] = field(default_factory=list)

    def run(self, progress: Progress) -> Run:
        records = self.folder / self.name / "records"
        records.mkdir(parents=True)
        bar = progress.add_task(self.name, total=self.options.steps)
        with (self.folder / self.name / "log.txt").open("w") as log:
            launcher = subprocess.Popen(
                self.command(), cwd=records.parent, stdout=log, stderr=log, env=self.env(records)
            )
            try:
                self.watch(launcher, Run(records), progress, bar)
            except BaseException:
                launcher.send_signal(signal.SIGINT)
                launcher.wait(60)
                raise
        if launcher.returncode != 0:
            raise SystemExit(f"{self.name}: the launcher ended with {launcher.returncode}, see {log.name}")
        return Run(records).read()

    def command(self) -> list[str]:
        script = [
            str(HERE / "recorded.py"),
            "--epochs",
            str(self.options.epochs),
            "--windows",
            str(self.options.windows),
        ]
        return [sys.executable, "-m", "dlrover_hooks", "run", "-n", str(self.options.workers), "--job",
                f"demo-{self.name}-{os.getpid()}", *script]  # fmt: skip

    def env(self, records: Path) -> dict[str, str]:
        return dict(os.environ) | {"DEMO_RECORDS": str(records.resolve())}

    def watch(self, launcher: subprocess.Popen, run: Run, progress: Progress, bar: TaskID) -> None:
        pending, hit = list(self.shots), None
        while launcher.poll() is None:
            run.read()
            progress.update(bar, completed=run.step)
            if hit is not None and (back := self.recovered(run, hit)):
                hit.recovery_s = back - hit.at
                hit = None
            if hit is None and pending and run.step >= pending[0].step:
                hit = pending.pop(0)
                self.shoot(run, hit, progress)
            time.sleep(0.01)
        progress.update(bar, completed=run.read().step)
        if hit is not None and hit.rank is not None and (back := self.recovered(run, hit)):
            hit.recovery_s = back - hit.at

    def shoot(self, run: Run, shot: Shot, progress: Progress) -> None:
        victim = run.pids[shot.rank] if shot.rank is not None else _master_pid(run.master)
        shot.at = time.time()
        os.kill(victim, signal.SIGKILL)
        progress.console.print(f"  kill -9 {shot.target} (pid {victim}) at step {run.step}")

    def recovered(self, run: Run, shot: Shot) -> float | None:
        """The time of recovery: a replacement worker has stepped, or a new master responds (training never stopped)."""
        if shot.rank is not None:
            return run.first_step_after(shot.at)
        try:
            return time.time() if _master_pid(run.master) else None
        except requests.RequestException:
            return None


def _master_pid(url: str) -> int:
    return int(requests.get(f"{url}/healthz", timeout=5).json()["pid"])


def _shots(options: argparse.Namespace, chance: random.Random) -> list[Shot]:
    first = chance.randrange(options.workers)
    second = (first + 1) % options.workers
    spans = ((0.15, 0.3), (0.4, 0.55), (0.65, 0.8))
    steps = [round(options.steps * chance.uniform(*span)) for span in spans]
    return [Shot(steps[0], first), Shot(steps[1], second), Shot(steps[2], None)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=2000, help="training windows of 64 characters per epoch")
    parser.add_argument("--seed", type=int, default=None, help="chooses the steps at which it is shot")
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    options = parser.parse_args()
    batch = 32 // options.workers * options.workers
    options.steps = options.epochs * -(-options.windows // batch)
    return options


def main() -> int:
    options, console = _options(), Console()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10_000)
    folder = options.out / time.strftime("%Y%m%d-%H%M%S")
    shots = _shots(options, random.Random(seed))
    console.print(f"[bold]A training run is shot three times[/] ({options.workers} workers, seed {seed})")
    console.print(f"logs: {folder}", soft_wrap=True)
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        calm = Trial("undisturbed", folder, options).run(progress)
        shot = Trial("shot", folder, options, shots).run(progress)
    report = compare(calm, shot, shots, options)
    plot(calm, shot, shots, options.out / "loss.png")
    table(console, report, options.out / "report.json")
    return 0 if report["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
