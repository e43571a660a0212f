"""The store of a round: what a change does, what is refused, what a restart of the master keeps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, HooksError, Stale, TooLarge
from dlrover_hooks.master.core import job_registry, views
from dlrover_hooks.master.core.effects import Wake
from dlrover_hooks.master.core.events import Envelope, Key, decode, encode
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.rounds import key_value_store
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.master.runtime import Runtime
from dlrover_hooks.protocol import Change, KeyChange
from dlrover_hooks.testing import StorageFake

KEYS = st.sampled_from(["a", "b", "c"])
SMALL = st.sampled_from([b"", b"1", b"-20", b"x", b"yy"])
CHANGES = st.lists(st.builds(KeyChange, st.sampled_from(Change), KEYS, SMALL, SMALL), max_size=4)


def agent(name: str, **more: object) -> p.Join:
    fields: dict[str, object] = {
        "job": "job@agents",
        "incarnation": name,
        "node": f"node-{name}",
        "seats": (p.Seat(name, 0),),
        "host": "127.0.0.1",
        "port": 29500,
        "min_workers": 2,
        "max_workers": 2,
        "proposed_run": "run",
        "agents": True,
    }
    return p.Join(**(fields | more))  # type: ignore[arg-type]


def met(*names: str) -> job_registry.Master:
    """These agents sit in round 1."""
    state = job_registry.Master()
    for name in names:
        job_registry.apply(state, agent(name, min_workers=len(names), max_workers=len(names)), 0.0)
    return state


def change(*changes: KeyChange, who: str = "a", round: int = 1) -> p.ChangeKeys:
    return p.ChangeKeys("job@agents", who, round, changes)


def waiting(*keys: str, who: str = "a", round: int = 1) -> p.AwaitKeys:
    return p.AwaitKeys("job@agents", who, round, keys)


@given(st.lists(CHANGES, max_size=12), st.integers(0, 12))
def test_replay_gives_the_same_state_and_refusals_change_nothing(batches: list[list[KeyChange]], cut: int) -> None:
    """Through the journal's bytes, a snapshot at any point, and a repeated request (its first answer comes again)."""
    live, replayed = met("a", "b"), met("a", "b")
    for number, batch in enumerate(batches, 1):
        event, key, before = change(*batch), Key("a", "store", number), job_registry.encode(live)
        record = decode(encode(Envelope(now=1.0, event=event, key=key)))
        try:
            reply = job_registry.apply(live, event, 1.0, key).reply
        except HooksError:
            assert job_registry.encode(live) == before
            continue
        job_registry.apply(replayed, record.event, record.now, record.key)
        assert job_registry.apply(live, event, 2.0, key) == msgspec.structs.replace(
            job_registry.apply(live, event, 2.0, key), reply=reply, repeated=True
        )
        if number == cut:
            replayed = job_registry.decode(job_registry.encode(replayed))
    assert job_registry.encode(live) == job_registry.encode(replayed)
    keys = live.jobs["job@agents"].keys
    assert keys.nbytes == sum(len(name) + len(value) for name, value in keys.values.items())


@given(st.lists(CHANGES.filter(len), max_size=12))
def test_all_or_nothing(batches: list[list[KeyChange]]) -> None:
    """A batch does what its changes do one by one; if one of them is refused, none is made."""
    together, one_by_one = key_value_store.Keys(), key_value_store.Keys()
    for batch in batches:
        draft = msgspec.msgpack.decode(msgspec.msgpack.encode(one_by_one), type=key_value_store.Keys)
        try:
            alone = tuple(key_value_store.change(draft, [one])[0] for one in batch)
        except BadRequest:
            with pytest.raises(BadRequest):
                key_value_store.change(together, batch)
        else:
            one_by_one = draft
            assert key_value_store.change(together, batch) == alone
        assert together == one_by_one


def test_sizes_are_bounded() -> None:
    keys = key_value_store.Keys()
    with pytest.raises(TooLarge, match="1025 characters"):
        key_value_store.change(keys, [KeyChange(Change.SET, "k" * 1025, b"")])
    key_value_store.change(keys, [KeyChange(Change.SET, "k", bytes(key_value_store.LARGEST_VALUE))])
    with pytest.raises(TooLarge):
        key_value_store.change(keys, [KeyChange(Change.APPEND, "k", b"1")])
    more = [KeyChange(Change.SET, str(number), bytes(key_value_store.LARGEST_VALUE)) for number in range(62)]
    key_value_store.change(keys, more)
    with pytest.raises(TooLarge, match="at most"):
        key_value_store.change(keys, [KeyChange(Change.SET, "l", bytes(key_value_store.LARGEST_VALUE))])
    key_value_store.change(keys, [KeyChange(Change.DELETE, "0"), KeyChange(Change.SET, "l", b"")])
    many = [KeyChange(Change.SET, f"n{number}", b"") for number in range(key_value_store.MOST_KEYS)]
    with pytest.raises(TooLarge, match="keys"):
        key_value_store.change(keys, many)


