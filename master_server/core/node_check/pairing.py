"""Which nodes exchange data in the next round of a check, and which need no further round.

In the first round neighbours do. In the second one, and for nodes in doubt in later ones, a node whose transfers failed
or were slow gets a peer whose transfers were fast. A node is decided once a transfer of it was fast, or two with
different peers were not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from dlrover_hooks.master.core.node_check.check_state import Candidate
from dlrover_hooks.master.core.node_check.speed_comparison import SpeedReference, reference_of

ROUNDS_FOR_ALL = 2
"""Every node takes part in so many: that one transfer was disturbed does not make a node slow."""
MOST_ROUNDS = 6
"""Enough to single out each bad node among more than half of good ones; it bounds the time of a check."""
_ATTEMPTS = 2
"""Transfers that must fail, or be slow, before a node is."""


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
        return name in self.fast or (len(met) >= _ATTEMPTS and not self.fast.isdisjoint(met))


def next_pairs(standings: Standings, number: int) -> list[tuple[str, str]]:
    """The pairs of round `number` (from 1); empty: the check is over. O(nodes)."""
    if number > MOST_ROUNDS:
        return []
    doubtful = [name for name in standings.able if not standings.is_decided(name)]
    fast = deque(name for name in standings.able if name in standings.fast)
    pairs: list[tuple[str, str]] = []
    left: list[str] = []
    for name in doubtful:
        helper = _take(fast, standings.candidates[name].peers)
        if helper is None:
            left.append(name)
        else:
            pairs.append((name, helper))
    if number <= ROUNDS_FOR_ALL:
        left += fast
    return pairs + _among(left, standings)


def _among(names: Iterable[str], standings: Standings) -> list[tuple[str, str]]:
    """Pairs of neighbours that have not met; where only two nodes are left to meet, of these again."""
    queue, pairs = deque(names), list[tuple[str, str]]()
    while len(queue) > 1:
        name = queue.popleft()
        one = standings.candidates[name]
        other = _take(queue, one.peers)
        if other is None and one.best is None and len(one.contacts) < _ATTEMPTS:
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
