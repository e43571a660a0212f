"""The launcher's part in a preemption: receives the notice, reports it to the master, and ends workers in time.

The master notifies all workers, which leave at one step by themselves. Workers get SIGTERM only shortly before the end,
for scripts without hooks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Sequence

from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import HooksError
from dlrover_hooks.launcher import interruption_notices
from dlrover_hooks.launcher.interruption_notices import InterruptionNotice
from dlrover_hooks.launcher.requeue import Slurm, requeue
from dlrover_hooks.protocol import JobView, Preempt
from dlrover_hooks.worker.preemption import REQUEUE

log = logging.getLogger("dlrover_hooks.run")

LIMIT_S = 120.0
"""Time before SLURM's time limit at which the job begins to leave."""
_RESERVE_S = 1.0
"""Subtracted from the workers' time, so that the launcher itself can end."""


class Eviction:
    """Owns the poller. Main thread only, except `hear`.

    Args:
        preemption: the source of notices, see `interruption_notices.source`.
        grace_s: between SIGTERM and SIGKILL.
    """

    def __init__(self, job: str, node: str, *, preemption: str, grace_s: float, slurm: Slurm | None) -> None:
        self.notice: InterruptionNotice | None = None
        self._job, self._node, self._grace_s, self._slurm = job, node, grace_s, slurm
        self._told = False
        source = interruption_notices.source(preemption)
        self._poller = interruption_notices.NoticePoller(source, self.hear) if source is not None else None

    def hear(self, notice: InterruptionNotice) -> None:
        """Record a notice; only the first one counts. Any thread, signal handlers too."""
        self.notice = self.notice or notice

    def signalled(self, number: int) -> None:
        """Handle SIGUSR1, which SLURM sends before its time limit if configured (`--signal`)."""
        end = self._slurm.end if self._slurm is not None else None
        self.hear(InterruptionNotice(signal.Signals(number).name, end))

    def due(self, client: MasterClient) -> bool:
        """Whether it is time for SIGTERM. Called at every turn of the launcher; reports a new notice to the master."""
        now, slurm = time.time(), self._slurm
        if slurm is not None and slurm.end is not None and slurm.end - now <= LIMIT_S:
            self.hear(InterruptionNotice("SLURM's time limit", slurm.end))
        if self.notice is None:
            return False
        if self.notice.at is not None:  # without a time, SIGTERM follows at once, and workers have the whole grace
            self._tell(client, self.notice, self.notice.at - now)
        return self.notice.at is None or self.notice.at - now <= self._grace_s

    @property
    def left_s(self) -> float:
        """Seconds left for the workers until the node ends; infinity if unknown."""
        if self.notice is None or self.notice.at is None:
            return math.inf
        return max(0.0, self.notice.at - time.time() - _RESERVE_S)

    def _tell(self, client: MasterClient, notice: InterruptionNotice, left_s: float) -> None:
        if self._told:
            return
        within_s = self.left_s
        with contextlib.suppress(HooksError):  # master away, or no round yet: try again at the next turn
            asked = Preempt(self._job, client.incarnation, self._node, within_s, notice.reason)
            self._told = client.call(asked, timeout_s=1.0).round > 0
        if self._told:
            log.warning("job %s: node %s goes in %d s (%s); the workers leave", self._job, self._node, left_s,
                        notice.reason)  # fmt: skip

    def close(self) -> None:
        """Stop polling."""
        if self._poller is not None:
            self._poller.close()


def after(number: int, codes: Sequence[int], view: JobView | None) -> int:
    """The launcher's exit code after a signal, from its workers' exit codes. Ctrl-C is not a preemption."""
    if number == signal.SIGINT:
        return 128 + number
    if view is not None and view.finished:
        return 0
    return REQUEUE if codes and set(codes) == {REQUEUE} else 128 + number


def last_code(code: int, slurm: Slurm | None, *, wanted: bool) -> int:
    """The final exit code. 143 if this launcher has requeued the job in SLURM, so that it is not done twice."""
    if code == REQUEUE and wanted and slurm is not None and slurm.node_rank == 0 and requeue(slurm):
        return 128 + signal.SIGTERM
    return code
