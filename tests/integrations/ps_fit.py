"""`fit_elastic` with a model of tf_keras: `python ps_fit.py PLAN LIVES`, see ps_chief.py.

With `gate`, each worker reads that file before its 21st batch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf

from dlrover_hooks.integrations.tensorflow import fit_elastic
from tests.integrations.ps_chief import length_of
from tests.waiting import until


class Rows(tf.keras.callbacks.Callback):
    """Writes a row per batch, and waits at the steps of `holds`."""

    def __init__(self, plan: dict[str, Any], lives: Path) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self.plan, self.lives = plan, lives

    def write(self, **row: Any) -> None:
        with self.lives.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), **row}) + "\n")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = len(self.lives.read_text().splitlines()) + 1
        self.write(step=step)
        gate = self.lives.parent / f"go-{step}"
        if step in self.plan.get("holds", ()) and not gate.exists():
            self.write(holds=step)
            until(gate.exists, f"the file {gate.name}", 120.0)


def build_model() -> Any:
    model = tf.keras.Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(4), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.Adagrad(0.1), "mse", steps_per_execution=1)
    return model


def dataset(gate: str) -> Any:
    """Endless, in batches of 8."""
    x = tf.random.stateless_normal((64, 8), (1, 2))
    batches = tf.data.Dataset.from_tensor_slices((x, tf.reduce_sum(x, 1))).repeat().batch(8)
    if not gate:
        return batches

    def waits(number: Any, batch: tuple[Any, Any]) -> Any:
        return batch[0], batch[1] + tf.cast(length_of(gate, number == 20), tf.float32)

    return batches.enumerate().map(waits)


def main() -> None:
    plan, lives = json.loads(sys.argv[1]), Path(sys.argv[2])
    rows = Rows(plan, lives)
    build = (lambda: __import__("keras").Sequential()) if plan.get("kind") == "keras" else build_model
    history = fit_elastic(
        build,
        lambda _: dataset(plan.get("gate", "")),
        epochs=4,
        steps_per_epoch=60,
        save_to=str(lives.parent / "saved"),
        save_every=25,
        watchdog_s=plan.get("watchdog_s", 120.0),
        callbacks=[rows],
    )
    rows.write(losses=history["loss"])


if __name__ == "__main__":
    main()
