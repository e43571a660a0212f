"""Keras 3: one callback makes `model.fit` elastic.

    el = ElasticCallback(save_to="saved")
    model.fit(el.data(x, y, batch_size=64), epochs=3, callbacks=[el])

The callback turns Keras' events into calls of `StepDriver`. A step is one batch of `fit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import msgspec

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.data.leased.shard_dataset import ShardDataset
from dlrover_hooks.data.step_indices import StepIndices
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.keras import _private_api as private, callback_state, model_state
from dlrover_hooks.integrations.keras.batches import ArraySource, BatchSource, ElasticBatches, Fetches, IndexedBatches
from dlrover_hooks.integrations.keras.leases import LeasedBatches
from dlrover_hooks.integrations.keras.streams import StreamedBatches, reader_of
from dlrover_hooks.session import Preempted, Restored, Session
from dlrover_hooks.step_driver import StepDriver

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dlrover_hooks.config.shared_keywords import SharedKeywords
    from dlrover_hooks.integrations.keras.data_parallel import DataParallel


class KerasElasticCallback(keras.callbacks.Callback):
    """Resumes `fit` in the middle of an epoch, with the batches that follow those in the model.

    Saved together, after the same batch: weights, seeds of random layers, optimizer, metrics, the position in the data,
    random state, and what `EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint` and `History` remember.

    Args:
        save_to: fsspec URL of the durable checkpoints; None keeps them in memory only.
        on_preempt: called with a `Preempted` when this process is preempted, once the step is saved.
        shared: see `SharedKeywords`; the meanings are those of `dlrover_hooks.config.Config`.

    Leaving `fit` by an exception leaves the job unfinished, to be resumed. All methods run on the training thread.
    Raises `UsageError` for settings that cannot work.
    """

    def __init__(
        self,
        save_to: str | None = None,
        *,
        on_preempt: Callable[[Preempted], object] | None = None,
        **shared: Unpack[SharedKeywords],
    ) -> None:
        super().__init__()
        self.config = msgspec.structs.replace(_checked(settings.load(save_to=save_to, **shared)), snapshot="eager")
        self.step = 0
        """Batches in the model, over all restarts."""
        self._on_preempt = on_preempt
        self._place = settings.place()
        if self._place.world_size > 1 and keras.backend.backend() != "torch":
            raise UsageError(
                f"{self._place.world_size} workers were started: on the {keras.backend.backend()} backend Keras trains "
                "in one process here",
                hint="start one worker (--nproc-per-node 1), or set KERAS_BACKEND=torch",
            )
        self._batches: ElasticBatches | None = None
        self._fetches = Fetches(self._before_fetch, self._after_fetch)
        self._driver: StepDriver | None = None
        self._parallel: DataParallel | None = None
        self._restored: Restored | None = None
        self._thread = threading.get_ident()
        self._fetched_at = -1
        """`step` when this thread requested the newest batch."""
        self._params: dict[str, Any] = {}
        self._beside: list[Any] = []
        self._resumed: dict[str, Any] | None = None
        """From the start of a resumed training until its first epoch begins."""
        self._epoch = 0
        """The current epoch."""
        self._begun = self._finished = False

    @property
    def restored(self) -> Restored | None:
        """What the last `fit` resumed; None for a fresh start."""
        return self._restored

    @property
    def session(self) -> Session | None:
        """The membership in the job, while `fit` runs."""
        return self._driver.session if self._driver is not None else None

    def data(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        batches: int | None = None,
    ) -> ElasticBatches:
        """The data for `fit`, in an order that a checkpoint can name a place in.

        Args:
            x, y, sample_weight: as for `fit`: arrays, or nested lists and dicts of arrays. Or `x` is a `PyDataset` of a
                known number of batches, whose batch `i` is the same in every epoch. Or a function that returns an
                iterator over the batches of one epoch, each as Keras takes it: `x`, `(x, y)` or
                `(x, y, sample_weight)`. If it has a parameter `epoch`, it gets the number of the epoch, from 0. Or a
                finite `tf.data.Dataset` of batches, whose order is the same in every process. Or a
                `dlrover_hooks.ShardDataset`, which the master lends out in shards.
            batch_size: samples of a batch, over all workers; a `PyDataset` or a function has its own.
            shuffle: another order in every epoch: of the samples, or of the batches of a `PyDataset`.
            seed: of the order.
            batches: how many of them an epoch of the function has, or of a `tf.data.Dataset` that does not know it.
        """
        if self._batches is not None and not self._begun:
            raise UsageError(
                "data() was called twice before fit: the callback keeps the place in one training set",
                hint="give validation data to fit as it is",
            )
        self._begun = False
        rows, size = (x, y, sample_weight), self.config.global_batch_size or batch_size
        self._batches = (
            self._leased(*rows, size)
            or self._read_by_epochs(*rows, batches)
            or self._read_by_index(*rows, size, shuffle, seed)
        )
        return self._batches

    def _leased(self, x: Any, y: Any, sample_weight: Any, batch_size: int) -> ElasticBatches | None:
        """None: `x` is no `ShardDataset`."""
        if not isinstance(x, ShardDataset):
            return None
        _refuse_beside(x, y, sample_weight)
        return LeasedBatches(x, batch_size, self._place.rank, self._place.world_size, self._fetches)

    def _read_by_epochs(self, x: Any, y: Any, sample_weight: Any, batches: int | None) -> ElasticBatches | None:
        """None: batch `i` of `x` can be read without those before it."""
        reader = reader_of(x, batches)
        if reader is None:
            return None
        _refuse_beside(x, y, sample_weight)
        return StreamedBatches(reader, self._place.rank, self._place.world_size, self._fetches)

    def _read_by_index(
        self, x: Any, y: Any, sample_weight: Any, batch_size: int, shuffle: bool, seed: int
    ) -> ElasticBatches:
        if isinstance(x, keras.utils.PyDataset):
            _refuse_beside(x, y, sample_weight)
            source, batch_size = BatchSource(x), 1
        else:
            source = ArraySource(x, y, sample_weight)
        steps = StepIndices(source.count, batch_size, shuffle=shuffle, seed=seed)
        return IndexedBatches(source, steps, self._place.rank, self._place.world_size, self._fetches)

    # ---- Keras' events ----------------------------------------------------------------------------------------------

    def set_params(self, params: dict[str, Any]) -> None:
        """Called by Keras before a training: also finds the callbacks beside this one."""
        super().set_params(params)
        self._params = params
        self._beside = private.callbacks_beside()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.config.disable:
            if self._batches is not None:
                self._batches.training = True
            return
        batches = self._check()
        batches.training = True
        private.begin_at(self._fitted, None)
        if self._driver is not None:  # the last training ended with an exception
            self._driver.close(p.Departure.FAILED)
        self._thread, self._fetched_at, self._begun = threading.get_ident(), -1, True
        self._driver = StepDriver(self, self.config, self._place, on_preempt=self._on_preempt)
        self._restored = restored = self._driver.start(check=model_state.check_state)
        try:
            self._check_kind(restored)
            batches.attach(self._driver.session, self._params["epochs"])
            if restored is not None:
                self._resume(restored)
            if self._place.world_size > 1:
                self._parallel = self._parallel_to_others(batches)
        except BaseException:
            self._driver.close(p.Departure.FAILED)
            raise
        self._driver.begin(None)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        resumed, self._resumed = self._resumed, None
        if resumed is not None:  # Keras has reset its metrics and callbacks by now
            callback_state.restore(self._beside, resumed["callbacks"])
            if self._batches is not None and self._batches.within_epoch:
                model_state.assign(self._fitted, resumed["variables"], ("metrics",))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._driver is None:
            return
        if self._fetched_at != self.step:
            self._driver.before_fetch(self.step)
        self._driver.boundary(self.step, lambda: self._state(self._epoch))
        if self._parallel is not None:
            self._parallel.before_step()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._driver is None or self._batches is None:
            return
        if not self._batches.requested:
            raise UsageError("fit does not read the data of this callback", hint="model.fit(el.data(x, y), ...)")
        if self._parallel is not None:
            self._parallel.after_step()
        clock = self._driver.session.clock
        clock.optimizing()  # Keras does not say when: the whole step counts as compute
        self.step += self._batches.applied(batch)
        self._driver.stepped()
        clock.boundary()
        self._batches.look_ahead()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._parallel is not None and logs is not None:
            logs.update(self._parallel.agreed(logs))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._driver is None:
            return
        private.begin_at(self._fitted, None)
        if self._parallel is not None:
            self._parallel.end()
            self._parallel = None
        try:
            if self._batches is not None:
                self._batches.end()
            over = self._params["epochs"] if self._fitted.stop_training else self._epoch + 1
            self._driver.finish(self.step, self._state(max(over, self._epoch + 1)))
        finally:
            self._driver.close(p.Departure.DONE, self.step)
        self._driver, self._finished = None, True

    # ---- within -----------------------------------------------------------------------------------------------------

    @property
    def _fitted(self) -> keras.Model:
        model = self.model
        assert model is not None
        return model

    def _check(self) -> ElasticBatches:
        if self._batches is None:
            raise UsageError("fit was given no data of this callback", hint="model.fit(el.data(x, y), callbacks=[el])")
        if self._finished:
            raise UsageError(
                f"job {self.config.job}: the training of this callback is over",
                hint="make another ElasticCallback with another job= for the next fit",
            )
        if isinstance(self._batches, LeasedBatches) and self._fitted.steps_per_execution > 1:
            raise UsageError(
                "steps_per_execution must be 1 with leased shards: the number of batches is not known beforehand",
                hint="compile(..., steps_per_execution=1)",
            )
        if self._params.get("steps") not in (None, self._batches.num_batches):
            raise UsageError(
                f"an epoch of fit has {self._params['steps']} batches, one of the data {self._batches.num_batches}",
                hint="leave steps_per_epoch out: an epoch is one pass over the data",
            )
        return self._batches

    def _check_kind(self, restored: Restored | None) -> None:
        leased = isinstance(self._batches, LeasedBatches)
        if restored is not None and not restored.weights_only and bool(restored.leases) != leased:
            raise UsageError(
                f"the checkpoint has the position of {'other data, not of a' if leased else 'a'} ShardDataset",
                hint="give the data of the first start, or start over (resume='never')",
            )

    def _resume(self, restored: Restored) -> None:
        state = restored.state
        assert self._batches is not None
        private.build(self._fitted, self._batches.first())
        if restored.weights_only:
            return model_state.assign(self._fitted, state["variables"], ("model",))
        model_state.assign(self._fitted, state["variables"], ("model", "optimizer"))
        self.step, self._resumed = state["step"], state
        self._epoch = state["epoch"] - 1  # if no epoch is left
        private.begin_at(self._fitted, state["epoch"])

    def _state(self, epoch: int) -> dict[str, Any]:
        """The `state` part of a cut; `epoch`: in which the next batch is."""
        return {
            "keras_backend": keras.backend.backend(),
            "step": self.step,
            "epoch": epoch,
            "variables": model_state.arrays_of(self._fitted, self._parallel.seed_offset if self._parallel else 0),
            "callbacks": callback_state.states(one for one in self._beside if one is not self),
        }

    def _parallel_to_others(self, batches: ElasticBatches) -> DataParallel:
        from dlrover_hooks.integrations.keras.data_parallel import DataParallel  # imports torch

        private.build(self._fitted, batches.first())
        if self._parallel is not None:  # the last training ended with an exception
            self._parallel.end()
        parallel = DataParallel(self._fitted, self._place.rank, lambda: batches.weight)
        parallel.begin()
        return parallel

    def _before_fetch(self) -> bool:
        here = threading.get_ident() == self._thread  # TensorFlow reads in threads of its own
        if here and self._driver is not None:
            self._driver.session.clock.boundary()
            self._driver.before_fetch(self.step)
            self._fetched_at = self.step
        return here

    def _after_fetch(self) -> None:
        if threading.get_ident() == self._thread and self._driver is not None:
            self._driver.session.clock.fetched()


def _checked(config: settings.Config) -> settings.Config:
    if config.snapshot == "lazy":
        raise UsageError(
            "snapshot='lazy' cannot work with Keras: its backends change the weights in place, or free their memory",
            hint="leave snapshot out: each save is copied before the next batch",
        )
    return config


def _refuse_beside(x: Any, y: Any, sample_weight: Any) -> None:
    if y is not None or sample_weight is not None:
        raise UsageError(f"y or sample_weight beside a {type(x).__name__}", hint="let it return them with each batch")
