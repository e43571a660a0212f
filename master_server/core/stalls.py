"""The verdict on a round that makes no more steps: which rank holds up the others. Pure.

Each rank reports its own stall with its heartbeats. The others wait for the rank at fault in a collective, so a rank
that stalls outside of all collectives is named first, and is the one to be replaced. Of
all this only `EndStalled` is journaled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from dlrover_hooks.master.core.events import EndStalled
from dlrover_hooks.master.core.heartbeats import Judged, LivenessLease, Nodes
from dlrover_hooks.master.core.job import Job, StallRestarts
from dlrover_hooks.protocol import Phase, Stall, StallPolicy

MOST_RESTARTS = 3
"""Restarts of a job because of stalls. A false alarm, such as an evaluation that is longer than the learned limit,
therefore cannot repeat for ever. They do not count as failures (`--max-restarts`), so it cannot end the job either.
"""
_LISTED = 8
"""Most groups of ranks, and most ranks of a group, that a verdict lists."""


class StallVerdict(msgspec.Struct, frozen=True):
    """`text`: for the log. `ends`: the event that ends the members to be replaced, if the policy asks for that."""

    text: str
    ends: EndStalled | None = None


class _Stalled(NamedTuple):
    """A member that stalls."""

    rank: int
    incarnation: str
    pulse: LivenessLease
    stall: Stall


def found(nodes: Nodes, job: Job, speaker: str) -> StallVerdict | None:
    """The verdict once all live ranks of the round stall; the next one only after a rank has made a step.

    `speaker` has sent a heartbeat. Only those of rank 0 are followed by a look at all ranks: O(ranks) once a second.
    """
    current = job.rounds.round
    member = current.members.get(speaker) if current is not None and current.phase is Phase.TRAINING else None
    if current is None or member is None or member.rank != 0:
        return None
    stalled: list[_Stalled] = []
    for one in current.members.values():
        pulse = nodes.pulses.get((job.name, one.incarnation))
        if one.live and (pulse is None or pulse.stall is None):
            return None
        if one.live and pulse is not None and pulse.stall is not None:
            stalled.append(_Stalled(one.rank, one.incarnation, pulse, pulse.stall))
    told = all(one.pulse.judged is not Judged.NO for one in stalled)
    if told and not any(one.pulse.judged is Judged.TOLD for one in stalled):
        return None
    chosen, then = _replaced(sorted(stalled), job.stalls)
    if chosen is None and told:
        return None
    for one in stalled:
        one.pulse.judged = Judged.TOLD if chosen is None else Judged.YES
    text = verdict((one.rank, one.stall) for one in stalled) + then
    if not chosen:
        return StallVerdict(text)
    step = max(one.pulse.step for one in stalled)
    names = tuple(one.incarnation for one in chosen)
    return StallVerdict(text, EndStalled(job.name, current.number, names, step))


def _replaced(stalled: list[_Stalled], before: StallRestarts) -> tuple[list[_Stalled] | None, str]:
    """The members to be replaced, and an addition to the verdict. None: not yet known. `stalled`: by rank."""
    policy = stalled[0].stall.restart
    if policy is StallPolicy.NONE:
        return [], ""
    outside = [one for one in stalled if not one.stall.waits_in]
    if policy is StallPolicy.RANK and len(outside) == len(stalled):
        return [], ". Nothing is restarted: no rank waits for another one"
    if before.count >= MOST_RESTARTS:
        return [], f". Nothing is restarted: this job has used up its {MOST_RESTARTS} restarts because of stalls"
    if max(one.pulse.step for one in stalled) <= before.step:
        return [], ". Nothing is restarted: no step was made since the last restart because of a stall"
    if busy := [one.rank for one in outside if one.stall.busy]:
        return None, f". Nothing is restarted yet: {_ranks(busy)} {'is' if len(busy) == 1 else 'are'} active"
    chosen = outside if policy is StallPolicy.RANK and outside else stalled
    whom = "all ranks" if len(chosen) == len(stalled) else _ranks([one.rank for one in chosen])
    return chosen, f". Restarting {whom} ({before.count + 1} of {MOST_RESTARTS} restarts because of stalls)"


def verdict(stalls: Iterable[tuple[int, Stall]]) -> str:
    """One sentence on all ranks of a round, from each rank and its stall."""
    groups: dict[tuple[str, str], list[int]] = {}
    shortest_s = float("inf")
    for rank, stall in sorted(stalls, key=lambda one: one[0]):
        groups.setdefault((stall.waits_in, stall.where), []).append(rank)
        shortest_s = min(shortest_s, stall.seconds)
    order = sorted(groups, key=lambda group: (bool(group[0]), len(groups[group])))
    parts = [f"{_ranks(groups[group])} {_what(*group)}" for group in order[:_LISTED]]
    if len(order) > _LISTED:
        parts.append(f"and {len(order) - _LISTED} other places")
    alike = "; all wait in collectives, perhaps in different ones" if order[0][0] else ""
    return f"no rank has made a step for {shortest_s:.0f} s: {'; '.join(parts)}{alike}"


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:_LISTED])) + more


def _what(waits_in: str, where: str) -> str:
    return f"in {waits_in} ({where})" if waits_in else f"at {where}"
