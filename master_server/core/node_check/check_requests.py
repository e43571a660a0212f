"""Requests of nodes that are checked, and the deadlines of a check. O(1) for each, O(nodes log nodes) once a round."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core.effects import Wake, check_topic
from dlrover_hooks.master.core.job import Effects, Job, arm, knows
from dlrover_hooks.master.core.node_check import check_verdicts
from dlrover_hooks.master.core.node_check.check_state import (
    Candidate,
    CheckResult,
    Contact,
    NodeCheck,
    RunningCheck,
)
from dlrover_hooks.master.core.node_check.pairing import Standings, next_pairs
from dlrover_hooks.protocol import (
    LISTED_NODES,
    AwaitCheck,
    CheckJoined,
    CheckPeer,
    CheckReport,
    CheckStep,
    Done,
    JoinCheck,
    KeptOut,
    NodeVerdict,
    ReportTransfer,
    ShowCheck,
)

_REPORT_S = 5.0
"""For a node's report to arrive, after the time for its transfer."""


def join(job: Job, event: JoinCheck, now: float, effects: Effects) -> CheckJoined:
    """A node takes part in the next check. A request that is repeated changes nothing. Raises BadRequest."""
    check = job.check
    if event.least > event.most or not event.node:
        raise BadRequest(f"A check of {event.least} to {event.most} nodes for node {event.node!r}: that is none.")
    if check.running is not None and event.incarnation in check.running.candidates:
        return CheckJoined(number=check.running.number)
    if not check.coming:
        check.first_at = now
    check.coming.pop(check.latest.get(event.node, ""), None)  # an earlier process of this node
    check.coming[event.incarnation], check.latest[event.node] = event, event.incarnation
    check.wanted = 1 if job.live else event.least
    check.begins_at = check.first_at + event.gather_s
    if len(check.coming) >= event.most or job.live:
        check.begins_at = now
    elif len(check.coming) >= check.wanted:
        check.begins_at = min(check.begins_at, now + event.last_call_s)
    _advance(job, now, effects)
    return CheckJoined(number=check.number + (event.incarnation in check.coming))


def transfer(job: Job, event: ReportTransfer, now: float, effects: Effects) -> Done:
    """A node's transfer has ended. Raises Stale."""
    running = job.check.running
    if running is None or event.step != job.check.step or event.incarnation not in running.pairs:
        _place(job, event.incarnation)
        return Done()
    running.reports.setdefault(event.incarnation, event)
    running.lost.discard(event.incarnation)  # only its connection to the master was interrupted
    _advance(job, now, effects)
    return Done()


def part(job: Job, incarnation: str, now: float, effects: Effects) -> None:
    """A process has left, or was lost: its node is not waited for in this round, if its peer does not reach it either.

    One that is in no transfer now may have come back before the next one.
    """
    check = job.check
    if not check.takes_part(incarnation):
        return
    if (left := check.coming.pop(incarnation, None)) is not None:
        del check.latest[left.node]
    running = check.running
    if running is not None and incarnation in running.pairs and incarnation not in running.reports:
        running.lost.add(incarnation)
    _advance(job, now, effects)


def tick(job: Job, now: float, effects: Effects) -> None:
    """A deadline of the job is reached, perhaps one of its check."""
    _advance(job, now, effects)


def _advance(job: Job, now: float, effects: Effects) -> None:
    """Begin a check, end a round or a check, as is due."""
    check = job.check
    while True:
        running = check.running
        if running is None and check.coming and now >= check.begins_at:
            _begin(check)
        elif running is not None and (now >= running.until or _is_complete(running)):
            _end_round(running)
        else:
            break
        assert check.running is not None
        _begin_round(job, check.running, now)
        effects.append(Wake(topic=check_topic(job.name)))
    arm(job, now, effects)


def _is_complete(running: RunningCheck) -> bool:
    if len(running.reports) + len(running.lost) < len(running.pairs):
        return False
    reports = (running.reports.get(running.pairs[name]) for name in running.lost)
    return all(report is None or report.speed is None for report in reports)


def _begin(check: NodeCheck) -> None:
    check.number += 1
    order = sorted(check.coming.values(), key=lambda one: one.node)
    candidates = {one.incarnation: Candidate(joined=one) for one in order}
    check.running = RunningCheck(number=check.number, wanted=check.wanted, candidates=candidates)
    check.coming, check.latest, check.begins_at = {}, {}, math.inf


