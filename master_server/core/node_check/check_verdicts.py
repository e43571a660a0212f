"""The verdict on each node of a check, and its reason in one sentence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from dlrover_hooks.master.core.node_check.check_state import Candidate, CheckResult, RunningCheck
from dlrover_hooks.master.core.node_check.pairing import Standings
from dlrover_hooks.master.core.node_check.speed_comparison import SpeedReference, reference_of
from dlrover_hooks.protocol import LISTED_NODES, Measure, MeasureKind, NodeReport, NodeVerdict, speed_text

_ORDER = (NodeVerdict.BAD, NodeVerdict.UNCLEAR, NodeVerdict.SLOW, NodeVerdict.OK)
_LONGEST = 500
"""Characters of a reason: a node with many devices may have as many failures."""
_Key = tuple[MeasureKind, str]


def judge(check: RunningCheck) -> CheckResult:
    """All verdicts of a check that is over: O(nodes log nodes)."""
    standings = Standings(check.candidates)
    references = _references(check.candidates.values())
    found = [(name, _report(name, standings, references)) for name in check.candidates]
    found.sort(key=lambda one: (_ORDER.index(one[1].verdict), one[1].node))
    nodes = tuple(report for _, report in found)
    return CheckResult(
        number=check.number,
        wanted=check.wanted,
        rounds=check.round,
        nodes=nodes,
        listed=tuple(msgspec.structs.replace(one, measures=()) for one in nodes[:LISTED_NODES]),
        places={name: index for index, (name, _) in enumerate(found)},
        counts=dict(Counter(report.verdict.value for _, report in found)),
    )


def _references(candidates: Iterable[Candidate]) -> dict[_Key, SpeedReference]:
    """The reference for each kind of measurement and model of device."""
    speeds: dict[_Key, list[float]] = defaultdict(list)
    for candidate in candidates:
        for one in candidate.joined.measures:
            if one.speed is not None:
                speeds[one.kind, one.model].append(one.speed)
    return {key: reference_of(found) for key, found in speeds.items()}


def _report(name: str, standings: Standings, references: dict[_Key, SpeedReference]) -> NodeReport:
    one = standings.candidates[name]
    verdict, reason = _verdict(name, standings, references)
    return NodeReport(
        node=one.joined.node,
        verdict=verdict,
        reason=reason if len(reason) <= _LONGEST else reason[: _LONGEST - 3] + "...",
        measures=one.joined.measures,
        network=one.best,
        round_trip_s=min((c.round_trip_s for c in one.contacts if c.round_trip_s is not None), default=None),
    )


def _verdict(name: str, standings: Standings, references: dict[_Key, SpeedReference]) -> tuple[NodeVerdict, str]:
    one = standings.candidates[name]
    if one.fault:
        return NodeVerdict.BAD, one.fault
    if one.contacts and one.best is None:
        return _unconnected(name, standings)
    slow = [text for measure in one.joined.measures if (text := _slow(measure, references))]
    if name not in standings.fast and one.best is not None:
        peers = sorted({standings.candidates[peer].joined.node for peer in one.peers})
        median = speed_text(None, standings.network.median)
        slow.append(
            f"network: {speed_text(None, one.best)} at best, with {', '.join(peers)}; "
            f"the median of all nodes is {median}"
        )
    return (NodeVerdict.SLOW, "; ".join(slow)) if slow else (NodeVerdict.OK, "")


def _slow(measure: Measure, references: dict[_Key, SpeedReference]) -> str:
    """How slow this measurement is; empty: it is not."""
    if measure.speed is None:
        return ""
    kind, reference = measure.kind, references[measure.kind, measure.model]
    if not reference.is_slow(measure.speed):
        return ""
    here, median = speed_text(kind, measure.speed), speed_text(kind, reference.median)
    return f"{kind.value} on {measure.what}: {here}; the median of all nodes is {median}"


def _unconnected(name: str, standings: Standings) -> tuple[NodeVerdict, str]:
    """The verdict on a node none of whose transfers succeeded."""
    one = standings.candidates[name]
    peers = sorted({standings.candidates[peer].joined.node for peer in one.peers})
    how = f"no transfer with {', '.join(peers)} succeeded: {one.contacts[-1].failed}"
    if standings.is_decided(name):
        return NodeVerdict.BAD, how
    if all(contact.unreachable for contact in one.contacts):
        return NodeVerdict.BAD, f"{', '.join(peers)} cannot reach it, but it reaches them: {one.contacts[-1].failed}"
    return NodeVerdict.UNCLEAR, f"{how}; no other node shows which end is at fault"
