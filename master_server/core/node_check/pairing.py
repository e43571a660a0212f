"""Which nodes exchange data in the next round of a check, and which need no further round.

In the first round neighbours do. From the second one on, a node whose transfers failed or were slow gets a peer whose
transfers were fast. Every node has transfers with two peers, so that one that was disturbed does not make a node slow.
A node is decided once one of them was fast, or one of its peers has been fast with another node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from dlrover_hooks.master.core.node_check.check_state import Candidate
from dlrover_hooks.master.core.node_check.speed_comparison import SpeedReference, reference_of

MOST_ROUNDS = 6
"""Enough to single out each bad node among more than half of good ones; it bounds the time of a check."""
_PEERS = 2
"""With which every node has a transfer, if there are so many."""


class Standings:
    """The candidates, with what their transfers show so far. Made once a round: O(nodes log nodes)."""

    def __init__(self, candidates: Mapping[str, Candidate]) -> None:
        self.candidates = candidates
        able = {name: one for name, one in candidates.items() if not one.fault}
        bests = {name: best for name, one in able.items() if (best := one.best) is not None}
        self.network: SpeedReference = reference_of(bests.values())
        self.fast = {name for name, best in bests.items() if not self.network.is_slow(best)}
        """Those with a transfer that was not slow."""
        self.able = tuple(able)

    def is_decided(self, name: str) -> bool:
        """True if no further transfer is needed to judge it."""
        met = self.candidates[name].peers
        return len(met) >= _PEERS and (name in self.fast or not self.fast.isdisjoint(met))

    def is_suspect(self, name: str) -> bool:
        """True if it has had transfers, and all failed or were slow."""
        return name not in self.fast and bool(self.candidates[name].contacts)


def next_pairs(standings: Standings, number: int) -> list[tuple[str, str]]:
    """The pairs of round `number` (from 1); empty: the check is over. O(nodes)."""
    if number > MOST_ROUNDS:
        return []
    undecided = {name: None for name in standings.able if not standings.is_decided(name)}
    decided = [name for name in standings.able if name in standings.fast and name not in undecided]
    helpers = deque([name for name in undecided if name in standings.fast] + decided)
    pairs = _helped([name for name in undecided if standings.is_suspect(name)], helpers, standings)
    paired = {name for pair in pairs for name in pair}
    rest = [name for name in undecided if name not in paired]
    pairs += _among(sorted(rest, key=lambda name: len(standings.candidates[name].contacts)), standings)
    paired = {name for pair in pairs for name in pair}
    helpers = deque(name for name in decided if name not in paired)
    return pairs + _helped([name for name in undecided if name not in paired], helpers, standings)


def _helped(names: Iterable[str], helpers: deque[str], standings: Standings) -> list[tuple[str, str]]:
    """Pairs of one of `names` and one of `helpers` each, as far as these last."""
    found = ((name, _take(helpers, standings.candidates[name].peers)) for name in names)
    return [(name, helper) for name, helper in found if helper is not None]


def _among(names: Iterable[str], standings: Standings) -> list[tuple[str, str]]:
    """Pairs of neighbours that have not met; if there is none to meet, a transfer that failed is repeated once."""
    queue, pairs = deque(names), list[tuple[str, str]]()
    while len(queue) > 1:
        name = queue.popleft()
        one = standings.candidates[name]
        other = _take(queue, one.peers)
        if other is None and one.best is None and len(one.contacts) < _PEERS:
            other = queue.popleft()
        if other is not None:
            pairs.append((name, other))
    return pairs


def _take(queue: deque[str], met: set[str]) -> str | None:
    """The first of `queue` that is not in `met`, removed from it. A node has met at most `MOST_ROUNDS` others."""
    for index, name in enumerate(queue):
        if name not in met:
            del queue[index]
            return name
        if index > MOST_ROUNDS:
            break
    return None
