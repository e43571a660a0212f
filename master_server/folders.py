"""Where manifests go: the storage the master writes to, and the claim that keeps other masters off it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dlrover_hooks.errors import HooksError, StorageFailed
from dlrover_hooks.protocol import Manifest, Retention

STALL_S = 120.0
log = logging.getLogger("dlrover_hooks.master")


class Hold(Protocol):
    """A claim on a checkpoint URL."""

    def release(self) -> None:
        """Give it up."""
        ...


class Storage(Protocol):
    """Where manifests go. Blocking; called from threads."""

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int | Retention) -> None:
        """Write the MANIFEST, point `latest` at it, drop old generations. Raises SaveToBusy where another job came."""
        ...

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        """Remember that the run is over."""
        ...

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> Hold:
        """Keep other masters off `url`. Raises SaveToBusy or StorageFailed."""
        ...


class Folders:
    """The storage of checkpoints as training sees it. A store that hangs has failed after `stall_s` without an answer.

    What failed is tried once more, with the file system opened anew: a master's credentials may have expired since its
    last commit.
    """

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._patience: Any = None

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int | Retention) -> None:
        """See `Storage`."""
        commit, still_held = _checkpoint("storage").commit, _checkpoint("claim").still_held

        def work() -> None:
            still_held(url, options)
            commit(url, options, manifest, keep)

        self._twice(f"commit {manifest.generation} to {url}", work)

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        """See `Storage`."""
        finish = _checkpoint("storage").finish
        self._twice(f"write the end of job {job!r} to {url}", lambda: finish(url, options, job, run, step))

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> Hold:
        """See `Storage`."""
        take = _checkpoint("claim").Claim.take
        return self._twice(f"claim {url} for job {job!r}", lambda: take(url, options, job, owner))

    def _twice(self, what: str, work: Callable[[], Any]) -> Any:
        if self._patience is None:
            self._patience = _checkpoint("patience").Patience(self._stall_s)
        try:
            return self._patience.run(lambda _: work(), what)
        except StorageFailed as error:
            log.warning("%s, trying again", error.message)
            return self._patience.run(lambda _: work(), what)


def release(hold: Hold) -> None:
    """Give the claim up; trouble is only logged, since nobody could mend it now."""
    try:
        hold.release()
    except (HooksError, OSError) as error:
        log.warning("a claim was not given up: %s", error)


def _checkpoint(module: str) -> Any:
    """Loaded at first use: a master without checkpoints needs no fsspec, and `alone` lies below that room."""
    return importlib.import_module(f"dlrover_hooks.checkpoint.{module}")
