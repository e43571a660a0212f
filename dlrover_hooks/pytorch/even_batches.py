"""The same number of batches on every rank, and weighted losses where no hook weights the gradients.

FSDP2 gathers parameters in every forward, so ranks with unequal shares of a step would wait for each other forever. It
also averages gradients, as DDP does with a hook of the user's own, so unequal shares must be weighted in the loss.

    loader = EvenLoader(elastic_loader(DataLoader(...), optimizer=optimizer, global_batch_size=60))
    for x, y in loader:
        model.set_requires_gradient_sync(loader.step_ends)
        (loss_fn(model(x), y) * loader.mean_scale).backward()
        if loader.step_ends: ...
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from dlrover_hooks.data.batch_plan import BatchPlan
from dlrover_hooks.data.implicit_accumulation import leader as leader
from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.errors import UsageError
from dlrover_hooks.pytorch.ddp_exactness import weighs


class Around:
    """Wrapper of an elastic loader; missing attributes come from that loader. Subclasses define `_batches`."""

    elastic: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "elastic" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.elastic, name)

    def __len__(self) -> int:
        """This rank's micro-batches in a full epoch, after a resume too."""
        return len(self.elastic)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch after a restore, else an epoch. After `break` the next one begins the next epoch."""
        return self._batches(iter(self.elastic))  # eagerly: zipped loaders must all begin before one cuts

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        raise NotImplementedError


class EvenLoader(Around):
    """An `ElasticLoader` with the same number of batches on every rank.

    A rank with fewer batches in a step first receives copies of its first batch, one for each missing batch. These
    copies are ghosts. A ghost costs no time, since the other ranks are computing, and its loss must be multiplied by 0.
    The last batch of a step is never a ghost. Only real batches are counted as samples. Other attributes are those of
    the `ElasticLoader`. Main thread only.
    """

    def __init__(self, elastic: ElasticLoader) -> None:
        if not isinstance(elastic, ElasticLoader):
            raise UsageError(
                f"an EvenLoader is made around an ElasticLoader, not {type(elastic).__name__}",
                hint="leased data is even already: a rank without data repeats a batch with weight 0",
            )
        elastic.accumulate_by_hand()
        elastic.evened = True
        self.elastic = elastic
        self.ghost = False
        """True if the batch last received only stands for one that this rank does not have."""
        self.step_ends = True
        """True if the batch last received is the last one of its step, on every rank."""

    def __len__(self) -> int:
        """Batches of a full epoch, ghosts included; the same on every rank."""
        return epoch_batches(self.elastic.sampler.plan)

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            missing = self._missing()
            self.ghost, self.step_ends = True, False
            for _ in range(missing):
                yield _copied(batch)
            self.ghost, self.step_ends = False, self.elastic.step_ends
            yield batch

    def _missing(self) -> int:
        """The number of ghosts before the batch just received. All ghosts of a step come before its first batch."""
        progress, plan = self.elastic.sampler.progress, self.elastic.sampler.plan
        step, number = progress.current()
        if number != 1:
            return 0
        most = step_batches(plan) if progress.in_full_step else tail_batches(plan, progress.base % plan.n)
        return most - step.micro_batches

    @property
    def loss_scale(self) -> float:
        """See `ElasticSampler.loss_scale`; 0 for a ghost."""
        return 0.0 if self.ghost else self.elastic.loss_scale

    @property
    def mean_scale(self) -> float:
        """See `mean_scale`."""
        return mean_scale(self)

    def state_dict(self) -> dict[str, Any]:
        """See `ElasticLoader.state_dict`."""
        return self.elastic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `ElasticLoader.load_state_dict`."""
        self.elastic.load_state_dict(state)


def _copied(batch: Any) -> Any:
    """The loop may change what it receives: empty a dict, or scale a tensor in place."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # an object of the user's own in it
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)


def step_batches(plan: BatchPlan) -> int:
    """Batches of a full step on the rank with the most."""
    return plan.most


def tail_batches(plan: BatchPlan, place: int = 0) -> int:
    """Batches of the short last step of an epoch from `place`, on the rank with the most; 0 without a short step."""
    return max(plan.tail_shares(place), default=0)


def epoch_batches(plan: BatchPlan, place: int = 0) -> int:
    """Batches of an epoch from `place` on, the same on every rank."""
    return plan.full_steps(place) * step_batches(plan) + tail_batches(plan, place)


def is_uneven(plan: BatchPlan) -> bool:
    """True if ranks differ in their number of batches, in full steps or in the short one."""
    return len(set(plan.shares)) > 1 or len(set(plan.tail_shares())) > 1


def loss_scale(loader: ElasticLoader | EvenLoader, *, weighed: bool) -> float:
    """Factor for the gradient of the current batch's loss. `weighed`: a communication hook applies the weight."""
    sampler, plan = loader.sampler, loader.sampler.plan
    if isinstance(loader, EvenLoader) and loader.ghost:
        return 0.0
    share = step_batches(plan) / plan.micro_batches  # Lightning divides by the largest share of any rank
    return sampler.loss_scale * share * (1.0 if weighed else sampler.weight * plan.world_size)


def mean_scale(loader: ElasticLoader | EvenLoader) -> float:
    """Factor for the loss (a mean over samples) of the batch last received, where gradients are averaged over ranks.

    Summed over the batches of a step, gradients are then exactly those of the mean over its samples. 0 for a ghost.
    """
    return loss_scale(loader, weighed=False) / step_batches(loader.sampler.plan)


class TokenMean:
    """A loss that is the mean over all tokens of a step, for any distribution over batches and ranks.

        mean = TokenMean(model, loader)
        for x, y in loader:
            logits = model(x)
            mean.add(cross_entropy(logits, y, reduction="sum"), y.numel()).backward()
            if loader.step_ends:
                mean.divide()
                optimizer.step()

    The number of tokens is known only after the last batch of a step. So sums are accumulated, and gradients are
    divided at the end. `model` holds the gradients, under DDP (with or without weighted gradients) or FSDP2. Training
    thread only; `divide` is a collective.
    """

    def __init__(self, model: nn.Module, loader: ElasticLoader | EvenLoader) -> None:
        self._parameters: Iterable[nn.Parameter] = list(model.parameters())
        self._loader, self._weighed = loader, weighs(model)
        self._tokens = torch.zeros((), dtype=torch.int64)

    def add(self, total: torch.Tensor, tokens: int | torch.Tensor) -> torch.Tensor:
        """The tensor for `backward`; `total` is the sum over the `tokens` of the last batch received. 0 for a ghost."""
        if self._ghost:
            return total * 0.0
        self._tokens = self._tokens.to(total.device) + tokens
        return total / self._loader.sampler.weight if self._weighed else total * self._loader.sampler.plan.world_size

    @property
    def _ghost(self) -> bool:
        return self._loader.sampler.step.ghost or (isinstance(self._loader, EvenLoader) and self._loader.ghost)

    def divide(self) -> int:
        """Call at the step's end, before gradients are clipped. Returns the tokens of the step, over all ranks."""
        tokens, self._tokens = self._tokens, torch.zeros_like(self._tokens)
        if dist.is_initialized():
            dist.all_reduce(tokens)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(max(1, int(tokens)))
        return int(tokens)
