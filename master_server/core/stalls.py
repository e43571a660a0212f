"""The verdict on a round that makes no more steps: which rank holds up the others. Pure; nothing of it is journaled.

Each rank reports its own stall with its heartbeats. The others wait for the rank at fault in a collective, so a rank
that stalls outside of all collectives is named first.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.rounds.rendezvous import Round
from dlrover_hooks.protocol import Phase, Stall

_LISTED = 8
"""Most groups of ranks, and most ranks of a group, that a verdict lists."""


def found(nodes: Nodes, job: str, speaker: str, current: Round | None) -> str:
    """The verdict once all live ranks of the round stall, else empty; again only after a rank has made a step.

    `speaker` has sent a heartbeat. Only those of rank 0 are followed by a look at all ranks: O(ranks) once a second.
    """
    member = current.members.get(speaker) if current is not None and current.phase is Phase.TRAINING else None
    if current is None or member is None or member.rank != 0:
        return ""
    live = {one.rank: nodes.pulses.get((job, name)) for name, one in current.members.items() if one.live}
    stalled = {rank: pulse for rank, pulse in live.items() if pulse is not None and pulse.stall is not None}
    if len(stalled) < len(live) or all(pulse.judged for pulse in stalled.values()):
        return ""
    for pulse in stalled.values():
        pulse.judged = True
    return verdict((rank, pulse.stall) for rank, pulse in stalled.items() if pulse.stall is not None)


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
