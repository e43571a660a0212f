"""Liveness: leases and watch connections of every incarnation. Volatile: a new master life starts all leases anew.

Pure like the rest, but not journaled. Only a verdict is: `verdicts` names who is dead, and the runtime turns each into
the journaled event `Lost`. A heartbeat starts a lease; whoever has not sent one yet (it imports, or loads a checkpoint)
gets a longer grace, and an open watch connection prolongs that. While it is open the kernel reports a real death at
once, so silence alone (C code that holds the GIL, a suspended machine) is borne for `open_lease_s`. One heap entry per
incarnation, renewed when it comes up: every sign of life costs O(1).
"""

from __future__ import annotations

import heapq
import math

import msgspec

from dlrover_hooks.master.core.events import Lost
from dlrover_hooks.protocol import Vitals

Name = tuple[str, str]
"""(job, incarnation)."""
GRACE_S = 300.0
"""For whoever has not sent a heartbeat yet: a worker may import or load for so long."""


SILENT = "it never spoke"


class Pulse(msgspec.Struct):
    """What is known of one incarnation. `until`: dead after this; `suspect_until`: too, since its connection ended.

    `ears`: its open watch connections. `beats`: it has sent a heartbeat.
    """

    until: float
    queued: float = math.inf
    suspect_until: float = math.inf
    ears: int = 0
    beats: bool = False
    step: int = 0
    vitals: Vitals | None = None

    @property
    def end(self) -> float:
        """When it is dead unless it gives a sign."""
        return min(self.until, self.suspect_until)


class Nodes(msgspec.Struct):
    """All pulses. Times are seconds of a monotonic clock."""

    lease_s: float = 10.0
    suspicion_s: float = 0.5
    open_lease_s: float = 60.0
    pulses: dict[Name, Pulse] = {}
    heap: list[tuple[float, str, str]] = []


def beat(nodes: Nodes, name: Name, now: float, *, step: int = 0, vitals: Vitals | None = None) -> None:
    """A heartbeat: the lease starts anew, a suspicion is dropped."""
    pulse = _pulse(nodes, name, now)
    pulse.until, pulse.suspect_until, pulse.beats = now + lease_of(nodes, pulse), math.inf, True
    pulse.step = max(pulse.step, step)
    pulse.vitals = vitals or pulse.vitals
    _queue(nodes, name, pulse)


def lease_of(nodes: Nodes, pulse: Pulse) -> float:
    """For how many seconds it may be silent between two heartbeats."""
    return max(nodes.lease_s, nodes.open_lease_s) if pulse.ears else nodes.lease_s


def heard(nodes: Nodes, name: Name, now: float, for_s: float) -> None:
    """Another sign of life, good for `for_s` at least."""
    pulse = _pulse(nodes, name, now)
    pulse.until, pulse.suspect_until = max(pulse.until, now + for_s), math.inf
    _queue(nodes, name, pulse)


def expect(nodes: Nodes, name: Name, now: float, within_s: float, *, beats: bool = False) -> None:
    """It must give a sign `within_s`, whatever was promised before. `beats`: another life has had its heartbeats."""
    pulse = _pulse(nodes, name, now)
    pulse.until, pulse.beats = now + within_s, pulse.beats or beats
    _queue(nodes, name, pulse)


def opened(nodes: Nodes, name: Name, now: float) -> None:
    """A watch connection is open."""
    pulse = _pulse(nodes, name, now)
    pulse.ears += 1
    heard(nodes, name, now, lease_of(nodes, pulse) if pulse.beats else GRACE_S)


def closed(nodes: Nodes, name: Name, now: float, *, answered: bool = False) -> None:
    """A watch connection ended: with the last one, death is suspected unless somebody speaks soon.

    Who was `answered` asks again at once. But when a thousand are told of one break, the last of them is heard late.
    """
    pulse = nodes.pulses.get(name)
    if pulse is None:
        return
    pulse.ears = max(0, pulse.ears - 1)
    if pulse.ears == 0:
        pulse.suspect_until = now + (nodes.lease_s if answered else nodes.suspicion_s)
        if pulse.beats:
            pulse.until = min(pulse.until, now + nodes.lease_s)
        _queue(nodes, name, pulse)


def grant(nodes: Nodes, now: float, missed_s: float) -> None:
    """For `missed_s` nobody could be heard: everybody gets as long to speak, at most a lease or a suspicion."""
    lease_until, suspect_until = now + min(missed_s, nodes.lease_s), now + min(missed_s, nodes.suspicion_s)
    for pulse in nodes.pulses.values():
        pulse.until = max(pulse.until, lease_until)
        pulse.suspect_until = max(pulse.suspect_until, suspect_until)


def forget(nodes: Nodes, name: Name) -> None:
    """No longer of interest. Its heap entry is skipped when it comes up."""
    nodes.pulses.pop(name, None)


def next_at(nodes: Nodes) -> float:
    """When to call `verdicts` next; infinity if nobody is known."""
    return nodes.heap[0][0] if nodes.heap else math.inf


def verdicts(nodes: Nodes, now: float) -> list[Lost]:
    """Who is dead by now. They are forgotten here."""
    dead: list[Lost] = []
    while nodes.heap and nodes.heap[0][0] <= now:
        at, job, incarnation = heapq.heappop(nodes.heap)
        pulse = nodes.pulses.get((job, incarnation))
        if pulse is None or pulse.queued != at:
            continue
        pulse.queued = math.inf
        if pulse.ears and not pulse.beats:
            pulse.until = max(pulse.until, now + GRACE_S)
        if pulse.end <= now:
            del nodes.pulses[job, incarnation]
            dead.append(Lost(job=job, incarnation=incarnation, reason=_reason(nodes, pulse)))
        else:
            _queue(nodes, (job, incarnation), pulse)
    return dead


def _reason(nodes: Nodes, pulse: Pulse) -> str:
    if pulse.suspect_until <= pulse.until:
        return "its connection was lost"
    return f"no heartbeat for {lease_of(nodes, pulse):g} s" if pulse.beats else SILENT


def _pulse(nodes: Nodes, name: Name, now: float) -> Pulse:
    if name not in nodes.pulses:
        nodes.pulses[name] = Pulse(until=now)
    return nodes.pulses[name]


def _queue(nodes: Nodes, name: Name, pulse: Pulse) -> None:
    """An entry that comes up too early is renewed then; one that would come up too late is renewed now."""
    if pulse.end < pulse.queued:
        pulse.queued = pulse.end
        heapq.heappush(nodes.heap, (pulse.end, *name))
