"""What the suites for every master share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlrover_hooks import protocol as p
from tests.e2e.job_script import attach, join

CallerOf = Callable[[str], Any]


def started(caller_of: CallerOf, job: str, **more: Any) -> p.Plan:
    """Two workers of one node train."""
    caller_of("agent").call(join(job=job))
    for index in range(2):
        caller_of(f"w{index}").call(attach(f"w{index}", job=job, **more))
    return caller_of("w0").call(p.AwaitPlan(job=job, incarnation="w0"))
