"""Which master a command asks about which job: from its options, or from the jobs that run on this machine."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dlrover_hooks.errors import UsageError

if TYPE_CHECKING:
    from dlrover_hooks.client import MasterClient
    from dlrover_hooks.launcher.running_jobs import RunningJob


def job_master(
    job: str | None, master: str | None, token: str | None, *, tasks: bool = False, roles: bool = False
) -> RunningJob:
    """The job and its master. Without the address `master`: a job of this machine, with `tasks` one that can be scaled,
    with `roles` one of several roles.

    `pid` is 0 if the address was given. Raises UsageError.
    """
    from dlrover_hooks.launcher.running_jobs import RunningJob, find

    if master is None:
        return find(job, tasks=tasks, roles=roles)
    check_url(master)
    if job is None:
        raise UsageError("--master needs a job", hint="give its name")
    return RunningJob(job, master, token, pid=0)


def check_url(master: str) -> None:
    """Raises UsageError."""
    if "://" not in master:
        raise UsageError(f"--master {master!r} is no URL", hint="give one such as http://127.0.0.1:8780")


@contextlib.contextmanager
def asking(command: str, master: str, token: str | None) -> Iterator[MasterClient]:
    """A client of the master for this command."""
    from dlrover_hooks.client import MasterClient

    client = MasterClient(master, token, incarnation=f"{command}-{uuid.uuid4().hex}")
    try:
        yield client
    finally:
        client.close()
