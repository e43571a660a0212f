"""What the master needs of storage: where manifests go, and the claim that keeps other masters off a URL."""

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

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> HeldUrl:
        """Keep other masters off `url`. Raises SaveToBusy or StorageFailed."""
        ...


class NoStorage:
    """For a master whose jobs have no `save_to`: refuses each claim, and nothing is committed without one."""

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
    """Give the claim up; trouble is only logged, since nobody could mend it now."""
    try:
        hold.release()
    except (HooksError, OSError) as error:
        log.warning("a claim was not given up: %s", error)
