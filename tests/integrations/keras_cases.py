# pyright: reportArgumentType=false, reportOptionalIterable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOptionalOperand=false
# (Keras has no annotations that a checker could rely on.)
# ruff: noqa: E402
"""A small run with Keras, broken off and resumed by plan; prints a JSON report of each life. No pytest, no torch.

    python tests/integrations/keras_cases.py '{"job": "j", "crashes": [2, 3, null], ...}'

The environment picks the backend (KERAS_BACKEND). `calm`: before them one life of another job, which nothing breaks
off. `kill`: the last crash is a SIGKILL.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

with warnings.catch_warnings():  # of the frameworks, at their import
    warnings.simplefilter("ignore")
    import keras

BEFORE = set(sys.modules)

from dlrover_hooks import ShardDataset
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.keras import ElasticCallback
from tests.pace import pace

ADDED = sorted({"torch", "jax", "tensorflow"} & (sys.modules.keys() - BEFORE))

SAMPLES, BATCH, EPOCHS = 45, 8, 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)
LEASED = {"shard_size": 10, "seed": 3}
GIVEN: dict[str, Any] = {
    "data": "arrays", "spe": 1, "epochs": EPOCHS, "policy": "float32", "shared": {}, "kill": False,
    "class_weight": False, "width": 8, "plain": False, "batch": BATCH, "batches": None, "calm": False,
}  # fmt: skip


class Crash(Exception):
    pass


class Trace(keras.layers.Layer):
    """Notes in weights of the model which samples each step trained on; their ids are in the first column.

    What a rollback takes out of the model it takes out of the trace, too. With several workers a rank's samples count
    as much as its gradients, because the trace is averaged like them.
    """

    def build(self, shape: Any) -> None:
        self.steps = self.add_weight(shape=(STEPS, SAMPLES), initializer="zeros", trainable=False, dtype="float32")
        self.step = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            ids = keras.ops.cast(keras.ops.round(x[:, 0]), "int32")
            samples = keras.ops.sum(keras.ops.one_hot(ids, SAMPLES, dtype="float32"), axis=0)
            row = keras.ops.one_hot(self.step, STEPS, dtype="float32")
            self.steps.assign_add(keras.ops.expand_dims(row, 1) * keras.ops.expand_dims(samples, 0))
            self.step.assign_add(1)
        return x[:, 1:]


class Noisy(keras.utils.PyDataset):
    """Batches with noise out of NumPy's global generator, as many augmentations draw it."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._x, self._y = x, y

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __getitem__(self, index: int) -> Any:
        ids = list(range(index * BATCH, min((index + 1) * BATCH, SAMPLES)))
        x = self._x[ids]
        x[:, 1:] += 0.01 * np.random.standard_normal((len(ids), 4)).astype("float32")
        return x, self._y[ids]


def drawn(x: Any, y: Any) -> Any:
    """Epochs that draw their order and noise from NumPy's global generator."""

    def make_batches() -> Iterator[Any]:
        order = np.random.permutation(SAMPLES)
        for at in range(0, SAMPLES, BATCH):
            ids = order[at : at + BATCH]
            rows = x[ids]
            rows[:, 1:] += 0.01 * np.random.standard_normal((len(ids), 4)).astype("float32")
            yield rows, y[ids]

    return make_batches


def numbered(x: Any, y: Any) -> Any:
    """Epochs whose order is a function of their number."""

    def make_batches(epoch: int) -> Iterator[Any]:
        order = np.random.default_rng([7, epoch]).permutation(SAMPLES)
        return ((x[ids], y[ids]) for ids in np.split(order, range(BATCH, SAMPLES, BATCH)))

    return make_batches


def tensors(x: Any, y: Any, form: str) -> Any:
    """A `tf.data.Dataset`; `form` names what is done to it."""
    import tensorflow as tf  # pyright: ignore[reportMissingModuleSource]

    found = tf.data.Dataset.from_tensor_slices((x, y))
    if form == "uncached":
        return found.shuffle(SAMPLES, seed=5).cache().batch(BATCH)
    if form == "unseeded":
        tf.random.set_seed(None)
    seed = None if form in ("unseeded", "global") else 5
    found = found.cache().shuffle(SAMPLES, seed=seed).batch(BATCH).prefetch(2)
    if form == "quick":
        options = tf.data.Options()
        options.deterministic = False
        return found.with_options(options)
    return {"filtered": found.filter(lambda rows, labels: True), "endless": found.repeat()}.get(form, found)


