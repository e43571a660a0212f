# pyright: reportOptionalOperand=false, reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
# (Keras has no annotations that a checker could rely on.)
"""The contract's trial under Keras' `ElasticCallback`, on the backend of KERAS_BACKEND: a step is a batch of `fit`."""

from __future__ import annotations

import contextlib
import os
from typing import Any

os.environ["JAX_ENABLE_X64"] = "1"

import keras
import numpy as np

from dlrover_hooks.integrations.keras import ElasticCallback
from tests.contracts.report import EVALUATED, Crash, Given, Report, keywords


class Linear(keras.layers.Layer):
    """A Dense layer that is exact in float64: Keras' own multiplies matrices in float32 on the torch backend."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units))
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros")

    def call(self, x: Any) -> Any:
        return keras.ops.sum(keras.ops.expand_dims(x, -1) * self.kernel, axis=1) + self.bias


class Seen(keras.metrics.Metric):
    """Counts each sample since the last reset: what ran in a compiled step."""

    def __init__(self, samples: int) -> None:
        super().__init__(name="seen")
        self.samples = samples
        self.counts = self.add_variable((samples,), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ids = keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32")
        self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(ids, self.samples, dtype=self.counts.dtype), axis=0))

    def result(self) -> Any:
        return keras.ops.sum(self.counts)


class Notes(keras.callbacks.Callback):
    """Reports what each step and each evaluation saw. Stands before the elastic callback, which adds up the ranks'."""

    def __init__(self, seen: Seen, data: Any, steps: Steps, report: Report) -> None:
        super().__init__()
        self.seen, self.data, self.steps, self.report, self.epoch = seen, data, steps, report, 0

    def counts(self) -> Any:
        if (sync := getattr(self.model, "jax_state_sync", None)) is not None:
            sync()
        return np.array(keras.ops.convert_to_numpy(self.seen.counts))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.before = self.counts()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.data.weight:
            self.report.note(self.epoch, self.steps.step, "train", np.flatnonzero(self.counts() - self.before))

    def on_test_end(self, logs: Any = None) -> None:
        self.report.evaluated.append(np.repeat(np.arange(self.seen.samples), self.counts().astype(int)).tolist())
        self.report.evaluated_at.append(self.steps.step)


class Steps(keras.callbacks.Callback):
    """Counts steps, and breaks off. Stands behind the elastic callback."""

    def __init__(self, el: ElasticCallback, crash: int | None, report: Report) -> None:
        super().__init__()
        self.el, self.crash, self.report, self.step = el, crash, report, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.report.restored = self.el.restored.generation.step if self.el.restored is not None else None
        self.report.active = self.el.session is not None
        self.step = self.report.restored or 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.step == self.crash:
            raise Crash

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1


def rows(count: int, samples: int) -> Any:
    """As `trial.Numbers` without noise."""
    at = np.arange(count, dtype="float64")
    return np.stack([at / samples, (at * 7 % 11) / 11, (at * 3 % 5) / 5, np.ones(count)], 1)


def mean_square(ids: Any, found: Any) -> Any:
    """The mean is taken here: Keras' own divides in float32."""
    target: Any = keras.ops.cast(keras.ops.reshape(ids, (-1,)) % 3, found.dtype)
    shape: Any = keras.ops.shape(found)
    count: Any = keras.ops.cast(shape[0], found.dtype)
    return keras.ops.sum(keras.ops.square(found[:, 0] - target / 3)) / count


def flat(variables: Any) -> list[float]:
    return [value for one in variables for value in np.asarray(keras.ops.convert_to_numpy(one)).ravel().tolist()]


def train(given: Given, crash: int | None) -> Report:
    """See `Trial`. `fit` has no accumulation: a batch is what `accumulate` micro-batches of all ranks would be."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(5)
    report, seen = Report(), Seen(given.samples)
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            Linear(8),
            keras.layers.Activation("tanh"),
            keras.layers.Dropout(0.3 if given.noise else 0.0),
            Linear(1),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.3, 3, 0.8, staircase=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), mean_square, metrics=[seen])
    el = ElasticCallback(**keywords(given))
    size = given.batch * given.accumulate * given.world
    data = el.data(rows(given.samples, given.samples), np.arange(given.samples), batch_size=size)
    steps = Steps(el, crash, report)
    validation = rows(EVALUATED, EVALUATED), np.arange(EVALUATED)
    beside = [Notes(seen, data, steps, report), el, steps]
    report.crashed = True
    with contextlib.suppress(Crash):
        model.fit(data, epochs=given.epochs, validation_data=validation, callbacks=beside, verbose=0)
        report.crashed = False
    report.step = steps.step
    report.weights, report.moments = flat(model.trainable_weights), flat(model.optimizer.variables)
    report.lr = flat([model.optimizer.learning_rate])
    return report
