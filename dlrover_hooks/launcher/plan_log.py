"""Tells the user of a planned job what was planned for its nodes, and what became of it."""

from __future__ import annotations

import logging

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import HooksError

log = logging.getLogger("dlrover_hooks.run")


class PlanLog:
    """Of one job. One thread calls `look`."""

    def __init__(self, job: str, client: MasterClient) -> None:
        self._job, self._client = job, client
        self._told: dict[int, str] = {}
        """Outcome of each plan that was logged."""

    def look(self, timeout_s: float) -> None:
        """Log what has changed. Nothing is logged while the master does not answer."""
        try:
            found: p.Plans = self._client.call(p.ShowPlans(self._job), timeout_s=timeout_s)
        except HooksError:
            return
        for plan in found.plans:
            if self._told.get(plan.number) == plan.outcome:
                continue
            if plan.number not in self._told:
                log.info("job %s: plan %d: %s (%s)", self._job, plan.number, plan.what, plan.reason)
            if plan.decided:
                log.info("job %s: plan %d is %s: %s", self._job, plan.number, plan.outcome, plan.decided)
            self._told[plan.number] = plan.outcome
