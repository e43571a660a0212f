"""What `ElasticCallback` costs a batch of Keras' `fit` on the torch backend, for `bench_callback`."""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # read when keras is imported

import keras
import numpy as np
import torch

from dlrover_hooks.integrations.keras import ElasticCallback
from tests.benchmarks import turns

BATCH, WIDTH, HIDDEN = 64, 32, 64
"""Samples of a batch, its features, and neurons of a hidden layer. All layers together fit into a processor's cache:
steps of wide layers differ by 10 % with the place that their weights have in memory."""
SIZES = (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""Numbers of hidden layers."""


class _Tells(keras.callbacks.Callback):
    def __init__(self, clock: turns.Clock) -> None:
        super().__init__()
        self._clock = clock

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._clock.step_ended()


def measured(rounds: int) -> tuple[dict[str, Any], dict[str, float]]:
    """See `turns.measured`."""
    torch.set_num_threads(1)
    logging.getLogger("dlrover_hooks").setLevel(logging.ERROR)
    conditions, figures = turns.measured("keras", rounds, _train, SIZES)
    return {"keras_version": keras.__version__, **conditions}, figures


def _train(clock: turns.Clock, steps: int, hook: bool, size: int) -> None:
    layers = [keras.layers.Dense(HIDDEN, activation="relu") for _ in range(size)]
    model: Any = keras.Sequential([keras.layers.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-3), "mean_squared_error")
    x = np.random.default_rng(0).normal(size=(BATCH * steps, WIDTH)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    if not hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[_Tells(clock)])
        return
    el = ElasticCallback(job=f"bench-{uuid.uuid4().hex[:8]}")
    clock.session = lambda: el.session
    model.fit(el.data(x, y, batch_size=BATCH), verbose=0, callbacks=[_Tells(clock), el])
