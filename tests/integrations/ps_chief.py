"""The chief of a job under test: `python ps_chief.py PLAN LIVES`, run by `dlrover-hooks run --ps`.

Each shard adds 1 to its own place in `seen`, so the variables say how often each was applied. It appends to LIVES a
line for each step, and a last one with what the model holds. At the steps of `holds` it waits for the file `go-STEP`,
and with `holds_end` for `go-end` before it reads the model. Shard `hangs_at` reads the file `gate`, and fails
if it is not empty. `ballast_mib`: of a variable that is in no checkpoint; each step has the servers compute with it, if
the job `works`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dlrover_hooks.integrations.tensorflow import PSProgram, PSTrainer
from tests.waiting import until

PLAN: dict[str, Any] = {
    "samples": 1200, "size": 2, "epochs": 1, "save_every": 50, "holds": [], "kind": "raw", "watchdog_s": 120.0,
    "max_reconnects": 10, "inflight": 16, "partition": True, "resume": "auto", "width": 8, "holds_end": False,
    "hangs_at": -1, "gate": "", "ballast_mib": 0, "works": False,
}  # fmt: skip
HOLD_S = 120.0
RATE = 0.05


def parts_of(variable: Any) -> list[Any]:
    return list(getattr(variable, "variables", [variable]))


def length_of(gate: str, now: Any) -> Any:
    """Of the file `gate` if `now`, else 0. A read of a named pipe waits, and nothing can cancel it."""
    return tf.strings.length(tf.io.read_file(tf.where(now, gate, os.devnull)))  # no constant: that is read at once


class Model:
    """A linear model with Adagrad by hand (raw), or one of Keras with Adam."""

    def __init__(self, plan: dict[str, Any], strategy: Any) -> None:
        self.shards = -(-plan["samples"] // plan["size"])
        self.size, self.strategy = plan["size"], strategy
        self.seen = tf.Variable(tf.zeros((self.shards,), tf.int32), name="seen")
        self.kept: dict[str, Any] = {"seen": self.seen}
        self.fails_at = plan.get("fails_at", -1)
        self.hangs_at, self.gate = plan["hangs_at"], plan["gate"]
        self.works = plan["works"]
        self.ballast = tf.Variable(tf.zeros((plan["ballast_mib"] << 18,)), name="ballast")
        width = plan["width"]
        if plan["kind"] == "raw":
            self.weights = tf.Variable(tf.ones((width, 4)), name="weights")
            self.sums = tf.Variable(tf.fill((width, 4), 0.1), name="sums")
            self.kept |= {"weights": self.weights, "sums": self.sums}
        else:
            keras = __import__("tf_keras" if plan["kind"] == "tf_keras" else "keras")
            layers = [keras.layers.Input((width,)), keras.layers.Dense(4)]
            self.keras = keras.Sequential(layers)
            self.optimizer = keras.optimizers.Adam(0.01)
            self.optimizer.build(self.keras.trainable_variables)
            self.kept |= {"model": self.keras, "optimizer": self.optimizer}

    def step(self, begin: Any, end: Any) -> Any:
        number = tf.cast(begin // self.size, tf.int32)
        if self.fails_at >= 0:
            tf.debugging.assert_less(begin, tf.constant(self.fails_at, tf.int64), "an error of this very step")
        if self.gate:
            length = length_of(self.gate, number == self.hangs_at)
            tf.debugging.assert_equal(length, 0, "connection refused")  # as if its worker was lost
        x = tf.random.stateless_normal((self.size, 8), tf.stack([number, 7]))
        loss = self.raw(x) if not hasattr(self, "keras") else self.strategy.run(self.fitted, args=(x,))
        for part in parts_of(self.ballast) if self.works else ():
            with tf.device(part.device):
                part.assign_add(tf.sqrt(tf.abs(part)))
        at = 0
        for part in parts_of(self.seen):
            part.assign_add(tf.one_hot(number - at, part.shape[0], dtype=tf.int32))
            at += part.shape[0]
        return loss

    def raw(self, x: Any) -> Any:
        parts, sums = parts_of(self.weights), parts_of(self.sums)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, tf.convert_to_tensor(self.weights)) ** 2)
        for part, total, gradient in zip(parts, sums, tape.gradient(loss, parts), strict=True):
            total.assign_add(gradient**2)
            part.assign_sub(RATE * gradient / tf.sqrt(total.read_value()))
        return loss

    def fitted(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.keras(x) ** 2)
        variables = self.keras.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


def main() -> None:
    plan = PLAN | json.loads(sys.argv[1])
    lives, folder = Path(sys.argv[2]), Path(sys.argv[2]).parent
    model: list[Model] = []

    def write(**row: Any) -> None:
        with lives.open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "at": time.time(), **row}) + "\n")

    def build(strategy: Any) -> PSProgram:
        model[:] = [Model(plan, strategy)]
        return PSProgram(model[0].step, **model[0].kept)

    def result(step: int, loss: Any) -> None:
        write(step=step, version=trainer.cluster.version, loss=float(loss))
        if step in plan["holds"] and not (gate := folder / f"go-{step}").exists():
            write(holds=step)
            until(gate.exists, f"the file {gate.name}", HOLD_S)

    def end(_: PSProgram) -> None:
        if plan["holds_end"] and not (gate := folder / "go-end").exists():
            write(ends=True)
            until(gate.exists, f"the file {gate.name}", HOLD_S)
        held = {name: value for name, value in model[0].kept.items() if name in ("seen", "weights")}
        write(**{name: np.concatenate([part.numpy() for part in parts_of(one)]).tolist() for name, one in held.items()})

    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=64, max_shards=8)
    trainer = PSTrainer(
        build,
        samples=plan["samples"],
        shard_size=plan["size"],
        epochs=plan["epochs"],
        save_to=str(folder / "saved"),
        save_every=plan["save_every"],
        partitioner=partitioner if plan["partition"] else None,
        inflight=plan["inflight"],
        on_result=result,
        on_end=end,
        watchdog_s=plan["watchdog_s"],
        max_reconnects=plan["max_reconnects"],
        resume=plan["resume"],
    )
    report = trainer.run()
    write(done=report.steps, applied=report.applied, versions=[one.version for one in report.reconnects])


if __name__ == "__main__":
    main()
