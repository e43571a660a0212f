"""Runs the trials of a rehearsal one after another, and prints what they show."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.rehearsal.comparison import RECOVERED, Evidence, Verdict, judge
from dlrover_hooks.rehearsal.trial_run import RehearsalPlan, Trial
from dlrover_hooks.testing.faults.fault_plan import Fault, Kind, Moment, Target


def rehearse(plan: RehearsalPlan, out: str | None) -> bool:
    """Run the rehearsal and print its table; whether all promises are kept. Main thread.

    The traces stay in `out`, or in a temporary folder if a promise is broken; its path is printed.

    Raises:
        HooksError: there is nothing to compare: the undisturbed run failed, took too long, or used no hook.
        UsageError: `out` cannot be made.
    """
    console = Console(stderr=True, highlight=False)
    faults = len(plan.faults) + len(plan.menu)
    what = f"{plan.workers} workers, {plan.steps} steps, {faults} faults (seed {plan.seed})"
    console.print(f"{' '.join(plan.command)}: {what}")
    folder = Path(tempfile.mkdtemp(prefix="dlrover-hooks-rehearsal-") if out is None else out).absolute()
    if out is not None:
        _make(folder)
    kept = finished = False
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        kept = _show(_verdicts(plan, folder, console), console)
        finished = True
    except HooksError:
        finished = True
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if out is None and (kept or not finished):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            console.print(f"traces and logs: {folder}", soft_wrap=True)
    return kept


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}", hint="name a folder that is not there yet") from error


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _verdicts(plan: RehearsalPlan, folder: Path, console: Console) -> list[Verdict]:
    """Run all trials, and judge them."""
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    calm = Trial("undisturbed", folder, plan)
    with Progress(*columns, console=console) as progress:
        calm.go(progress)
        _refuse_useless(calm)
        hit = Trial("with faults", folder, plan, plan.drawn(min(plan.steps, calm.run.step)))
        hit.go(progress)
        again = _relaunched(plan, folder, calm.run.step)
        if again is not None:
            again.go(progress)
    return judge(
        Evidence(
            calm=calm.run,
            hit=hit.run,
            bound=plan.steps,
            code=hit.code,
            struck=hit.struck(),
            planned=len(hit.faults),
            calm_lines=calm.lines,
            hit_lines=hit.lines,
            again=again.run if again is not None else None,
            again_code=again.code if again is not None else 0,
            relaunched=plan.relaunched,
            keeps=again is not None and any(again.folder.glob("saved-*")),
        )
    )


def _relaunched(plan: RehearsalPlan, folder: Path, last: int) -> Trial | None:
    """The trial whose launcher is killed halfway and started again with another number of workers; None if disabled."""
    if not plan.relaunched:
        return None
    step = max(2, min(plan.steps, last) // 2)
    return Trial(
        "relaunched", folder, plan, (Fault(step=step, kind=Kind.KILL, of=Target.LAUNCHER, at=Moment.BOUNDARY),)
    )


def _refuse_useless(calm: Trial) -> None:
    if calm.code != 0:
        raise HooksError(
            f"the undisturbed run ended with {calm.code}, so there is nothing to compare with:\n{calm.tail()}",
            hint="the script must run under `dlrover-hooks run` first; one without a process group needs --workers 1",
        )
    if not any(life.rows for life in calm.run.lives):
        raise HooksError(
            f"no hook of dlrover-hooks saw a step, so a fault would cost the whole run\n{calm.tail()}",
            hint="use AsyncCheckpointer, ElasticCallback or another adapter in the script",
        )


def _show(verdicts: list[Verdict], console: Console) -> bool:
    """Print the table. Returns True if nothing is broken, and a fault was seen."""
    rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("promise", "", "what was seen"):
        rows.add_column(name, justify="left")
    marks = {True: "[green]kept[/]", False: "[bold red]BROKEN[/]", None: "[yellow]not shown[/]"}
    for verdict in verdicts:
        rows.add_row(verdict.promise, marks[verdict.kept], verdict.found)
        if verdict.hint:
            rows.add_row("", "", f"[dim]{'hint' if verdict.kept is False else 'note'}: {verdict.hint}[/]")
    console.print(rows)
    seen = any(verdict.promise == RECOVERED and verdict.kept is not None for verdict in verdicts)
    return seen and not any(verdict.kept is False for verdict in verdicts)
