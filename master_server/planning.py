"""Calls the managers of the jobs whose nodes are planned: once in each window, and when a plan may be due before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from dlrover_hooks.errors import HooksError
from dlrover_hooks.master.core.events import PlanMade
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.master.scaling.job_manager import JobManager
from dlrover_hooks.master.scaling.job_resource_optimizer import JobResourceOptimizer, Situation, situation
from dlrover_hooks.master.scaling.optimizer import ResourceOptimizer
from dlrover_hooks.protocol import Message, ScalingMode

if TYPE_CHECKING:
    from dlrover_hooks.master.brain.client.brain_jobs import BrainJobs

log = logging.getLogger("dlrover_hooks.master")


def local_optimizer(found: Situation) -> ResourceOptimizer:
    """The optimizer that needs no service. It is imported here: only a master that plans needs numpy."""
    from dlrover_hooks.master.scaling.local_optimizer import LocalOptimizer

    return LocalOptimizer(found.limits, ps=found.ps, statistics=found.statistics, has=found.has)


class Planning:
    """Lives in the loop of the runtime. Optimizers run in one thread: a fit takes milliseconds, a service longer.

    Args:
        nodes: heartbeats and reports.
        state: the journaled state.
        inform: applies and journals an internal event of the master.
        journal_now: the time of an event that is journaled now.
        brain: makes the plans of jobs in Cluster Mode. None: their own statistics do.
    """

    def __init__(
        self,
        nodes: Nodes,
        state: Callable[[], Master],
        inform: Callable[[Message], None],
        journal_now: Callable[[], float],
        brain: BrainJobs | None = None,
    ) -> None:
        self._nodes, self._state, self._inform, self._now = nodes, state, inform, journal_now
        self._brain = brain
        self._resource_optimizer = JobResourceOptimizer(self._optimizer)
        self._managers: dict[str, JobManager] = {}
        self._windows: dict[str, asyncio.TimerHandle] = {}
        self._planning: dict[str, asyncio.Future[PlanMade | None]] = {}
        self._again: set[str] = set()
        """Jobs whose state changed while a plan was being made."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlrover-hooks-planning")
        self._closed = False

    def start(self) -> None:
        """Continue after a restart."""
        self._loop = asyncio.get_running_loop()
        for name, job in sorted(self._state().jobs.items()):
            if job.scaling is not None:
                self.due(name)

    def due(self, name: str) -> None:
        """A plan for this job may be due, and its windows are to be measured. Call from the loop."""
        if self._closed:
            return
        if name not in self._managers:
            self._managers[name] = JobManager(name, self._resource_optimizer)
            self._next_window(name)
        self._plan(name)

    async def close(self, patience_s: float) -> None:
        """No more plans. A fit under way ends by itself, and its plan is dropped. The Brain gets the samples that wait
        if it takes them within `patience_s`."""
        self._closed = True
        for timer in self._windows.values():
            timer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._brain is not None:
            await asyncio.wait([self._loop.run_in_executor(None, self._brain.close)], timeout=patience_s)

    def _optimizer(self, found: Situation) -> ResourceOptimizer:
        if self._brain is not None and found.mode is ScalingMode.CLUSTER:
            return self._brain.optimizer(found)
        return local_optimizer(found)

    def _next_window(self, name: str) -> None:
        job = self._state().jobs.get(name)
        if job is None or job.scaling is None:
            del self._managers[name]
            self._windows.pop(name, None)
            return
        self._windows[name] = self._loop.call_later(job.scaling.history.pace.window_s, self._window, name)

    def _window(self, name: str) -> None:
        """A window is over: take a sample, and see whether a plan is due."""
        job, manager = self._state().jobs.get(name), self._managers[name]
        if job is not None and job.scaling is not None and not job.scaling.finished:
            if (event := manager.sample(self._nodes, job, job.scaling)) is not None:
                if self._brain is not None:
                    self._brain.report(name, event.sample)
                self._inform(event)
            else:
                self._plan(name)
        self._next_window(name)

    def _plan(self, name: str) -> None:
        """Have a plan made, unless one is being made."""
        job = self._state().jobs.get(name)
        if self._closed or job is None or job.scaling is None:
            return
        if job.scaling.finished:
            if self._brain is not None:
                end = partial(self._brain.end, name, succeeded=not job.scaling.failure)
                self._loop.run_in_executor(self._thread, end)
            return
        if name in self._planning:
            self._again.add(name)
            return
        now = self._now()
        found = situation(job, job.scaling, now)
        future = self._loop.run_in_executor(self._thread, self._managers[name].plan, found, now)
        self._planning[name] = future
        future.add_done_callback(lambda done: self._planned(name, done))

    def _planned(self, name: str, done: asyncio.Future[PlanMade | None]) -> None:
        del self._planning[name]
        if self._closed or done.cancelled():
            return
        error = done.exception()
        if isinstance(error, HooksError):
            log.warning("job %s: no plan could be made: %s", name, error)
        elif error is not None:
            log.error("job %s: no plan could be made: please report this", name, exc_info=error)
        elif (event := done.result()) is not None:
            if not event.plan.empty:
                log.info("job %s: %s", name, event.reason)
            self._inform(event)
        if name in self._again:
            self._again.discard(name)
            self._plan(name)
