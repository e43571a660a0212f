"""Fewer micro-batches for a slow rank in loops that run the same number of batches on every rank.

Lightning and Transformers do (`EvenLoader`). In a step that the master has distributed by the ranks' speeds, a slow
rank has ghosts instead, which must cost it nothing, so they are not computed. A ghost can be left out if it contains no
collective call, for which other ranks would wait. DDP reduces the gradients in the last batch of a step, which is never
a ghost. So ghosts can be left out unless the loop makes collective calls of its own between the first batch of a step
and the last one.
"""

from __future__ import annotations

import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from dlrover_hooks.data.loader import ElasticLoader
from dlrover_hooks.errors import HooksError
from dlrover_hooks.pytorch import collective_calls
from dlrover_hooks.pytorch.even_batches import EvenLoader, step_batches


class SkippedGhosts:
    """Of one training loader and its model. Training thread; `micro_batches`: any thread."""

    def __init__(self, loader: ElasticLoader | EvenLoader, ddp: DistributedDataParallel) -> None:
        self._loader, self._ddp = loader, weakref.ref(ddp)
        self.possible = True
        """False once a collective call was made between the first batch of a step and the last one."""
        self._rebuilt, self._within, self._made = _has_rebuilt(ddp), False, None

    @property
    def rebalanced(self) -> bool:
        """Whether ghosts are left out: the master has distributed the micro-batches, as all ranks found it possible."""
        return self._loader.sampler.plan.rebalanced

    def leaves_out(self, *, ghost: bool, last: bool) -> bool:
        """Whether the micro-batch that begins now is not to be run. Call it before each one.

        `last`: it is the last one of its step. Raises HooksError, see `begins`.
        """
        self.begins(last=last)
        if last or not ghost or not self.rebalanced:
            return False
        self.skips()
        return True

    def begins(self, *, last: bool) -> None:
        """A micro-batch begins, the `last` one of its step or another one. Look for collective calls since the one
        before it in the same step began.

        Raises HooksError if there are any and ghosts are left out: other ranks make another number of these calls.
        """
        if last and not self._within:
            return
        made, rebuilt = collective_calls.of_the_loop(), _has_rebuilt(self._ddp())
        calls = self._within and (made is None or made != self._made)
        if calls and rebuilt == self._rebuilt:  # once DDP agrees on the order of its buckets, by calls of its own
            self._refuse()
        self._rebuilt, self._within, self._made = rebuilt, not last, made

    def _refuse(self) -> None:
        self.possible = False
        if self.rebalanced:
            raise HooksError(
                "a collective call was made within a step with micro-batches that are distributed by the speed of the "
                "ranks: the ranks differ in the number of their micro-batches, so they would wait for each other",
                hint='on_straggler="report", or make such calls with the last batch of a step only',
            )

    def skips(self) -> None:
        """The ghost that begins is left out. If it is the first batch of its step, DDP makes those calls here that it
        makes at the beginning of a forward pass, as it does on the other ranks.
        """
        ddp = self._ddp()
        if ddp is None:
            return
        with torch.enable_grad():
            if ddp.reducer._rebuild_buckets():
                ddp._has_rebuilt_buckets = True
        if ddp._check_sync_bufs_pre_fwd():
            ddp._sync_buffers()
        ddp.require_forward_param_sync = False  # as after a forward pass that is not synchronised

    def micro_batches(self) -> tuple[int, int, bool]:
        """As `ElasticLoader.micro_batches`, for the batches that are computed: ghosts that are not left out count."""
        plan = self._loader.sampler.plan
        if not self.possible:
            return 0, 0, False
        return plan.micro_batches if plan.rebalanced else step_batches(plan), plan.total, plan.rebalanced


def _has_rebuilt(ddp: DistributedDataParallel | None) -> bool:
    """Whether DDP has agreed with the other ranks on the order of its buckets."""
    return getattr(ddp, "_has_rebuilt_buckets", False)
