"""Which rank computes which samples of a step, and with which weight. Pure arithmetic, no torch.

A step at global batch G takes the G positions from q on, whatever the world size is: G = N * b. Its N = G / b
micro-batches are distributed in contiguous slices: rank i runs `m_i = N // W + (i < N % W)` of them, or `shares[i]` if
the master has distributed them unevenly because of a slow rank (`uneven_shares`).

If G does not divide n, `tail` defines the epoch's last step:

- `ghost` (default): short. The L remaining samples are distributed in proportion to m_i (evenly, if all are equal), so
  that no rank runs *more* micro-batches than in a full step. A rank without samples repeats one sample with weight 0,
  so that it takes part in the collectives;
- `drop`: the epoch ends with its last full step;
- `carry`: full, completed with the first samples of the next epoch, whose own steps begin after them. Every step is
  full, every sample is used once per epoch, but epochs differ in length by a step: `BatchPlan.fixed_length` is False,
  and loops that compare counts with `len(loader)` cannot use it.

Weights are for a gradient hook that SUMs over ranks (`dlrover_hooks.pytorch.ddp_exactness.weigh_gradients`), given a
training loop that takes the mean loss of each micro-batch and divides it by m_r, as Lightning, Accelerate and
Transformers do:

- full step: `m_r / N`, the exact mean over G samples;
- short step: `(m_r / j_r) * (c_r / L)`, c_r samples in j_r = ceil(c_r / b) micro-batches. Exact if j_r = 1 or b
  divides c_r; else this rank's share is a mean of the means of unequal micro-batches (samples of its last, smaller one
  weigh more), unless the loop also multiplies each loss by `ElasticSampler.loss_scale`. Without accumulation (m_r = 1)
  it is always exact.

A loop with a loss per sample needs none of this: `ElasticSampler.sample_weights` is 1 / samples of the step.
"""

from __future__ import annotations

from collections import Counter
from numbers import Integral
from typing import Literal

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.protocol import Shares

Tail = Literal["ghost", "drop", "carry"]
TAILS = ("ghost", "drop", "carry")
GOOD = 0.9
"""From this busy share of the ranks on, `BatchPlan.suggestion` is None."""


class Slice(msgspec.Struct, frozen=True):
    """One rank's part of one step: in-epoch positions [lo, hi), run as `micro_batches`.

    The step covers the `samples` positions before `end`. With tail "carry" positions continue after the epoch's n.
    """

    lo: int
    hi: int
    end: int
    samples: int
    micro_batches: int
    ghost: bool
    weight: float


