"""Numbers of messages: each has bounds, and at the bounds the master's own arithmetic and journal still work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest
from dlrover_hooks.master import openapi
from dlrover_hooks.master.core import events, job_registry, views
from dlrover_hooks.master.core.events import Envelope, Key
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job_registry import Master
from tests.e2e.job_script import attach, held, join, vote

LARGEST = p.LARGEST_STEP


def integers(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every integer that a JSON Schema describes."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            yield path, schema
        for name, inner in schema.items():
            yield from integers(inner, f"{path}.{name}")
    elif isinstance(schema, list):
        for inner in schema:
            yield from integers(inner, path)


def test_every_integer_has_bounds() -> None:
    found = dict(integers(openapi.document()["components"]["schemas"], ""))
    assert len(found) > 100
    unbounded = [path for path, schema in found.items() if not {"minimum", "maximum"} <= schema.keys()]
    assert unbounded == []


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (p.Hold, b'{"job": "job", "incarnation": "w0", "passed": 18446744073709551615}'),
        (p.Attach, b'{"job": "job", "incarnation": "w0", "node": "n", "pid": 1, "heard": 18446744073709551615}'),
        (p.Heartbeat, b'{"job": "job", "incarnation": "w0", "step": 1180591620717411303424}'),
        (p.TakeLeases, b'{"job": "job", "incarnation": "w0", "name": "d", "fence": 1, "rate": 1e308}'),
    ],
)
def test_oversized_numbers_are_malformed(kind: type[p.Message], body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=kind)


class Books:
    """A core whose events and states are encoded as the journal does, and whose replies travel as JSON."""

    def __init__(self) -> None:
        self.state = Master()

    def apply(self, event: Any, now: float = 1e9) -> Any:
        sent = msgspec.json.decode(msgspec.json.encode(event), type=type(event))
        key = Key(incarnation=event.incarnation, channel="c", seq=1) if isinstance(event, p.Attach) else None
        envelope = events.decode(events.encode(Envelope(now=now, event=sent, key=key)))
        reply = job_registry.apply(self.state, envelope.event, envelope.now, envelope.key).reply
        assert job_registry.encode(job_registry.decode(job_registry.encode(self.state))) == job_registry.encode(
            self.state
        )
        return msgspec.json.decode(msgspec.json.encode(reply), type=type(reply))

    def ask(self, request: Any) -> Any:
        reply = views.query(self.state, Nodes(), request)
        return msgspec.json.decode(msgspec.json.encode(reply), type=type(reply))


def trains(**more: Any) -> Books:
    books = Books()
    books.apply(join())
    for worker in ("w0", "w1"):
        books.apply(attach(worker, **more))
    return books


def test_the_greatest_attempt_and_step() -> None:
    """What the master counts on from them is sent and journaled like any number."""
    books = trains(heard=LARGEST, save_to="/tree", persist_every=p.LARGEST_EVERY)
    plan = books.ask(p.AwaitPlan("job", "w0"))
    assert plan.attempt == LARGEST + 1
    for rank in range(2):
        books.apply(vote(rank, LARGEST, attempt=plan.attempt, step_s=5e-324, copy_s=1e9, passed=LARGEST))
    assert books.ask(p.Heartbeat("job", "w0", step=LARGEST)).cadence.every == p.LARGEST_EVERY
    books.apply(p.Preempt("job", "w0", "node-agent", 1e9, "notice"))
    for worker in ("w0", "w1"):
        books.apply(p.Hold("job", worker, LARGEST))
    assert books.ask(p.AwaitParting("job", "w0")).step == LARGEST + 1
    assert books.ask(p.ShowJob("job")).step == LARGEST


def test_no_attempt_follows_the_last() -> None:
    books = Books()
    books.apply(join())
    with pytest.raises(BadRequest, match="attempt"):
        books.apply(attach("w0", held=(held(5, 0, attempt=LARGEST + 1),)))
    assert not books.ask(p.ShowJob("job")).members[0].attached


def test_a_forged_world_costs_no_memory() -> None:
    """A slot of a million ranks is not whole; finding that out is quick."""
    books = trains(held=(held(5, 0, world=1 << 20),))
    assert books.ask(p.AwaitPlan("job", "w0")).restore is None


@pytest.mark.parametrize("rate", [0.0, 5e-324, 1e15])
@pytest.mark.parametrize("begin", [0, (1 << 63) - 2])
def test_leases_at_the_end_of_numbers(rate: float, begin: int) -> None:
    """A stream that begins at the last position, and holders of any speed."""
    books = trains()
    opening = p.OpenLedger("job", "w0", "d", "f", (p.Partition(begin=begin),), shard_size=(1 << 53) - 1)
    fence = books.apply(opening).fence
    taken = books.apply(p.TakeLeases("job", "w0", "d", fence, 64, rate=rate))
    assert taken.leases[0].lo == begin
    for lease in taken.leases:
        books.apply(p.TakeLeases("job", "w0", "d", fence, 1, acks=(p.Ack(lease.id, lease.hi),), rate=rate))
    view = books.ask(p.ShowLedger("job", "d"))
    assert view.done > 0
