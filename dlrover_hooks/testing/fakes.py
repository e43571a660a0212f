"""An in-memory master with the real core, a manual clock, and fake storage that records commits and fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from dlrover_hooks.client.in_process_master import InProcessMaster
from dlrover_hooks.errors import SaveToBusy, StorageFailed
from dlrover_hooks.master.manifest_storage import Storage
from dlrover_hooks.protocol import Manifest, Retention


class ManualClock:
    """Advances only when a test moves it. Waiting takes at most 0.05 s of real time."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock. Call `MasterFake.advance` instead to let the master act on it at once."""
        self._now += seconds

    def wait(self, changed: threading.Condition, timeout_s: float) -> None:
        """Wait briefly for another thread; on timeout, advance the clock by `timeout_s`."""
        if not changed.wait(min(timeout_s, 0.05)):
            self._now += timeout_s


class StorageFakeClaim:
    """A claim of `StorageFake`."""

    def __init__(self, storage: StorageFake, url: str) -> None:
        self._storage, self._url = storage, url

    def release(self) -> None:
        """Release the URL."""
        self._storage.claims.pop(self._url, None)


class StorageFake:
    """Storage in memory. Set `failure` to make commits fail with it."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []
        self.finished: list[tuple[str, str, str, int]] = []
        self.claims: dict[str, str] = {}
        self.failure: str | None = None

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int | Retention) -> None:
        """Record the manifest."""
        del url, options, keep
        if self.failure is not None:
            raise StorageFailed(self.failure)
        self.manifests.append(manifest)

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        """Record the end."""
        del options
        self.finished.append((url, job, run, step))

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> StorageFakeClaim:
        """Claim `url` for one job. Raises SaveToBusy if another job has it."""
        del options, owner
        if self.claims.setdefault(url, job) != job:
            raise SaveToBusy(f"{url} belongs to job {self.claims[url]!r}, which is alive")
        return StorageFakeClaim(self, url)


class MasterFake(InProcessMaster):
    """A master in this process: the real core, a manual clock, storage in memory. Any incarnation may call it."""

    def __init__(self, *, clock: ManualClock | None = None, storage: Storage | None = None) -> None:
        self.hand = clock or ManualClock()
        self.store = storage or StorageFake()
        super().__init__(clock=self.hand, storage=self.store, lease_s=10.0, suspicion_s=0.5, inline=True)

    def advance(self, seconds: float) -> None:
        """Move the clock and run everything that has become due."""
        self.hand.advance(seconds)
        self.step()
