"""What the TensorFlow adapter says of bad input that needs no cluster: `python ps_refusals.py FOLDER`.

Prints a line of JSON: for each case the class of the error, and its text.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import dlrover_hooks.integrations.tensorflow as adapter
from dlrover_hooks.integrations.tensorflow.checkpoints import LATEST, VERSION, PSCheckpoints, PSCheckpointState
from dlrover_hooks.integrations.tensorflow.cluster_connection import check_program


def saved(folder: Path, version: int = VERSION) -> PSCheckpoints:
    """A checkpoint of one variable, `weights`, of 8 by 4."""
    found = PSCheckpoints(str(folder))
    model = tf.train.Checkpoint(weights=tf.Variable(tf.ones((8, 4))))
    found.write(model, PSCheckpointState(version, "job", 5, {"cursor": 5}))
    return found


def restored(folder: Path, **variables: Any) -> None:
    checkpoints = saved(folder)
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.restore(tf.train.Checkpoint(**variables), newest[0])


def gone(folder: Path) -> None:
    checkpoints = saved(folder)
    newest = checkpoints.newest()
    assert newest is not None
    for path in Path(newest[0]).glob("model*"):
        path.unlink()
    checkpoints.restore(tf.train.Checkpoint(weights=tf.Variable(tf.ones((8, 4)))), newest[0])


def written(folder: Path, name: str, text: str) -> None:
    folder.mkdir()
    (folder / name).write_text(text)
    PSCheckpoints(str(folder)).newest()


def without_tf_keras() -> object:
    sys.modules["tf_keras"] = None  # type: ignore[assignment]  # Python's mark of a module that is not there
    try:
        return adapter.PSReconnect
    finally:
        del sys.modules["tf_keras"]


def main() -> None:
    folder = Path(sys.argv[1])
    cases: dict[str, Callable[[], object]] = {
        "other shape": lambda: restored(folder / "shape", weights=tf.Variable(tf.ones((4, 4)))),
        "other name": lambda: restored(folder / "name", kernel=tf.Variable(tf.ones((8, 4)))),
        "other release": lambda: saved(folder / "release", VERSION + 1).newest(),
        "other adapter": lambda: written(folder / "adapter", "latest.json", "{}"),
        "torn": lambda: written(folder / "torn", LATEST, '{"fol'),
        "gone": lambda: gone(folder / "gone"),
        "no program": lambda: check_program(tf.Variable(1.0)),  # pyright: ignore[reportArgumentType]
        "resume": lambda: adapter.PSTrainer(
            lambda _: adapter.PSProgram(print), samples=1, shard_size=1, save_to=str(folder), resume="maybe"
        ),
        "no task": lambda: adapter.PSTrainer(
            lambda _: adapter.PSProgram(print), samples=1, shard_size=1, save_to=str(folder)
        ).run(),
        "no tf_keras": without_tf_keras,
        "no such name": lambda: adapter.PSTrainr,  # pyright: ignore[reportAttributeAccessIssue]
    }
    said: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            said[name] = ["no error", repr(case())]
        except Exception as error:
            said[name] = [[one.__name__ for one in type(error).__mro__], str(error)]
    said["names"] = [adapter.PSReconnect.__name__, adapter.PSClusterChanged.__name__, adapter.fit_elastic.__name__]
    said["distributions"] = sorted(set(importlib.metadata.packages_distributions()["tensorflow"]))
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
