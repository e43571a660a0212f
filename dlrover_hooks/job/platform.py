"""What the masters of a job need of the platform that runs their processes: this machine, or Ray."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from dlrover_hooks.protocol import Roles, RoleWorker, WorkerCause


class EndedWorker(NamedTuple):
    """A worker whose process is gone, or whose function is over. `cause` None: it is done."""

    rank: int
    life: int
    cause: WorkerCause | None
    detail: str = ""


class WorkerPlatform(Protocol):
    """The workers of one role, for its SubMaster. Every method may be called again after a restart of the SubMaster."""

    def lives(self) -> dict[int, int]:
        """The newest life of each rank whose process runs, or whose end `ended` will tell. Any thread."""
        ...

    def start(self, worker: RoleWorker, avoid: Collection[str], env: Mapping[str, str]) -> str:
        """Start the process of its life, on none of the nodes `avoid` if there is another one. `env`: variables beyond
        those of its role.

        Why it has to wait; empty: it was started.
        """
        ...

    def end(self, rank: int, life: int) -> None:
        """Kill a process, and wait until it is gone, if its node answers. `ended` does not tell of it."""
        ...

    def outcome(self, rank: int, life: int) -> EndedWorker:
        """What became of a process that `lives` does not list: it may have ended before this SubMaster began."""
        ...

    def ended(self, timeout_s: float) -> list[EndedWorker]:
        """Those that have ended since the last call; waits for the first one. One thread only."""
        ...


class MasterPlatform(Protocol):
    """The SubMasters, for the PrimeMaster."""

    def begin(self) -> bool:
        """Start the SubMasters that do not run. False: some place for the job is not there yet, call it again."""
        ...

    def missing(self) -> str:
        """What `begin` waits for."""
        ...

    def restarted(self, timeout_s: float) -> list[str]:
        """Roles whose SubMaster has ended since the last call and was started again; waits for the first one."""
        ...

    def finish(self, roles: Roles) -> None:
        """The job is over: end all its processes but this one, free what it holds, and keep `roles` as its result."""
        ...