class BatchPlan(msgspec.Struct, frozen=True):
    """How `world_size` ranks share every step of an epoch of n samples, seen from `rank`.

    `shares`: m_i of every rank i; as even as possible if left out.

    Errors: UsageError for invalid sizes, with the nearest valid ones.
    """

    n: int
    batch_size: int
    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    tail: Tail = "ghost"
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_tail(self)
        _check_share(self)
        if self.shares:
            _check_shares(self)
        else:
            msgspec.structs.force_setattr(self, "shares", even_shares(self.total, self.world_size))

    @property
    def total(self) -> int:
        """N, the micro-batches of a full step over all ranks."""
        return self.global_batch_size // self.batch_size

    @property
    def micro_batches(self) -> int:
        """m_r, the micro-batches of this rank in a full step: the number that the loop accumulates over."""
        return self.shares[self.rank]

    @property
    def most(self) -> int:
        """The micro-batches of a full step on the rank with the most."""
        return max(self.shares)

    @property
    def before(self) -> int:
        """Micro-batches of a full step that lower ranks run."""
        return sum(self.shares[: self.rank])

    @property
    def rebalanced(self) -> bool:
        """Whether the shares are less even than they could be, because ranks differ in speed."""
        return self.shares != even_shares(self.total, self.world_size)

    @property
    def efficiency(self) -> float:
        """Busy share of equally fast ranks in a full step, in (0, 1]: N / (W * max m_i)."""
        return self.total / (self.world_size * self.most)

    @property
    def suggestion(self) -> str | None:
        """A smaller batch that keeps the ranks busier, as text; None if they are busy, or nothing is better."""
        if self.efficiency >= GOOD or self.rebalanced:
            return None
        G, W = self.global_batch_size, self.world_size
        smaller = [b for b in range(self.batch_size - 1, 0, -1) if G % b == 0]
        busy = {b: _efficiency(G // b, W) for b in smaller}
        best = next((b for b in smaller if busy[b] >= GOOD), None) or max(smaller, key=busy.__getitem__, default=0)
        if not best or busy[best] <= self.efficiency:
            return None
        return f"batch_size={best} would keep the ranks {busy[best]:.0%} busy"

    @property
    def summary(self) -> str:
        """The plan in one line, for the log."""
        counts = Counter(self.shares)
        parts = [f"{counts[share]} x {share}" for share in sorted(counts, reverse=True)]
        ranks = f"{self.world_size} workers share" if self.world_size > 1 else "1 worker runs"
        line = (
            f"{ranks} {self.total} micro-batches of {self.batch_size} in each step (global batch "
            f"{self.global_batch_size}): {', '.join(parts)}"
        )
        if self.rebalanced:
            return f"{line}, because ranks differ in speed"
        line = f"{line}; {self.efficiency:.0%} busy"
        return f"{line}; {self.suggestion}" if self.suggestion else line

    @property
    def fixed_length(self) -> bool:
        """Whether all epochs are equally long. Not with tail "carry", unless the global batch divides n."""
        return self.tail != "carry" or self.n % self.global_batch_size == 0

    def full_steps(self, q: int = 0) -> int:
        """Full steps that begin (carry) or fit between in-epoch position q and the end of the epoch."""
        left, G = self.n - q, self.global_batch_size
        return -(-left // G) if self.tail == "carry" else left // G

    def first(self, q: int) -> int:
        """In-epoch position of the first step of an epoch with a step at q: 0, or after what the last epoch took."""
        return q % self.global_batch_size if self.tail == "carry" else 0

    def has_tail(self, q: int = 0) -> bool:
        """True if an epoch that is run from q on ends with a short step."""
        return self.tail == "ghost" and (self.n - q) % self.global_batch_size > 0

    def over(self, q: int) -> bool:
        """True if no step of this epoch begins at q."""
        return self.n - q < (self.global_batch_size if self.tail == "drop" else 1)

    def behind(self, q: int) -> int:
        """Where the next epoch's first step begins, in positions of this epoch, if it is run from q to its end."""
        return q + self.full_steps(q) * self.global_batch_size if self.tail == "carry" else self.n

    def step(self, q: int) -> Slice:
        """This rank's part of the step that begins at in-epoch position q. UsageError after the last step."""
        if q < 0 or self.over(q):
            raise UsageError(f"no step begins at position {q} of an epoch of {self.n} samples (tail={self.tail!r})")
        left = self.n - q
        return self._full(q) if left >= self.global_batch_size or self.tail == "carry" else self._short(q, left)

    def _full(self, q: int) -> Slice:
        m, b, G = self.micro_batches, self.batch_size, self.global_batch_size
        lo = q + self.before * b
        return Slice(lo, lo + m * b, q + G, G, m, False, m / self.total)

    def _short(self, q: int, left: int) -> Slice:
        m = self.micro_batches
        lo, hi = q + left * self.before // self.total, q + left * (self.before + m) // self.total
        if lo == hi:
            return Slice(q, q + 1, self.n, left, 1, True, 0.0)
        runs = -(-(hi - lo) // self.batch_size)
        return Slice(lo, hi, self.n, left, runs, False, m / runs * (hi - lo) / left)

    def tail_shares(self, q: int = 0) -> tuple[int, ...]:
        """Micro-batches of every rank in the short last step of an epoch that is run from q on, ghosts included; empty
        if there is none.
        """
        if not self.has_tail(q):
            return ()
        left, before, found = (self.n - q) % self.global_batch_size, 0, list[int]()
        for share in self.shares:
            samples = left * (before + share) // self.total - left * before // self.total
            found.append(max(1, -(-samples // self.batch_size)))
            before += share
        return tuple(found)

    def length(self, q: int = 0) -> int:
        """Micro-batches of this rank from in-epoch position q to the end; from 0: of a complete epoch."""
        full = self.full_steps(q)
        tail = self.step(q + full * self.global_batch_size).micro_batches if self.has_tail(q) else 0
        return full * self.micro_batches + tail

    def samples(self, q: int = 0) -> int:
        """Samples this rank fetches from q to the end of the epoch, including a ghost's one sample."""
        full = self.full_steps(q)
        if not self.has_tail(q):
            return full * self.micro_batches * self.batch_size
        last = self.step(q + full * self.global_batch_size)
        return full * self.micro_batches * self.batch_size + last.hi - last.lo


def fitting(batch_size: int, global_batch_size: int, world_size: int) -> int:
    """The largest micro-batch up to `batch_size` that divides the global batch, with at least one for each rank; 0 if
    there is none.
    """
    largest = min(batch_size, global_batch_size // world_size)
    return next((size for size in range(largest, 0, -1) if global_batch_size % size == 0), 0)


def even_shares(total: int, world_size: int) -> tuple[int, ...]:
    """`total` micro-batches, as evenly as possible: lower ranks run one more."""
    least, more = divmod(total, world_size)
    return (least + 1,) * more + (least,) * (world_size - more)


def uneven_shares(told: Shares | None, total: int, world_size: int) -> tuple[int, ...]:
    """The master's distribution of `total` micro-batches, for every rank; empty if it is not for such a step."""
    if told is None or told.total != total:
        return ()
    own = {one.rank: one.micro_batches for one in told.ranks}
    others = [rank for rank in range(world_size) if rank not in own]
    left = total - sum(own.values())
    if max(own, default=0) >= world_size or min(own.values(), default=1) < 1 or not 0 < len(others) <= left:
        return ()
    own |= dict(zip(others, even_shares(left, len(others)), strict=True))
    return tuple(own[rank] for rank in range(world_size))


def _efficiency(total: int, world_size: int) -> float:
    return total / (world_size * -(-total // world_size))


def _check_sizes(plan: BatchPlan) -> None:
    n, b, G = plan.n, plan.batch_size, plan.global_batch_size
    if not all(isinstance(size, Integral) for size in (n, b, G, plan.rank, plan.world_size)):
        raise UsageError(f"batch_size={b!r}, global_batch_size={G!r} and the world's sizes must be whole numbers")
    if n < 1:
        raise UsageError(f"the dataset has {n} samples", hint="give a dataset with at least one sample")
    if b < 1 or G < 1:
        raise UsageError(f"batch_size={b} and global_batch_size={G} must be at least 1")
    if plan.world_size < 1 or not 0 <= plan.rank < plan.world_size:
        raise UsageError(f"rank {plan.rank} is not in a world of {plan.world_size}")


def _check_tail(plan: BatchPlan) -> None:
    n, G = plan.n, plan.global_batch_size
    if plan.tail not in TAILS:
        raise UsageError(f"tail={plan.tail!r} is not known", hint=f"one of {', '.join(TAILS)}")
    if plan.tail == "drop" and n < G:
        raise UsageError(
            f'tail="drop" would drop all {n} samples: the global batch is {G}',
            hint=f'use tail="ghost", drop_last=False, or global_batch_size <= {n}',
        )
    if plan.tail == "carry" and n < G:
        raise UsageError(
            f'tail="carry" would put the {n} samples more than once into a step: the global batch is {G}',
            hint=f'use tail="ghost", or global_batch_size <= {n}',
        )


def _check_shares(plan: BatchPlan) -> None:
    if len(plan.shares) != plan.world_size or min(plan.shares) < 1 or sum(plan.shares) != plan.total:
        raise UsageError(
            f"shares={plan.shares!r} do not distribute {plan.total} micro-batches over {plan.world_size} workers",
            hint="give each rank at least one, and all of them together exactly so many; or leave shares out",
        )


def _check_share(plan: BatchPlan) -> None:
    b, G, W = plan.batch_size, plan.global_batch_size, plan.world_size
    if G % b == 0 and G // b >= W:
        return
    what = f"global_batch_size={G} is not a multiple of batch_size={b}"
    if G % b == 0:
        what = f"global_batch_size={G} at batch_size={b} makes {G // b} micro-batches for {W} workers"
    fits = fitting(b, G, W)
    advice = f"batch_size={fits} is the largest that fits" if fits else f"use at most {G} workers"
    near = max(-(-G // b), W) * b
    raise UsageError(what, hint=f"{advice}, or change global_batch_size (now {G}, {near} would do)")
