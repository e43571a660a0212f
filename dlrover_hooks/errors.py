"""Every error this library raises, in one tree.

    HooksError
    ├── UsageError                 the caller can correct it: a setting, an argument, a missing launcher
    │   ├── DataMismatch           the data state does not fit this dataset (length, seed, order, batch)
    │   ├── UnsupportedState       something in the state cannot be saved without pickle
    │   └── MissingExtra           a framework's package is not installed
    ├── MasterError                the master answered with an error; carries the HTTP status
    │   ├── Unauthorized     401   wrong or missing token
    │   ├── UnknownJob       404   this master has no such job
    │   ├── UnknownDataset   404   that job has no ledger of this name; never to be read as "finished"
    │   ├── Stale            409   an older incarnation, round or attempt: it must stop
    │   ├── SaveToBusy       409   another live job owns that checkpoint URL
    │   ├── JobAlive         409   the job still has workers; delete it with force
    │   ├── GivenUp          410   a launcher ended the job for all nodes
    │   ├── BadRequest       422   the message breaks a rule (min > max, negative rank ...)
    │   ├── TooLarge         413   the body is over the limit
    │   └── JournalFailed    503   the journal cannot be written; nothing was changed
    ├── MasterAway                 no answer within the deadline
    ├── JobFinished                the job was trained to its end and cannot be joined
    ├── RoundEnded                 a member is lost or new workers wait: leave the loop, join the next round
    ├── ShardsFailed               samples could not be read; it lists them and why
    ├── CheckpointError
    │   ├── NoCheckpoint           `resume="require"` found no complete generation
    │   ├── Corrupt                a slot or file does not match its hash or size
    │   ├── StorageFailed          the checkpoint URL cannot be written or read
    │   └── KeeperAway             the keeper process is gone or does not answer
    └── LaunchError                a worker, master or keeper could not be started

Each message names what happened, the job, rank or generation, and what to do (the `hint`).
"""

from __future__ import annotations

from typing import Any


class HooksError(Exception):
    """Base of all errors raised here. `hint`: what to do; it is part of `str(error)`."""

    status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nHINT: {self.hint}" if self.hint else self.message


class UsageError(HooksError):
    status = 400


class DataMismatch(UsageError):
    pass


class UnsupportedState(UsageError):
    pass


class MissingExtra(UsageError, ImportError):
    pass


class MasterError(HooksError):
    status = 500


class Unauthorized(MasterError):
    status = 401


class UnknownJob(MasterError):
    status = 404


class UnknownDataset(MasterError):
    status = 404


class Stale(MasterError):
    status = 409


class SaveToBusy(MasterError):
    status = 409


class JobAlive(MasterError):
    status = 409


class GivenUp(MasterError):
    status = 410


class BadRequest(MasterError):
    status = 422


class TooLarge(MasterError):
    status = 413


class JournalFailed(MasterError):
    status = 503


class MasterAway(HooksError):
    status = 503
    reached = True
    """False: no connection was made, so the master cannot have received the request."""


class JobFinished(HooksError):
    pass


class RoundEnded(HooksError):
    pass


class ShardsFailed(HooksError):
    """Raised after the last batch of an epoch. `quarantined`: the samples left out of it, with reasons."""

    def __init__(self, message: str, *, hint: str = "", quarantined: tuple[Any, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.quarantined = quarantined


class CheckpointError(HooksError):
    pass


class NoCheckpoint(CheckpointError):
    pass


class Corrupt(CheckpointError):
    pass


class StorageFailed(CheckpointError):
    pass


class KeeperAway(CheckpointError):
    pass


class LaunchError(HooksError):
    pass


def named(name: str) -> type[HooksError]:
    """The class called `name`, or `MasterError` for a name from a newer master."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, HooksError) else MasterError
