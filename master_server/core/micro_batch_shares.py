"""How the ranks share the micro-batches of a step, so that steps are as short as their different speeds allow. Pure.

A step takes as long as its slowest rank computes: `share * seconds per micro-batch`. The number of micro-batches of a
step stays the same, so the step trains on the same samples with the same weights.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from dlrover_hooks.protocol import RankShare, Shares, StepPhase, StepPhases


class Rebalance(NamedTuple):
    """A distribution that makes steps shorter. `shares` None: the even one. `text`: what changes for the rank."""

    shares: Shares | None
    text: str


def shortest(total: int, costs: Sequence[float]) -> list[int]:
    """Of `total` micro-batches the share of each rank, at least 1, with the smallest possible max(share * cost).

    `costs`: of one micro-batch, above 0. Of equally good ranks the lower one gets one more. `total` must be at least
    the number of ranks. O(ranks log ranks).
    """
    speeds = [1.0 / cost for cost in costs]
    in_step = (total - len(costs)) / sum(speeds)
    shares = [max(1, int(in_step * speed)) for speed in speeds]
    ends = [((share + 1) * cost, rank) for rank, (share, cost) in enumerate(zip(shares, costs, strict=True))]
    heapq.heapify(ends)
    for _ in range(total - sum(shares)):
        rank = ends[0][1]
        shares[rank] += 1
        heapq.heapreplace(ends, ((shares[rank] + 1) * costs[rank], rank))
    return shares


def rebalance(
    windows: Sequence[StepPhases], rank: int, phase: StepPhase, *, factor: float, least: float
) -> Rebalance | str:
    """The best distribution for the slow `rank`, or why there is none.

    Args:
        windows: of all ranks, by rank.
        rank: the others wait for it, because of its `phase`.
        factor: a rank whose micro-batches take less than this multiple of the median counts as fast as the others, so
            that noise does not move micro-batches.
        least: of a step's time that must be won. Each change costs a new round.
    """
    mine, world = windows[rank], len(windows)
    total = mine.total_micro_batches
    if phase not in (StepPhase.DATA, StepPhase.COMPUTE):
        return f"Nothing is done: fewer micro-batches do not shorten its {phase.value}"
    if not total or any(one.total_micro_batches != total or not one.micro_batches for one in windows):
        return "Nothing is done: its ranks cannot run different numbers of micro-batches"
    if any(one.network_s is None for one in windows):
        return "Nothing is done: its compute is not told apart from its waiting, so ranks cannot be compared"
    if total <= world:
        return (
            "Nothing is done: each rank runs 1 micro-batch of a step. A smaller batch_size with the same "
            "global_batch_size makes more of them"
        )
    seconds = [max(one.data_s + one.compute_s, 1e-9) / one.micro_batches for one in windows]
    median_s = statistics.median_low(seconds)
    costs = [one if one > factor * median_s else median_s for one in seconds]
    shares = shortest(total, costs)
    before_s = max(cost * one.micro_batches for cost, one in zip(costs, windows, strict=True))
    after_s = max(cost * share for cost, share in zip(costs, shares, strict=True))
    if before_s - after_s < least * mine.total_s:
        return (
            f"Nothing is done: it runs {mine.micro_batches} of the {total} micro-batches of a step, and no other "
            "distribution makes steps much shorter. A smaller batch_size with the same global_batch_size makes more "
            "of them"
        )
    slow = tuple(RankShare(place, shares[place]) for place, cost in enumerate(costs) if cost > median_s)
    text = (
        f"A micro-batch takes it {seconds[rank] / median_s:.2g} times as long as the others: it runs {shares[rank]} of "
        f"{total} in a step now, was {mine.micro_batches}"
    )
    return Rebalance(Shares(total, slow) if slow else None, text)
