"""A plug-in for tests/contracts/test_job_backends.py, which copies this file into a folder and installs it there.

It writes its calls into the file `calls` of that folder.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dlrover_hooks.job import JobSpec
from dlrover_hooks.job.platform import EndedWorker
from dlrover_hooks.protocol import FailurePolicy, RoleEvent

FOLDER = Path(__file__).parent


def _write(line: str) -> None:
    with open(FOLDER / "calls", "a") as file:
        file.write(line + "\n")


def prepare_job(spec: JobSpec) -> JobSpec:
    return msgspec.structs.replace(spec, env=spec.env | {"SITE": "prepared"})


def worker_env(spec: JobSpec, role: str, rank: int) -> dict[str, str]:
    return {"SITE": "not used: the job's own value takes precedence", "SITE_WORKER": f"{spec.name} {role} {rank}"}


def on_worker_ended(job: str, role: str, end: EndedWorker) -> FailurePolicy | None:
    return FailurePolicy.ROLE if end.life == 1 else None


def on_event(job: str, event: RoleEvent) -> None:
    _write(f"event {event.kind} {event.role} {event.rank} {event.life}")


def relaunch_nodes(job: str, nodes: tuple[str, ...]) -> tuple[str, ...]:
    _write(f"relaunched {len(nodes)}")
    return nodes
