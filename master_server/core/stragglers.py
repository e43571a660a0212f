"""The verdict on a rank that is slower than the others. Pure, and nothing of it is journaled.

In synchronous training the steps of all ranks take the same time, because the fast ranks wait for the slow one. So the
ranks are compared by their own work, without the time in which they wait. A rank is slow in a window if one part of its
steps takes longer than the same part of the others by each of these measures, and if the others do wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from dlrover_hooks.master.core.heartbeats import LivenessLease, Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.protocol import Phase, StepPhase, StepPhases, Straggler

WINDOWS = 3
"""Windows in a row in which a rank is slow, before it is named; and in which it is not, before that is withdrawn. A
pause, such as an evaluation or a slow save, is in one window, or at the border of two."""
FACTOR = 1.5
"""Multiple of the median. DLRover's node check calls a node slow at 2, NVRx a rank at 1 / 0.7 of the fastest."""
DEVIATIONS = 3.0
"""Of the other ranks, by their median absolute deviation; the conservative choice of Leys et al. (2013)."""
_NORMAL = 1.4826
"""The median absolute deviation times this is the standard deviation of normal noise (the same source)."""
SHARE = 0.1
"""Of the step's time that the others must lose. With less, a new process or node does not repay its start for long."""

LEAST_RANKS = 3
"""If it is not known who waits. What looks like slow work may be a wait for the slow rank; then all others do it."""


class Slow(NamedTuple):
    """A rank is slow in one window. Both times are seconds per step."""

    phase: StepPhase
    seconds: float
    median_s: float


class _Ranked(NamedTuple):
    rank: int
    node: str
    pulse: LivenessLease
    phases: StepPhases


def found(nodes: Nodes, job: Job, speaker: str) -> list[str]:
    """What is to be logged, after `speaker` has sent a heartbeat.

    Only a new window of rank 0 is followed by a look at all ranks: O(ranks log ranks) once in a window.
    """
    current = job.rounds.round
    member = current.members.get(speaker) if current is not None and current.phase is Phase.TRAINING else None
    pulse = nodes.pulses.get((job.name, speaker))
    if current is None or member is None or member.rank != 0 or pulse is None or not pulse.new_phases:
        return []
    ranked: list[_Ranked] = []
    for one in current.members.values():
        its = nodes.pulses.get((job.name, one.incarnation))
        if one.live and (its is None or its.phases is None):
            return []
        if one.live and its is not None and its.phases is not None:
            ranked.append(_Ranked(one.rank, one.node, its, its.phases))
    ranked.sort(key=lambda one: one.rank)
    slow = slow_ranks([one.phases for one in ranked])
    return [text for number, one in enumerate(ranked) for text in _judged(one, slow.get(number), len(ranked))]


def _judged(one: _Ranked, slow: Slow | None, ranks: int) -> Iterator[str]:
    """Counts a new window of a rank, and yields what changes with it."""
    pulse, window_s = one.pulse, one.phases.window_s
    if not pulse.new_phases:
        return
    pulse.new_phases, before = False, pulse.straggler
    if slow is None:
        pulse.fine_windows, pulse.slow_windows = pulse.fine_windows + 1, 0
        if before is not None and pulse.fine_windows >= WINDOWS:
            pulse.straggler = None
            yield f"rank {one.rank} ({one.node}) is no longer slow, after {before.for_s:.0f} s"
        return
    same = pulse.slow_windows and pulse.slow_phase is slow.phase
    pulse.slow_windows, pulse.slow_s = (pulse.slow_windows + 1, pulse.slow_s + window_s) if same else (1, window_s)
    pulse.slow_phase, pulse.fine_windows = slow.phase, 0
    if pulse.slow_windows < WINDOWS:
        return
    pulse.straggler = Straggler(slow.phase, slow.seconds, slow.median_s, pulse.slow_s)
    if before is None or before.phase is not slow.phase:
        yield (
            f"rank {one.rank} ({one.node}) is slow: its {slow.phase.value} takes {slow.seconds:.3g} s per step, the "
            f"median of all {ranks} ranks is {slow.median_s:.3g} s, for {pulse.slow_s:.0f} s"
        )


def slow_ranks(windows: list[StepPhases]) -> dict[int, Slow]:
    """The slow ones among the windows of all ranks, by their place in the list; of several parts the one that costs
    most.
    """
    known = sorted(one.network_s for one in windows if one.network_s is not None)
    apart = len(windows) > 1 and len(known) == len(windows)
    waits_s = known[len(known) // 2] if apart else 0.0
    worst: dict[int, Slow] = {}
    judged = tuple(StepPhase) if apart else (StepPhase.DATA,) if len(windows) >= LEAST_RANKS else ()
    for phase in judged:
        seconds = [_seconds(one, phase) for one in windows]
        for number in _outliers(seconds):
            window, slow = windows[number], Slow(phase, seconds[number], statistics.median_low(seconds))
            least_s = SHARE * window.total_s
            others_wait = not apart or waits_s - (window.network_s or 0.0) >= least_s
            costs_most = number not in worst or _lost(slow) > _lost(worst[number])
            if _lost(slow) >= least_s and others_wait and costs_most:
                worst[number] = slow
    return worst


def _lost(slow: Slow) -> float:
    return slow.seconds - slow.median_s


def _outliers(seconds: list[float]) -> list[int]:
    """The places of those that exceed the median by the factor, and by the deviations of all that do not."""
    median = statistics.median_low(seconds)  # of two ranks the faster one is the measure
    above = [number for number, one in enumerate(seconds) if one > FACTOR * median]
    deviation = statistics.median_low(abs(one - median) for one in seconds if one <= FACTOR * median)
    return [number for number in above if seconds[number] - median > DEVIATIONS * _NORMAL * deviation]


def _seconds(window: StepPhases, phase: StepPhase) -> float:
    if phase is StepPhase.DATA:
        return window.data_s
    if phase is StepPhase.COMPUTE:
        return window.compute_s
    return window.optimizer_s if phase is StepPhase.OPTIMIZER else window.checkpoint_s
