"""Trainer state beside the optimizer that a step may change: taken at each step boundary, merged into a later cut.

A cut takes a millisecond, most of it for hooks and nested dicts. Here only the values are taken that may differ at the
next boundary, through attribute paths that are resolved once. The dicts around them, and state that no step changes
(hyper-parameters), come from a cut that is made when a worker was lost.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.integrations.lightning import _private_api as private
from dlrover_hooks.integrations.lightning.consistent_cut import put_back
from dlrover_hooks.integrations.lightning.stateful_loaders import OwnLoaders
from dlrover_hooks.pytorch.ddp_exactness import BucketOrder
from dlrover_hooks.pytorch.even_batches import EvenLoader


class Values(tuple[Any, ...]):
    """A tuple of immutable values, so that a deep copy is not needed."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> Values:
        return self


class StateBesideOptimizer:
    """The step state of one fit, from `on_train_start` on. Training thread."""

    def __init__(self, trainer: Trainer, own: OwnLoaders | None, buckets: BucketOrder | None) -> None:
        self._trainer, self._own, self._buckets = trainer, own, buckets
        self._places, ways = private.counts(trainer)
        self._counts = attrgetter(*ways)
        callbacks = private.callbacks(trainer)
        self._callbacks = [one for one in callbacks if private.keeps_state(one)]
        self._savers = [one for one in callbacks if isinstance(one, ModelCheckpoint)]
        self._datamodule: Any = cast(Any, trainer).datamodule
        self._hooked = private.adds_to_checkpoints(trainer)
        self._flattened: list[Any] = []
        self._loaders = list[Any]()
        self.rests = False
        """True if the fit is being left at a step boundary, and nothing has run since."""

    def take(self) -> dict[str, Any]:
        """The state at a step boundary. Containers in it are the Trainer's own; the caller must copy them."""
        trainer, self.rests = self._trainer, False
        return {
            "values": Values((
                self._counts(trainer.fit_loop),
                trainer.current_epoch,
                trainer.global_step,
                [private.last_saved_step(one) for one in self._savers],
                private.limits(trainer) if trainer.should_stop else None,
                self._buckets.names if self._buckets is not None else [],
            )),
            "loaders": [self._of_loader(one) for one in self._stateful()],
            "callbacks": [one.state_dict() for one in self._callbacks],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "datamodule": self._datamodule.state_dict() if self._datamodule is not None else {},
        }  # fmt: skip

    def lost(self, kept: dict[str, Any]) -> str:
        """Why `kept` (a copy of the result of `take`, or a part of a full cut) cannot be merged into a current cut.

        Empty if it can. The content that hooks add to a checkpoint is available only when they are called, and they use
        attributes as they are then.
        """
        if not self._hooked or self.rests or "lightning" in kept:
            return ""
        return f"{self._hooked} has an on_save_checkpoint, which is called for saves only"

    def put_over(self, cut: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
        """`cut`, made in the middle of a step, as it would have been when `kept` (see `lost`) was taken."""
        if "lightning" in kept:
            return put_back(cut, kept)
        counts, epoch, step, saved_at, stopped, buckets = kept["values"]
        lightning = cut["lightning"]
        lightning |= {"epoch": epoch, "global_step": step, "lr_schedulers": kept["lr_schedulers"]}
        loop = lightning["loops"]["fit_loop"]
        for place, count in zip(self._places, counts, strict=True):
            _put(loop, place, count)
        if kept["loaders"]:
            states = zip(self._loaders, kept["loaders"], strict=True)
            loop["state_dict"]["combined_loader"] = [_state_of_loader(loader, state) for loader, state in states]
        private.discount(lightning)
        for callback, state in zip(self._callbacks, kept["callbacks"], strict=True):
            _put_if(lightning["callbacks"], callback.state_key, state)
        _put_if(lightning, type(self._trainer.precision_plugin).__qualname__, kept["precision"])
        if self._datamodule is not None:
            _put_if(lightning, type(self._datamodule).__qualname__, kept["datamodule"])
        keys = [one.state_key for one in self._savers]
        beside = {"saved_at": dict(zip(keys, saved_at, strict=True)), "stopped": stopped, "bucket_order": buckets}
        return cut | beside

    def _stateful(self) -> list[Any]:
        """The training loaders with a state. They may change between epochs."""
        combined = private.combined_loader(self._trainer)
        if combined is not None and combined.flattened is not self._flattened:
            self._flattened = combined.flattened
            self._loaders = private.stateful_loaders(self._trainer)
        return self._loaders

    def _of_loader(self, loader: Any) -> Any:
        if isinstance(loader, ElasticLoader | EvenLoader):
            return loader.sampler.progress.marked
        return (self._own.at_request(loader) if self._own is not None else None) or loader.state_dict()


def _state_of_loader(loader: Any, kept: Any) -> dict[str, Any]:
    return loader.state_dict() | {"cursor": kept} if isinstance(loader, ElasticLoader | EvenLoader) else kept


def _put(tree: dict[str, Any], place: tuple[str, ...], value: object) -> None:
    *way, last = place
    for key in way:
        tree = tree[key]
    tree[last] = value


def _put_if(tree: dict[str, Any], key: str, state: Any) -> None:
    """Set `key`, or remove it for an empty state, as Lightning does."""
    tree.pop(key, None)
    if state:
        tree[key] = state
