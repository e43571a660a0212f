"""The master's work at a checkpoint URL: commits, the end of a run, claims. Each is tried twice, with a timeout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dlrover_hooks.checkpoint.storage import generations, url_claim
from dlrover_hooks.checkpoint.storage.stall_guard import StallGuard
from dlrover_hooks.errors import StorageFailed
from dlrover_hooks.protocol import Manifest, Retention

STALL_S = 120.0
log = logging.getLogger("dlrover_hooks.master")


class CommittedStorage:
    """The storage of checkpoints during training. A store that does not answer for `stall_s` counts as failed.

    A failed operation is retried once with the file system opened again: a master's credentials may have expired since
    its last commit.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._patience: StallGuard | None = None

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int | Retention) -> None:
        """See `dlrover_hooks.master.manifest_storage.Storage`."""

        def work() -> None:
            url_claim.still_held(url, options)
            generations.commit(url, options, manifest, keep)

        self._twice(f"commit {manifest.generation} to {url}", work)

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        """See `dlrover_hooks.master.manifest_storage.Storage`."""
        self._twice(f"write the end of job {job!r} to {url}", lambda: generations.finish(url, options, job, run, step))

    def claim(
        self, url: str, options: Mapping[str, Any] | None, job: str, owner: str, epoch: int = 0
    ) -> url_claim.UrlClaim:
        """See `dlrover_hooks.master.manifest_storage.Storage`. `epoch`: of one of several masters with one journal."""

        def work() -> url_claim.UrlClaim:
            return url_claim.UrlClaim.take(url, options, job, owner, epoch)

        return self._twice(f"claim {url} for job {job!r}", work)

    def _twice(self, what: str, work: Callable[[], Any]) -> Any:
        if self._patience is None:
            self._patience = StallGuard(self._stall_s)
        try:
            return self._patience.run(lambda _: work(), what)
        except StorageFailed as error:
            log.warning("%s, trying again", error.message)
            return self._patience.run(lambda _: work(), what)
