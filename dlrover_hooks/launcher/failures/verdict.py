"""Interprets the end of a worker or of the run: exit codes and messages. Pure decisions; starts nothing."""

from __future__ import annotations

import contextlib
import importlib
import signal
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dlrover_hooks.errors import HooksError
from dlrover_hooks.host.child_process import Child, described
from dlrover_hooks.launcher.failures.causes import USAGE as USAGE, Action, cause_of
from dlrover_hooks.launcher.options import LaunchOptions
from dlrover_hooks.launcher.processes.worker_errors import WorkerError
from dlrover_hooks.protocol import AGAIN, BAD_NODE, REQUEUE, JobView

DONE, USER_ERROR, GAVE_UP = 0, 1, 77
_PASSED_ON = {REQUEUE: "it is preempted; start it again to go on", BAD_NODE: "this node is bad; replace it"}
"""A worker's exit codes that its own launcher returns, too; no other launcher does."""


class FailureVerdict(msgspec.Struct, frozen=True):
    """`code`: the run's exit code; None: restart the workers."""

    code: int | None
    text: str


class WorkerExit(msgspec.Struct, frozen=True):
    """How a worker ended. `here`: on this node.

    `exit_code` None: its end was not observed. The master declared it lost or, with `left`, it reported that it left
    before it was done.
    """

    name: str
    exit_code: int | None
    here: bool = True
    reported: WorkerError | None = None
    """Its own report, if an exception ended it."""
    left: bool = False
    stalled: bool = False
    """The master ended it because it made no steps."""
    slow: bool = False
    """The master ended it because the others waited for it or its node."""
    where: str = ""
    """The line at which a worker was that sent no heartbeats, or the state of its process; empty: unknown."""
    out_of_memory: bool = False
    """The kernel has killed it, or a process of its DataLoader, for want of memory."""

    @property
    def has_cause(self) -> bool:
        """It is not merely a consequence of another worker's end."""
        return _standing(self) < _ECHO

    def __str__(self) -> str:
        if self.exit_code is None:
            return f"{self.name} " + (_LEFT if self.left else f"was lost ({self._why_lost})")
        if self.exit_code == 0:
            return f"{self.name} ended with exit code 0 before the others were done"
        return f"{self.name} died ({described(self.exit_code)}{_MEMORY if self.out_of_memory else ''})"

    @property
    def why(self) -> str:
        """The reason in a few words."""
        if self.exit_code is None:
            return _LEFT if self.left else f"lost: {self._why_lost}"
        if self.exit_code == 0:
            return f"{described(self.exit_code)}, before the others were done"
        return described(self.exit_code) + (_MEMORY if self.out_of_memory else "")

    @property
    def _why_lost(self) -> str:
        if self.slow:
            return "it was slow, and the others waited for it"
        return "it made no steps for too long" if self.stalled else "silent for too long" + self.where


_KILLED_LOADER = "killed by signal: Killed"
"""Part of torch's message if a process of a DataLoader ends by SIGKILL."""
_LEFT, _MEMORY = "left training by an exception or sys.exit", ": out of memory"


def end_of(child: Child, reported: WorkerError | None = None, *, out_of_memory: bool = False) -> WorkerExit:
    """The end of a worker of this node. `out_of_memory`: the kernel has just killed a process for want of memory."""
    code = child.exit_code()
    killed = code == -signal.SIGKILL or (reported is not None and _KILLED_LOADER in reported.error)
    return WorkerExit(child.name, code, reported=reported, out_of_memory=out_of_memory and killed)


def left_by_itself(ends: Mapping[str, WorkerExit]) -> bool:
    """All have left because of a preemption. One that the master declared dead does not count: it reports an error."""
    return bool(ends) and all(end.exit_code == REQUEUE and end.reported is None for end in ends.values())


def culprit(ends: Iterable[WorkerExit]) -> WorkerExit:
    """The most likely cause: a bad node or a signal, else an exit code with its own meaning, else any failure."""
    return min(ends, key=lambda end: (_standing(end), not end.here))


_ECHO = 3


