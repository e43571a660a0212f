"""The verdict on a rank that is slower than the others. Pure; only what is done is journaled, see `straggler_actions`.

In synchronous training the steps of all ranks take the same time, because the fast ranks wait for the slow one. So the
ranks are compared by their own work, without the time in which they wait. A rank is slow in a window if one part of its
steps takes longer than the same part of the others by each of these measures, and if the others do wait for it.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import msgspec

from dlrover_hooks.master.core import straggler_actions
from dlrover_hooks.master.core.events import EndSlow, Reshare
from dlrover_hooks.master.core.heartbeats import LivenessLease, Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.rounds.members import Member
from dlrover_hooks.master.core.straggler_actions import FACTOR, SHARE, SlowRank
from dlrover_hooks.protocol import Phase, StepPhase, StepPhases, Straggler

WINDOWS = 3
"""Windows in a row in which a rank is slow, before it is named; and in which it is not, before that is withdrawn. A
pause, such as an evaluation or a slow save, is in one window, or at the border of two."""
DEVIATIONS = 3.0
"""Of the other ranks, by their median absolute deviation; the conservative choice of Leys et al. (2013)."""
_NORMAL = 1.4826
"""The median absolute deviation times this is the standard deviation of normal noise (the same source)."""

LEAST_RANKS = 3
"""If it is not known who waits. What looks like slow work may be a wait for the slow rank; then all others do it."""


class Slow(NamedTuple):
    """A rank is slow in one window. Both times are seconds per step."""

    phase: StepPhase
    seconds: float
    median_s: float


class StragglerVerdict(msgspec.Struct, frozen=True):
    """`lines`: for the log. `acts`: the event that acts upon one of the slow ranks, if its policy asks for that."""

    lines: tuple[str, ...] = ()
    acts: EndSlow | Reshare | None = None


class _Ranked(NamedTuple):
    member: Member
    pulse: LivenessLease
    phases: StepPhases


def found(nodes: Nodes, job: Job, speaker: str, now: float) -> StragglerVerdict:
    """What follows after `speaker` has sent a heartbeat. `now`: the time that an event has now.

    Only a new window of rank 0 is followed by a look at all ranks: O(ranks log ranks) once in a window.
    """
    current = job.rounds.round
    member = current.members.get(speaker) if current is not None and current.phase is Phase.TRAINING else None
    pulse = nodes.pulses.get((job.name, speaker))
    if current is None or member is None or member.rank != 0 or pulse is None or not pulse.new_phases:
        return StragglerVerdict()
    ranked: list[_Ranked] = []
    for one in current.members.values():
        its = nodes.pulses.get((job.name, one.incarnation))
        if one.live and (its is None or its.phases is None):
            return StragglerVerdict()
        if one.live and its is not None and its.phases is not None:
            ranked.append(_Ranked(one, its, its.phases))
    ranked.sort(key=lambda one: one.member.rank)
    windows = [one.phases for one in ranked]
    slow = slow_ranks(windows)
    lines: list[str] = []
    acts: EndSlow | Reshare | None = None
    for number, one in enumerate(ranked):
        if not one.pulse.new_phases:
            continue
        one.pulse.new_phases, before = False, one.pulse.straggler
        if number not in slow:
            lines += _not_slow(one)
        elif (now_slow := _slow(one, slow[number])) is not None:
            text = _sentence(one.member, now_slow, len(ranked))
            slow_rank = SlowRank(one.member, one.phases.policy, now_slow.phase, windows, text)
            then = straggler_actions.response(job, slow_rank, now)
            then = then if acts is None else straggler_actions.Response()  # one at a time
            acts = acts or then.acts
            if before is None or before.phase is not now_slow.phase or then.acts is not None:
                lines.append(text + then.text)
    return StragglerVerdict(tuple(lines), acts)


def _not_slow(one: _Ranked) -> list[str]:
    """Count a window in which the rank was not slow; what changes with it."""
    pulse, before = one.pulse, one.pulse.straggler
    pulse.fine_windows, pulse.slow_windows = pulse.fine_windows + 1, 0
    if before is None or pulse.fine_windows < WINDOWS:
        return []
    pulse.straggler = None
    return [f"rank {one.member.rank} ({one.member.node}) is no longer slow, after {before.for_s:.0f} s"]


def _slow(one: _Ranked, slow: Slow) -> Straggler | None:
    """Count a window in which the rank was slow. None: there were too few of them in a row."""
    pulse, window_s = one.pulse, one.phases.window_s
    same = pulse.slow_windows and pulse.slow_phase is slow.phase
    pulse.slow_windows, pulse.slow_s = (pulse.slow_windows + 1, pulse.slow_s + window_s) if same else (1, window_s)
    pulse.slow_phase, pulse.fine_windows = slow.phase, 0
    if pulse.slow_windows < WINDOWS:
        return None
    pulse.straggler = Straggler(slow.phase, slow.seconds, slow.median_s, pulse.slow_s)
    return pulse.straggler


def _sentence(member: Member, slow: Straggler, ranks: int) -> str:
    return (
        f"rank {member.rank} ({member.node}) is slow: its {slow.phase.value} takes {slow.seconds:.3g} s per step, the "
        f"median of all {ranks} ranks is {slow.median_s:.3g} s, for {slow.for_s:.0f} s"
    )


def slow_ranks(windows: list[StepPhases]) -> dict[int, Slow]:
    """The slow ones among the windows of all ranks, by their place in the list; of several parts the one that costs
    most.
    """
    if not all(one.in_step for one in windows):
        return {}
    known = sorted(one.network_s for one in windows if one.network_s is not None)
    apart = len(windows) > 1 and len(known) == len(windows)
    waits_s = known[len(known) // 2] if apart else 0.0
    worst: dict[int, Slow] = {}
    judged = tuple(StepPhase) if apart else (StepPhase.DATA,) if len(windows) >= LEAST_RANKS else ()
    for phase in judged:
        seconds = [_seconds(one, phase) for one in windows]
        for number in _outliers(seconds):
            if phase in (StepPhase.DATA, StepPhase.COMPUTE) and _is_its_share(windows, seconds, number):
                continue
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


def _is_its_share(windows: list[StepPhases], seconds: list[float], number: int) -> bool:
    """True if the rank takes longer only because it runs more micro-batches, and by no more than one too many.

    Where it runs more than one too many, the micro-batches are distributed for speeds that the ranks no longer have.
    """
    counts = [one.micro_batches for one in windows]
    if not all(counts):
        return False
    of_one = [whole / count for whole, count in zip(seconds, counts, strict=True)]
    one_fewer = [*seconds]
    one_fewer[number] -= of_one[number]
    return number not in _outliers(of_one) and number not in _outliers(one_fewer)


def _seconds(window: StepPhases, phase: StepPhase) -> float:
    if phase is StepPhase.DATA:
        return window.data_s
    if phase is StepPhase.COMPUTE:
        return window.compute_s
    return window.optimizer_s if phase is StepPhase.OPTIMIZER else window.checkpoint_s
