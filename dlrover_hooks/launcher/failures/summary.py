"""The summary at the end of a run with failures: the first failure, its cause and cost, the reaction, the next step."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

import msgspec

from dlrover_hooks.launcher.failures.causes import cause_of
from dlrover_hooks.launcher.failures.verdict import DONE, GAVE_UP, USAGE, USER_ERROR, WorkerExit, counted, reached
from dlrover_hooks.protocol import BAD_NODE, REQUEUE, JobView

WIDTH = 80
_SHOWN = 3
"""Number of later failures that are listed one by one."""
_ENDS = {
    DONE: "the job is done",
    USER_ERROR: "the script failed (exit code 1): mend it first, then",
    REQUEUE: "preempted, the state is saved (exit code 75)",
    BAD_NODE: "this node is bad (exit code 76): replace it, then there",
    GAVE_UP: "given up (exit code 77): look for the cause above first, then",
    USAGE: "a setting must be mended (exit code 78), then",
    130: "ended with Ctrl-C",
    143: "ended with SIGTERM",
}
_NOTHING = {
    USER_ERROR: "nothing: it would fail again",
    USAGE: "nothing: it would fail again",
    GAVE_UP: "nothing: the restarts are spent (--max-restarts)",
}
"""The reaction to a failure after which nothing was restarted."""


class Failure(msgspec.Struct, frozen=True):
    """A worker's end that was not a consequence of another one's. `step`: of the job then; None: unknown.

    `then`: the reaction. `resumed`: the step from which the job resumed; None: it did not, or this is unknown.
    """

    end: WorkerExit
    node: str
    then: str
    attempt: int = 0
    step: int | None = None
    resumed: int | None = None


class FailureSummary(msgspec.Struct, frozen=True):
    """The contents of the summary. `code`: the launcher's exit code; `command`: resumes the job."""

    job: str
    code: int
    failures: tuple[Failure, ...]
    command: str


class FailureRecord:
    """Failures of one run, as its agent sees them. Main thread only."""

    def __init__(self, node: str) -> None:
        self.failures: list[Failure] = []
        self._node = node

    def failed(self, cause: WorkerExit, view: JobView | None, then: str) -> None:
        """`cause` broke the round; `then`: the reaction, empty if there is none."""
        self.heard(view)
        known = view is not None and view.begun_step is not None
        step, attempt = (reached(cause, view), view.attempt) if view is not None and known else (None, 0)
        self.failures.append(Failure(cause, self._node if cause.here else "", then, attempt, step))

    def heard(self, view: JobView | None) -> None:
        """Completes the last failure: a later attempt shows the step from which the job resumed."""
        if view is None or view.begun_step is None or not self.failures:
            return
        last = self.failures[-1]
        if last.resumed is None and last.step is not None and view.attempt > last.attempt:
            self.failures[-1] = msgspec.structs.replace(last, resumed=view.begun_step)


def again(arguments: Sequence[str], job: str) -> str:
    """The command line that resumes `job`, from the arguments of this one."""
    named = any(one in ("--job", "--rdzv-id") or one.startswith(("--job=", "--rdzv-id=")) for one in arguments)
    rest = [one if not one.startswith("--token=") else "--token=..." for one in arguments if one != "--fresh"]
    rest = ["..." if before == "--token" else one for before, one in zip(["", *rest], rest, strict=False)]
    return shlex.join(["dlrover-hooks", *rest[:1], *([] if named else ["--job", job]), *rest[1:]])


def screen(story: FailureSummary, *, colour: bool = False) -> str:
    """The text, at most 80 columns wide unless a word is longer, with a final newline."""
    first, later = story.failures[0], story.failures[1:]
    rows = [("who", _who(first)), ("why", _why(first)), ("", _where(first)), ("when", _when(first))]
    rows += [("lost", _lost(first)), ("done", first.then or _NOTHING.get(story.code, "")), *_later(later)]
    rows.append(("try", cause_of(first.end).hint))
    rows.append(("end", _ENDS.get(story.code, f"exit code {story.code}")))
    title = f"job {story.job}: the first failure{_outcome(story)}"
    lines = ["-" * WIDTH, f"\x1b[1;31m{title}\x1b[0m" if colour else title]
    for name, text in rows:
        lines += _row(name, text)
    if story.code != DONE:
        lines.append(f"  next   {story.command}")  # not wrapped, so that it can be copied
    return "\n".join([*lines, "-" * WIDTH]) + "\n"


def _outcome(story: FailureSummary) -> str:
    if story.code == DONE:
        return " (the job is done)"
    ended = story.code in (130, 143) and story.failures[-1].resumed is not None
    return " (the job went on until it was ended)" if ended else ""


def _row(name: str, text: str) -> list[str]:
    if not text:
        return []
    lines = textwrap.wrap(text, WIDTH - 9, break_long_words=False, break_on_hyphens=False)
    return [f"  {name if index == 0 else '':<7}{line}" for index, line in enumerate(lines)]


def _who(failure: Failure) -> str:
    return failure.end.name + (f" on node {failure.node}" if failure.node else "")


def _why(failure: Failure) -> str:
    end = failure.end
    if end.reported is not None:
        return f"{end.why}: {end.reported.error}"
    return end.why + (", see its own output above" if end.exit_code is not None and end.exit_code > 0 else "")


def _where(failure: Failure) -> str:
    return failure.end.reported.where if failure.end.reported is not None else ""


def _when(failure: Failure) -> str:
    """Workers report their step once a second and with each save, so more steps may have been made."""
    if failure.step is None:
        return "before training began"
    return f"at step {max(failure.step, failure.resumed or 0)} or later"


def _lost(failure: Failure) -> str:
    if failure.step is None or failure.resumed is None:
        return ""
    known = failure.step - failure.resumed
    lost = f"at least {counted(known, 'step')}" if known > 0 else "no step that is known to be finished"
    return f"{lost}: it went on from step {failure.resumed}"


def _later(later: Sequence[Failure]) -> list[tuple[str, str]]:
    rows = [("later" if index == 0 else "", f"{_who(one)} {_when(one)}: {_why(one)}")
            for index, one in enumerate(later[:_SHOWN])]  # fmt: skip
    more = len(later) - _SHOWN
    return rows + ([("", f"and {counted(more, 'more failure')}")] if more > 0 else [])
