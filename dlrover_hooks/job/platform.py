"""The interface between the masters of a job and the platform that runs its processes: this machine, or Ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from dlrover_hooks.protocol import Roles, RoleWorker, WorkerCause


class EndedWorker(NamedTuple):
    """A worker whose process or function has ended. `cause` None: the function returned, so the worker is done."""

    rank: int
    life: int
    cause: WorkerCause | None
    detail: str = ""


class WorkerPlatform(Protocol):
    """The workers of one role, used by its SubMaster. A restarted SubMaster may repeat a call of the former one."""

    def lives(self) -> dict[int, int]:
        """By rank: the newest life whose process runs, or whose end `ended` has yet to report. Any thread."""
        ...

    def start(self, worker: RoleWorker, avoid: Collection[str], env: Mapping[str, str]) -> str:
        """Start the process for `worker.life`.

        Args:
            worker: as the master lists it.
            avoid: nodes to use only if no other node has room.
            env: variables of the process. Those of the job and of its role take precedence.

        Returns:
            Why the process could not be started yet; empty: it was started.
        """
        ...

    def end(self, rank: int, life: int) -> None:
        """Kill a process and, if its node answers, wait until it has ended. `ended` does not report this end."""
        ...

    def outcome(self, rank: int, life: int) -> EndedWorker:
        """How a process ended that `lives` does not list. It may have ended before this SubMaster was started."""
        ...

    def ended(self, timeout_s: float) -> list[EndedWorker]:
        """The workers that ended since the last call. Waits up to `timeout_s` for the first one. One thread only."""
        ...


class MasterPlatform(Protocol):
    """The SubMasters of a job, used by its PrimeMaster."""

    def begin(self) -> bool:
        """Start the SubMasters that do not run. False: resources for the job are missing; call it again later."""
        ...

    def missing(self) -> str:
        """Which resources `begin` waits for; empty: none."""
        ...

    def restarted(self, timeout_s: float) -> list[str]:
        """Roles whose SubMaster ended since the last call and was started again.

        Waits up to `timeout_s` seconds for the first one.
        """
        ...

    def finish(self, roles: Roles) -> None:
        """End all processes of the job except the caller's, free its resources, and store `roles` as its result."""
        ...
