"""The keyword arguments that all adapters share, as a type: editors list them, and type checkers verify them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypedDict

from dlrover_hooks.config.duration import Duration
from dlrover_hooks.protocol import Retention


class SharedKeywords(TypedDict, total=False):
    """Every setting of `Config` that an adapter takes; None means the environment, then the default."""

    storage_options: dict[str, Any] | None
    save_every: Duration | None
    persist_every: Duration | None
    keep: int | str | Retention | None
    snapshot: str | None
    resume: str | None
    job: str | None
    global_batch_size: int | None
    master: str | None
    token: str | None
    on_error: str | None
    replicas: int | None
    replica_mb_per_s: int | None
    disable: bool | None
    fresh: bool | None
    preempt_signals: str | None
    grace: timedelta | str | float | None
    step_timeout: timedelta | str | float | None
    on_stall: str | None
    on_straggler: str | None
