"""Liveness: leases and watch connections of every incarnation. Not journaled: a restarted master starts new leases.

Pure like the rest of the core. Only the verdicts are journaled: `verdicts` lists the dead incarnations, and the runtime
applies each as a `Lost` event. A heartbeat starts a lease. An incarnation that has sent none yet (it imports, or loads
a checkpoint) gets a longer grace period, and an open watch connection prolongs it. While that connection is open the
kernel reports a real death at once, so silence alone (C code that holds the GIL, a suspended machine) is tolerated for
`open_lease_s`. There is one heap entry per incarnation, renewed when it is popped: each sign of life costs O(1).

All senders together send at most `beats_per_s`: each reply states the interval that this needs, and leases are at least
`MISSED` intervals. A closed connection is detected as fast as before. If thousands close at once, as when a proxy is
restarted, the master needs seconds to accept them again: no worker is declared dead before it could connect again.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Mapping

import msgspec

from dlrover_hooks.master.core.events import Lost
from dlrover_hooks.protocol import NodeVitals, Stall, StepPhase, StepPhases, Straggler, Vitals

Name = tuple[str, str]
"""(job, incarnation)."""
GRACE_S = 300.0
"""Grace period before the first heartbeat: a worker may import or load for so long."""
BEATS_PER_S = 1000.0
"""A heartbeat over HTTP takes 0.1 to 0.2 ms of a core (`make bench-master`): all take a fifth of one at most."""
RECONNECTS_PER_S = 1000.0
"""Connections that a busy master accepts again in a second, each with its first request; an idle one twice as many."""
MISSED = 3
"""A lease is at least so many intervals: two lost heartbeats in a row are no death."""

SILENT = "it never sent a heartbeat"


class Judged(enum.Enum):
    """NO: there is no verdict on this stall. TOLD: it is logged, and a restart may follow. YES: it is settled."""

    NO = "no"
    TOLD = "told"
    YES = "yes"


class LivenessLease(msgspec.Struct):
    """The liveness of one incarnation: it is dead after `until`, or after `suspect_until` once its connection ended.

    `ears`: number of its open watch connections. `cut`: the last one has ended without an answer, and it has sent
    nothing since. `beats`: it has sent a heartbeat. `interval_s`: what it was told last. `step_at`: when the heartbeat
    with its greatest step arrived. `judged`: how far the verdict on its `stall` is. `new_phases`: they are not judged
    yet. It was slow, by `slow_phase`, in the last `slow_windows`, for `slow_s`, or not slow in the last `fine_windows`.
    """

    until: float
    queued: float = math.inf
    suspect_until: float = math.inf
    ears: int = 0
    cut: bool = False
    beats: bool = False
    interval_s: float = 0.0
    step: int = 0
    step_at: float = 0.0
    vitals: Vitals | None = None
    stall: Stall | None = None
    judged: Judged = Judged.NO
    phases: StepPhases | None = None
    new_phases: bool = False
    slow_phase: StepPhase | None = None
    slow_windows: int = 0
    slow_s: float = 0.0
    fine_windows: int = 0
    straggler: Straggler | None = None

    @property
    def end(self) -> float:
        """When it is declared dead, without another sign of life."""
        return min(self.until, self.suspect_until)


class KeptVitals(msgspec.Struct, frozen=True):
    """See `node_vitals`. `at`: when it arrived. Of each process tree since its first report, by incarnation: `core_s`,
    core-seconds, and `most_bytes`, its highest memory.
    """

    report: NodeVitals
    at: float
    core_s: dict[str, float]
    most_bytes: dict[str, int]


class Furthest(msgspec.Struct):
    """The greatest step that any of `names` has reported, and how many of those that are tracked have reported it."""

    names: Mapping[str, object]
    step: int
    count: int


class Nodes(msgspec.Struct):
    """All pulses, and the reports of nodes. Times are seconds of a monotonic clock.

    `cut`: how many are cut; `most_cut`: the most since it was 0. `furthest`: by job, if known.
    """

    lease_s: float = 10.0
    suspicion_s: float = 0.5
    open_lease_s: float = 60.0
    beats_per_s: float = BEATS_PER_S
    pulses: dict[Name, LivenessLease] = {}
    heap: list[tuple[float, str, str]] = []
    reports: dict[str, dict[str, KeptVitals]] = {}
    """The last one of each node, by job and node."""
    cut: int = 0
    most_cut: int = 0
    furthest: dict[str, Furthest] = {}


def interval_s(nodes: Nodes, more: int = 0) -> float:
    """Least seconds between two heartbeats of one sender, with `more` senders than are tracked. 0: their own pace of a
    second or more will do. In whole seconds, so that it changes rarely.
    """
    seconds = math.ceil((len(nodes.pulses) + more) / nodes.beats_per_s)
    return float(seconds) if seconds > 1 else 0.0


def silence_s(nodes: Nodes, pulse: LivenessLease | None = None, more: int = 0) -> float:
    """Seconds that a process may be silent while its connection is not open."""
    told_s = pulse.interval_s if pulse is not None else 0.0
    return max(nodes.lease_s, MISSED * max(told_s, interval_s(nodes, more)))


def beat(
    nodes: Nodes,
    name: Name,
    now: float,
    *,
    step: int = 0,
    vitals: Vitals | None = None,
    stall: Stall | None = None,
    phases: StepPhases | None = None,
    told_s: float | None = None,
) -> None:
    """A heartbeat: the lease starts again, a suspicion is dropped. `told_s`: the interval in its reply; None: it is not
    answered yet.
    """
    pulse = _pulse(nodes, name, now)
    pulse.interval_s = pulse.interval_s if told_s is None else told_s
    pulse.until, pulse.beats = now + lease_of(nodes, pulse), True
    _clear(nodes, pulse)
    if step > pulse.step:
        _advance(nodes, name, pulse, step)
        pulse.step_at = now
    pulse.vitals, pulse.stall = vitals or pulse.vitals, stall
    if stall is None:
        pulse.judged = Judged.NO
    if phases is not None and phases != pulse.phases:  # a heartbeat may arrive twice
        pulse.phases, pulse.new_phases = phases, True
    _queue(nodes, name, pulse)


def lease_of(nodes: Nodes, pulse: LivenessLease) -> float:
    """Seconds it may be silent between two heartbeats."""
    silent_s = silence_s(nodes, pulse)
    return max(silent_s, nodes.open_lease_s) if pulse.ears else silent_s


def heard(nodes: Nodes, name: Name, now: float, for_s: float, *, beats: bool = False) -> None:
    """Another sign of life, which is valid for at least `for_s`. `beats`: heartbeats follow at once."""
    pulse = _pulse(nodes, name, now)
    pulse.until, pulse.beats = max(pulse.until, now + for_s), pulse.beats or beats
    _clear(nodes, pulse)
    _queue(nodes, name, pulse)


def expect(nodes: Nodes, name: Name, now: float, within_s: float, *, beats: bool = False) -> None:
    """Require a sign of life `within_s`, whatever applied before. `beats`: it sent heartbeats before a restart."""
    pulse = _pulse(nodes, name, now)
    pulse.until, pulse.beats = now + within_s, pulse.beats or beats
    _queue(nodes, name, pulse)


def opened(nodes: Nodes, name: Name, now: float) -> None:
    """A watch connection is open."""
    pulse = _pulse(nodes, name, now)
    pulse.ears += 1
    heard(nodes, name, now, lease_of(nodes, pulse) if pulse.beats else GRACE_S)


def closed(nodes: Nodes, name: Name, now: float, *, answered: bool = False) -> None:
    """A watch connection ended. After the last one, the next sign of life must follow within `suspicion_s`.

    After an answer it is a whole lease: the client sends its watch again at once, but if a thousand are `answered`
    because of one break, the last of these requests arrives late.
    """
    pulse = nodes.pulses.get(name)
    if pulse is None:
        return
    pulse.ears = max(0, pulse.ears - 1)
    if pulse.ears == 0:
        silent_s = silence_s(nodes, pulse)
        _cut(nodes, pulse, now_cut=not answered)
        pulse.suspect_until = now + (silent_s if answered else nodes.suspicion_s)
        if pulse.beats:
            pulse.until = min(pulse.until, now + silent_s)
        _queue(nodes, name, pulse)


def grant(nodes: Nodes, now: float, missed_s: float) -> None:
    """No sign of life could be received for `missed_s`: allow all incarnations that time, up to a lease (suspicion)."""
    lease_until, suspect_until = now + min(missed_s, nodes.lease_s), now + min(missed_s, nodes.suspicion_s)
    for pulse in nodes.pulses.values():
        pulse.until = max(pulse.until, lease_until)
        pulse.suspect_until = max(pulse.suspect_until, suspect_until)


def forget(nodes: Nodes, name: Name) -> None:
    """Stop the tracking. The heap entry is skipped when it is popped."""
    _untrack(nodes, name)


def furthest(nodes: Nodes, job: str, names: Mapping[str, object]) -> int:
    """The greatest step that a heartbeat of the job's processes `names` has reported. O(1) with the same object as in
    the last call, while a process is tracked that has reported this step.
    """
    found = nodes.furthest.get(job)
    if found is None or found.names is not names:
        steps = [pulse.step for name in names if (pulse := nodes.pulses.get((job, name))) is not None]
        if not steps:
            return 0
        found = nodes.furthest[job] = Furthest(names, max(steps), steps.count(max(steps)))
    return found.step


def _advance(nodes: Nodes, name: Name, pulse: LivenessLease, step: int) -> None:
    """A process has reported a greater step than before."""
    pulse.step, top = step, nodes.furthest.get(name[0])
    if top is None or step < top.step or name[1] not in top.names:
        return
    top.step, top.count = step, 1 if step > top.step else top.count + 1


def _untrack(nodes: Nodes, name: Name) -> None:
    pulse, top = nodes.pulses.pop(name, None), nodes.furthest.get(name[0])
    if pulse is not None:
        _cut(nodes, pulse, now_cut=False)
    if pulse is None or top is None or pulse.step < top.step or name[1] not in top.names:
        return
    top.count -= 1
    if not top.count:
        del nodes.furthest[name[0]]


def next_at(nodes: Nodes) -> float:
    """When to call `verdicts` next; infinity if nothing is tracked."""
    return nodes.heap[0][0] if nodes.heap else math.inf


def verdicts(nodes: Nodes, now: float) -> list[Lost]:
    """The incarnations that are dead by now. Their tracking ends."""
    dead: list[Lost] = []
    while nodes.heap and nodes.heap[0][0] <= now:
        at, job, incarnation = heapq.heappop(nodes.heap)
        pulse = nodes.pulses.get((job, incarnation))
        if pulse is None or pulse.queued != at:
            continue
        pulse.queued = math.inf
        if pulse.ears and not pulse.beats:
            pulse.until = max(pulse.until, now + GRACE_S)
        if pulse.cut and pulse.until > now and (back_at := _back_at(nodes, pulse)) > now:
            pulse.queued = back_at
            heapq.heappush(nodes.heap, (back_at, job, incarnation))
        elif pulse.end <= now:
            dead.append(Lost(job=job, incarnation=incarnation, reason=_reason(nodes, pulse)))
            _untrack(nodes, (job, incarnation))
        else:
            _queue(nodes, (job, incarnation), pulse)
    return dead


def _reason(nodes: Nodes, pulse: LivenessLease) -> str:
    if pulse.suspect_until <= pulse.until:
        return "its connection was lost"
    return f"no heartbeat for {lease_of(nodes, pulse):g} s" if pulse.beats else SILENT


def _pulse(nodes: Nodes, name: Name, now: float) -> LivenessLease:
    if name not in nodes.pulses:
        nodes.pulses[name] = LivenessLease(until=now)
    return nodes.pulses[name]


def _clear(nodes: Nodes, pulse: LivenessLease) -> None:
    """Drop the suspicion."""
    _cut(nodes, pulse, now_cut=False)
    pulse.suspect_until = math.inf


def _cut(nodes: Nodes, pulse: LivenessLease, *, now_cut: bool) -> None:
    nodes.cut += now_cut - pulse.cut
    nodes.most_cut = max(nodes.most_cut, nodes.cut) if nodes.cut else 0
    pulse.cut = now_cut


def _back_at(nodes: Nodes, pulse: LivenessLease) -> float:
    """Until when a process whose connection was cut may connect again, if all do that were cut with it."""
    return pulse.suspect_until - nodes.suspicion_s + max(nodes.suspicion_s, nodes.most_cut / RECONNECTS_PER_S)


def _queue(nodes: Nodes, name: Name, pulse: LivenessLease) -> None:
    """Queue an earlier entry if the current one is too late. One that is too early is renewed when it is popped."""
    if pulse.end < pulse.queued:
        pulse.queued = pulse.end
        heapq.heappush(nodes.heap, (pulse.end, *name))
