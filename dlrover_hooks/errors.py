"""Every error this library raises, in one tree.

    HooksError
    ├── UsageError
    │   ├── DataMismatch
    │   ├── UnsupportedState
    │   ├── JobSpecError
    │   └── MissingExtra
    ├── MasterError
    │   ├── Unauthorized       401
    │   ├── UnknownJob         404
    │   ├── UnknownDataset     404
    │   ├── Stale              409
    │   ├── Conflict           409
    │   ├── SaveToBusy         409
    │   ├── JobAlive           409
    │   ├── GivenUp            410
    │   ├── BadRequest         422
    │   ├── TooLarge           413
    │   ├── JournalFailed      503
    │   └── DatabaseFailed     503
    ├── MasterAway
    ├── BrainAway
    ├── KubernetesFailed
    ├── CallFailed
    ├── JobFinished
    ├── RoundEnded
    ├── ShardsFailed
    ├── CheckpointError
    │   ├── NoCheckpoint
    │   ├── Corrupt
    │   ├── StorageFailed
    │   └── KeeperAway
    └── LaunchError

Each message names what happened, the job, rank or generation, and what to do (the `hint`).
"""

from __future__ import annotations

from typing import Any


class HooksError(Exception):
    """Base of all errors raised here. `hint`: what to do; it is part of `str(error)`."""

    status = 500
    """Of the HTTP reply in which the master reports it."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nHINT: {self.hint}" if self.hint else self.message


class UsageError(HooksError):
    """The caller can correct it: a setting, an argument, a missing launcher. A restart does not help."""

    status = 400


class DataMismatch(UsageError):
    """The data state does not fit this dataset: another length, seed, order or batch."""


class UnsupportedState(UsageError):
    """Something in the state cannot be saved without pickle."""


class JobSpecError(UsageError):
    """The description of a job of several roles is wrong. `problems`: all that were found, as sentences."""

    def __init__(self, job: str, problems: list[str]) -> None:
        super().__init__(f"job {job!r} cannot run as described:\n" + "\n".join(f"  - {one}" for one in problems))
        self.problems = problems


class MissingExtra(UsageError, ImportError):
    """A framework's package is not installed."""


class MasterError(HooksError):
    """The master answered with an error."""

    status = 500


class Unauthorized(MasterError):
    """The token is wrong or missing."""

    status = 401


class UnknownJob(MasterError):
    """This master has no such job."""

    status = 404


class UnknownDataset(MasterError):
    """The job has no ledger of this name. Never to be read as "finished"."""

    status = 404


class Stale(MasterError):
    """An older incarnation, round or attempt: it must stop."""

    status = 409


class Conflict(MasterError):
    """Another live process is what this one wants to be: a job has one chief."""

    status = 409


class SaveToBusy(MasterError):
    """Another live job owns that checkpoint URL."""

    status = 409


class JobAlive(MasterError):
    """The job still has workers; it can be deleted with force."""

    status = 409


class GivenUp(MasterError):
    """A launcher ended the job for all nodes."""

    status = 410


class BadRequest(MasterError):
    """The message breaks a rule: min > max, a negative rank."""

    status = 422


class TooLarge(MasterError):
    """The body is over the limit."""

    status = 413


class JournalFailed(MasterError):
    """The journal cannot be written; nothing was changed."""

    status = 503


class DatabaseFailed(MasterError):
    """The Brain's database cannot be read or written; nothing was changed."""

    status = 503


class MasterAway(HooksError):
    """The master did not answer within the deadline."""

    status = 503
    reached = True
    """False: no connection was made, so the master cannot have received the request."""


class BrainAway(HooksError):
    """The Brain did not answer within the deadline, or made no plan. A master goes on with `LocalOptimizer`."""

    status = 503


class KubernetesFailed(HooksError):
    """The API server of a Kubernetes cluster refused a request (`code`: its HTTP status), or gave no answer (0)."""

    status = 502

    def __init__(self, message: str, *, hint: str = "", code: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class CallFailed(HooksError):
    """A call to a worker of another role failed: the function raised, or the worker did not answer in time."""


class JobFinished(HooksError):
    """The job was trained to its end and cannot be joined."""


class RoundEnded(HooksError):
    """A member is lost or new workers wait: leave the loop and join the next round."""


class ShardsFailed(HooksError):
    """Samples could not be read. Raised after the last batch of an epoch.

    `quarantined`: the samples left out of it, with reasons.
    """

    def __init__(self, message: str, *, hint: str = "", quarantined: tuple[Any, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.quarantined = quarantined


class CheckpointError(HooksError):
    """A checkpoint cannot be saved, read or used."""


class NoCheckpoint(CheckpointError):
    """`resume="require"` or a URL was given, and no complete generation was found."""


class Corrupt(CheckpointError):
    """A slot or file does not match its hash or size."""


class StorageFailed(CheckpointError):
    """The checkpoint URL cannot be written or read."""


class KeeperAway(CheckpointError):
    """The keeper process is gone or does not answer."""


class LaunchError(HooksError):
    """A worker, master or keeper could not be started."""


def named(name: str) -> type[HooksError]:
    """The class called `name`, or `MasterError` for a name from a newer master."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, HooksError) else MasterError
