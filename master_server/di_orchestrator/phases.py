"""The phases of a `DIJob`. Pure.

The images of the design are lost: how RESTARTING and RESCHEDULING end, and the counters, follow DI Orchestrator's code
(opendilab/DI-orchestrator dde78a72, 2023-01).
"""

from __future__ import annotations

import msgspec

from dlrover_hooks.master.di_orchestrator.di_job_resource import DIJobPhase as Phase, DIJobSpec, DIJobStatus


class ReplicaCounts(msgspec.Struct, frozen=True):
    """The Pods of a job.

    `wanted`: so many are to be. `created`: those that exist and are not being deleted, without those from before the
    last restart. `ready`, `succeeded` and `failed` are parts of them. `placed`: each is on the node that
    `status.allocation` says, where it says one.
    """

    wanted: int
    created: int = 0
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    placed: bool = True

    @property
    def complete(self) -> bool:
        """All that are wanted exist, where they are to be, and no other one."""
        return self.wanted > 0 and self.created == self.wanted and self.placed


def next_phase(spec: DIJobSpec, status: DIJobStatus, pods: ReplicaCounts) -> DIJobStatus:
    """The status with the phase that follows, and its counters. It is the same where nothing follows."""
    phase = status.phase
    if phase is Phase.RESCHEDULING and not pods.wanted:
        return _to(status, Phase.PENDING)
    if phase in (Phase.PENDING, Phase.RESTARTING, Phase.RESCHEDULING):
        return _to(status, Phase.STARTING) if pods.complete else status
    if phase in (Phase.STARTING, Phase.RUNNING):
        return _of_started(spec, status, pods)
    return status


def _of_started(spec: DIJobSpec, status: DIJobStatus, pods: ReplicaCounts) -> DIJobStatus:
    if pods.failed:
        if spec.backoff_limit is not None and status.restarts >= spec.backoff_limit:
            return _to(status, Phase.FAILED)
        return msgspec.structs.replace(status, phase=Phase.RESTARTING, restarts=status.restarts + 1)
    if pods.succeeded and pods.succeeded == pods.wanted:
        return _to(status, Phase.SUCCEEDED)
    if not pods.complete:
        return msgspec.structs.replace(status, phase=Phase.RESCHEDULING, reschedules=status.reschedules + 1)
    if status.phase is Phase.STARTING and pods.ready + pods.succeeded == pods.wanted:
        return _to(status, Phase.RUNNING)
    return status


def _to(status: DIJobStatus, phase: Phase) -> DIJobStatus:
    return msgspec.structs.replace(status, phase=phase)
