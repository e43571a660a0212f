"""Names over restarts: a run that is started again writes over what its earlier lives wrote, and beside nothing.

`ModelCheckpoint` takes a name that is not free for somebody else's and adds `-v1`; `CSVLogger` begins a new `version_N`
folder for every start. Both are right for a new run and litter for a run that goes on.
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

from dlrover_hooks.integrations.lightning import _compat as private

MARK = "dlrover_hooks_run"
"""In files of weights only, which hold no callback's state."""


def write_over_earlier(trainer: Trainer, run: str) -> None:
    """A file of `run` from before this fit counts as free, for every `ModelCheckpoint`; others keep their `-v1`."""
    given = set[str]()
    for callback in private.callbacks(trainer):
        if isinstance(callback, ModelCheckpoint):
            _write_over_earlier(callback, run, given)
    connector: Any = trainer._checkpoint_connector
    dump = connector.dump_checkpoint

    def dump_checkpoint(weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = dump(weights_only)
        return checkpoint | {MARK: run} if weights_only else checkpoint

    connector.dump_checkpoint = dump_checkpoint


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
    trainer._checkpoint_connector.__dict__.pop("dump_checkpoint", None)
    for callback in private.callbacks(trainer):
        callback.__dict__.pop("file_exists", None)


def written_by(path: str, run: str) -> bool:
    """Is this a checkpoint of `run`? It names its run in its pickle, which is looked at as bytes, not loaded."""
    with contextlib.suppress(OSError, zipfile.BadZipFile), fsspec.open(path, "rb") as file:
        archive = zipfile.ZipFile(cast(Any, file))
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        return name is not None and run.encode() in archive.read(name)
    return False


def forget_missing(trainer: Trainer) -> None:
    """A run that is killed while files are written behind the step knows of some that never appeared. When callbacks
    are restored; all ranks.
    """
    for callback in private.callbacks(trainer):
        if isinstance(callback, ModelCheckpoint):
            known = {*callback.best_k_models, callback.best_model_path, callback.last_model_path} - {""}
            missing = trainer.strategy.broadcast([path for path in known if not callback._fs.exists(path)])
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
    """By `ModelCheckpoint`, the step that it saved last: it keeps that to itself, and would save the step again."""
    found = (one for one in private.callbacks(trainer) if isinstance(one, ModelCheckpoint))
    return {one.state_key: one._last_global_step_saved for one in found}


def keep_saved_at(trainer: Trainer, steps: dict[str, int]) -> None:
    """What `saved_at` gave. Once callbacks are restored."""
    for one in private.callbacks(trainer):
        if isinstance(one, ModelCheckpoint):
            one._last_global_step_saved = steps.get(one.state_key, one._last_global_step_saved)


def versions(trainer: Trainer) -> list[Any]:
    """By logger, its `version_N` on rank 0, which alone writes; None for those that are left alone. All ranks."""
    own = [logger.version if isinstance(logger, CSVLogger) else None for logger in trainer.loggers]
    return trainer.strategy.broadcast(own)


def leave_folders(trainer: Trainer) -> None:
    """This rank may be 0 in the next life. A `CSVLogger` that has written nothing begins in a folder of its own then,
    as that of a new process does: in one that is there already it would remove what the rank 0 before has written.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            logger._version = None


def keep_versions(trainer: Trainer, restored: dict[str, Any], key: str, run: str) -> None:
    """Have the loggers go on in the folders that callback `key` noted in a checkpoint of `run`, without the rows of
    steps that are trained again. In `setup`, where Lightning has made the new folders already.
    """
    mark = restored["callbacks"].get(key, {})
    before = mark.get("versions", ()) if mark.get("run") == run else ()
    steps = private.batches_that_stepped(restored)
    for logger, version in zip(trainer.loggers, before, strict=False):
        if isinstance(logger, CSVLogger) and version is not None:
            new = logger.log_dir
            logger._version = version
            if trainer.is_global_zero:
                _go_on(logger, steps)
            if trainer.is_global_zero and new != logger.log_dir:
                with contextlib.suppress(OSError):  # something is in it: not ours to remove
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
    whole = text[: text.rfind("\n") + 1]  # a process that is killed as it writes leaves the beginning of a row
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
    """The rows that were written up to that step.

    Lightning gives a row of its own an epoch. Others may have another axis (a module that logs a "step" of its own), so
    they are judged by their place: what lies ahead of a row that stays, stays; what lies behind one that goes, goes.
    """
    numbers = [int(number) if (number := row.get("step") or "0").isdigit() else 0 for row in rows]
    own = [place for place, row in enumerate(rows) if row.get("epoch")]
    last = max((place for place in own if numbers[place] < steps), default=-1)
    gone = min((place for place in own if numbers[place] >= steps), default=len(rows))
    return [
        row for place, row in enumerate(rows)
        if (numbers[place] < steps and (row.get("epoch") or place < gone)) or (place < last and not row.get("epoch"))
    ]  # fmt: skip
