"""The members of a round, and counts over them that are kept with each change: a view for one node then costs O(1)."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import islice

import msgspec

from dlrover_hooks.protocol import Departure

LOST = "lost"
STALLED = "stalled"
"""The master ended it because it made no steps; its process may still be alive."""
SLOW = "slow"
"""The master ended it because the others wait for it, or for another member of its node; its process is alive."""
REPLACED = "replaced"
"""Its agent has joined again without this member."""
DONE = Departure.DONE.value
EXITED = "exited"
"""Its process exited with 0 without a `Leave`: the other members may wait for it in a collective operation."""


class Member(msgspec.Struct):
    """A member of the round. `gone`: how it left, None while it lives. `rejoined`: it waits for the next round.

    `launcher` reaps its process. `recovers`: see `Attach`. To change `attached`, `recovers`, `gone` or `exit_code`,
    take the member out of the round's `Census` before, and add it after.
    """

    incarnation: str
    agent: str
    node: str
    local_rank: int
    rank: int
    pid: int = 0
    attached: bool = False
    loaded: bool = False
    rejoined: bool = False
    gone: str | None = None
    launcher: str = ""
    recovers: bool = False
    exit_code: int | None = None

    @property
    def live(self) -> bool:
        """It has not left."""
        return self.gone is None

    @property
    def ended_well(self) -> bool:
        """It left as done, or its process exited with 0."""
        return self.exit_code == 0 or self.gone == DONE


def weight(member: Member) -> tuple[int, int]:
    """Sorts gone members by what they say about the cause of a broken round."""
    if member.gone == DONE:
        return 3, member.rank
    if member.gone == EXITED:
        return 1, member.rank
    by_itself = member.gone in (LOST, STALLED, SLOW) and (member.exit_code is None or member.exit_code < 0)
    return (0 if by_itself else 2), member.rank


class Census(msgspec.Struct):
    """Counts over members. `attached`, `recovers`: live ones that are attached, and those of them that recover.

    `unended`: gone ones that did not end well. `gone`: weight, rank and incarnation of each, sorted. `live_at`,
    `lost_at`: by node. `dead_nodes`: nodes that have lost members and have none left, sorted.
    """

    attached: int = 0
    recovers: int = 0
    unended: int = 0
    gone: list[tuple[int, int, str]] = []
    live_at: dict[str, int] = {}
    lost_at: dict[str, int] = {}
    dead_nodes: list[str] = []

    def add(self, member: Member) -> None:
        """Count a member."""
        self._count(member, 1)
        if member.gone is not None:
            bisect.insort(self.gone, (*weight(member), member.incarnation))
            index = bisect.bisect_left(self.dead_nodes, member.node)
            listed = self.dead_nodes[index : index + 1] == [member.node]
            if not listed and member.node in self.lost_at and member.node not in self.live_at:
                self.dead_nodes.insert(index, member.node)

    def take_out(self, member: Member) -> None:
        """Undo `add`, before the member changes. A member that has gone never lives again."""
        self._count(member, -1)
        if member.gone is not None:
            del self.gone[bisect.bisect_left(self.gone, (*weight(member), member.incarnation))]

    def _count(self, member: Member, sign: int) -> None:
        if member.gone is None:
            self.attached += sign * member.attached
            self.recovers += sign * (member.attached and member.recovers)
            _shift(self.live_at, member.node, sign)
            return
        self.unended += sign * (not member.ended_well)
        if member.gone == LOST:
            _shift(self.lost_at, member.node, sign)


def _shift(counts: dict[str, int], node: str, sign: int) -> None:
    """Add `sign`; there are no entries of 0, so that equal counts are equal objects."""
    counts[node] = counts.get(node, 0) + sign
    if not counts[node]:
        del counts[node]


def census_of(members: Iterable[Member]) -> Census:
    """The counts over `members`."""
    census = Census()
    for member in sorted(members, key=lambda one: one.gone is not None):  # `add` asks whether a node has live ones left
        census.add(member)
    return census


def first_gone(census: Census, members: dict[str, Member], node: str, most: int) -> list[Member]:
    """The first `most` gone members of other nodes than `node`, by weight."""
    gone = (members[name] for _, _, name in census.gone)
    return list(islice((member for member in gone if member.node != node), most))
