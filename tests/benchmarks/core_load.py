"""What 10,000 workers cost the master's core alone, and how soon a master is back after a million events."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import requests

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core import events, job_registry, views
from dlrover_hooks.master.core.events import Envelope, Key, Lost
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.journal.journal_protocol import SNAPSHOT_EVERY
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from tests.benchmarks.ledger_load import Load
from tests.benchmarks.report import Figures
from tests.e2e.master_process import LiveMaster
from tests.waiting import WAIT_S

WORKERS, PER_NODE = 10_000, 8
BATCH = 1000
"""Events of one transaction."""


class Rendezvous:
    """The core with `WORKERS` workers, each of which joins for itself: more requests than one join for each node."""

    def __init__(self) -> None:
        self.state, self.nodes, self._seq, self._now = job_registry.Master(), Nodes(), 0, 1000.0

    def meet(self, names: list[str], after: int) -> None:
        """All of them join, get ranks, attach, and learn that there is nothing to restore."""
        for name in names:
            self._event(self._join(name))
        for name in names:
            seated = views.query(self.state, self.nodes, p.AwaitRound("job", name, after))
            assert isinstance(seated, p.Seated)
            assert seated.world_size == len(names)
        for name in names:
            self._event(p.Attach("job", name, _node(name), 1, recovers=True))
        for name in names:
            plan = views.query(self.state, self.nodes, p.AwaitPlan("job", name))
            assert isinstance(plan, p.Plan)
            assert plan.phase is p.Phase.TRAINING

    def lose(self, names: Iterable[str]) -> None:
        """The failure detector's verdicts."""
        for name in names:
            job_registry.apply(self.state, Lost("job", name), self._now)

    def _join(self, name: str) -> p.Join:
        seats = (p.Seat(name, int(name.partition(".")[2])),)
        low = WORKERS // 2
        return p.Join(
            "job", name, _node(name), seats, "10.0.0.1", 29500, low, WORKERS, "run", 1e6, launcher=_node(name)
        )

    def _event(self, event: p.Join | p.Attach) -> None:
        self._seq, self._now = self._seq + 1, self._now + 1e-4
        job_registry.apply(self.state, event, self._now, Key(event.incarnation, "main", self._seq))


def _node(name: str) -> str:
    return name.partition(".")[0]


def rendezvous_figures() -> Figures:
    """CPU seconds of the core: the first round, and the next one after a tenth of the workers were lost at once."""
    core = Rendezvous()
    names = [f"node{index // PER_NODE:04}.{index % PER_NODE}" for index in range(WORKERS)]
    began = time.process_time()
    core.meet(names, 0)
    formed = time.process_time()
    core.lose(names[: WORKERS // 10])
    core.meet(names[WORKERS // 10 :], 1)
    return {
        "rendezvous_10k_core_s": formed - began,
        "mass_failure_10k_core_s": time.process_time() - formed,
    }


# ---- restart --------------------------------------------------------------------------------------------------------


class JournaledLoad(Load):
    """Lease requests of 10,000 workers, journaled as the runtime does it, but without waiting for the disk."""

    def __init__(self, journal: SqliteJournal) -> None:
        self._journal, self._batch = journal, list[bytes]()
        self.snapshots_s = list[float]()
        super().__init__(samples=10**12)

    def _send(self, event: p.OpenLedger | p.TakeLeases) -> p.Leases:
        key = self._key(event)
        reply = job_registry.apply(self.state, event, self.now, key).reply
        self._batch.append(events.encode(Envelope(now=self.now, event=event, key=key)))
        if len(self._batch) == BATCH:
            self.flush()
        return reply  # pyright: ignore[reportReturnType]

    def flush(self) -> None:
        """Write what is not written."""
        full = self._journal.since_snapshot + len(self._batch) >= SNAPSHOT_EVERY
        began = time.process_time()
        snapshot = job_registry.encode(self.state) if full else None
        if full:
            self.snapshots_s.append(time.process_time() - began)
        self._journal.append(self._batch, snapshot)
        self._batch = []


def restart_figures(count: int) -> Figures:
    """Seconds from the start of a master's process to its first `ready`, with the journal of `count` events.

    The last snapshot is as old as it can be, so that most events are replayed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "master.db"
        journal = SqliteJournal(path, synchronous="normal")
        load = JournaledLoad(journal)
        while load.requests < count or journal.since_snapshot + BATCH < SNAPSHOT_EVERY:
            load.turn()
        load.flush()
        replayed = float(journal.since_snapshot)
        journal.close()
        nbytes = path.stat().st_size
        began = time.perf_counter()
        master = LiveMaster(Path(folder), journal=path)
        try:
            answer = requests.get(f"{master.url}/readyz", timeout=WAIT_S)
            ready_s = time.perf_counter() - began
            assert answer.json()["status"] == "ready"
        finally:
            master.close()
    return {
        "restart_ready_s": ready_s,
        "restart_events": float(load.requests),
        "restart_events_replayed": replayed,
        "journal_mib": nbytes / 2**20,
        "snapshot_10k_workers_ms": 1e3 * statistics.median(load.snapshots_s),
    }
