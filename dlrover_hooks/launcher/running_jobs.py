"""The jobs that launchers of this user run on this machine, and its jobs of several roles: where the master of each is.

`dlrover-hooks scale`, `vitals`, `plans` and `roles` find address and token there. A file per launcher, readable by this
user alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.errors import UsageError


class RunningJob(msgspec.Struct, frozen=True):
    """`token`: of the master; None: it needs none. `pid`: of the launcher, or of the process that submitted a job of
    several roles. `tasks`: a parameter server job. `planned`: the master plans its nodes. `roles`: a job of several
    roles."""

    job: str
    master: str
    token: str | None
    pid: int
    tasks: bool = False
    planned: bool = False
    roles: bool = False


@contextlib.contextmanager
def listed(
    job: str, master: str, token: str | None, *, tasks: bool = False, planned: bool = False, roles: bool = False
) -> Iterator[str]:
    """While it lasts, this launcher's job can be found, by the file of the returned name."""
    path = os.path.join(settings.runtime_dir(), f"job-{_digest(job)}-{os.getpid()}.json")
    draft = f"{path}.draft"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(RunningJob(job, master, token, os.getpid(), tasks, planned, roles)))
    os.replace(draft, path)
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def find(job: str | None, *, tasks: bool = False, roles: bool = False) -> RunningJob:
    """The job of that name, or the only one. Raises UsageError.

    Args:
        job: its name. None: the only one of its kind.
        tasks: only jobs that can be scaled.
        roles: only jobs of several roles; otherwise only others.
    """
    running = sorted(_running(), key=lambda one: one.planned)  # several launchers may run one job: this one decides
    found = {one.job: one for one in running if one.roles == roles and (one.tasks or one.planned or not tasks)}
    chosen = [one for one in found.values() if job in (None, one.job)]
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        _check_kind(job, [one for one in running if one.roles != roles])
    names = ", ".join(sorted({one.job for one in chosen or running})) or "none"
    kind = "job that can be scaled" if tasks else "job of several roles" if roles else "job"
    what = f"no {kind} {job!r} runs here" if job else "which job?"
    raise UsageError(
        f"{what} (running on this machine: {names})",
        hint="give the job's name; for a job of another machine, --master and DLROVER_HOOKS_TOKEN, too",
    )


def _check_kind(job: str | None, others: list[RunningJob]) -> None:
    """Raises UsageError if `job` is one of the `others`, which another command shows, or if only those run."""
    named = sorted({one.job for one in others if job in (None, one.job)})
    if not named:
        return
    jobs = f"{'jobs' if len(named) > 1 else 'job'} {', '.join(named)}"
    if others[0].roles:
        has, command = "several roles", f"dlrover-hooks roles --job {named[0]}"
    else:
        has, command = "no roles", f"dlrover-hooks vitals {named[0]}"
    raise UsageError(f"{jobs} {'have' if len(named) > 1 else 'has'} {has}", hint=f"use {command}")


def _running() -> Iterator[RunningJob]:
    """The jobs whose launchers are alive. Files of killed launchers are removed."""
    folder = settings.runtime_dir()
    for name in os.listdir(folder):
        if not (name.startswith("job-") and name.endswith(".json")):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            with open(path, "rb") as file:
                job = msgspec.json.decode(file.read(), type=RunningJob)
            if os.path.exists(f"/proc/{job.pid}"):
                yield job
            else:
                os.remove(path)


def _digest(job: str) -> str:
    return hashlib.sha256(job.encode()).hexdigest()[:16]
