"""The messages between a job's master and the Brain, and the paths that they are sent to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from dlrover_hooks.master.scaling.optimizer import OptimizeStage
from dlrover_hooks.protocol import Count, Done, JobSample, Message, Node, ResourceLimits, ResourcePlan, World

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Label = Annotated[str, msgspec.Meta(max_length=256)]
Weight = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
Time = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
"""Seconds since 1970."""
BATCH = 1000
"""Most samples in one request."""


class RegisterJob(Message, frozen=True):
    """A job begins, or its master was started again. Sent again it changes nothing but what it says.

    `user`, `script_hash` and `model_size` (parameters) find the finished jobs that are like it. `tenant`: whose quota
    counts; `weight`: of the job, when a cluster is divided. `ps`: it has parameter servers; otherwise it is an
    all-reduce job with a fixed `global_batch` (samples) and `workers_per_host`.
    """

    job: Name
    limits: ResourceLimits
    user: Label = ""
    script_hash: Label = ""
    model_size: Count = 0
    tenant: Label = ""
    weight: Weight = 1.0
    ps: bool = False
    global_batch: World = 1
    workers_per_host: World = 1


class Registered(Message, frozen=True):
    """`newest_plan`: number of the last plan that was made for the job; 0: none."""

    newest_plan: Count


class TimedSample(Message, frozen=True):
    """What was measured over one window, and when it ended."""

    at: Time
    sample: JobSample


class ReportSamples(Message, frozen=True):
    """Statistics of a job, the oldest first."""

    job: Name
    samples: Annotated[tuple[TimedSample, ...], msgspec.Meta(max_length=BATCH)]


class AskPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which resources shall the job have now?

    `have`: number of the last plan that the master got. A newer one of this stage is the answer; otherwise one is made.
    With `oom_nodes`, nodes that were killed for memory, a plan is always made for them. `model_only`: by the fitted
    model alone. `config`: for the algorithm.
    """

    job: Name
    stage: OptimizeStage
    have: Count = 0
    oom_nodes: Annotated[tuple[Node, ...], msgspec.Meta(max_length=10_000)] = ()
    model_only: bool = False
    config: dict[str, Any] = {}
    timeout_s: Annotated[float, msgspec.Meta(ge=0.0, le=60.0)] = 10.0


class PlanAnswer(Message, frozen=True):
    """An empty plan: the job stays as it is. `pending`: none was made in time; ask again.

    `predicted`: steps per second with it, by a model; None: it was made by a rule.
    """

    plan: ResourcePlan = ResourcePlan()
    number: Count = 0
    algorithm: str = ""
    reason: str = ""
    predicted: float | None = None
    pending: bool = False


class EndJob(Message, frozen=True):
    """The job is over. Its statistics stay, for plans of jobs that are like it."""

    job: Name
    succeeded: bool = True


PATHS: Mapping[type[msgspec.Struct], tuple[str, type[Message]]] = MappingProxyType(
    {
        RegisterJob: ("/v1/brain/register", Registered),
        ReportSamples: ("/v1/brain/samples", Done),
        AskPlan: ("/v1/brain/plan", PlanAnswer),
        EndJob: ("/v1/brain/end", Done),
    }
)
"""By request: the path that it is posted to, and the reply."""
