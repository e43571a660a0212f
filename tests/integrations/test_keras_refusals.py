# pyright: reportArgumentType=false, reportAssignmentType=false
# (Keras has no annotations that a checker could rely on.)
"""What Keras cannot do with the callback is refused, with what works instead. In this process, on the torch backend."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import pytest
import torch

from dlrover_hooks.errors import Corrupt, DataMismatch, UsageError
from dlrover_hooks.integrations.keras import ElasticCallback, _private_api as private, callback_state, model_state
from dlrover_hooks.integrations.keras.data_parallel import DataParallel
from tests import ranks

X, Y = np.random.RandomState(0).rand(20, 3).astype("float32"), np.zeros(20, "float32")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with ranks.named_job("keras") as name:
        yield name


@pytest.fixture
def el(job: str) -> ElasticCallback:
    return ElasticCallback(job=job)


def model(width: int = 4) -> keras.Model:
    made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(width), keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return made


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index: int) -> Any:
        return X, Y


class Interrupts(keras.callbacks.Callback):
    """Ctrl-C in the third batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((iter([(X, Y)]),), r"(?s)has no positions to resume at.*el.data\(make_batches, batches=N\)"),
        ((lambda: iter([(X, Y)]),), "does not say how many batches an epoch has"),
        ((Endless(),), "endless"),
        ((X, Y[:5]), r"the arrays have \[5, 20\] samples"),
        ((X, None, Y), "sample_weight was given without y"),
    ],
)
def test_data_without_places(el: ElasticCallback, data: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        el.data(*data)


@pytest.mark.parametrize(
    ("data", "batches", "words"),
    [
        (X, 4, r"(?s)batches=4 beside a ndarray.*leave batches= out"),
        (lambda: [], 1, r"<lambda>\(\) returned no batches"),
        (lambda: [], 0, "batches=0"),
        (lambda root, epoch: [], 1, r"<lambda>\(\) needs the arguments root, epoch"),
    ],
)
def test_functions_that_give_no_epochs(el: ElasticCallback, data: Any, batches: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        el.data(data, batches=batches)
    with pytest.raises(UsageError, match="y or sample_weight beside a function"):
        el.data(lambda: [(X, Y)], Y, batches=1)


@pytest.mark.parametrize(
    ("epochs", "words"),
    [
        ([4, 3], r"make_batches\(\) has 3 batches in epoch 1, not 4"),
        ([4, 5], r"(?s)make_batches\(\) has more than 4 batches in epoch 1.*itertools.islice"),
    ],
)
def test_epochs_of_another_length_than_said(el: ElasticCallback, epochs: list[int], words: str) -> None:
    def make_batches(epoch: int) -> Any:
        return ((X, Y) for _ in range(epochs[epoch]))

    with pytest.raises(UsageError, match=words):
        model().fit(el.data(make_batches, batches=4), epochs=2, callbacks=[el], verbose=0)


def test_a_function_that_returns_the_same_iterator_again(el: ElasticCallback) -> None:
    once = iter([(X, Y)] * 9)
    with pytest.raises(UsageError, match="returned the same iterator twice"):
        model().fit(el.data(lambda: once, batches=3), callbacks=[el], verbose=0)


def test_a_function_is_read_with_its_callback_only(el: ElasticCallback) -> None:
    """Without it the epoch is not known."""
    with pytest.raises(UsageError, match=r"(?s)read without their callback.*callbacks=\[el\]"):
        model().fit(el.data(lambda: [(X, Y)] * 4, batches=4), verbose=0)


def test_the_position_of_data_with_other_seeds(el: ElasticCallback) -> None:
    """A `tf.data` dataset knows those of its shuffles, a function has none."""
    data: Any = el.data(lambda: [(X, Y)], batches=1)
    saved = data.state_dict()
    data.load_state_dict(saved)
    with pytest.raises(DataMismatch, match=r"the seeds \[\], at the first start \[\[1, 5\]\]"):
        data.load_state_dict(saved | {"seeds": [[1, 5]]})
    with pytest.raises(Corrupt, match="the saved random state cannot be used"):
        data.load_state_dict(saved | {"began": {"epoch": 0, "rng": {"python": 5}}})


def test_a_dataloader_is_read_by_a_function(job: str) -> None:
    """Its order is drawn from torch's generator where an epoch begins, and once more where it continues."""
    pairs = list(zip(torch.arange(20.0), torch.zeros(20), strict=True))
    seen: list[list[float]] = []

    def fit(job: str, *beside: Any) -> list[list[float]]:
        torch.manual_seed(3)
        loader = torch.utils.data.DataLoader(pairs, 5, shuffle=True, collate_fn=rows)
        el, now = ElasticCallback(job=job, save_every=1), len(seen)
        data = el.data(lambda: loader, batches=4)
        with contextlib.suppress(KeyboardInterrupt):
            model().fit(data, epochs=2, callbacks=[el, *beside], verbose=0)
        return seen[now:]

    def rows(found: Any) -> Any:
        ids = [float(one) for one, _ in found]
        seen.append(ids)
        return torch.tensor(ids).reshape(-1, 1).expand(-1, 3), torch.zeros(len(ids))

    calm = fit(f"{job}-calm")
    fit(job, Interrupts())
    resumed = fit(job)
    assert calm[-4:] == resumed[-4:]
    assert calm[2:6] == resumed[2:6], "those before it are read again"
    assert sorted(one for ids in calm[-4:] for one in ids) == list(range(20))


def test_a_seed_out_of_range(el: ElasticCallback) -> None:
    with pytest.raises(UsageError, match=r"seed=-1 is not in \[0, 2\*\*64\)"):
        el.data(X, Y, seed=-1)


def test_data_of_one_training_only(el: ElasticCallback) -> None:
    el.data(X, Y)
    with pytest.raises(UsageError, match="give validation data to fit as it is"):
        el.data(X, Y)


def test_a_fit_that_does_not_read_the_data(el: ElasticCallback) -> None:
    with pytest.raises(UsageError, match="fit was given no data of this callback"):
        model().fit(X, Y, callbacks=[el], verbose=0)
    el.data(X, Y, batch_size=20)
    with pytest.raises(UsageError, match="does not read the data"):
        model().fit(X, Y, batch_size=20, callbacks=[el], verbose=0)


def test_an_epoch_is_one_pass(el: ElasticCallback) -> None:
    with pytest.raises(UsageError, match="leave steps_per_epoch out"):
        model().fit(el.data(X, Y, batch_size=5), steps_per_epoch=2, callbacks=[el], verbose=0)


def test_one_training_for_each_callback(el: ElasticCallback) -> None:
    made = model()
    made.fit(el.data(X, Y), callbacks=[el], verbose=0)
    with pytest.raises(UsageError, match="with another job="):
        made.fit(el.data(X, Y), callbacks=[el], verbose=0)


def test_another_batch_size(job: str) -> None:
    """The first start decides, so that a step keeps its samples."""
    el = ElasticCallback(job=job, save_every=1)
    with pytest.raises(KeyboardInterrupt):
        model().fit(el.data(X, Y, batch_size=5), callbacks=[el, Interrupts()], verbose=0)
    other = ElasticCallback(job=job)
    with pytest.raises(UsageError, match="batches have 4 samples, at the first start they had 5"):
        model().fit(other.data(X, Y, batch_size=4), callbacks=[other], verbose=0)


def test_a_fit_that_was_broken_off_begins_where_the_next_one_resumes(job: str) -> None:
    """In one process: Ctrl-C in the first epoch, then `fit` again with the same callback; all epochs are trained."""
    el, made = ElasticCallback(job=job, save_every=1), model()
    with pytest.raises(KeyboardInterrupt):
        made.fit(el.data(X, Y, batch_size=5), epochs=2, callbacks=[el, Interrupts()], verbose=0)
    history = made.fit(el.data(X, Y, batch_size=5), epochs=2, callbacks=[el], verbose=0)
    assert el.restored is not None
    assert el.restored.generation.step in (1, 2)
    assert (el.step, history.epoch) == (8, [0, 1])


def test_settings_that_cannot_work(job: str) -> None:
    with pytest.raises(UsageError, match="snapshot='lazy' cannot work with Keras"):
        ElasticCallback(job=job, snapshot="lazy")


@pytest.mark.parametrize(
    "loss", [keras.losses.MeanSquaredError(reduction="sum"), {"out": keras.losses.Huber(reduction="none")}]
)
def test_losses_that_several_workers_cannot_share(loss: Any) -> None:
    made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, name="out")])
    made.compile("adam", loss)
    with pytest.raises(UsageError, match="with several workers it must be a mean over the samples"):
        DataParallel(made, 0, lambda: 1.0)


