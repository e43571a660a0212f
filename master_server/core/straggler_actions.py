"""What is done about a slow rank, by its `on_straggler`. Pure; the result, `EndSlow` or `Reshare`, is journaled.

A restart of one process helps against what is wrong with it alone, such as leaked memory or a core that it shares. A
slow machine stays slow, so a place is restarted once. Fewer micro-batches help whatever the cause is, in a new round of
the same processes. Where the master plans the nodes, it replaces a node instead of excluding it, and also one whose
rank cannot run fewer micro-batches. All actions together have a budget, so that a false alarm, or a script whose ranks
differ in their work, cannot cause restarts without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlrover_hooks.master.core import micro_batch_shares
from dlrover_hooks.master.core.events import EndSlow, Reshare
from dlrover_hooks.master.core.job import Job, StragglerActions
from dlrover_hooks.master.core.rounds.members import Member
from dlrover_hooks.master.core.rounds.rendezvous import Round
from dlrover_hooks.protocol import StepPhase, StepPhases, StragglerPolicy

MOST_ACTIONS = 3
"""In a launch, as for stalls. They do not count as failures (`--max-restarts`), so they cannot end the job."""
COOLDOWN_S = 300.0
"""Between two actions: the steps after one differ, with cold caches or with fewer workers, and several ranks may be
slow for one reason, which the first action removes."""


FACTOR = 1.5
"""Multiple of the median from which on a rank is slow. DLRover's node check calls a node slow at 2, NVRx a rank at
1 / 0.7 of the fastest."""
SHARE = 0.1
"""Of the step's time that the others must lose. With less, a new process or node does not repay its start for long."""


class Response(NamedTuple):
    """`text`: an addition to the report of the slow rank. `acts`: the event that performs the action."""

    text: str = ""
    acts: EndSlow | Reshare | None = None


class SlowRank(NamedTuple):
    """A slow member, and what shows it. `windows`: of all live ranks, by rank. `reason`: for a person."""

    member: Member
    policy: StragglerPolicy
    phase: StepPhase
    windows: Sequence[StepPhases]
    reason: str


def response(job: Job, slow: SlowRank, now: float) -> Response:
    """What follows for a `slow` rank of the current round. `now`: the time that an event has now."""
    current, before = job.rounds.round, job.slow
    member, policy, reason = slow.member, slow.policy, slow.reason
    if current is None or policy is StragglerPolicy.REPORT or _ends(job, current):
        return Response()
    if why := obstacle(job, current, member, policy):
        return Response(f". {why}")
    balance = None
    if policy is StragglerPolicy.REBALANCE:
        balance = micro_batch_shares.rebalance(slow.windows, member.rank, slow.phase, factor=FACTOR, least=SHARE)
        if isinstance(balance, str) and not plans_nodes(job):
            return Response(f". {balance}")
        if isinstance(balance, str):
            balance, policy = None, StragglerPolicy.EXCLUDE
    if before.count and (passed_s := now - before.at) < COOLDOWN_S:
        return Response(f". Nothing is done yet: the last such action was {passed_s:.0f} s ago ({COOLDOWN_S:.0f} s)")
    spent = f" ({before.count + 1} of {MOST_ACTIONS} actions because of slow ranks)"
    if balance is not None:
        event = Reshare(job.name, current.number, member.incarnation, balance.shares, f"{reason}. {balance.text}")
        return Response(f". {balance.text}{spent}", event)
    names, what = [member.incarnation], "Restarting it"
    if policy is StragglerPolicy.EXCLUDE:
        others = current.at[member.node]
        names += [name for name in others if name != member.incarnation and current.members[name].live]
        what = f"{'Replacing' if plans_nodes(job) else 'Excluding'} node {member.node}"
    return Response(f". {what}{spent}", EndSlow(job.name, current.number, tuple(names), policy, reason))


def obstacle(job: Job, current: Round, member: Member, policy: StragglerPolicy) -> str:
    """Why nothing can be done about `member`; empty if something can. O(members) for EXCLUDE."""
    if member.launcher == member.incarnation:
        return "Nothing is done: it was not started by dlrover-hooks run, which would start it again"
    if job.slow.count >= MOST_ACTIONS:
        return f"Nothing is done: this job has used up its {MOST_ACTIONS} actions because of slow ranks"
    if policy is StragglerPolicy.REBALANCE:
        return "" if len(current.members) == current.live else "Nothing is done: members have left the round"
    if policy is StragglerPolicy.RELAUNCH:
        again = _place(member) in job.slow.places
        return "It is not restarted: it was slow before, and a restart did not help" if again else ""
    if plans_nodes(job):  # another node takes its place
        return ""
    if member.node == job.served_at:
        return f"Node {member.node} is not excluded: it serves the master, which would end with it"
    left = sum(one.live and one.node != member.node for one in current.members.values())
    left += sum(len(one.join.seats) for one in job.rounds.waiting.values() if one.join.node != member.node)
    if left < job.rounds.min_workers:
        remain = "1 worker would remain" if left == 1 else f"{left} workers would remain"
        return f"Node {member.node} is not excluded: {remain}, and the job needs {job.rounds.min_workers}"
    return ""


def plans_nodes(job: Job) -> bool:
    """The master plans the nodes of this job, so it can have one replaced."""
    return job.scaling is not None and not job.scaling.finished


def no_reshare(job: Job, current: Round, member: Member) -> bool:
    """True if a `Reshare` came too late: the round ends anyway, or the budget is spent by now."""
    return _ends(job, current) or bool(obstacle(job, current, member, StragglerPolicy.REBALANCE))


def counted(before: StragglerActions, now: float) -> StragglerActions:
    """The record with one more action, after which no place was restarted."""
    return StragglerActions(before.count + 1, now, before.places, before.excluded)


def noted(before: StragglerActions, member: Member, event: EndSlow, now: float) -> StragglerActions:
    """The record with one more action."""
    excluded = {member.node: event.reason} if event.policy is StragglerPolicy.EXCLUDE else {}
    places = (*before.places, _place(member))
    return StragglerActions(before.count + 1, now, places, before.excluded | excluded)


def readmitted(before: StragglerActions, node: str) -> StragglerActions:
    """The record once `node` is launched again: it takes part like any other."""
    if node not in before.excluded:
        return before
    excluded = {name: why for name, why in before.excluded.items() if name != node}
    return StragglerActions(before.count, before.at, before.places, excluded)


def _ends(job: Job, current: Round) -> bool:
    """The round is ending anyway: members are done, are preempted, or the job was given up."""
    return current.done > 0 or bool(job.leaving.nodes) or job.ending is not None


def _place(member: Member) -> str:
    return f"{member.node}/{member.local_rank}"
