"""Lightning Fabric 2.6: one line makes a `Fabric` elastic.

    fabric = ElasticFabric(Fabric(), save_to="checkpoints")
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for epoch in fabric.epochs(3):
        for batch in loader: ...
    fabric.finish()

Fabric calls its callbacks for models and optimizer steps, but not for loaders or loops, so this is a wrapper. It
replaces Fabric's loaders, which would shard the data again, and makes `step`, `zero_grad` and clipping act only where a
step ends. So the user's loop needs no code for accumulation, at any world size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.utilities import move_data_to_device
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.data.implicit_accumulation import hold_back
from dlrover_hooks.data.leased.leased_loader import LeasedLoader
from dlrover_hooks.data.loader import ElasticLoader, supports
from dlrover_hooks.errors import UsageError
from dlrover_hooks.pytorch.adapter_loop import TrainingLoop, Window, is_leased, is_training, keeps_own_state
from dlrover_hooks.pytorch.even_batches import Around
from dlrover_hooks.pytorch.tensor_loading import left_alone
from dlrover_hooks.session import Preempted, Restored

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dlrover_hooks.config.shared_keywords import SharedKeywords

log = logging.getLogger("dlrover_hooks")


class ElasticFabric:
    """A `Fabric` whose training loop can be interrupted anywhere and resumed at any world size.

    All other attributes are those of the wrapped Fabric. Objects are restored when they are set up. Cuts are taken when
    the batch after a step is requested from the training loader. Do not accumulate by hand and do not divide the loss:
    `global_batch_size` sets the number of samples in a step, and `backward` and `optimizer.step()` follow it.

    Args:
        fabric: a launched Fabric with which nothing was set up.
        save_to: fsspec URL of the durable checkpoints; None keeps them in memory only.
        on_preempt: called with a `Preempted` when all ranks leave because one is preempted, once the step is saved.
        shared: see `SharedKeywords`; the meanings are those of `dlrover_hooks.config.Config`.

    All methods run on the training thread. Raises UsageError for settings that cannot work.
    """

    def __init__(
        self,
        fabric: Fabric,
        save_to: str | None = None,
        *,
        on_preempt: Callable[[Preempted], object] | None = None,
        **shared: Unpack[SharedKeywords],
    ) -> None:
        self.fabric, self.config = fabric, settings.load(save_to=save_to, **shared)
        self._on_preempt = on_preempt
        self.loop: TrainingLoop | None = None
        """The membership in the job, from the first `setup` to `finish`; None when the hooks are inactive."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["fabric"], name)

    @property
    def step(self) -> int:
        """Optimizer steps in the model, over all restarts; 0 when the hooks are inactive."""
        return self.loop.step if self.loop is not None else 0

    @property
    def restored(self) -> Restored | None:
        """What this start resumed; None for a fresh start, and before the first `setup`."""
        return self.loop.restored if self.loop is not None else None

    # ---- setup ------------------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *optimizers: Any, scheduler: Any = None, **options: Any) -> Any:
        """As `Fabric.setup`; then everything is restored."""
        made = self.fabric.setup(module, *optimizers, scheduler=scheduler, **options)
        model, *others = made if isinstance(made, tuple) else (made,)
        if (loop := self._come_up()) is not None:
            loop.add_model(model.module, model._forward_module)
            for one in others[: len(optimizers)]:
                self._keep_optimizer(loop, one)
            if scheduler is not None:
                self.include(others[-1])
        return made

    def setup_module(self, module: nn.Module, **options: Any) -> Any:
        """As `Fabric.setup_module`; then the module is restored."""
        return self.setup(module, **options)

    def setup_optimizers(self, *optimizers: Any) -> Any:
        """As `Fabric.setup_optimizers`; then the optimizers are restored."""
        made = self.fabric.setup_optimizers(*optimizers)
        if (loop := self._come_up()) is not None:
            for one in made if isinstance(made, tuple) else (made,):
                self._keep_optimizer(loop, one)
        return made

    def setup_dataloaders(self, *dataloaders: Any, move_to_device: bool = True, **options: Any) -> Any:
        """As `Fabric.setup_dataloaders`, but the training loaders, which are the shuffled ones, are made elastic.

        A loader with its own state is returned unchanged and kept in the cut. For a training loader that is not
        shuffled, pass `elastic_loader(loader)`.
        """
        given = list(dataloaders)
        made = [self._loader(one, given, move_to_device, options) for one in given]
        return made[0] if len(made) == 1 else made

    def include(self, *objects: Any) -> None:
        """Restore any other object with `state_dict` and `load_state_dict`, and keep it in every cut.

        Objects of one class are restored by order. A scheduler included here (or passed to `setup`) only steps where a
        step ends.
        """
        if (loop := self._come_up()) is None:
            return
        for one in objects:
            if isinstance(one, LRScheduler):
                loop.add("scheduler", one)
                hold_back(one, ("step",), loop.window)
            else:
                loop.add("object", one)

    def _come_up(self) -> TrainingLoop | None:
        if self.loop is None and (reason := self._stand_aside()) is not None:
            log.warning("dlrover-hooks is inactive: %s", reason)
        elif self.loop is None:
            place = settings.place(rank=self.fabric.global_rank, world_size=self.fabric.world_size)
            self.loop = TrainingLoop(self.config, place, self._on_preempt)
        return self.loop

    def _stand_aside(self) -> str | None:
        if self.config.disable:
            return "DLROVER_HOOKS_DISABLE is set"
        if not isinstance(self.fabric.strategy, DDPStrategy | SingleDeviceStrategy):
            return left_alone(type(self.fabric.strategy).__name__, "Fabric", self.config.on_error)
        return None

    def _keep_optimizer(self, loop: TrainingLoop, optimizer: Any) -> None:
        loop.add_optimizer(optimizer.optimizer)
        inner = optimizer.optimizer
        optimizer.step = _at_step_end(loop.window, optimizer.step)

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if loop.window.may_zero():
                inner.zero_grad(*args, **kwargs)

        optimizer.zero_grad = zero_grad

    def _loader(self, loader: Any, beside: list[Any], move: bool, options: dict[str, Any]) -> Any:
        if (loop := self._come_up()) is None:
            return self.fabric.setup_dataloaders(loader, move_to_device=move, **options)
        if isinstance(loader, SetUpLoader):
            raise UsageError(
                f"loader {loader.name!r} was set up already, it would have two places in the data",
                hint="give each loader to `setup_dataloaders` once",
            )
        if keeps_own_state(loader):
            log.warning("%s keeps its own state: exactly-once data is its promise, it is not wrapped", type(loader))
            loop.add_own_loader(loader)
            return loader
        if not is_training(loader, beside):
            loop.left_out = loop.left_out or (
                "a loader that does not shuffle was taken for evaluation: for training give "
                "fabric.setup_dataloaders(elastic_loader(loader))"
            )
            return self.fabric.setup_dataloaders(loader, move_to_device=move, **options)
        if is_leased(loader):
            return SetUpLoader(loop.leased(loader, accumulate=1), loop.window, self.fabric.device if move else None)
        if (reason := supports(loader)) is not None:
            log.warning("a training loader goes to Fabric as it is (%s)", reason)
            return self.fabric.setup_dataloaders(loader, move_to_device=move, **options)
        elastic = loop.elastic(loader, accumulate=1, seed=settings.global_seed())
        return SetUpLoader(elastic, loop.window, self.fabric.device if move else None)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs left of n, an interrupted one included: over all restarts exactly n (`range(n)` would repeat)."""
        return self.loop.epochs(n) if self.loop is not None else iter(range(n))

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """As `Fabric.backward` for a mean loss, scaled so that a step's gradient is the mean over its samples."""
        if self.loop is None:
            self.fabric.backward(tensor, *args, **kwargs)
            return
        window = self.loop.window
        scale = window.scale() / window.micro_batches
        self.fabric.backward(tensor if scale == 1.0 else tensor * scale, *args, **kwargs)
        window.pending = not window.ends

    def clip_gradients(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """As Fabric's; does nothing inside a window, where gradients are incomplete."""
        if self.loop is None or self.loop.window.ends:
            return self.fabric.clip_gradients(*args, **kwargs)
        return None

    # ---- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is over: make the last step durable and leave the job. Safe to call twice."""
        if self.loop is not None:
            self.loop.finish()

    def close(self, reason: p.Departure = p.Departure.FAILED) -> None:
        """Leave the job unfinished, to be resumed. Called automatically when the process ends."""
        if self.loop is not None:
            self.loop.close(reason)


class SetUpLoader(Around):
    """A training loader for Fabric's loop: elastic, batches on the device. Other attributes are those of `elastic`."""

    def __init__(self, elastic: ElasticLoader | LeasedLoader, window: Window, device: torch.device | None) -> None:
        self.elastic, self.device, self._window = elastic, device, window

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            for batch in batches:
                self._window.received()
                yield batch if self.device is None else move_data_to_device(batch, self.device)
        finally:
            self._window.over()


def _at_step_end(window: Window, act: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optimizer's `step`: inside a window only the closure is called, because it contains the backward."""

    def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if window.ends:
            return act(closure, **kwargs)
        with torch.enable_grad():
            return closure() if closure is not None else None

    return step
