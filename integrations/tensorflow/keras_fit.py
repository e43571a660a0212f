"""`model.fit` of tf_keras on parameter servers that come and go.

    history = fit_elastic(build_model, dataset_fn, epochs=3, steps_per_epoch=100, save_to="saved")

The model and its functions belong to one cluster. So `fit` is left at a batch boundary when the cluster changes, the
model is built again on the new one and restored, and `fit` goes on with the rest of the epoch. The place in the data is
the user's: `dataset_fn` is called again after each change. `PSTrainer` counts shards and loses none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.config import Config
from dlrover_hooks.errors import MissingExtra, UsageError
from dlrover_hooks.integrations.tensorflow import _private_api as private
from dlrover_hooks.integrations.tensorflow.checkpoints import VERSION, PSCheckpoints, PSCheckpointState
from dlrover_hooks.integrations.tensorflow.cluster_connection import connect, disconnect
from dlrover_hooks.integrations.tensorflow.cluster_switch import ClusterSwitch, task_of_this_process
from dlrover_hooks.integrations.tensorflow.server import serve_and_exit
from dlrover_hooks.integrations.tensorflow.trainer import SAVE_EVERY, SaveCadence
from dlrover_hooks.protocol.restored_value_check import require

try:
    import tf_keras  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise MissingExtra(
        "fit() on parameter servers needs tf_keras: Keras 3 cannot do it",
        hint="pip install --no-deps tf_keras (with its dependencies pip would install a second TensorFlow)",
    ) from missing


class PSClusterChanged(Exception):
    """A newer cluster version is announced: `fit` ends at a batch boundary."""


class PSReconnect(tf_keras.callbacks.Callback):
    """Leaves `fit` at a batch boundary when the cluster has changed, by raising `PSClusterChanged`.

    Args:
        switch: the chief's place in the job.
        on_batch: called after each batch that was scheduled.
    """

    def __init__(self, switch: ClusterSwitch, on_batch: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._supports_tf_logs = True  # otherwise tf_keras refuses callbacks with batch methods on this strategy
        self._switch, self._on_batch = switch, on_batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by `fit` when a batch was scheduled."""
        self._switch.alive()
        self._on_batch()
        if self._switch.changed:
            raise PSClusterChanged

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Called by `fit` when a batch of the validation was scheduled."""
        self._switch.alive()


class _Fitted:
    """One model on one cluster version."""

    def __init__(
        self, cluster: p.PSCluster, host: str, build_model: Callable[[], Any], partitioner: Any, saved: PSCheckpoints
    ) -> None:
        self.strategy, self.coordinator = connect(cluster, host, partitioner)
        try:
            with self.strategy.scope():
                model = self.model = build_model()
                if not isinstance(model, tf_keras.Model):
                    raise UsageError(
                        f"build_model returned {type(model).__module__}.{type(model).__name__}: Keras 3 cannot fit() "
                        "on parameter servers",
                        hint="set TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, or write a loop (PSTrainer)",
                    )
                if getattr(model, "optimizer", None) is None:
                    raise UsageError("build_model returned a model that is not compiled", hint="model.compile(...)")
                if not model.built:
                    raise UsageError("build_model returned a model that is not built", hint="give it an Input layer")
                private.create_slots(model.optimizer, model.trainable_variables)
            self.checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            if (newest := saved.newest()) is not None:
                saved.restore(self.checkpoint, newest[0])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the cluster."""
        disconnect(self.coordinator)


class _Progress:
    """The place of `fit`: batches scheduled in the epoch."""

    def __init__(self, steps_per_epoch: int) -> None:
        self.epoch = self.batch = 0
        self._steps = steps_per_epoch

    @property
    def step(self) -> int:
        """Batches over all epochs."""
        return self.epoch * self._steps + self.batch

    def load(self, data: dict[str, Any]) -> None:
        """Raises Corrupt, or UsageError if the epochs had another length."""
        require(data, dict[str, int], "the place of fit")
        if data["steps_per_epoch"] != self._steps:
            raise UsageError(
                f"an epoch has {self._steps} steps, at the first start it had {data['steps_per_epoch']}",
                hint="give the steps_per_epoch of the first start, or another save_to",
            )
        self.epoch, self.batch = divmod(data["step"], self._steps)

    def state(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"step": self.step, "steps_per_epoch": self._steps}


