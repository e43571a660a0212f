"""`JobHandle`: the interface to a submitted job."""

from __future__ import annotations

from typing import Protocol

from dlrover_hooks.protocol import JobPhase, Roles

EXIT_CODES = {JobPhase.DONE: 0, JobPhase.FAILED: 1, JobPhase.STOPPED: 130}
STOPPED = "a user stopped it"
"""The reason that is recorded if `stop` is called without one."""


class JobHandle(Protocol):
    """A submitted job. `JobSpec.submit(wait=False)` returns one."""

    @property
    def name(self) -> str:
        """The name of the job."""
        ...

    @property
    def url(self) -> str:
        """The URL of its HTTP master, for the commands of dlrover-hooks. On Ray empty while there is no master."""
        ...

    @property
    def token(self) -> str:
        """The token of its HTTP master."""
        ...

    def status(self) -> Roles:
        """The current state of the job, or its result. Raises MasterAway if its master does not answer."""
        ...

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the job and return its exit code: 0 done, 1 failed, 130 stopped.

        Raises:
            TimeoutError: the job still runs after `timeout_s` seconds.
        """
        ...

    def stop(self, reason: str = STOPPED, *, timeout_s: float = 60.0) -> int:
        """Stop the job, wait for its end, and return the exit code, as `wait` does.

        If the job has not ended after `timeout_s` seconds, its processes are killed.
        """
        ...

    def restart(self, role: str) -> None:
        """Start all workers of a role again. Raises MasterError, and MasterAway if the master does not answer."""
        ...
