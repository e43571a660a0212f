"""Lightning 2.6: writes the user's own checkpoints in the background.

    trainer = Trainer(..., plugins=[FlashCheckpointIO()])

`trainer.save_checkpoint` and `ModelCheckpoint` keep their behavior, their names and Lightning's file format. A step
only waits for the copy of the state.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from dlrover_hooks.checkpoint.save.background_saves import BackgroundSaves
from dlrover_hooks.checkpoint.save.state_tree_copies import StateTreeCopies
from dlrover_hooks.checkpoint.storage.atomic_files import whole_file, whole_link
from dlrover_hooks.errors import HooksError, UnsupportedState, UsageError
from dlrover_hooks.integrations.lightning import _private_api as private

log = logging.getLogger("dlrover_hooks")
_alive: WeakSet[FlashCheckpointIO] = WeakSet()
_undo: list[Callable[[], None]] = []
"""Restores `ModelCheckpoint`. Has at most one element, while any of `_alive` may write."""


class FlashCheckpointIO(TorchCheckpointIO):
    """Lightning's stock `.ckpt` files, written atomically by one background thread.

    A save copies the state and returns. One file may be being written and one more waiting; a third save waits for the
    first. Removals are ordered after the saves before them, `load_checkpoint` waits for pending saves of its path, and
    a fit ends when all is written. Outside of training, after a fit, a save returns when its file is written.

    Args:
        on_error: `"raise"`: a save that failed raises StorageFailed at the next save, load or end; `"warn"`: it warns.
        deadline: seconds that a save, a load or the end waits for the storage before it raises CheckpointError.

    Lightning calls all methods on the training thread, save and remove on global rank 0 only.
    """

    def __init__(self, on_error: str = "raise", deadline: float = 600.0) -> None:
        if on_error not in ("raise", "warn"):
            raise UsageError(f"on_error={on_error!r} is unknown", hint='use "raise" or "warn"')
        self.on_error, self.deadline = on_error, deadline
        self._behind: BackgroundSaves | None = None
        self._copies = StateTreeCopies()
        self._idle_at: Any = None
        self._said = False

    def __getstate__(self) -> dict[str, Any]:
        """For spawned processes: settings only."""
        return {"on_error": self.on_error, "deadline": self.deadline}

    def __setstate__(self, state: dict[str, Any]) -> None:
        FlashCheckpointIO.__init__(self, **state)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Copy `checkpoint`; it may change as soon as this returns.

        Raises:
            TypeError: `storage_options` is given, as in Lightning's own.
            StorageFailed: an earlier save failed.
            CheckpointError: earlier saves are not done within the deadline.
        """
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        behind, path = self._started(), _spelled(path)
        behind.room()
        try:
            state = self._copies.take(checkpoint, timeout_s=self.deadline)
        except UnsupportedState as error:
            self._write_now(behind, checkpoint, path, error)
            return
        behind.save(path, lambda: self._write(state, path))
        if self._is_idle(checkpoint):
            behind.wait(path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As Lightning's own, after pending saves of `path`."""
        if self._behind is not None:
            self._behind.wait(_spelled(path))
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove `path` after all earlier saves."""
        behind, remove = self._started(), super().remove_checkpoint
        behind.remove(_spelled(path), lambda: remove(path))

    def teardown(self) -> None:
        """End of a fit: wait until everything is written. Raises the error of a failed save."""
        behind, self._behind = self._behind, None
        self._copies.close()
        self._idle_at = _ANY
        if behind is None:
            return
        already = sys.exc_info()[1]
        try:
            self._over(behind)
        except HooksError as error:
            if already is None:  # otherwise the fit's own error propagates
                raise
            log.error("%s", error)

    def leaves(self, path: str) -> bool | None:
        """Whether `path` will exist when pending work is done; None if nothing is pending for it."""
        return self._behind.leaves(_spelled(path)) if self._behind is not None else None

    def _started(self) -> BackgroundSaves:
        if self._behind is None:
            self._behind = BackgroundSaves(on_error=self.on_error, deadline_s=self.deadline)
            _alive.add(self)
            if not _undo:
                _undo.append(private.count_files_under_way(_leaves, _link_later))
        return self._behind

    def _over(self, behind: BackgroundSaves) -> None:
        try:
            behind.close()
        finally:
            _alive.discard(self)
            if not _alive and _undo:
                _undo.pop()()

    def _is_idle(self, checkpoint: dict[str, Any]) -> bool:
        """True while no steps are trained: all saves after a fit have the same step, until training continues."""
        step = checkpoint.get("global_step")
        if self._idle_at is _ANY:
            self._idle_at = step
        if self._idle_at != step:
            self._idle_at = None
        return self._idle_at is not None

    def _write_now(
        self, behind: BackgroundSaves, checkpoint: dict[str, Any], path: str, error: UnsupportedState
    ) -> None:
        if not self._said:
            self._said = True
            log.warning("%s is written within the step: %s", path, error)
        behind.wait()
        self._write(checkpoint, path)

    def _write(self, state: dict[str, Any], path: str) -> None:
        if not private.is_local(path):
            super().save_checkpoint(state, path)
            return
        with whole_file(path) as part:
            torch.save(state, part)  # by name: with a buffer, torch.save would hold the interpreter's lock


_ANY = object()
"""Placeholder for the step of the first save after a fit."""


def _spelled(path: Any) -> str:
    """One normalized name per file."""
    text = os.fspath(path)
    return os.path.abspath(text.removeprefix("file://")) if private.is_local(text) else text


def _leaves(path: str) -> bool | None:
    return next((leaves for io in _alive if (leaves := io.leaves(path)) is not None), None)


def _link_later(path: str, link: str) -> bool:
    """Create `link` to `path` when that is written; False if nothing is pending for either.

    An earlier link of that name may be pending although `path` exists: two threads must not replace it at once.
    """
    for io in _alive:
        pending = io.leaves(path) or io.leaves(link) is not None
        if pending and io._behind is not None and _spelled(path) != _spelled(link):
            io._behind.add(_spelled(link), lambda: whole_link(path, link))
            return True
    return False
