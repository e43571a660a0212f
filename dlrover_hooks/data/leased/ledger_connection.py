"""This worker's access to the master's ledger of one dataset. Without a session it connects to the master itself."""

from __future__ import annotations

import logging
import uuid
import weakref
from typing import Any, NamedTuple

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.data.leased.lease_client import LeaseCaller, LeaseClient, LeaseRequester
from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.data.leased.sources import Stream
from dlrover_hooks.errors import MasterAway, MasterError, UsageError
from dlrover_hooks.host.fork_guard import ForkGuard
from dlrover_hooks.protocol import LedgerState

log = logging.getLogger(__name__)


class LedgerConnection(NamedTuple):
    """The connection of this worker. `free`: it is in no round, its work is not rolled back."""

    caller: LeaseCaller
    job: str
    incarnation: str
    free: bool
    rank: int


class LedgerClient:
    """Access to the ledger of `dataset`; a new one for each attempt. Opens the ledger when it is first needed."""

    def __init__(self, line: LedgerConnection, dataset: ShardDataset, batch_size: int, epochs: int) -> None:
        self.line, self.dataset, self.epochs = line, dataset, epochs
        self._batch_size = batch_size
        self.here = ForkGuard()
        self._ledger: p.Ledger | None = None
        self._ends: dict[str, int] = {}

    @property
    def ledger(self) -> p.Ledger:
        """The master's reply. Raises MasterAway, or the master's refusal (such as another fingerprint)."""
        return self._ledger or self.reopen({})

    def open(self) -> None:
        """Register this worker at the master. Raises as `ledger`."""
        if self._ledger is None:
            self.reopen({})

    @property
    def opened(self) -> bool:
        """Whether the ledger has been opened."""
        return self._ledger is not None

    def borrow(self, epoch: int) -> LeaseClient:
        """Start taking leases of `epoch`. Raises UsageError in a forked child."""
        self.refuse_forked()
        line, dataset = self.line, self.dataset
        claim = LeaseRequester(line.job, line.incarnation, dataset.name, self.ledger.fence, epoch)
        return LeaseClient(
            line.caller,
            claim,
            lookahead=dataset.lookahead,
            patience_s=dataset.patience_s,
            exact=not line.free,
            reopen=self.reopen,
        )

    def refuse_forked(self) -> None:
        """Raise UsageError in a forked child: the leases belong to its parent."""
        if not self.here:
            raise UsageError(
                f"dataset {self.dataset.name!r} is lent to process {self.here.pid}, not to what was forked from it",
                hint="iterate it where it was made; `num_workers` of the DataLoader reads in processes of its own",
            )

    def finished(self, epoch: int) -> bool:
        """Whether all of `epoch` is done, here and on all other workers."""
        line = self.line
        request = p.AwaitShards(line.job, line.incarnation, self.dataset.name, self.ledger.fence, epoch, timeout_s=0.0)
        return line.caller.call(request, timeout_s=self.dataset.patience_s).state is LedgerState.FINISHED

    def reopen(self, ends: dict[str, int]) -> p.Ledger:
        """Open the ledger again, with the ends found of a stream's partitions. Gives back all leases of this worker."""
        self._ends |= ends
        ledger: p.Ledger = self.line.caller.call(self._request(), timeout_s=self.dataset.patience_s)
        self._ledger = ledger
        return ledger

    def _request(self) -> p.OpenLedger:
        line, dataset, stream = self.line, self.dataset, isinstance(self.dataset.source, Stream)
        partitions = tuple(
            p.Partition(part.name, part.begin, self._ends.get(part.name, part.end))
            for part in dataset.partitions(self.epochs)
        )
        return p.OpenLedger(
            line.job,
            line.incarnation,
            dataset.name,
            dataset.fingerprint,
            partitions,
            epoch_length=0 if stream else len(dataset),
            batch_size=self._batch_size,
            shard_size=dataset.shard_size,
            free=line.free,
        )


def own_line(dataset: ShardDataset, owner: object) -> LedgerConnection:
    """A connection for a worker without a session: to the master of the environment, else to a ledger in this process.

    It ends with `owner` or the process. Raises UsageError if several workers would each train on everything.
    """
    from dlrover_hooks.data.leased import step_agreement  # imports torch

    config, incarnation = settings.load(), uuid.uuid4().hex
    if config.master is None:
        return _alone(config, dataset, incarnation, step_agreement.world_size())
    if not config.named:
        raise UsageError(
            f"dataset {dataset.name!r}: the master is known but not the job: each worker would train on everything",
            hint="set DLROVER_HOOKS_JOB to one name for all workers of the run",
        )
    client = MasterClient(config.master, config.token, incarnation=incarnation)
    weakref.finalize(owner, client.close)
    return LedgerConnection(client, config.job, incarnation, free=True, rank=step_agreement.rank())


def _alone(config: settings.Config, dataset: ShardDataset, incarnation: str, ranks: int) -> LedgerConnection:
    workers = max(ranks, settings.place().world_size)
    if workers > 1:
        raise UsageError(
            f"dataset {dataset.name!r}: {workers} workers need a master that lends it out, and none is known",
            hint="run `python -m dlrover_hooks.master` and set DLROVER_HOOKS_MASTER=http://HOST:PORT",
        )
    from dlrover_hooks.client.in_process_master import InProcessMaster

    return LedgerConnection(InProcessMaster(), config.job, incarnation, free=True, rank=0)


def hold(line: LedgerConnection) -> None:
    """Keep an own connection's liveness channel open, so that the master detects this process's end at once."""
    if isinstance(line.caller, MasterClient):
        line.caller.watch(line.job, lambda _: None, lambda error: log.warning("job %s: %s", line.job, error))


def let_go(line: LedgerConnection) -> None:
    """Close an own connection."""
    caller: Any = line.caller
    if isinstance(caller, MasterClient):
        try:
            caller.call(p.Leave(line.job, line.incarnation, p.Departure.DONE), timeout_s=2.0)
        except (MasterAway, MasterError) as error:
            log.debug("left without a reply of the master: %s", error)
    caller.close()
