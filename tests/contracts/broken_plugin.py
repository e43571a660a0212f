"""A plug-in all of whose functions fail, for tests/contracts/test_job_backends.py."""

from __future__ import annotations

from typing import Any

from dlrover_hooks.job import JobSpec


def prepare_job(spec: JobSpec) -> Any:
    return None


def worker_env(spec: JobSpec, role: str, rank: int) -> Any:
    return {"SITE_WORKER": rank}


def on_worker_ended(job: str, role: str, end: Any) -> Any:
    return "replace"


def on_event(job: str, event: Any) -> Any:
    raise SystemExit(3)


def relaunch_nodes(job: str, nodes: Any) -> Any:
    raise ValueError("no account at the cloud")
