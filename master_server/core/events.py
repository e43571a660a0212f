"""The master's internal events, and the envelope in which every event is journaled.

An event is either a request whose route has `event=True` or one of the structs below. `now` is in seconds, taken once
and journaled, so that a replay gives the same state. It starts with the time of day at which the journal is created.
From then on it counts the time during which a master worked, and does not follow the wall clock.
"""

from __future__ import annotations

import msgspec

from dlrover_hooks.errors import BadRequest
from dlrover_hooks.protocol import (
    ROUTES,
    Generation,
    JobSample,
    Message,
    OptimizeStage,
    ResourcePlan,
    Shares,
    StragglerPolicy,
)


class Lost(Message, frozen=True):
    """A verdict of `heartbeats`: a lease expired, or a connection ended and was not followed by a sign of life."""

    job: str
    incarnation: str
    reason: str = ""


class EndStalled(Message, frozen=True):
    """A verdict of `stalls`: the members `incarnations` of `round` made no steps, and are to be replaced.

    `step`: the greatest one that the job had made.
    """

    job: str
    round: int
    incarnations: tuple[str, ...]
    step: int


class EndSlow(Message, frozen=True):
    """A verdict of `stragglers`: a member of `round` is slow, and `incarnations` are to be ended because of it.

    They are the slow member alone, for a new process of its place, or first it and then the others of its node, which
    is excluded. `reason`: for a person.
    """

    job: str
    round: int
    incarnations: tuple[str, ...]
    policy: StragglerPolicy
    reason: str


class Reshare(Message, frozen=True):
    """A verdict of `stragglers`: the next round of the same ranks shares the micro-batches of a step as in `shares`
    (None: evenly), because the member `incarnation` of `round` is slow. `reason`: for a person.
    """

    job: str
    round: int
    incarnation: str
    shares: Shares | None
    reason: str


class Tick(Message, frozen=True):
    """A `Deadline` of this job is reached."""

    job: str


class Committed(Message, frozen=True):
    """The MANIFEST of `generation` is written."""

    job: str
    generation: Generation


class CommitFailed(Message, frozen=True):
    """Storage refused the MANIFEST of `generation`."""

    job: str
    generation: Generation
    reason: str = ""


class FinishWritten(Message, frozen=True):
    """The end of the job's run is recorded in storage."""

    job: str


class ForgetFinished(Message, frozen=True):
    """Delete the jobs that are over and had no event after `before`."""

    before: float


class Sampled(Message, frozen=True):
    """A window of a job whose nodes are planned was measured."""

    job: str
    sample: JobSample


class PlanMade(Message, frozen=True):
    """The optimizer has made a plan for the job, which is in `stage` from now on. Empty: nothing else changes.

    `verified`: it is compared with the speed before it. `predicted`: steps per second, if a model predicts them.
    """

    job: str
    plan: ResourcePlan
    stage: OptimizeStage
    reason: str
    predicted: float | None = None
    verified: bool = True
    answers_out_of_memory: bool = False
    """It is the plan for the nodes that were killed for memory."""


INTERNAL: tuple[type[Message], ...] = (
    Lost,
    EndStalled,
    EndSlow,
    Reshare,
    Sampled,
    PlanMade,
    Tick,
    Committed,
    CommitFailed,
    FinishWritten,
    ForgetFinished,
)
KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (*(route.request for route in ROUTES if route.event), *INTERNAL)
}


class Key(Message, frozen=True):
    """Idempotency key: the `seq`-th event that `incarnation` sent on `channel`. `seq` only increases."""

    incarnation: str
    channel: str
    seq: int


class Envelope(msgspec.Struct, frozen=True):
    """One journaled event."""

    now: float
    event: Message
    key: Key | None = None


class JournalRecord(msgspec.Struct, frozen=True, array_like=True):
    """An envelope on disk: the event's class name beside its bytes."""

    kind: str
    now: float
    key: Key | None
    event: msgspec.Raw


def encode(envelope: Envelope) -> bytes:
    """The envelope as MessagePack."""
    body = msgspec.Raw(msgspec.msgpack.encode(envelope.event))
    record = JournalRecord(kind=type(envelope.event).__name__, now=envelope.now, key=envelope.key, event=body)
    return msgspec.msgpack.encode(record)


def decode(data: bytes) -> Envelope:
    """The envelope from `encode`.

    Raises:
        msgspec.DecodeError, KeyError: the bytes are no encoded envelope, or this release has no such kind of event.
        BadRequest: this release has stricter rules for the event than the release that journaled it.
    """
    record = msgspec.msgpack.decode(data, type=JournalRecord)
    try:
        event = msgspec.msgpack.decode(record.event, type=KINDS[record.kind])
    except msgspec.ValidationError as error:
        raise BadRequest(f"{record.kind} is not valid: {error}.") from None
    return Envelope(now=record.now, key=record.key, event=event)
