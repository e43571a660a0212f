"""What the end of a worker, or of the run, means: which exit code, and what to tell. Decides, starts nothing."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable

import msgspec

from dlrover_hooks.protocol import JobView
from dlrover_hooks.runtime.child import Child, described

DONE, USER_ERROR, GAVE_UP, USAGE = 0, 1, 77, 78
AGAIN = 75
"""A worker's exit code, see `config.tell_launcher`: the master declared it dead by mistake, start it again."""


class Verdict(msgspec.Struct, frozen=True):
    """`code`: the run's exit code; None: start the workers again."""

    code: int | None
    text: str


def culprit(dead: Iterable[Child]) -> Child:
    """Who most likely took the others along: a signal's victim, then one that knows why, then any that failed."""
    return min((child for child in dead if child.exit_code()), key=lambda child: _standing(child.exit_code() or 0))


def knows_why(exit_code: int | None) -> bool:
    """This end has a cause of its own: it is not the echo of another worker's."""
    return exit_code is not None and _standing(exit_code) < _ECHO


_ECHO = 2


def _standing(exit_code: int) -> int:
    return 0 if exit_code < 0 else 1 if exit_code in (AGAIN, USAGE) else _ECHO


def judge(cause: Child, view: JobView | None, began_at: int, *, restarts: int, max_restarts: int) -> Verdict:
    """What follows from the end of `cause`. `view`: the job, None if the master did not say; `began_at`: the step."""
    code = cause.exit_code() or USER_ERROR
    what = f"{cause.name} died ({described(code)})"
    if view is not None and view.finished:
        return Verdict(USER_ERROR, f"{what}: {finished_before(view.finished_step)}")
    if code == USAGE:
        return Verdict(USAGE, f"{what}: a setting must be mended first, see its traceback above; not restarted")
    if view is not None:
        what += f" at step {view.step}"
        if code > 0 and code != AGAIN and view.step <= began_at:
            where = "no further than where it started" if began_at else "before any progress"
            return Verdict(USER_ERROR, f"{what}, {where}: not restarted, see its traceback above")
    if restarts >= max_restarts:
        return Verdict(GAVE_UP, f"{what}; gave up after {counted(restarts, 'restart')} (--max-restarts)")
    return Verdict(None, what)


def finished_before(step: int | None) -> str:
    """The training is over, what came after it is not ours."""
    return f"training was finished at step {step or 0}; the script failed afterwards"


def farewell(job: str, view: JobView | None) -> str:
    """What is left of a run that a signal ended, and how to go on with it. Call when the keeper has ended."""
    again = f"start again with: dlrover-hooks run --job {job} ..."
    if view is None:
        return f"what was saved is not known: the master gave no answer; {again}"
    if view.finished:
        return f"training was finished at step {view.finished_step or 0}"
    if view.save_to is None:
        return "nothing was saved: no save_to is set (or no worker came that far)"
    stored = _latest(view.save_to, job)
    if stored is not None:
        return f"saved step {stored} at {view.save_to}; {again}"
    steps = [one.step for one in (view.newest_committed, view.newest_complete) if one is not None]
    if not steps:
        return f"no step was saved at {view.save_to} yet; {again}"
    if view.newest_committed is not None:
        return f"saved step {view.newest_committed.step} or later at {view.save_to}; {again}"
    return f"step {max(steps)} was whole in memory, and not found at {view.save_to}: look there; {again}"


def _latest(save_to: str, job: str) -> int | None:
    """The step of the newest durable checkpoint, where `save_to` is a folder of this machine."""
    folder = save_to.removeprefix("file://")
    if "://" in folder:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(os.path.join(folder, "latest.json"), encoding="utf-8") as file:
            latest = json.load(file)
        return int(latest["generation"]["step"]) if latest["job"] == job else None
    return None


def counted(number: int, what: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
