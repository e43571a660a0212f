"""Applies an event to a job exactly once. A repeated event gets the reply of its first occurrence.

`apply` validates before it mutates, so an error leaves the state unchanged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core.checkpoints import restore_choice, save_votes
from dlrover_hooks.master.core.effects import Effect, Wake, key_topic
from dlrover_hooks.master.core.events import (
    CommitFailed,
    Committed,
    EndSlow,
    EndStalled,
    FinishWritten,
    Key,
    Lost,
    PlanMade,
    Reshare,
    Sampled,
    Tick,
)
from dlrover_hooks.master.core.job import (
    MOST_FAILURE_TIMES,
    Effects,
    Job,
    Remembered,
    arm_for_persist,
    committing,
    in_round,
    knows,
    seat,
)
from dlrover_hooks.master.core.job_scaling import plan_requests
from dlrover_hooks.master.core.leased_data import job_ledgers
from dlrover_hooks.master.core.node_check import check_requests
from dlrover_hooks.master.core.ps_clusters import task_requests
from dlrover_hooks.master.core.roles import role_requests
from dlrover_hooks.master.core.rounds import key_value_store, member_changes, preemption_agreement
from dlrover_hooks.protocol import (
    ROUTES,
    Attach,
    ChangeKeys,
    Connected,
    Done,
    EndTasks,
    Exited,
    Fenced,
    Hold,
    Join,
    JoinCheck,
    KeyValues,
    Leave,
    Loaded,
    MasterRestarted,
    Message,
    MigrateTask,
    NodesRelaunched,
    OpenLedger,
    PluginFailed,
    Preempt,
    RegisterTask,
    RegisterWorker,
    ReportNodes,
    ReportTask,
    ReportTransfer,
    RestartRole,
    ScaleNodes,
    ScaleTasks,
    StartRoles,
    StartScaling,
    StopRoles,
    TakeLeases,
    Vote,
    Voted,
    WorkerEnded,
    WorkerWaits,
)


class EventOutcome(msgspec.Struct, frozen=True):
    """The result of an event: its reply and its effects."""

    reply: Message
    effects: tuple[Effect, ...] = ()
    repeated: bool = False
    """The event was applied before: nothing changed and nothing is journaled."""


_REPLY: dict[type[Message], type[Message]] = {route.request: route.reply for route in ROUTES}


def apply(job: Job, event: Message, now: float, key: Key | None = None) -> EventOutcome:
    """Apply `event` to `job`. If this raises a MasterError nothing was changed."""
    if key is not None and (reply := repeated(job, event, key)) is not None:
        return EventOutcome(reply=reply, repeated=True)
    effects: Effects = []
    failures = job.failures
    reply = _TABLE[type(event)](job, event, now, effects)
    job.changed_at = now
    if job.failures != failures:
        before = job.failed_at if job.failures > failures else []
        job.failed_at = [*before, *[now] * (job.failures - failures)][-MOST_FAILURE_TIMES:]
    if key is not None and (knows(job, key.incarnation) or isinstance(event, (Leave, RestartRole))):
        # a sender that leaves is unknown afterwards but may repeat its request, and a user is never known; a join
        # without a rank is applied again
        channels = job.replies.setdefault(key.incarnation, {})
        channels[key.channel] = Remembered(seq=key.seq, event=_checksum(event), reply=msgspec.json.encode(reply))
    return EventOutcome(reply=reply, effects=tuple(effects))


def repeated(job: Job, event: Message, key: Key) -> Message | None:
    """The reply to an event that was applied before; None if it was not. Raises Stale if a later one was."""
    last = job.replies.get(key.incarnation, {}).get(key.channel)
    if last is None or key.seq > last.seq:
        return None
    if key.seq == last.seq and last.event == _checksum(event):
        return msgspec.json.decode(last.reply, type=_REPLY[type(event)])
    raise Stale(
        f"Request {key.seq} of {key.incarnation!r} on channel {key.channel!r} comes after another request {last.seq}.",
        hint="Sequence numbers of a channel only count up: use one client per incarnation, or a channel for each.",
    )


def _checksum(event: Message) -> int:
    return zlib.crc32(msgspec.msgpack.encode(event))


def _vote(job: Job, event: Vote, now: float, effects: Effects) -> Voted:
    current, member = seat(job, event.incarnation)
    generation = event.generation
    stale = generation.run != job.run or generation.attempt != current.attempt
    if stale or current.attempt == 0 or job.finished:
        raise Stale(
            f"Vote of rank {event.rank} for {generation}, but job {job.name!r} is at attempt {job.attempt} of run "
            f"{job.run[:8]}, round {current.number} ({current.phase.value}).",
            hint="Drop this generation and follow the plan of the current round.",
        )
    if event.rank != member.rank or event.world_size != current.world_size or generation.step < 0:
        raise BadRequest(
            f"Vote as rank {event.rank} of {event.world_size} for step {generation.step}, but incarnation "
            f"{event.incarnation!r} is rank {member.rank} of {current.world_size}."
        )
    commit = save_votes.vote(job.saves, job.settings, job.name, event, now)
    if commit is not None:
        effects.append(committing(job, commit))
    arm_for_persist(job, now, effects)
    return save_votes.voted(job.saves)


def _change_keys(job: Job, event: ChangeKeys, now: float, effects: Effects) -> KeyValues:
    del now
    in_round(job, event.incarnation, event.round)
    values = key_value_store.change(job.keys, event.changes)
    effects += [Wake(topic=topic) for topic in sorted({key_topic(job.name, one.key) for one in event.changes})]
    return KeyValues(values)


def _committed(job: Job, event: Committed, now: float, effects: Effects) -> Done:
    save_votes.committed(job.saves, job.settings, event.generation, now)
    arm_for_persist(job, now, effects)
    return Done()


def _commit_failed(job: Job, event: CommitFailed, now: float, effects: Effects) -> Done:
    del effects
    save_votes.commit_failed(job.saves, job.settings, event.generation, now)
    return Done()


def _finish_written(job: Job, event: FinishWritten, now: float, effects: Effects) -> Done:
    del event, now, effects
    job.finish_written = True
    return Done()


_TABLE: dict[type[Message], Callable[[Job, Any, float, Effects], Message]] = {
    Join: member_changes.join,
    Attach: restore_choice.attach,
    Loaded: restore_choice.loaded,
    Exited: member_changes.exited,
    Leave: member_changes.leave,
    Preempt: preemption_agreement.preempt,
    Hold: preemption_agreement.hold,
    Vote: _vote,
    ChangeKeys: _change_keys,
    OpenLedger: job_ledgers.open_ledger,
    TakeLeases: job_ledgers.take,
    ScaleTasks: task_requests.scale,
    MigrateTask: task_requests.migrate,
    RegisterTask: task_requests.register_task,
    ReportTask: task_requests.report,
    Fenced: task_requests.fenced,
    Connected: task_requests.connected,
    EndTasks: task_requests.end_tasks,
    StartRoles: role_requests.start,
    RegisterWorker: role_requests.register,
    WorkerEnded: role_requests.ended,
    WorkerWaits: role_requests.waits,
    MasterRestarted: role_requests.master_restarted,
    PluginFailed: role_requests.plugin_failed,
    NodesRelaunched: role_requests.nodes_relaunched,
    RestartRole: role_requests.restart_role,
    StopRoles: role_requests.stop,
    JoinCheck: check_requests.join,
    ReportTransfer: check_requests.transfer,
    StartScaling: plan_requests.start,
    ScaleNodes: plan_requests.scale,
    ReportNodes: plan_requests.report,
    Sampled: plan_requests.sampled,
    PlanMade: plan_requests.made,
    Lost: member_changes.lost,
    EndStalled: member_changes.end_stalled,
    EndSlow: member_changes.end_slow,
    Reshare: member_changes.reshare,
    Tick: member_changes.tick,
    Committed: _committed,
    CommitFailed: _commit_failed,
    FinishWritten: _finish_written,
}