def test_a_state_of_another_backend_or_adapter() -> None:
    """A checkpoint with valid hashes may hold anything."""
    sound = {"keras_backend": "torch", "step": 1, "epoch": 0, "variables": {}, "callbacks": {}}
    model_state.check_state(sound)
    with pytest.raises(UsageError, match="set KERAS_BACKEND=jax"):
        model_state.check_state(sound | {"keras_backend": "jax"})
    with pytest.raises(UsageError, match="was not saved by the Keras callback: it holds model; step"):
        model_state.check_state({"model": {}, "step": 1})
    forged = ({"step": -1}, {"variables": [1]}, {"variables": {"model": {"0.kernel": 5}}}, {"callbacks": {"Own.0": 5}})
    for damaged in (5, *(sound | one for one in forged)):
        with pytest.raises(Corrupt):
            model_state.check_state(damaged)


def test_the_variables_of_another_model_change_nothing() -> None:
    saved, other = model_state.arrays_of(model()), model(5)
    before = [one.value.detach().clone() for one in other.weights]
    with pytest.raises(UsageError, match=r"0.kernel has shape \(3, 5\), in the checkpoint \(3, 4\)"):
        model_state.assign(other, saved, ("model",))
    assert all(torch.equal(one.value, then) for one, then in zip(other.weights, before, strict=True))


