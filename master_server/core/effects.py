"""Effects: the actions that an event requires of the runtime, which performs them only after the event is durable."""

from __future__ import annotations

from typing import Any

from dlrover_hooks.protocol import Manifest, Message, Retention


class Wake(Message, frozen=True):
    """Requests that wait on `topic` are to be evaluated again."""

    topic: str


class RoundFormed(Message, frozen=True):
    """Ranks were assigned: the workers must attach in time."""

    job: str


class Deadline(Message, frozen=True):
    """Send `Tick(job)` at `at` (seconds, the clock of `now`). Replaces the job's earlier deadline. Infinite: none."""

    job: str
    at: float


class CommitGeneration(Message, frozen=True):
    """Write the MANIFEST, then `latest`, then apply the retention `keep`. Results in Committed or CommitFailed."""

    job: str
    url: str
    options: dict[str, Any]
    manifest: Manifest
    keep: int | Retention


class WriteFinished(Message, frozen=True):
    """Record beside the checkpoints that `run` ended at `step`. Results in FinishWritten."""

    job: str
    url: str
    options: dict[str, Any]
    run: str
    step: int


class ReleaseClaims(Message, frozen=True):
    """The job no longer writes: release its checkpoint URLs for other jobs, unless it writes again by then."""

    job: str


class PlanDue(Message, frozen=True):
    """The state of a job whose nodes are planned has changed: a plan may be due before the next window."""

    job: str


Effect = PlanDue | Wake | RoundFormed | Deadline | CommitGeneration | WriteFinished | ReleaseClaims


def round_topic(job: str) -> str:
    """Woken when a round is formed or will not be formed."""
    return f"round {job}"


def plan_topic(job: str) -> str:
    """Woken when there is a new plan, or no plan to wait for."""
    return f"plan {job}"


def watch_topic(job: str) -> str:
    """Woken when the round broke, the job ended, a member is preempted, or the number of newcomers changed."""
    return f"watch {job}"


def parting_topic(job: str) -> str:
    """Woken when the step at which members leave is agreed, or can no longer be agreed."""
    return f"parting {job}"


def tasks_topic(job: str) -> str:
    """Woken when the tasks of a parameter server job changed."""
    return f"tasks {job}"


def nodes_topic(job: str) -> str:
    """Woken when the nodes that a job is to have changed."""
    return f"nodes {job}"


def roles_topic(job: str) -> str:
    """Woken when the workers of a job of several roles changed."""
    return f"roles {job}"


def cluster_topic(job: str) -> str:
    """Woken when a cluster version may have been announced."""
    return f"cluster {job}"


def check_topic(job: str) -> str:
    """Woken when a round of transfers of its node check begins, or the check is over."""
    return f"check {job}"


def key_topic(job: str, key: str) -> str:
    """Woken when `key` of the round's store changed."""
    return f"key {job}\n{key}"


def shards_topic(job: str, name: str) -> str:
    """Woken when positions of ledger `name` were returned, an epoch of it ended, or its fence increased."""
    return f"shards {job}\n{name}"