def fit_elastic(
    build_model: Callable[[], Any],
    dataset_fn: Callable[[Any], Any],
    *,
    epochs: int,
    steps_per_epoch: int,
    save_to: str,
    save_every: int | str = SAVE_EVERY,
    keep: int = 2,
    callbacks: Sequence[Any] = (),
    partitioner: Any = None,
    watchdog_s: float = 120.0,
    max_reconnects: int = 10,
    job: str | None = None,
    master: str | None = None,
    token: str | None = None,
) -> dict[str, list[float]]:
    """`fit` a compiled tf_keras model on the cluster that the master announces; the history of all epochs.

    Args:
        build_model: returns the compiled model, with an Input layer. Called once per cluster version.
        dataset_fn: as for `tf_keras.utils.experimental.DatasetCreator`: takes an `InputContext`, returns an endless
            `tf.data.Dataset`.
        epochs, steps_per_epoch: of the whole training.
        save_to, save_every, keep, partitioner, watchdog_s, max_reconnects, job, master, token: as for `PSTrainer`.
        callbacks: of the user. Their `on_train_begin` is called once per epoch and after each change.

    Raises:
        UsageError, MasterError, MasterAway: as `PSTrainer.run`.
    """
    config = settings.load(save_to=save_to, save_every=save_every, job=job, master=master, token=token)
    place = task_of_this_process("fit_elastic")
    if place.type is not p.NodeType.CHIEF:
        serve_and_exit(config, place)
    creator = tf_keras.utils.experimental.DatasetCreator(dataset_fn)
    loop = _FitLoop(config, PSCheckpoints(save_to, keep), epochs, steps_per_epoch, creator, callbacks)
    switch = ClusterSwitch(
        config, place, watchdog_s=watchdog_s, max_reconnects=max_reconnects, step=lambda: loop.progress.step
    )
    switch.run(
        lambda cluster: _Fitted(cluster, switch.host, build_model, partitioner, loop.saved),
        lambda fitted: loop.run(switch, fitted),
        lambda: loop.over,
    )
    return loop.history


class _FitLoop:
    """The epochs of a training, over all clusters."""

    def __init__(
        self,
        config: Config,
        saved: PSCheckpoints,
        epochs: int,
        steps_per_epoch: int,
        creator: Any,
        callbacks: Sequence[Any],
    ) -> None:
        self.saved, self.progress = saved, _Progress(steps_per_epoch)
        self.history: dict[str, list[float]] = {}
        self._config, self._epochs, self._steps = config, epochs, steps_per_epoch
        self._creator, self._callbacks = creator, callbacks
        self._cadence = SaveCadence(config.save_every)
        self.over = False
        self._load()

    def _load(self) -> None:
        self.progress.epoch = self.progress.batch = 0
        if (newest := self.saved.newest()) is not None:
            self.progress.load(newest[1].data)
        self.over = self.progress.epoch >= self._epochs

    def run(self, switch: ClusterSwitch, fitted: _Fitted) -> None:
        """Train from the newest checkpoint on, until all epochs are over or the cluster has changed. Raises OpError."""
        self._load()

        def batch_done() -> None:
            self.progress.batch += 1
            if self._cadence.due(self.progress.step):
                self._save(switch, fitted)

        try:
            while not self.over:
                found = fitted.model.fit(
                    self._creator,
                    initial_epoch=self.progress.epoch,
                    epochs=self.progress.epoch + 1,
                    steps_per_epoch=self._steps - self.progress.batch,
                    callbacks=[PSReconnect(switch, batch_done), *self._callbacks],
                    verbose=0,
                )
                for name, values in found.history.items():
                    self.history.setdefault(name, []).extend(values)
                self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
                self._save(switch, fitted)
                self.over = fitted.model.stop_training or self.progress.epoch >= self._epochs
        except PSClusterChanged:
            if switch.planned:
                self._save(switch, fitted)

    def _save(self, switch: ClusterSwitch, fitted: _Fitted) -> None:
        """Complete the scheduled batches, then save."""
        fitted.coordinator.join()
        step = self.progress.step
        self.saved.write(
            fitted.checkpoint,
            PSCheckpointState(VERSION, self._config.job, step, self.progress.state(), tf.__version__),
        )
        self._cadence.saved(step)
        switch.alive()
