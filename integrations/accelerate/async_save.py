"""Asynchronous `save_state` for Accelerate: its own functions write its folder from copies, in the background.

A folder is created under a hidden name near its final path. Each process writes its files there and then an empty
marker file; the main process waits for all of them and renames the folder. No collective runs in the background.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state, save_custom_state
from accelerate.utils import broadcast_object_list

from dlrover_hooks.checkpoint.save.background_saves import BackgroundSaves
from dlrover_hooks.checkpoint.save.state_tree_copies import StateTreeCopies
from dlrover_hooks.checkpoint.storage.atomic_files import SUFFIX, blame, put_back, sync_all, whole_folder
from dlrover_hooks.errors import StorageFailed, UnsupportedState

log = logging.getLogger("dlrover_hooks")
PEERS_S = 60.0
"""Timeout of the main process for the files of the others, and of the others for its rename."""


class AsyncSaves:
    """The saves of one `Accelerator`. Training thread; all processes make the same calls.

    Raises:
        StorageFailed: an earlier save failed, unless `on_error` is "warn".
        CheckpointError: earlier saves are not done within ten minutes.
    """

    def __init__(self, accelerator: Accelerator, *, on_error: str = "raise") -> None:
        self._accelerator = accelerator
        self._behind = BackgroundSaves(on_error=on_error)
        self._copies = StateTreeCopies()
        self._life = ""
        self._count = 0
        self._said = False

    def save(self, output_dir: str | os.PathLike[str] | None, safe_serialization: bool) -> Path:
        """Save the current state. Returns the folder's final path."""
        self._behind.room()
        target = self._target(output_dir)
        part = self._part(target)
        state = self._state(str(part))
        try:
            state = self._copies.take(state)
        except UnsupportedState as error:
            if not self._said:
                self._said = True
                log.warning("save_state writes %s within the step: %s", target, error)
            self._behind.save(str(target), lambda: self._write(state, part, target, safe_serialization))
            self._behind.wait()
        else:
            copied = state
            del state
            self._behind.save(str(target), lambda: self._write(copied, part, target, safe_serialization))
        self._accelerator.project_configuration.iteration += 1
        return target

    def wait(self) -> None:
        """Return when all folders are written. Raises the error of a failed save."""
        self._behind.wait()

    def close(self) -> None:
        """As `wait`; then free the memory and end the thread."""
        self._behind.close()
        self._copies.close()

    def _target(self, output_dir: str | os.PathLike[str] | None) -> Path:
        project = self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError("save_state needs an output_dir where checkpoints are not named automatically")
            return Path(output_dir).absolute()
        target = Path(str(self._accelerator.project_dir), "checkpoints", f"checkpoint_{project.iteration}").absolute()
        if target.exists() or self._behind.leaves(str(target)):
            raise ValueError(
                f"Checkpoint directory {target} ({project.iteration}) already exists. Please manually override "
                "`self.save_iteration` with what iteration to start with."
            )
        return target

    def _part(self, target: Path) -> Path:
        """The folder's temporary name. Not among numbered checkpoints, because those are loaded by their number."""
        numbered = self._accelerator.project_configuration.automatic_checkpoint_naming
        home = target.parent.parent if numbered else target.parent
        if not self._life:
            if self._accelerator.is_main_process:
                name = "checkpoint_*" if numbered else glob.escape(target.name)
                for left in home.glob(f".{name}.*{SUFFIX}"):
                    shutil.rmtree(left, ignore_errors=True)
                put_back(target)
            (self._life,) = broadcast_object_list([uuid.uuid4().hex[:8]])
        self._count += 1
        part = home / f".{target.name}.{self._life}-{self._count}{SUFFIX}"
        part.mkdir(parents=True, exist_ok=True)
        return part

    def _state(self, part: str) -> dict[str, Any]:
        """The state to write later. Hooks, RNG state and samplers are written to `part` at once."""
        inner: Any = self._accelerator
        weights = [inner.get_state_dict(model, unwrap=False) for model in inner._models]
        for hook in inner._save_model_state_pre_hook.values():
            hook(inner._models, weights, part)
        save_accelerator_state(part, [], [], [], inner._dataloaders, inner.process_index, inner.step)
        return {
            "weights": weights,
            "optimizers": [one.state_dict() for one in inner._optimizers],
            "schedulers": [one.state_dict() for one in inner._schedulers],
            "scaler": inner.scaler.state_dict() if inner.scaler is not None else None,
            "objects": [one.state_dict() for one in inner._custom_objects],
        }

    def _write(self, state: dict[str, Any], part: Path, target: Path, safe_serialization: bool) -> None:
        """In the background, in every process: write this process's files, then finish or wait for the main process."""
        rank, main = self._accelerator.process_index, self._accelerator.is_main_process
        try:
            self._write_own(state, part, safe_serialization)
            (part / f"done-{rank}").touch()
            if main:
                self._finish(part, target)
            elif not _until(lambda: not part.exists()):
                raise StorageFailed(f"{target}: the main process has not made the folder whole within {PEERS_S:g} s")
        except BaseException as error:
            try:
                blame(part, error)
            finally:
                if main:
                    shutil.rmtree(part, ignore_errors=True)
                else:
                    (part / f"failed-{rank}").touch()
            raise

    def _write_own(self, state: dict[str, Any], part: Path, safe_serialization: bool) -> None:
        inner, rank = self._accelerator, self._accelerator.process_index
        own = part / f"own-{rank}"
        own.mkdir()
        scaler: Any = _Said(state["scaler"]) if state["scaler"] is not None else None
        optimizers, schedulers = ([_Said(one) for one in state[kind]] for kind in ("optimizers", "schedulers"))
        weights = state["weights"]
        save_accelerator_state(
            str(own), weights, optimizers, schedulers, [], rank, 0, scaler, safe_serialization=safe_serialization
        )
        for number, one in enumerate(state["objects"]):
            save_custom_state(_Said(one), str(own), number)
        (own / f"random_states_{rank}.pkl").unlink()  # saved just now; the one of the step is there already
        for file in own.iterdir():
            file.rename(part / file.name)
        own.rmdir()
        if not inner.is_main_process:
            sync_all(part)  # this machine's pages: the main process cannot sync them

    def _finish(self, part: Path, target: Path) -> None:
        """Main process: wait for all files, then rename the folder."""
        ranks = range(self._accelerator.num_processes)

        def there(word: str) -> list[int]:
            return [rank for rank in ranks if (part / f"{word}-{rank}").exists()]

        if not _until(lambda: there("failed") or len(there("done")) == len(ranks)) or there("failed"):
            late = sorted(set(ranks) - set(there("done")) | set(there("failed")))
            raise StorageFailed(f"{target}: ranks {late} failed, or have not written their files in {PEERS_S:g} s")
        for rank in ranks:
            (part / f"done-{rank}").unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        whole_folder(str(part), str(target))
        self._retain(target.parent)

    def _retain(self, folder: Path) -> None:
        """Apply `total_limit`, once the new folder is complete."""
        project = self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming or project.total_limit is None:
            return
        found = sorted(folder.iterdir(), key=lambda one: int((re.findall(r"\d+", one.name) or ["0"])[0]))
        for old in found[: -project.total_limit]:
            shutil.rmtree(old)


class _Said:
    """Stands in for an object whose state was saved: `state_dict` returns that state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


def _until(condition: Any) -> bool:
    """Poll `condition`, because there is no event for other processes' files. Returns False after a timeout."""
    deadline, pause = time.monotonic() + PEERS_S, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True
