"""A submitted job, from outside: its state, its end, and how to stop it."""

from __future__ import annotations

from typing import Protocol

from dlrover_hooks.protocol import JobPhase, Roles

EXIT_CODES = {JobPhase.DONE: 0, JobPhase.FAILED: 1, JobPhase.STOPPED: 130}


class JobHandle(Protocol):
    """What `JobSpec.submit(wait=False)` returns."""

    @property
    def name(self) -> str:
        """Of the job."""
        ...

    @property
    def url(self) -> str:
        """Of its HTTP master, at which every command of dlrover-hooks finds it."""
        ...

    @property
    def token(self) -> str:
        """Of its HTTP master."""
        ...

    def status(self) -> Roles:
        """The job as it stands, or as it ended. Raises MasterAway."""
        ...

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end: 0 done, 1 failed, 130 stopped. Raises TimeoutError."""
        ...

    def stop(self, reason: str = "a user stopped it", *, timeout_s: float = 60.0) -> int:
        """End the job and wait until nothing of it is left; the exit code, as of `wait`."""
        ...

    def restart(self, role: str) -> None:
        """Have all workers of a role started again. Raises MasterError."""
        ...
