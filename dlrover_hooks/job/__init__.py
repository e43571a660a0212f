"""Jobs of several roles: described with `DLJobBuilder`, run as processes on this machine or as actors of Ray.

Entry points: `DLJobBuilder`, `JobSpec`, and inside a worker `current_worker`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_hooks.job.builder import DLJobBuilder as DLJobBuilder, RoleBuilder as RoleBuilder
    from dlrover_hooks.job.job_handle import JobHandle as JobHandle
    from dlrover_hooks.job.platform import EndedWorker as EndedWorker
    from dlrover_hooks.job.plugins import JobPlugin as JobPlugin
    from dlrover_hooks.job.spec import JobSpec as JobSpec, RoleSpec as RoleSpec
    from dlrover_hooks.job.worker_context import WorkerContext as WorkerContext, current_worker as current_worker

_WHERE = {
    "DLJobBuilder": "builder",
    "EndedWorker": "platform",
    "JobHandle": "job_handle",
    "JobPlugin": "plugins",
    "JobSpec": "spec",
    "RoleBuilder": "builder",
    "RoleSpec": "spec",
    "WorkerContext": "worker_context",
    "current_worker": "worker_context",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