def test_disabled_it_is_plain_fit(job: str) -> None:
    el = ElasticCallback(job=job, disable=True)
    history = model().fit(el.data(X, Y, batch_size=5), epochs=2, callbacks=[el], verbose=0)
    assert len(history.history["loss"]) == 2
    assert el.session is None


@pytest.mark.parametrize(
    ("before", "backend", "words"),
    [
        ("sys.modules['keras'] = None; ", "torch", r"Keras is not installed: pip install 'dlrover-hooks\[keras\]'"),
        ("", "tensorflow", "set KERAS_BACKEND to torch, jax or tensorflow"),
    ],
)
def test_what_is_not_installed_is_named(before: str, backend: str, words: str) -> None:
    """This environment has no TensorFlow."""
    code = f"import sys; {before}import dlrover_hooks.integrations.keras"
    env = os.environ | {"KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert re.search("^ImportError: .*" + words, done.stderr, re.MULTILINE), done.stderr


class Own(keras.callbacks.Callback):
    """Of the user's own, with a state."""

    seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_states_of_callbacks_are_found_by_class_and_number() -> None:
    one, other, own = keras.callbacks.EarlyStopping(), keras.callbacks.EarlyStopping(), Own()
    one.wait, other.wait, own.seen = 3, 5, 7
    saved = callback_state.states([keras.callbacks.TerminateOnNaN(), one, own, other])
    assert list(saved) == ["EarlyStopping.0", "Own.0", "EarlyStopping.1"]
    fresh = [keras.callbacks.EarlyStopping(), Own(), keras.callbacks.EarlyStopping(), keras.callbacks.EarlyStopping()]
    saved["EarlyStopping.0"] |= {"monitor": "forged", "on_epoch_end": None}
    callback_state.restore(fresh, saved)
    assert [fresh[0].wait, fresh[1].seen, fresh[2].wait] == [3, 7, 5]
    assert fresh[0].monitor == "val_loss"
    assert callable(fresh[0].on_epoch_end)


def test_a_callback_whose_state_is_no_dict() -> None:
    class Listed(Own):
        def state_dict(self) -> Any:
            return [self.seen]

    with pytest.raises(UsageError, match=r"Listed.state_dict\(\) returned a list"):
        callback_state.states([Listed()])


def test_private_parts_of_keras(job: str) -> None:
    """What `_private_api` relies on is there."""
    found: list[list[Any]] = []

    class Looks(keras.callbacks.Callback):
        def set_params(self, params: dict[str, Any]) -> None:
            super().set_params(params)
            found.append(private.callbacks_beside())

        def on_train_begin(self, logs: Any = None) -> None:
            private.begin_at(self.model, 2)

    looks, stop = Looks(), keras.callbacks.EarlyStopping("loss")
    made = model()
    history = made.fit(X, Y, epochs=3, callbacks=[looks, stop], verbose=0)
    assert {looks, stop} <= set(found[0])
    assert history.epoch == [2]
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("adam", "mse")
    private.build(unbuilt, (X, Y))
    weight = unbuilt.weights[0]
    before = private.version(weight)
    weight.assign(weight.value + 1)
    assert private.version(weight) > before
    assert unbuilt.built
    assert unbuilt.optimizer.built
