"""The launcher's part in a preemption: hears that its node is to go, tells the master, and ends workers in time.

The master tells all workers, who leave at one step by themselves. Only when the time is nearly up they get SIGTERM:
a script without hooks knows nothing else.
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
"""So long before SLURM's time limit the job begins to leave."""
_RESERVE_S = 1.0
"""Kept from the workers' time, for the launcher's own way out."""


class Eviction:
    """Owns the poller. Main thread only, but `hear`.

    Args:
        preemption: who is asked, see `notices.source`.
        grace_s: between SIGTERM and SIGKILL.
    """

    def __init__(self, job: str, node: str, *, preemption: str, grace_s: float, slurm: Slurm | None) -> None:
        self.notice: InterruptionNotice | None = None
        self._job, self._node, self._grace_s, self._slurm = job, node, grace_s, slurm
        self._told = False
        source = interruption_notices.source(preemption)
        self._poller = interruption_notices.Poller(source, self.hear) if source is not None else None

    def hear(self, notice: InterruptionNotice) -> None:
        """The first one counts. Any thread, signal handlers too."""
        self.notice = self.notice or notice

    def signalled(self, number: int) -> None:
        """SIGUSR1: what SLURM sends ahead of its time limit, if it was told to (`--signal`)."""
        end = self._slurm.end if self._slurm is not None else None
        self.hear(InterruptionNotice(signal.Signals(number).name, end))

    def due(self, client: MasterClient) -> bool:
        """Is it time for SIGTERM? At every turn of the launcher; tells the master what is new."""
        now, slurm = time.time(), self._slurm
        if slurm is not None and slurm.end is not None and slurm.end - now <= LIMIT_S:
            self.hear(InterruptionNotice("SLURM's time limit", slurm.end))
        if self.notice is None:
            return False
        if self.notice.at is not None:  # the workers know the whole grace alone
            self._tell(client, self.notice, self.notice.at - now)
        return self.notice.at is None or self.notice.at - now <= self._grace_s

    @property
    def left_s(self) -> float:
        """For the workers, until the node goes; infinity if nobody says when."""
        if self.notice is None or self.notice.at is None:
            return math.inf
        return max(0.0, self.notice.at - time.time() - _RESERVE_S)

    def _tell(self, client: MasterClient, notice: InterruptionNotice, left_s: float) -> None:
        if self._told:
            return
        within_s = self.left_s
        with contextlib.suppress(HooksError):  # it is away, or no round has formed: again at the next turn
            asked = Preempt(self._job, client.incarnation, self._node, within_s, notice.reason)
            self._told = client.call(asked, timeout_s=1.0).round > 0
        if self._told:
            log.warning("job %s: node %s goes in %d s (%s); the workers leave", self._job, self._node, left_s,
                        notice.reason)  # fmt: skip

    def close(self) -> None:
        """Ask no more."""
        if self._poller is not None:
            self._poller.close()


def after(number: int, codes: Sequence[int], view: JobView | None) -> int:
    """The launcher's exit code after a signal: what its workers made of it. Ctrl-C is no preemption."""
    if number == signal.SIGINT:
        return 128 + number
    if view is not None and view.finished:
        return 0
    return REQUEUE if codes and set(codes) == {REQUEUE} else 128 + number


def last_code(code: int, slurm: Slurm | None, *, wanted: bool) -> int:
    """Put the job back into SLURM's queue, if that is this launcher's to do. 143: it is done, do not do it again."""
    if code == REQUEUE and wanted and slurm is not None and slurm.node_rank == 0 and requeue(slurm):
        return 128 + signal.SIGTERM
    return code
