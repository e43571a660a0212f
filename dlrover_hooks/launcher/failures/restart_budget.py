"""The cost of a failure: one of the job's restarts, which the master counts for all nodes; or a bad node is removed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from dlrover_hooks.launcher.failures.summary import FailureRecord
from dlrover_hooks.launcher.failures.verdict import (
    GAVE_UP,
    BadNodes,
    FailureVerdict,
    RepeatedFailures,
    WorkerExit,
    culprit,
    gave_up,
    judge,
)
from dlrover_hooks.launcher.master_requests import FailureCount, MasterRequests
from dlrover_hooks.launcher.options import LaunchOptions
from dlrover_hooks.protocol import BAD_NODE, REQUEUE, JobView

log = logging.getLogger("dlrover_hooks.run")


class Over(Exception):
    """The run ends here with exit code `code`. `for_all`: all other nodes end too, because of `why`.

    `echoes`: ends of workers that failed only because another one did.
    """

    def __init__(self, code: int, why: str = "", *, for_all: bool = False, echoes: Sequence[WorkerExit] = ()) -> None:
        super().__init__(code)
        self.code, self.why, self.for_all, self.echoes = code, why, for_all, echoes


def say_echoes(ends: Sequence[WorkerExit]) -> None:
    """Log one line for each worker whose traceback was not printed. Call it once the cause is logged."""
    for end in ends:
        if end.reported is not None:
            log.info("%s since a peer was gone: %s", end, end.reported.error.partition(". ")[0])


class Budget:
    """The restart budget, as one agent sees it. Main thread only."""

    def __init__(self, options: LaunchOptions, node: str, requests: MasterRequests) -> None:
        self._failures = FailureCount()
        """Of the job, on all nodes, as far as the master has reported."""
        self.record = FailureRecord(node)
        """Failures, for the final summary."""
        self.began_at = 0
        """Step of the job when the workers of this node were started."""
        self._repeats = RepeatedFailures()
        self._most, self._window_s = options.max_restarts, options.restart_window_s
        self._node, self._requests, self._blame = node, requests, BadNodes(node)

    @property
    def restarts(self) -> int:
        """Failures of the job since its launch."""
        return self._failures.total

    def started(self, view: JobView | None) -> None:
        """Call when workers are about to be started."""
        self.began_at = view.step if view is not None else 0
        if view is not None and view.failures >= self._failures.total:
            self._failures = FailureCount(view.failures, view.recent_failures)

    def charge_unexplained(self, number: int, then: str) -> None:
        """Count a restart for round `number`, which broke without a known cause: that is limited, too. Raises Over."""
        before, found = self._failures, self._requests.failures(self._failures)
        self._failures = FailureCount(max(found.total, before.total + 1), max(found.recent, 1))
        what = f"round {number} broke, and no worker is known to have failed"
        if self._failures.recent > self._most:
            raise Over(GAVE_UP, gave_up(what, self._most, self._window_s), for_all=True)
        log.warning("%s; %s (%s)", what, then, self._spent())

    def charge(self, ends: list[WorkerExit], view: JobView | None, then: str) -> None:
        """Judge a failure whose `ends` were reported to the master. Raises Over if it ends the run.

        Args:
            ends: of the workers that ended, on all nodes; empty: no failure.
            view: the job at that time.
            then: the action that follows, for the log.
        """
        if not ends:
            return
        began_at = self.began_at if view is None or view.begun_step is None else view.begun_step
        cause, node = culprit(ends), self._node
        self._failures = self._requests.failures(self._failures)
        again = self._repeats.seen(cause, view)
        verdict = judge(
            cause, view, began_at, node=node, failures=self._failures.recent, max_restarts=self._most,
            window_s=self._window_s, again=again,
        )  # fmt: skip
        if verdict.code is None and (bad := self._blame.falls(cause, view)):
            verdict = FailureVerdict(BAD_NODE, bad)
        self.record.failed(cause, view, then if verdict.code is None else "")
        if (
            cause.reported is not None and cause.reported.trace
        ):  # no other failure came first, so its traceback is printed
            sys.stderr.write(f"{cause.name}:\n{cause.reported.trace}")
        echoes = [end for end in ends if end is not cause and end.reported is not None and end.reported.trace]
        if verdict.code is not None:
            raise Over(verdict.code, verdict.text, for_all=verdict.code not in (REQUEUE, BAD_NODE), echoes=echoes)
        log.warning("%s; %s (%s)", verdict.text, then, self._spent())
        say_echoes(echoes)

    def _spent(self) -> str:
        return f"{self._failures.recent} of {self._most} restarts"
