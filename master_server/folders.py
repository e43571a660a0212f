"""Where manifests go: the storage the master writes to, and the claim that keeps other masters off it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from dlrover_hooks.errors import HooksError
from dlrover_hooks.protocol import Manifest

log = logging.getLogger("dlrover_hooks.master")


class Hold(Protocol):
    """A claim on a checkpoint URL."""

    def release(self) -> None:
        """Give it up."""
        ...


class Storage(Protocol):
    """Where manifests go. Blocking; called from threads."""

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int) -> None:
        """Write the MANIFEST, point `latest` at it, drop old generations."""
        ...

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        """Remember that the run is over."""
        ...

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> Hold:
        """Keep other masters off `url`. Raises SaveToBusy or StorageFailed."""
        ...


class Folders:
    """The storage of checkpoints as training sees it."""

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int) -> None:
        """See `Storage`."""
        _checkpoint("storage").commit(url, options, manifest, keep)

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        """See `Storage`."""
        _checkpoint("storage").finish(url, options, job, run, step)

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> Hold:
        """See `Storage`."""
        return _checkpoint("claim").Claim.take(url, options, job, owner)


def release(hold: Hold) -> None:
    """Give the claim up; trouble is only logged, since nobody could mend it now."""
    try:
        hold.release()
    except (HooksError, OSError) as error:
        log.warning("a claim was not given up: %s", error)


def _checkpoint(module: str) -> Any:
    """Loaded at first use: a master without checkpoints needs no fsspec, and `alone` lies below that room."""
    return importlib.import_module(f"dlrover_hooks.checkpoint.{module}")
