"""Several processes on the torch backend: each trains on its rows of every batch, and gradients are summed over ranks.

Keras' torch trainer calls the model itself, so DistributedDataParallel around it would be bypassed: `fit` computes
gradients and passes them to `optimizer.apply`. That call is wrapped here. Each rank's gradients are those of the mean
over its rows; weighted by its share of the batch they add up to those of the whole batch, short batches included. So a
step is the same at any world size, up to the order of summation. `fit` itself remains as it is.

After each step the ranks also agree on what they computed from their own rows: metrics are summed, and weights that a
layer has changed itself (moving averages) are averaged with the same shares. So everything that a checkpoint holds is
equal on all ranks. Imported on the torch backend only, and only for more than one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
import torch.distributed as dist

import dlrover_hooks.elastic.gloo_exit_wait  # noqa: F401  # gloo's threads are finished before the process ends
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.keras import _private_api as private, model_state

_MEANS = ("sum_over_batch_size", "mean")
_SEED_STRIDE = 50_000_017


class DataParallel:
    """One process' part in the steps of one `fit`. Training thread only; each method is called by all ranks.

    Args:
        model: compiled and built.
        rank: of this process.
        weight: this rank's share of the batch that is trained on, in [0, 1]; over all ranks they add up to 1.

    Raises:
        UsageError: a loss is not the mean over the samples of a batch.
    """

    def __init__(self, model: keras.Model, rank: int, weight: Callable[[], float]) -> None:
        _check_losses(model)
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self._model, self._weight, self._device = model, weight, model.weights[0].value.device
        self.seed_offset = rank * _SEED_STRIDE
        """Added to the seeds of random layers on this rank while `fit` runs; not in checkpoints."""
        self._metrics: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._apply = self._summing(model.optimizer)

    def begin(self) -> None:
        """Everything is restored: all ranks begin with the values of rank 0, and each with its own random numbers."""
        found = model_state.variables_of(self._model)
        for one in (*found["model"], *found["optimizer"]):
            dist.broadcast(one.value.detach(), 0)
        self._shift_seeds(self.seed_offset)

    def before_step(self) -> None:
        """Called before each step: notes what the step will change. Not collective."""
        self._metrics = [one.value.detach().clone() for one in self._model.metrics_variables]
        self._versions = [private.version(one) for one in self._own_state()]

    def after_step(self) -> None:
        """Called after each step: makes metrics and moving averages those of the whole batch."""
        weight, metrics = self._weight(), [one.value.detach() for one in self._model.metrics_variables]
        before = [*self._metrics, *(torch.zeros_like(one) for one in metrics[len(self._metrics) :])]
        own = self._own_state()
        versions = [*self._versions, *[0] * (len(own) - len(self._versions))]
        changed = [one.value.detach() for one, old in zip(own, versions, strict=True) if private.version(one) != old]
        counts = 1.0 if weight else 0.0
        parts = [_weighted(now.double() - then.double(), counts) for now, then in zip(metrics, before, strict=True)]
        parts += [_weighted(one.double(), weight) for one in changed]
        summed = _all_reduced(parts)
        for now, then, change in zip(metrics, before, summed, strict=False):
            now.copy_(then.double() + change)
        for one, mean in zip(changed, summed[len(metrics) :], strict=True):
            one.copy_(mean)

    def agreed(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The numbers in the logs of rank 0, so that callbacks decide alike on all ranks."""
        names = sorted(name for name, value in logs.items() if isinstance(value, (int, float)))
        values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64, device=self._device)
        dist.broadcast(values, 0)
        return dict(zip(names, values.tolist(), strict=True))

    def end(self) -> None:
        """`fit` is over. Not collective."""
        self._model.optimizer.apply = self._apply
        self._shift_seeds(-self.seed_offset)

    def _summing(self, optimizer: Any) -> Any:
        """Wraps `optimizer.apply`; returns the original."""
        original = optimizer.apply

        sum_over_ranks: Any = torch.compiler.disable(self._sum_over_ranks)

        def apply(gradients: Sequence[torch.Tensor | None], trainable_variables: Any = None) -> Any:
            if gradients:
                gradients = sum_over_ranks(gradients, trainable_variables or self._model.trainable_variables)
            return original(gradients, trainable_variables)

        optimizer.apply = apply
        return original

    def _sum_over_ranks(
        self, gradients: Sequence[torch.Tensor | None], variables: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        weight, here = self._weight(), [one is not None for one in gradients]
        parts = [
            torch.zeros_like(variable.value) if one is None else _weighted(one.detach(), weight)
            for one, variable in zip(gradients, variables, strict=True)
        ]
        present = torch.tensor(here, dtype=torch.float32, device=self._device)
        *summed, present = _all_reduced([*parts, present])
        if not all(here):  # a gradient that no rank has stays None
            here = present.tolist()
        return [one if there else None for one, there in zip(summed, here, strict=True)]

    def _own_state(self) -> list[Any]:
        """Floating-point weights that are not trained: layers change them themselves."""
        return [one for one in self._model.non_trainable_variables if one.value.is_floating_point()]

    def _shift_seeds(self, offset: int) -> None:
        for one in model_state.seeds_of(self._model):
            one.assign(one.value + offset)


def _weighted(value: torch.Tensor, weight: float) -> torch.Tensor:
    """A weight of 0 gives zeros, also of NaN and inf."""
    return value * weight if weight else torch.zeros_like(value)


def _all_reduced(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sums over ranks, with one collective for each type."""
    summed: list[torch.Tensor] = list(parts)
    for kind in dict.fromkeys(one.dtype for one in parts):
        places = [at for at, one in enumerate(parts) if one.dtype == kind]
        flat = torch.cat([parts[at].reshape(-1) for at in places])
        dist.all_reduce(flat)
        for at, piece in zip(places, flat.split([parts[at].numel() for at in places]), strict=True):
            summed[at] = piece.view(parts[at].shape)
    return summed


def _check_losses(model: keras.Model) -> None:
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in _MEANS:
            raise UsageError(
                f"the loss {getattr(loss, 'name', loss)} has reduction={reduction!r}: with several workers it must be "
                "a mean over the samples of a batch",
                hint="leave reduction out, or train with one worker (--nproc-per-node 1)",
            )
