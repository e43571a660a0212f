"""The storage interface of the master: it commits manifests, and claims a URL to keep other masters off it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from dlrover_hooks.errors import HooksError, UsageError
from dlrover_hooks.protocol import Manifest, Retention

log = logging.getLogger("dlrover_hooks.master")


class HeldUrl(Protocol):
    """A claim on a checkpoint URL."""

    def release(self) -> None:
        """Release the claim."""
        ...


class Storage(Protocol):
    """Stores manifests. All methods block and are called from threads."""

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int | Retention) -> None:
        """Write the MANIFEST, point `latest` at it, drop old generations. Raises SaveToBusy if the claim was lost."""
        ...

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        """Record that the run has ended at `step`."""
        ...

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> HeldUrl:
        """Keep other masters off `url`. Raises SaveToBusy or StorageFailed."""
        ...


class NoStorage:
    """For a master whose jobs have no `save_to`. Refuses every call, so no job can claim a URL and commit to it."""

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: Manifest, keep: int | Retention) -> None:
        """See `Storage`."""
        raise self._refusal(url)

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        """See `Storage`."""
        raise self._refusal(url)

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> HeldUrl:
        """See `Storage`."""
        raise self._refusal(url)

    def _refusal(self, url: str) -> UsageError:
        return UsageError(f"this master was made without storage, so it cannot commit to {url}")


def release(hold: HeldUrl) -> None:
    """Release the claim. Errors are only logged: no caller could handle them."""
    try:
        hold.release()
    except (HooksError, OSError) as error:
        log.warning("a claim was not given up: %s", error)
