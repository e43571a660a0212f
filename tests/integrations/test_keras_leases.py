# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
# (Keras has no annotations that a checker could rely on.)
"""Keras over leased shards: how an epoch ends, and what is refused. In this process, on the torch backend.

That every sample is in the model once, wherever the run is broken off, is in test_keras_leased.py for each backend.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import pytest

from dlrover_hooks import ShardDataset
from dlrover_hooks.data.leased.sources import Stream
from dlrover_hooks.errors import DataMismatch, ShardsFailed, UsageError
from dlrover_hooks.integrations.keras import ElasticCallback
from dlrover_hooks.protocol import Partition
from tests import ranks

SAMPLES = 22
seen: list[int] = []


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    seen.clear()
    with ranks.named_job("keras") as name:
        yield name


class Sees(keras.layers.Layer):
    """Notes the samples that it is trained on."""

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            seen.extend(int(one) for one in x[:, 0])
        return x


class Rows:
    """Samples of the form (x, y); some cannot be read."""

    def __init__(self, *bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError(f"{index} is torn")
        return np.array([index, 1, 1], "float32"), float(index % 2)

    def read(self, partition: str, lo: int, hi: int) -> Any:
        del partition
        return [self[index] for index in range(lo, hi)]


class Stops(keras.callbacks.Callback):
    """Ctrl-C, or an early end, in the third batch."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.asks = asks

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2 and self.asks:
            self.model.stop_training = True
        elif batch == 2:
            raise KeyboardInterrupt


def model() -> keras.Model:
    made = keras.Sequential([Sees(), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return made


def fit(job: str, dataset: Any, *beside: Any, shared: Any = None, **more: Any) -> ElasticCallback:
    el = ElasticCallback(job=job, save_every=1, **(shared or {}))
    more = {"epochs": 2, "verbose": 0, "callbacks": [el, *beside], **more}
    targets = np.zeros(len(dataset)) if isinstance(dataset, np.ndarray) else None
    model().fit(el.data(dataset, targets, batch_size=4), **more)
    return el


def test_each_epoch_ends_when_all_its_samples_are_done(job: str) -> None:
    """With class weights, in a model that `fit` builds; without Keras' warning that the data ran out."""
    el = fit(job, ShardDataset(Rows()), class_weight={0: 1.0, 1: 2.0})
    assert el.step == 12
    assert [sorted(seen[at : at + SAMPLES]) for at in (0, SAMPLES)] == [list(range(SAMPLES))] * 2
    assert seen[:SAMPLES] != seen[SAMPLES:]


def test_a_stream_has_one_epoch(job: str) -> None:
    stream = Stream(Rows(), [Partition("a", 3, 9), Partition("b", 12, 19)])
    fit(job, ShardDataset(stream), epochs=1, shuffle=False)
    assert sorted(seen) == [*range(3, 9), *range(12, 19)]
    with pytest.raises(UsageError, match=r"lent out for 1 epochs, not 2"):
        fit(f"{job}-two", ShardDataset(stream), shuffle=False)


def test_samples_that_cannot_be_read_are_told_when_the_epoch_ends(job: str, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ShardsFailed, match="2 samples of this epoch could not be read"):
        fit(job, ShardDataset(Rows(0, 13)), epochs=1)
    assert Counter(seen) == Counter(set(range(SAMPLES)) - {0, 13})
    seen.clear()
    fit(f"{job}-warn", ShardDataset(Rows(0, 13), on_error="warn"), epochs=1)
    assert "2 samples of this epoch could not be read" in str(recwarn.pop(RuntimeWarning).message)
    assert Counter(seen) == Counter(set(range(SAMPLES)) - {0, 13})


def test_training_that_stops_in_an_epoch_is_over(job: str) -> None:
    el = fit(job, ShardDataset(Rows()), Stops(asks=True))
    assert (el.step, len(seen)) == (3, 12)


def test_disabled_it_is_plain_fit(job: str) -> None:
    fit(job, ShardDataset(Rows()), shared={"disable": True})
    assert Counter(seen) == Counter([*range(SAMPLES)] * 2)


@pytest.mark.parametrize(
    ("dataset", "more", "words"),
    [
        (ShardDataset(Rows(), epochs=1), {}, r"(?s)lent out for 1 epochs, not 2.*ShardDataset\(..., epochs=2\)"),
        (ShardDataset(Rows()), {"steps_per_epoch": 2}, "leave steps_per_epoch out"),
        (ShardDataset(Rows()), {"steps_per_epoch": 6}, "leave steps_per_epoch out"),
    ],
)
def test_what_leases_cannot_do(job: str, dataset: ShardDataset, more: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fit(job, dataset, **more)
    assert seen == []


def test_several_workers_are_refused(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=r"(?s)2 workers.*shards are leased to one worker.*elastic_loader"):
        ElasticCallback(job=job).data(ShardDataset(Rows()))


def test_a_checkpoint_of_other_data_is_refused(job: str) -> None:
    """Arrays after leased shards, leased shards after arrays, and shards of another order."""
    with pytest.raises(KeyboardInterrupt):
        fit(job, ShardDataset(Rows()), Stops(asks=False))
    with pytest.raises(UsageError, match="the checkpoint has the position of a ShardDataset"):
        fit(job, np.zeros((20, 3), "float32"))
    with pytest.raises(DataMismatch, match="fingerprint"):
        fit(job, ShardDataset(Rows(), seed=1))
    with pytest.raises(KeyboardInterrupt):
        fit(f"{job}-arrays", np.zeros((20, 3), "float32"), Stops(asks=False))
    with pytest.raises(UsageError, match="the position of other data, not of a ShardDataset"):
        fit(f"{job}-arrays", ShardDataset(Rows()))
