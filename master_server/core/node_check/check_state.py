"""The journaled state of a job's node check: who waits for one, the one that runs, the result of the last."""

from __future__ import annotations

import math

import msgspec

from dlrover_hooks.protocol import JoinCheck, NodeReport, ReportTransfer


class Contact(msgspec.Struct, frozen=True):
    """A transfer with `peer`, as it counts for one of the two nodes. `speed` None: it failed."""

    peer: str
    speed: float | None = None
    round_trip_s: float | None = None
    failed: str = ""
    unreachable: bool = False
    """The peer could not reach this node, but this node reached the peer."""


class Candidate(msgspec.Struct):
    """A node that is checked. `silent`: why nothing is expected from it any more."""

    joined: JoinCheck
    contacts: list[Contact] = []
    silent: str = ""

    @property
    def fault(self) -> str:
        """Why it is bad whatever its transfers show; empty: nothing is known."""
        failed = [f"{one.kind.value} on {one.what}: {one.failed}" for one in self.joined.measures if one.failed]
        return self.silent or "; ".join(failed)

    @property
    def best(self) -> float | None:
        """The speed of its fastest transfer; None: none succeeded."""
        return max((one.speed for one in self.contacts if one.speed is not None), default=None)

    @property
    def peers(self) -> set[str]:
        """The incarnations with which it had a transfer."""
        return {one.peer for one in self.contacts}


class RunningCheck(msgspec.Struct):
    """`pairs`: of the current round, both ways. `until`: when reports that are still missing are given up.

    `lost`: nodes of the round that were lost before they had reported.
    """

    number: int
    wanted: int
    candidates: dict[str, Candidate]
    """By incarnation, in the order of the nodes' names."""
    round: int = 0
    pairs: dict[str, str] = {}
    reports: dict[str, ReportTransfer] = {}
    lost: set[str] = set()
    until: float = math.inf


class CheckResult(msgspec.Struct, frozen=True):
    """`nodes`: the worst first. `listed`: the first of them, without their measurements.

    `places`: by incarnation its index in `nodes`. `counts`: of nodes, by verdict.
    """

    number: int
    wanted: int
    rounds: int
    nodes: tuple[NodeReport, ...]
    listed: tuple[NodeReport, ...]
    places: dict[str, int]
    counts: dict[str, int]


class NodeCheck(msgspec.Struct):
    """All checks of a job. `step` numbers the rounds of all of them."""

    number: int = 0
    step: int = 0
    coming: dict[str, JoinCheck] = {}
    """By incarnation: they wait for the next check. `latest`: by node, its incarnation there."""
    latest: dict[str, str] = {}
    first_at: float = 0.0
    begins_at: float = math.inf
    wanted: int = 0
    running: RunningCheck | None = None
    last: CheckResult | None = None
    kept_out: dict[str, str] = {}
    """By node that its last check found bad, the reason."""

    def takes_part(self, incarnation: str) -> bool:
        """It waits for the next check, or is in the one that runs."""
        return incarnation in self.coming or (self.running is not None and incarnation in self.running.candidates)

    @property
    def standing(self) -> int:
        """Number of processes that wait for the next check, or are in the one that runs."""
        return len(self.coming) + (len(self.running.candidates) if self.running is not None else 0)

    def was_checked(self, incarnation: str) -> bool:
        """It took part in the last check."""
        return self.last is not None and incarnation in self.last.places

    @property
    def due(self) -> float:
        """When to call `check_requests.tick` next, if no report comes before."""
        if self.running is not None:
            return self.running.until
        return self.begins_at if self.coming else math.inf