def _standing(end: WorkerExit) -> int:
    if end.exit_code == BAD_NODE:
        return 0
    if end.exit_code is None or end.exit_code < 0:
        return 1
    if end.exit_code == 0 and end.left:  # it may have caught an exception caused by another worker's end
        return _ECHO + 1
    return 2 if end.exit_code in (0, AGAIN, REQUEUE, USAGE) else _ECHO


def judge(
    cause: WorkerExit,
    view: JobView | None,
    began_at: int,
    *,
    node: str,
    failures: int,
    max_restarts: int,
    window_s: float,
    again: bool = False,
) -> FailureVerdict:
    """What follows from `cause`, the newest of `failures` failures of the job within `window_s`, for `node`'s launcher.

    An exit code from the script is judged on its own node only.

    Args:
        view: the job; None if the master did not answer.
        began_at: the step.
        again: it repeats the last failure, and no step was made in between, see `RepeatedFailures`.
    """
    code = cause.exit_code or -1
    what = str(cause)
    others_go = view is not None and view.parting.nodes and node not in view.parting.nodes
    if cause.here and code in _PASSED_ON and not (code == REQUEUE and others_go):
        return FailureVerdict(code, f"{what}: {_PASSED_ON[code]}")
    if view is not None and view.finished:
        return FailureVerdict(USER_ERROR, f"{what}: {finished_before(view.finished_step)}")
    if code == USAGE and cause.here:
        return FailureVerdict(USAGE, f"{what}: a setting must be mended first, see its traceback above; not restarted")
    if view is not None:
        step = reached(cause, view)
        what += f" at step {step}"
        row = cause_of(cause)
        if cause.here and row.action is Action.REPLACE_NODE and _others(view, node):
            return FailureVerdict(BAD_NODE, f"{what}: {row.hint}; replace this node")
        if cause.here and row.in_vain is Action.FAIL and (again or step <= began_at):
            where = "no further than where it started" if began_at else "before any progress"
            where = "the same failure as before" if step > began_at else where
            then = row.hint if cause.out_of_memory else "see its traceback above"
            return FailureVerdict(USER_ERROR, f"{what}, {where}: not restarted, {then}")
    if failures > max_restarts:
        return FailureVerdict(GAVE_UP, gave_up(what, max_restarts, window_s))
    return FailureVerdict(None, what)


def _others(view: JobView, node: str) -> bool:
    """Other nodes have members, too, so `node` can be told from the script."""
    return view.unlisted.alive > 0 or any(member.node != node for member in view.members)


def reached(cause: WorkerExit, view: JobView) -> int:
    """The step that the job had reached: workers report it once a second, and with their final error."""
    return max(view.step, cause.reported.step if cause.reported is not None else 0)


class RepeatedFailures:
    """Detects a repeated failure: the same exit code, error and place in the script, at the same step.

    Such a script fails there every time, even though it was restored from an older step and repeated some steps.
    """

    def __init__(self) -> None:
        self._last: tuple[int | None, str, str] | None = None
        self._step = -1

    def seen(self, cause: WorkerExit, view: JobView | None) -> bool:
        """`cause` is the newest failure. True: it repeats the last one, and the job was no further than then."""
        if view is None or not cause.here or cause_of(cause).in_vain is not Action.FAIL:
            self._last = None
            return False
        reported = cause.reported or WorkerError("")
        this, step = (cause.exit_code, reported.error, reported.where), reached(cause, view)
        same = this == self._last and step <= self._step
        self._last, self._step = this, max(step, self._step)
        return same


def gave_up(what: str, max_restarts: int, window_s: float) -> str:
    """The message when the restarts of the job are used up."""
    most = counted(max_restarts, "restart")
    return (
        f"{what}; gave up after {most} (--max-restarts) of the job within {window_s:g} s (--restart-window), "
        "on whatever node"
    )


