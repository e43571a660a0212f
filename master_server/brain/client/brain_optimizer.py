"""The optimizer of Cluster Mode: asks the Brain for the plans of one job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dlrover_hooks.config import Tls
from dlrover_hooks.errors import BrainAway, UnknownJob, UsageError
from dlrover_hooks.master.brain.client.brain_client import BrainClient
from dlrover_hooks.master.brain.messages import AskPlan, EndJob, PlanAnswer, RegisterJob
from dlrover_hooks.master.scaling.optimizer import NO_CONFIG, OptimizeStage, ResourceOptimizer
from dlrover_hooks.protocol import Node, ResourcePlan

DEADLINE_S = 20.0
"""Of one plan. Longer than a plug-in may take (`algorithm_executor.LIMIT_S`)."""
_PART = 0.8
"""Of the time that is left, the Brain may use so much: its answer must arrive before the deadline."""


class BrainOptimizer(ResourceOptimizer):
    """Asks the Brain at `url`. Statistics are sent by a `StatsReporter`, so nothing is observed here.

    The first call registers the job. Every call ends within `deadline_s` seconds: with a plan (an empty one: the job
    stays as it is), or with `BrainAway`, and then the master goes on with its `LocalOptimizer`. A call after that asks
    again, and gets a plan that was made meanwhile. Not thread-safe: one thread calls it.

    Raises `UsageError` for a wrong address, or a configuration that is not JSON; `Unauthorized`.
    """

    def __init__(
        self, url: str, token: str | None, job: RegisterJob, *, deadline_s: float = DEADLINE_S, tls: Tls | None = None
    ) -> None:
        self._client, self._job, self._deadline_s = BrainClient(url, token, tls=tls), job, deadline_s
        self._registered, self._have = False, 0
        self.answer = PlanAnswer()
        """The last one: beside the plan its number, algorithm, reason and predicted speed (steps per second)."""

    def generate_opt_plan(self, stage: OptimizeStage, config: Mapping[str, Any] = NO_CONFIG) -> ResourcePlan:
        """The plan for a stage: one that the Brain has made by itself, or a new one."""
        return self._ask(stage, config)

    def generate_oom_recovery_plan(
        self, oom_nodes: Sequence[Node], stage: OptimizeStage, config: Mapping[str, Any] = NO_CONFIG
    ) -> ResourcePlan:
        """The plan for nodes that were killed because their memory was used up."""
        return self._ask(stage, config, oom_nodes=tuple(oom_nodes))

    def generate_resource_plan_with_optimizer(self, config: Mapping[str, Any] = NO_CONFIG) -> ResourcePlan:
        """The plan of the fitted model alone; empty while it is not determined."""
        return self._ask(OptimizeStage.RUNNING, config, model_only=True)

    def end_job(self, *, succeeded: bool) -> None:
        """The job is over. The Brain keeps its statistics for plans of new jobs. Raises `BrainAway`."""
        self._client.call(EndJob(self._job.job, succeeded), self._deadline_s)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _ask(self, stage: OptimizeStage, config: Mapping[str, Any], **more: Any) -> ResourcePlan:
        until = time.monotonic() + self._deadline_s
        try:
            msgspec.json.encode(dict(config))
        except TypeError as error:
            raise UsageError(f"configuration of the Brain's algorithm: {error}", hint="give plain values") from None
        self._register(until)
        while (left := until - time.monotonic()) > 0:
            message = AskPlan(self._job.job, stage, self._have, config=dict(config), timeout_s=min(60.0, _PART * left),
                              **more)  # fmt: skip
            try:
                answer: PlanAnswer = self._client.call(message, left)
            except UnknownJob:  # another database, or it has ended there
                self._registered = False
                self._register(until)
                continue
            if not answer.pending:
                self.answer = answer
                self._have = max(self._have, answer.number)
                return answer.plan
        raise BrainAway(
            f"The Brain at {self._client.url} made no plan for job {self._job.job} within {self._deadline_s:g} s.",
            hint="Its log names the algorithm that takes so long.",
        )

    def _register(self, until: float) -> None:
        if not self._registered:
            self._have = self._client.call(self._job, max(0.05, until - time.monotonic())).newest_plan
            self._registered = True