def _begin_round(job: Job, running: RunningCheck, now: float) -> None:
    """The next round, or the end of the check."""
    check = job.check
    pairs = next_pairs(Standings(running.candidates), running.round + 1)
    check.step += 1
    running.pairs = dict(pairs) | {other: one for one, other in pairs}
    running.reports, running.lost = {}, set()
    if not pairs:
        check.last, check.running = check_verdicts.judge(running), None
        _keep_out(check, check.last)
        for name in running.candidates:
            if not knows(job, name):
                job.replies.pop(name, None)
        return
    running.round += 1
    running.until = now + max(one.joined.transfer_s for one in running.candidates.values()) + _REPORT_S


def _keep_out(check: NodeCheck, result: CheckResult) -> None:
    for one in result.nodes:
        check.kept_out.pop(one.node, None)
        if one.verdict is NodeVerdict.BAD:
            check.kept_out[one.node] = one.reason


def _end_round(running: RunningCheck) -> None:
    """Note the transfers of the round for both nodes of each pair."""
    for name, other in running.pairs.items():
        if name in running.lost:
            running.candidates[name].silent = "its process ended, or lost its connection to the master, in a transfer"
        elif name not in running.reports:
            peer, within_s = running.candidates[other].joined.node, running.candidates[name].joined.transfer_s
            running.candidates[name].silent = f"it did not report its transfer with {peer} within {within_s:g} s"
    for name, other in running.pairs.items():
        contact = _contact(running, name, other)
        if contact is not None:
            running.candidates[name].contacts.append(contact)


def _contact(running: RunningCheck, name: str, other: str) -> Contact | None:
    """The transfer of `name` with `other`, as it counts for `name`. None: a peer that is silent shows nothing."""
    mine, theirs = running.reports.get(name), running.reports.get(other)
    if mine is None or theirs is None:
        return None
    speeds = [one.speed for one in (mine, theirs) if one.speed is not None]
    if len(speeds) == 2:
        trips = [one.round_trip_s for one in (mine, theirs) if one.round_trip_s is not None]
        return Contact(peer=other, speed=min(speeds), round_trip_s=min(trips, default=None))
    return Contact(peer=other, failed=theirs.failed or mine.failed, unreachable=mine.speed is not None)


# ---- queries ---------------------------------------------------------------------------------------------------------


def awaited(job: Job, request: AwaitCheck) -> CheckStep | None:
    """The node's next task, or its report; None: not yet. Raises Stale if it is in no check."""
    check, name = job.check, request.incarnation
    if name in check.coming:
        return None
    if check.running is None or name not in check.running.candidates:
        return CheckStep(step=check.step, report=report(job, place=_place(job, name)))
    running = check.running
    other = running.pairs.get(name)
    if other is None or request.after >= check.step or name in running.reports:
        return None
    one, peer = running.candidates[name].joined, running.candidates[other].joined
    return CheckStep(
        step=check.step,
        round=running.round,
        peer=CheckPeer(node=peer.node, incarnation=other, host=peer.host, port=peer.port, secret=peer.secret),
        dials_first=one.node < peer.node,
        within_s=one.transfer_s,
    )


def show(job: Job, request: ShowCheck) -> CheckReport:
    """The last check, with all its nodes, and the state of the next one."""
    del request
    check = job.check
    return msgspec.structs.replace(
        report(job),
        kept_out=kept_out(job),
        gathering=tuple(sorted(check.latest)[:LISTED_NODES]),
        running=check.running.number if check.running is not None else 0,
    )


def report(job: Job, *, place: int | None = None) -> CheckReport:
    """The last check; with `place` for the node at that index of it, so that it is short."""
    last = job.check.last
    if last is None:
        return CheckReport()
    if place is None:
        return CheckReport(number=last.number, wanted=last.wanted, rounds=last.rounds, nodes=last.nodes)
    own = last.nodes[place : place + 1]
    listed = last.listed[:place] + own + last.listed[place + 1 :]
    rest = Counter(last.counts)
    rest.subtract(one.verdict.value for one in listed)
    return CheckReport(number=last.number, wanted=last.wanted, rounds=last.rounds, nodes=listed, unlisted=dict(+rest))


def kept_out(job: Job) -> tuple[KeptOut, ...]:
    """The nodes that are bad by their last check, or excluded as slow; at most `LISTED_NODES`."""
    kept_out = job.check.kept_out | job.slow.excluded
    return tuple(KeptOut(node, why) for node, why in sorted(kept_out.items())[:LISTED_NODES])


def _place(job: Job, incarnation: str) -> int:
    """Its index in the last check. Raises Stale if it took no part in it, nor takes part in one that runs."""
    check = job.check
    if check.running is not None and incarnation in check.running.candidates:
        return -1
    if check.last is None or incarnation not in check.last.places:
        raise Stale(
            f"{incarnation!r} is in no node check of job {job.name!r}.",
            hint="Another process of this node may have taken its place. Run it again.",
        )
    return check.last.places[incarnation]