class Draws(keras.callbacks.Callback):
    """Draws from the generator that `drawn` draws from."""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        np.random.rand(3)


class Breaker(keras.callbacks.Callback):
    """Ends the run behind step `at`, by an exception or by SIGKILL."""

    def __init__(self, el: ElasticCallback, at: int | None, *, kill: bool) -> None:
        super().__init__()
        self._el, self._at, self._kill = el, at, kill

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._at is not None and self._el.step >= self._at:
            if self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Crash


def model_of(given: dict[str, Any]) -> keras.Model:
    """`plain`: without layers whose outputs depend on the rank, so that runs at two world sizes can be compared."""
    random = [] if given["plain"] else [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential(
        [
            keras.layers.Input((5,)),
            Trace(dtype="float32"),
            keras.layers.Dense(given["width"], activation="tanh"),
            *random,
            keras.layers.Dense(2, dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"], steps_per_execution=given["spe"])
    return model


def life(given: dict[str, Any], crash: int | None) -> dict[str, Any]:
    keras.config.set_dtype_policy(given["policy"])
    keras.utils.set_random_seed(11)
    chance = np.random.RandomState(3)
    features = chance.rand(SAMPLES, 4).astype("float32")
    x, y = np.column_stack([np.arange(SAMPLES, dtype="float32"), features]), (features.sum(1) > 2).astype("int32")
    model = model_of(given)
    el = ElasticCallback(given.get("save_to"), job=given["job"], **{"save_every": 1, **given["shared"]})
    beside: list[Any] = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05),
        keras.callbacks.EarlyStopping("val_loss", patience=4, min_delta=0.01),
        Breaker(el, crash, kill=given["kill"] and crash == given["crashes"][-1]),
    ]
    batches = -(-SAMPLES // BATCH)
    if given["data"] == "dataset":
        data = el.data(Noisy(x, y))
    elif given["data"] == "leased":
        data = el.data(ShardDataset(list(zip(x, y, strict=True)), **LEASED), batch_size=given["batch"])
    elif given["data"] == "drawn":
        data = el.data(drawn(x, y), batches=batches)
        if keras.backend.backend() != "tensorflow":  # which draws while it reads ahead
            beside.append(Draws())
    elif given["data"].startswith("tf"):
        data = el.data(tensors(x, y, given["data"].partition(".")[2]), batches=given["batches"])
    elif given["data"] == "numbered":
        data = el.data(numbered(x, y), batches=batches)
    elif given["data"] == "weighted":
        data = el.data(x, y, np.linspace(0.5, 1.5, SAMPLES, dtype="float32"), batch_size=given["batch"])
    else:
        data = el.data(x, y, batch_size=given["batch"])
    more: dict[str, Any] = {"class_weight": {0: 1.0, 1: 2.0}} if given["class_weight"] else {}
    crashed, history = True, None
    with contextlib.suppress(Crash):
        history = model.fit(
            data, epochs=given["epochs"], callbacks=[el, *beside], validation_data=(x[:9], y[:9]), verbose=0, **more
        )
        crashed = False
    trace = keras.ops.convert_to_numpy(model.layers[0].steps)
    return {
        "restored": el.restored.generation.step if el.restored is not None else None,
        "crashed": crashed,
        "step": el.step,
        "rank": int(os.environ.get("RANK", "0")),
        "trace": [np.repeat(np.arange(SAMPLES), np.ceil(row).astype(int)).tolist() for row in trace],
        "weights": [
            v for one in model.trainable_weights for v in np.asarray(keras.ops.convert_to_numpy(one)).ravel().tolist()
        ],
        "model": digest(model.weights),
        "optimizer": digest(model.optimizer.variables),
        "rate": float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)),
        "history": history.history if history is not None else None,
        "epochs": history.epoch if history is not None else None,
        "backend": keras.backend.backend(),
        "added": ADDED,
    }


def digest(variables: Any) -> str:
    found = hashlib.sha256()
    for one in variables:
        found.update(np.ascontiguousarray(keras.ops.convert_to_numpy(one)).tobytes())
    return found.hexdigest()


def main() -> None:
    given = {**GIVEN, **json.loads(sys.argv[1])}
    pace()
    if given["calm"]:
        undisturbed = {**given, "job": f"{given['job']}-calm", "save_to": None}
        print(json.dumps(life(undisturbed, None)), flush=True)
    for crash in given["crashes"]:
        try:
            report = life(given, crash)
        except UsageError as error:
            report = {"why": str(error)}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