def test_keys_live_as_long_as_their_round() -> None:
    """A fresh store for each round; a request of an older one, or of no member, is refused."""
    state = met("a", "b")
    job_registry.apply(state, change(KeyChange(Change.SET, "k", b"old")), 1.0)
    with pytest.raises(Stale):
        job_registry.apply(state, change(KeyChange(Change.SET, "k", b"x"), who="stranger"), 1.0)
    for name in ("a", "b"):
        job_registry.apply(state, agent(name), 2.0)
    assert state.jobs["job@agents"].keys == key_value_store.Keys()
    with pytest.raises(Stale, match=r"Round 1 .* is over"):
        job_registry.apply(state, change(KeyChange(Change.SET, "k", b"x")), 3.0)
    with pytest.raises(Stale):
        views.query(state, Nodes(), waiting("k"))


def test_who_waits_in_a_broken_round_is_told() -> None:
    """What is there can still be read; what is not will never come."""
    state, nodes = met("a", "b"), Nodes()
    job_registry.apply(state, change(KeyChange(Change.SET, "there", b"1")), 1.0)
    assert views.query(state, nodes, waiting("there", "not")) is None
    outcome = job_registry.apply(state, p.Leave("job@agents", "b", p.Departure.FAILED), 2.0)
    woken = {effect.topic for effect in outcome.effects if isinstance(effect, Wake)}
    assert woken & set(views.topics(state, waiting("there", "not")))
    assert views.query(state, nodes, waiting("there")) == p.KeyValues((b"1",))
    with pytest.raises(Stale, match="lost a member"):
        views.query(state, nodes, waiting("there", "not"))


def test_a_change_wakes_those_who_wait_for_the_key() -> None:
    """They wait for the first key that is missing, and again for the next one."""
    state = met("a", "b")
    for number, key in enumerate(("first", "second")):
        topics = set(views.topics(state, waiting("first", "second")))
        effects = job_registry.apply(state, change(KeyChange(Change.SET, key, b"1")), 1.0 + number).effects
        assert {effect.topic for effect in effects if isinstance(effect, Wake)} <= topics


# ---- agents' rounds -------------------------------------------------------------------------------------------------


def test_an_agents_round_trains_as_soon_as_it_is_formed() -> None:
    """Nobody attaches; a node that could be added is told of at once."""
    state, nodes = met("a"), Nodes()
    job_registry.apply(state, agent("a", min_workers=1, max_workers=3, last_call_s=0.0), 1.0)
    job = state.jobs["job@agents"]
    assert job.rounds.round is not None
    assert job.rounds.round.phase is p.Phase.TRAINING
    watch = p.Watch("job@agents", "a")
    assert views.query(state, nodes, watch) is None
    job_registry.apply(state, agent("b", min_workers=1, max_workers=3), 2.0)
    assert views.query(state, nodes, watch) == p.Notice(2, waiting=1)


def test_the_newest_nodes_bounds_count_until_somebody_says_otherwise() -> None:
    """min/max change while the job runs: those that meet again say nothing of them (max_workers=0)."""
    state = met("a")
    job_registry.apply(state, agent("b", min_workers=1, max_workers=2), 1.0)
    job_registry.apply(state, agent("a", min_workers=0, max_workers=0), 2.0)
    job = state.jobs["job@agents"]
    assert job.rounds.round is not None
    assert (job.rounds.min_workers, job.rounds.max_workers, job.rounds.round.world_size) == (1, 2, 2)


def test_who_was_told_something_is_not_suspected_for_having_heard_it(tmp_path: Path) -> None:
    """A thousand that are told of one break ask again, and the last of them is heard late. Not so a hang-up."""

    async def scene() -> tuple[float, float]:
        runtime = Runtime(SqliteJournal(tmp_path / "master.db"), storage=StorageFake(), lease_s=10.0, suspicion_s=0.5)
        runtime.start()
        for name in ("a", "b"):
            await runtime.event(agent(name))
        told, gone = (asyncio.ensure_future(runtime.wait(p.Watch("job@agents", name))) for name in ("a", "b"))
        while len(runtime.nodes.pulses) < 2 or not all(pulse.ears for pulse in runtime.nodes.pulses.values()):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        now, pulses = runtime._uptime.seconds(), dict(runtime.nodes.pulses)
        await runtime.event(p.Leave("job@agents", "b", p.Departure.FAILED))
        assert await told == p.Notice(1, broken=True)
        found = [pulses["job@agents", name].suspect_until - now for name in ("a", "b")]
        await runtime.close()
        return found[0], found[1]

    after_an_answer, after_a_hang_up = asyncio.run(scene())
    assert 5.0 < after_an_answer <= 11.0
    assert after_a_hang_up < 1.0
