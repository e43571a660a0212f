"""Training loaders with their own state, under Lightning: never wrapped, saved with their state at the step."""

from __future__ import annotations

from collections import deque
from typing import Any

from lightning.pytorch import Trainer

from dlrover_hooks.integrations.lightning import _private_api as private


class OwnLoaders:
    """The states of such loaders before each of the two newest batches was fetched.

    Recorded after the epoch's iterator was created. Their state counts fetched batches; a cut needs the trained ones.
    Training thread only.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loaders: list[Any] = []
        self._noted: deque[list[dict[str, Any]]] = deque(maxlen=2)

    def add(self, loader: Any) -> None:
        """`loader` has `state_dict` and `load_state_dict`."""
        self._loaders.append(loader)

    def note(self) -> None:
        """Called before a batch is fetched."""
        self._noted.append([loader.state_dict() for loader in self._loaders])

    def at_request(self, loader: Any) -> dict[str, Any] | None:
        """State of `loader` before the batch that the loop has just got. None: an unknown loader, or no batch yet."""
        return self._of(loader, 0 if private.fetches_ahead(self._trainer) else -1)

    def at_end(self, loader: Any) -> dict[str, Any] | None:
        """State from which a longer training would continue: after an epoch's end, the next epoch."""
        if not any(one is loader for one in self._loaders):
            return None
        if private.epoch_is_over(self._trainer):
            iter(loader)
        elif private.fetches_ahead(self._trainer):
            return self._of(loader, -1)
        return loader.state_dict()

    def _of(self, loader: Any, which: int) -> dict[str, Any] | None:
        noted = self._noted[which] if self._noted else []
        return next((state for one, state in zip(self._loaders, noted, strict=False) if one is loader), None)