class BadNodes:
    """Detects a bad node: counts how often in a row its workers broke the round without a new step in between.

    Only once the job has made steps, and with several nodes: on a single node, node and script cannot be distinguished.
    Only ends by a signal or by silence count, as caused by broken devices, memory or drivers; an exit code comes from
    the script.
    """

    MOST = 3

    def __init__(self, node: str) -> None:
        self._node, self._times, self._step = node, 0, -1

    def falls(self, cause: WorkerExit, view: JobView | None) -> str:
        """Why this node is to be replaced after `cause`; empty if it is not."""
        others = view is not None and _others(view, self._node)
        step = view.step if view is not None else 0
        if not step or not others or not cause.here or cause_of(cause).in_vain is not Action.REPLACE_NODE:
            self._times = 0
            return ""
        self._times = 1 if step > self._step else self._times + 1
        self._step = max(step, self._step)
        if self._times < self.MOST:
            return ""
        return f"{cause}: for the {self.MOST}rd time in a row on node {self._node}, at step {step}; replace that node"


def too_few(options: LaunchOptions, left: int, node: str = "") -> str:
    """Why the job, or `node`, cannot go on with so many workers."""
    least, where = (options.workers.least, f"of node {node}") if node else (options.min_workers, "of the job")
    return f"{counted(left, 'worker')} {where} left, and {least} needed: --fault-level shrink replaces no worker"


def workers_missing(options: LaunchOptions, waited_s: float, missing: str) -> str:
    """Why no round has formed. `missing`: nodes that are lost."""
    if not options.several_nodes:
        return f"the master formed no round of {options.workers} workers within {waited_s:g} s"
    who = f"node {missing} is lost" if missing else "others did not come"
    return (
        f"no round of {options.nodes} nodes with {options.workers} workers each formed within {waited_s:g} s: {who} "
        "(--replace-timeout)"
    )


def no_place(options: LaunchOptions, waited_s: float, view: JobView) -> str:
    """Why a late or surplus node ends. The job trains without it."""
    live = sum(member.alive for member in view.members) + view.unlisted.alive
    return (
        f"{counted(live, 'worker')} train without this node, and no place for it became free within {waited_s:g} s "
        f"(--nnodes {options.nodes}, --replace-timeout)"
    )


def trained_elsewhere(nodes: Sequence[str]) -> str:
    """Why a second launcher of a single-node job has had nothing to do."""
    return (
        f"the launcher on node {', '.join(nodes)} trained it to its end, while this one waited for a place. For a "
        "spare node give both --nnodes 1:2, for another job give this one another --job"
    )


def finished_before(step: int | None) -> str:
    """The message for a script that failed after the training was finished."""
    return f"training was finished at step {step or 0}; the script failed afterwards"


def farewell(job: str, view: JobView | None, command: str) -> str:
    """What was saved of a run that a signal ended, and the `command` that resumes it. Call it after the keeper has
    ended.
    """
    again = f"start again with: {command}"
    if view is None:
        return f"what was saved is not known: the master gave no answer; {again}"
    if view.finished:
        return f"training was finished at step {view.finished_step or 0}"
    if view.save_to is None:
        if not view.unlisted.attached and not any(one.attached for one in view.members):
            return f"nothing was saved: no worker had begun to train; {again}"
        return "nothing was saved: no save_to is set"
    stored = _stored(view.save_to, job)
    if stored is not None:
        return f"saved step {stored} at {view.save_to}; {again}"
    steps = [one.step for one in (view.newest_committed, view.newest_complete) if one is not None]
    if not steps:
        return f"no step was saved at {view.save_to} yet; {again}"
    if view.newest_committed is not None:
        return f"saved step {view.newest_committed.step} or later at {view.save_to}; {again}"
    return f"step {max(steps)} was whole in memory, and not found at {view.save_to}: look there; {again}"


def _stored(save_to: str, job: str) -> int | None:
    """The step that the next start finds, if `save_to` is a local folder; verified by hashes, as at the next start."""
    if "://" in save_to.removeprefix("file://"):
        return None
    with contextlib.suppress(HooksError):
        # imported by name: the launcher must not depend on `checkpoint`, and only this message uses it
        found = importlib.import_module("dlrover_hooks.checkpoint.storage.generations").scan(save_to, None, job)
        return found.manifests[0].generation.step if found.manifests else None
    return None


def counted(number: int, what: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
