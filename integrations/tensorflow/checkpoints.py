"""Checkpoints of a parameter server job: variables by `tf.train.Checkpoint`, and the place in the data beside them.

    SAVE_TO/step-00000120-1f0a93bc/model.index, ...  written by the parameter servers, each its own part
    SAVE_TO/step-00000120-1f0a93bc/state.json        the place in the data, written by the chief
    SAVE_TO/latest-ps.json                           names the newest complete folder; replaced atomically

TensorFlow stores a variable that is cut into parts as one tensor, so any number of parameter servers can restore it.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import msgspec
import tensorflow as tf

from dlrover_hooks.errors import Corrupt, NoCheckpoint, StorageFailed, UsageError
from dlrover_hooks.protocol import Count

VERSION = 1
LATEST = "latest-ps.json"
_OTHERS = ("latest.json", "finished.json")
"""Files that the checkpoints of other adapters have."""


class PSCheckpointState(msgspec.Struct, frozen=True):
    """`state.json`: `data` is the state of the `ShardOrder`, `steps` the number of shards in the model."""

    version: int
    job: str
    steps: Count
    data: dict[str, Any]
    tensorflow: str = ""


class _Latest(msgspec.Struct, frozen=True):
    folder: str


class PSCheckpoints:
    """The checkpoints in `save_to`. Training thread only.

    Args:
        save_to: a folder that the chief and all parameter servers reach under this name, or a URL that `tf.io.gfile`
            knows.
        keep: the newest so many stay.
    """

    def __init__(self, save_to: str, keep: int = 2) -> None:
        self.save_to, self._keep = save_to.rstrip("/"), keep

    def newest(self) -> tuple[str, PSCheckpointState] | None:
        """Folder and state of the newest checkpoint; None if there is none.

        Raises:
            UsageError: another adapter saves there.
            Corrupt: it cannot be read.
        """
        path = f"{self.save_to}/{LATEST}"
        if not tf.io.gfile.exists(path):
            found = [name for name in _OTHERS if tf.io.gfile.exists(f"{self.save_to}/{name}")]
            if found:
                raise UsageError(
                    f"{self.save_to} has checkpoints of another adapter ({found[0]})",
                    hint="give the parameter server job a save_to of its own",
                )
            return None
        folder = f"{self.save_to}/{_read(path, _Latest).folder}"
        state = _read(f"{folder}/state.json", PSCheckpointState)
        if state.version != VERSION:
            raise UsageError(
                f"{folder} was written in format {state.version}, this release reads {VERSION}",
                hint="use the release of dlrover-hooks that wrote it, or start over (resume='never')",
            )
        return folder, state

    def write(self, checkpoint: tf.train.Checkpoint, state: PSCheckpointState) -> None:
        """Save; when this returns the checkpoint is the newest one.

        Raises:
            StorageFailed: the folder cannot be written.
            OpError: a server is lost.
        """
        name = f"step-{state.steps:08}-{uuid.uuid4().hex[:8]}"  # never the folder that LATEST names
        folder = f"{self.save_to}/{name}"
        try:
            tf.io.gfile.makedirs(folder)
            checkpoint.write(f"{folder}/model")
            _replace(f"{folder}/state.json", msgspec.json.encode(state))
            _replace(f"{self.save_to}/{LATEST}", msgspec.json.encode(_Latest(name)))
            self._remove_old(name)
        except (tf.errors.PermissionDeniedError, tf.errors.ResourceExhaustedError, OSError) as error:
            raise StorageFailed(
                f"the checkpoint of step {state.steps} cannot be written to {self.save_to}: {error}",
                hint="chief and parameter servers must reach the folder under this name, and may write to it",
            ) from None

    def _remove_old(self, newest: str) -> None:
        found = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(self.save_to) if name.startswith("step-"))
        for name in [one for one in found if one != newest][: max(0, len(found) - self._keep)]:
            tf.io.gfile.rmtree(f"{self.save_to}/{name}")

    def restore(self, checkpoint: tf.train.Checkpoint, folder: str) -> None:
        """Read the variables.

        Raises:
            UsageError: names or shapes of the variables are others.
            NoCheckpoint: the files are gone.
            OpError: a server is lost.
        """
        try:
            checkpoint.read(f"{folder}/model").assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.InvalidArgumentError) as error:
            if isinstance(error, tf.errors.InvalidArgumentError) and "shape" not in str(error).lower():
                raise
            raise UsageError(
                f"the checkpoint {folder} does not fit the model: {str(error).splitlines()[0]}",
                hint="build the variables of the first start, or start over (resume='never')",
            ) from None
        except tf.errors.NotFoundError as error:
            if folder not in str(error):
                raise
            raise NoCheckpoint(f"{folder}/model is gone: {error.message}") from None


def _read(path: str, form: Any) -> Any:
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=form)
    except (msgspec.DecodeError, tf.errors.NotFoundError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"{path} cannot be read: {error}", hint="remove it to start over, or put back an older one"
        ) from None


def _replace(path: str, content: bytes) -> None:
    draft = f"{path}.{os.getpid()}"
    with tf.io.gfile.GFile(draft, "wb") as file:
        file.write(content)
    tf.io.gfile.rename(draft, path, overwrite=True)
