"""What a core machine asks its surroundings to do. The runtime does it after the event is durable, never before."""

from __future__ import annotations

from typing import Any

from dlrover_hooks.protocol import Manifest, Message, Retention


class Wake(Message, frozen=True):
    """Whoever waits on `topic` should ask again."""

    topic: str


class RoundFormed(Message, frozen=True):
    """Seats were given: their workers must attach in time."""

    job: str


class Deadline(Message, frozen=True):
    """Send `Tick(job)` at `at` (seconds, the clock of `now`). Replaces the job's earlier deadline."""

    job: str
    at: float


class CommitGeneration(Message, frozen=True):
    """Write the MANIFEST, then `latest`, then remove what `keep` does not keep; answer Committed or CommitFailed."""

    job: str
    url: str
    options: dict[str, Any]
    manifest: Manifest
    keep: int | Retention


class WriteFinished(Message, frozen=True):
    """Write down beside the checkpoints that `run` ended at `step`; answer FinishWritten."""

    job: str
    url: str
    options: dict[str, Any]
    run: str
    step: int


class ReleaseClaims(Message, frozen=True):
    """The job writes no more: let other jobs have its checkpoint URLs, unless it writes again by then."""

    job: str


Effect = Wake | RoundFormed | Deadline | CommitGeneration | WriteFinished | ReleaseClaims


def round_topic(job: str) -> str:
    """Woken when a round is formed."""
    return f"round {job}"


def plan_topic(job: str) -> str:
    """Woken when there is a new plan, or none to wait for."""
    return f"plan {job}"


def watch_topic(job: str) -> str:
    """Woken when the round broke or the job ended."""
    return f"watch {job}"


def parting_topic(job: str) -> str:
    """Woken when it is agreed where the round parts, or cannot be any more."""
    return f"parting {job}"


def key_topic(job: str, key: str) -> str:
    """Woken when `key` of the round's store changed."""
    return f"key {job}\n{key}"


def shards_topic(job: str, name: str) -> str:
    """Woken when positions of ledger `name` came back, an epoch of it ended, or its fence rose."""
    return f"shards {job}\n{name}"
