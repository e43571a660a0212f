"""The parameter server jobs that launchers of this user run on this machine: where the master of each is.

`dlrover-hooks scale` finds the address and the token there. A file per job, readable by this user alone.
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
    """`token`: of the master; None: it needs none. `pid`: of the launcher."""

    job: str
    master: str
    token: str | None
    pid: int


@contextlib.contextmanager
def listed(job: str, master: str, token: str | None) -> Iterator[None]:
    """While it lasts, this launcher's job can be found."""
    path = _path(job)
    draft = f"{path}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(RunningJob(job, master, token, os.getpid())))
    os.replace(draft, path)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def find(job: str | None) -> RunningJob:
    """The job of that name, or the only one. Raises UsageError."""
    found = sorted(_running(), key=lambda one: one.job)
    chosen = [one for one in found if job in (None, one.job)]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(one.job for one in found) or "none"
    what = f"no parameter server job {job!r} runs here" if job else "which job?"
    raise UsageError(
        f"{what} (running on this machine: {names})",
        hint="give --job; for a job of another machine, --master and DLROVER_HOOKS_TOKEN, too",
    )


def _running() -> Iterator[RunningJob]:
    """The jobs whose launchers are alive. Files of killed launchers are removed."""
    folder = settings.runtime_dir()
    for name in os.listdir(folder):
        if not (name.startswith("tasks-") and name.endswith(".json")):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            with open(path, "rb") as file:
                job = msgspec.json.decode(file.read(), type=RunningJob)
            if os.path.exists(f"/proc/{job.pid}"):
                yield job
            else:
                os.remove(path)


def _path(job: str) -> str:
    name = hashlib.sha256(job.encode()).hexdigest()[:16]
    return os.path.join(settings.runtime_dir(), f"tasks-{name}.json")
