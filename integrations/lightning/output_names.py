"""Output names across restarts: a restarted run overwrites its earlier files, and adds no new names beside them.

`ModelCheckpoint` treats an existing file as foreign and adds `-v1`; `CSVLogger` begins a new `version_N` folder at
every start. Both are right for a new run, but leave stray files for a resumed run.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import zipfile
from collections.abc import Sequence
from typing import Any, cast

import fsspec
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from dlrover_hooks.integrations.lightning import _private_api as private

MARK = "dlrover_hooks_run"
"""Key in weights-only files, which hold no callback state."""


def write_over_earlier(trainer: Trainer, run: str) -> None:
    """Treat existing files of `run` from before this fit as free, for every `ModelCheckpoint`; others get `-v1`."""
    given = set[str]()
    for callback in private.callbacks(trainer):
        if isinstance(callback, ModelCheckpoint):
            _write_over_earlier(callback, run, given)
    private.change_dump(trainer, lambda made, weights_only: made | {MARK: run} if weights_only else made)


def _write_over_earlier(callback: ModelCheckpoint, run: str, given: set[str]) -> None:
    exists = callback.file_exists

    def file_exists(filepath: Any, trainer: Trainer) -> bool:
        path = str(filepath)
        there = exists(filepath, trainer)
        if there and path not in given:
            earlier = trainer.is_global_zero and written_by(path, run)
            there = not trainer.strategy.reduce_boolean_decision(earlier, all=False)
        if not there:
            given.add(path)
        return there

    cast(Any, callback).file_exists = file_exists


def forget(trainer: Trainer) -> None:
    """Undo `write_over_earlier`."""
    private.restore_dump(trainer)
    for callback in private.callbacks(trainer):
        callback.__dict__.pop("file_exists", None)


def written_by(path: str, run: str) -> bool:
    """True if the file is a checkpoint of `run`. Searches its pickle as bytes for the run's id, without loading it."""
    with contextlib.suppress(OSError, zipfile.BadZipFile), fsspec.open(path, "rb") as file:
        archive = zipfile.ZipFile(cast(Any, file))
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        return name is not None and run.encode() in archive.read(name)
    return False


def forget_missing(trainer: Trainer) -> None:
    """Drop files from `ModelCheckpoint`'s records that do not exist. Call when callbacks are restored; all ranks.

    A run killed during background writes has recorded some that were never written.
    """
    for callback in private.callbacks(trainer):
        if isinstance(callback, ModelCheckpoint):
            known = {*callback.best_k_models, callback.best_model_path, callback.last_model_path} - {""}
            missing = trainer.strategy.broadcast([path for path in known if not private.file_exists(callback, path)])
            if missing:
                private.log.warning("not there any more, or never written before the crash: %s", ", ".join(missing))
                _forget(callback, set(missing))


def _forget(callback: ModelCheckpoint, missing: set[str]) -> None:
    left = callback.best_k_models = {path: one for path, one in callback.best_k_models.items() if path not in missing}
    if callback.last_model_path in missing:
        callback.last_model_path = ""
    if callback.best_model_path in missing:
        choose = min if callback.mode == "min" else max
        callback.best_model_path = choose(left, key=lambda path: float(left[path])) if left else ""
        callback.best_model_score = left.get(callback.best_model_path)


def saved_at(trainer: Trainer) -> dict[str, int]:
    """The last saved step by `ModelCheckpoint`. It is in no checkpoint; without it the step would be saved again."""
    found = (one for one in private.callbacks(trainer) if isinstance(one, ModelCheckpoint))
    return {one.state_key: private.last_saved_step(one) for one in found}


def keep_saved_at(trainer: Trainer, steps: dict[str, int]) -> None:
    """Restore the result of `saved_at`. Call once callbacks are restored."""
    for one in private.callbacks(trainer):
        if isinstance(one, ModelCheckpoint):
            private.set_last_saved_step(one, steps.get(one.state_key, private.last_saved_step(one)))


def versions(trainer: Trainer) -> list[Any]:
    """`version_N` by logger, as on rank 0, the only writer; None for loggers that are left unchanged. All ranks."""
    own = [logger.version if isinstance(logger, CSVLogger) else None for logger in trainer.loggers]
    return trainer.strategy.broadcast(own)


def leave_folders(trainer: Trainer) -> None:
    """Reset the version of each `CSVLogger` that has written nothing, because this rank may be 0 in the next round.

    The logger then begins in a folder of its own, as in a new process. In an existing folder it would remove the files
    of the previous rank 0.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and not private.has_written(logger):
            private.set_version(logger, None)


def keep_versions(trainer: Trainer, restored: dict[str, Any], key: str, run: str) -> None:
    """Make the loggers continue in the folders recorded under callback `key` in a checkpoint of `run`.

    Drops the rows of steps that are trained again. Call in `setup`, where Lightning has created the new folders
    already.
    """
    mark = restored["callbacks"].get(key, {})
    before = mark.get("versions", ()) if mark.get("run") == run else ()
    steps = private.batches_that_stepped(restored)
    for logger, version in zip(trainer.loggers, before, strict=False):
        if isinstance(logger, CSVLogger) and version is not None:
            new = logger.log_dir
            private.set_version(logger, version)
            if trainer.is_global_zero:
                _go_on(logger, steps)
            if trainer.is_global_zero and new != logger.log_dir:
                with contextlib.suppress(OSError):  # not empty: do not remove it
                    os.rmdir(new)


def _go_on(logger: CSVLogger, steps: int) -> None:
    writer: Any = logger.experiment
    writer.log_dir = logger.log_dir
    writer.metrics_file_path = os.path.join(logger.log_dir, writer.NAME_METRICS_FILE)
    os.makedirs(logger.log_dir, exist_ok=True)
    if not os.path.exists(writer.metrics_file_path):
        return
    with open(writer.metrics_file_path, newline="") as file:
        text = file.read()
    whole = text[: text.rfind("\n") + 1]  # a process killed while writing leaves a partial row
    if not whole:
        os.remove(writer.metrics_file_path)
        return
    rows = csv.DictReader(io.StringIO(whole, newline=""))
    writer.metrics_keys = list(rows.fieldnames or ())
    kept = rows_before(list(rows), steps)
    part = f"{writer.metrics_file_path}.tmp"
    with open(part, "w", newline="") as file:
        table = csv.DictWriter(file, writer.metrics_keys)
        table.writeheader()
        table.writerows(kept)
    os.replace(part, writer.metrics_file_path)


def rows_before(rows: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """The rows written up to step `steps`.

    Lightning's own rows have an epoch. Others may have another axis (a module that logs its own "step"), so they are
    judged by their position: a row before a kept one is kept, and a row after a dropped one is dropped.
    """
    numbers = [int(number) if (number := row.get("step") or "0").isdigit() else 0 for row in rows]
    own = [place for place, row in enumerate(rows) if row.get("epoch")]
    last = max((place for place in own if numbers[place] < steps), default=-1)
    gone = min((place for place in own if numbers[place] >= steps), default=len(rows))
    return [
        row for place, row in enumerate(rows)
        if (numbers[place] < steps and (row.get("epoch") or place < gone)) or (place < last and not row.get("epoch"))
    ]  # fmt: skip
