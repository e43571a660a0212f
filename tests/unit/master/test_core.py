"""Rules of the core that a random walk meets too seldom."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import BadRequest, Stale
from dlrover_hooks.master.core import heartbeats, job_registry
from dlrover_hooks.master.core.checkpoints import restore_sources, save_votes
from dlrover_hooks.master.core.events import Key
from dlrover_hooks.master.core.heartbeats import Nodes
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.rounds import rendezvous
from dlrover_hooks.testing import MasterFake, StorageFake
from tests.e2e.job_script import RUN, attach, held, join, stored, vote


def training(**more: Any) -> MasterFake:
    """Two workers of one node train."""
    master = MasterFake()
    master.call(join())
    for worker in ("w1", "w0"):
        master.call(attach(worker, **more))
    return master


def store(master: MasterFake) -> StorageFake:
    """Its storage."""
    assert isinstance(master.store, StorageFake)
    return master.store


def ask(master: MasterFake, after: int = 0) -> p.Plan:
    return master.call(p.AwaitPlan("job", "w0", after))


def test_full_restart_keeps_ranks() -> None:
    """New incarnations on the old places get the old ranks, whatever the order in which they come."""
    master = MasterFake()
    for node in ("a", "b"):
        master.call(join(node, 1, lives=node))
    for node in ("a", "b"):
        master.call(p.Exited("job", node, f"{node}0", 1))
    for node in ("b", "a"):
        master.call(join(node, 1, lives=f"new-{node}"))
    assert master.call(p.AwaitRound("job", "a", 1)).ranks == (0,)


def test_fixed_ranks_are_used() -> None:
    """torchrun has fixed the ranks: they are what the world gets; a restarted worker displaces its dead self."""
    master = MasterFake()
    master.call(join("a", seats=(p.Seat("a0", 0, 1),)))
    master.call(join("a-again", seats=(p.Seat("a1", 0, 1),), node="node-a"))
    master.call(join("b", seats=(p.Seat("b0", 0, 0),)))
    assert master.call(p.AwaitRound("job", "a-again")).ranks == (1,)
    with pytest.raises(Stale):
        master.call(p.AwaitRound("job", "a"))
    with pytest.raises(BadRequest, match="torchrun"):
        master.call(join("c", seats=(p.Seat("c0", 0, 0), p.Seat("c1", 0))))


def test_last_call_lets_latecomers_in() -> None:
    """Between min and max the round waits for `last_call_s` after the last join."""
    master = MasterFake()
    for index in range(3):
        master.call(join(str(index), 1, lives=f"{index}-", low=1, high=4, last_call_s=1.0))
        master.advance(0.6)
    assert master.state.jobs["job"].rounds.round is None
    master.advance(0.5)
    assert master.call(p.AwaitRound("job", "2")).world_size == 3


def test_surplus_waits_for_a_place() -> None:
    """A node that is too many gets the seat of the next one that dies."""
    master = MasterFake()
    for node in ("a", "b", "c"):
        master.call(join(node, 1, lives=node))
    assert master.call(p.AwaitRound("job", "c", timeout_s=0.0)).round is None
    master.call(p.Leave("job", "a0", p.Departure.PREEMPTED))
    master.call(join("b", 1, lives="b"))
    assert master.call(p.AwaitRound("job", "c", timeout_s=0.0)).ranks == (1,)


@pytest.mark.parametrize(
    ("slots", "found", "step", "source"),
    [
        ((held(8, 0), held(8, 1)), (stored(8),), 8, p.Source.MEMORY),
        ((held(8, 0), held(8, 1)), (stored(9),), 9, p.Source.STORAGE),
        ((held(8, 0), held(8, 1)), (stored(1, attempt=2),), 1, p.Source.STORAGE),
        ((held(9, 0), held(8, 0), held(8, 1)), (), 8, p.Source.MEMORY),
        (tuple(held(8, rank, 3) for rank in range(3)), (), 8, p.Source.MEMORY),
        ((held(8, 0, 3), held(8, 1, 3)), (stored(2),), 2, p.Source.STORAGE),
    ],
)
def test_restore_choice(slots: tuple[p.Held, ...], found: tuple[p.Manifest, ...], step: int, source: p.Source) -> None:
    """Newest whole generation; memory before storage at equal age; other world sizes too."""
    chosen = ask(training(held=slots, stored=found, save_to="/tree")).restore
    assert chosen is not None
    assert (chosen.generation.step, chosen.source) == (step, source)


def test_require_and_never_and_url() -> None:
    assert "require" in (ask(training(resume="require")).refused or "")
    never = ask(training(resume="never", held=(held(8, 0), held(8, 1))))
    assert (never.restore, never.attempt) == (None, 1)
    other = ask(training(resume="/other", held=(held(8, 0), held(8, 1)), stored=(stored(3),), save_to="/tree"))
    assert other.restore is not None
    assert (other.restore.generation.step, other.restore.url) == (3, "/other")


def test_weights_begin_a_run_of_its_own() -> None:
    """Of another run's generation; later rounds go on with the run's own, and without one take the weights again."""
    theirs = msgspec.structs.replace(stored(3), generation=p.Generation(4, 3, "b" * 32))
    for resume, folder in (("weights", "/tree"), ("weights:/other", "/other")):
        plan = ask(training(resume=resume, stored=(theirs,), save_to="/tree"))
        assert plan.restore is not None
        assert (plan.restore.weights, plan.restore.generation, plan.restore.url) == (True, theirs.generation, folder)
        assert (plan.run, plan.attempt) == (RUN, 1)
    assert "weights" in (ask(training(resume="weights")).refused or "")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_sharded_state_needs_all_images_on_each_node(sharded: bool) -> None:
    """At another world size; of a replicated one any image will do."""
    slots = [msgspec.structs.replace(held(8, rank, 3), sharded=sharded) for rank in range(3)]
    offers = restore_sources.Offers(held={"a": tuple(slots[:2]), "b": tuple(slots[2:])})
    assert bool(restore_sources.in_memory(offers, {"a": [0], "b": [1]})) is not sharded
    assert restore_sources.in_memory(offers, {"a": [0, 1], "b": [2]})  # each rank's own image is there
    offers.held["b"] = offers.held["a"] = tuple(slots)
    assert restore_sources.in_memory(offers, {"a": [0], "b": [1]})


def test_durable_when_all_have_stored() -> None:
    """A MANIFEST only of all ranks; then the next persist is due at the next multiple."""
    master = training(save_to="/tree", persist_every=4, save_every=2)
    assert ask(master).cadence == p.Cadence(every=2, persist_from=4)
    master.call(vote(0, 4, p.VoteKind.STORED))
    assert not store(master).manifests
    master.call(vote(1, 4, p.VoteKind.STORED))
    assert [file.rank for file in store(master).manifests[0].files] == [0, 1]
    beat = master.call(p.Heartbeat("job", "w0"))
    assert beat.cadence == p.Cadence(every=2, persist_from=8)
    assert master.call(vote(0, 6)).newest_committed == p.Generation(1, 4, "run0")


def test_failed_persist_is_due_again() -> None:
    master = training(save_to="/tree", persist_every=4, save_every=1)
    master.call(vote(0, 4, p.VoteKind.STORED))
    assert master.call(vote(1, 4, p.VoteKind.FAILED)).cadence.persist_from == 5
    store(master).failure = "no room"
    replies = [master.call(vote(rank, 5, p.VoteKind.STORED)) for rank in range(2)]
    assert master.call(p.Heartbeat("job", "w0")).cadence.persist_from == 7
    assert replies[-1].newest_committed is None
    assert master.state.jobs["job"].saves.failures == 2


def test_the_next_persist_waits_for_ranks_that_still_write() -> None:
    """They would refuse it; then others write it, refuse the next one, and so on: nothing would get durable.

    A rank that is lost answers no more: its round is over, and the next attempt begins without that wait.
    """
    master = training(save_to="/tree", persist_every=1, save_every=1)
    for step in (4, 7):
        refused = master.call(vote(1, step, p.VoteKind.FAILED)).cadence.persist_from
        assert refused is not None
        assert refused <= step, "rank 0 is asked for another one while it writes this one"
        assert (master.call(vote(0, step, p.VoteKind.STORED)).cadence.persist_from or 0) > step
    master.call(vote(1, 9, p.VoteKind.FAILED))
    master.call(p.Exited("job", "agent", "w0", 1))
    master.call(join(lives="new"))
    for worker in ("new1", "new0"):
        master.call(attach(worker, save_to="/tree", persist_every=1, save_every=1))
    plan = master.call(p.AwaitPlan("job", "new0"))
    assert (plan.attempt, plan.cadence.persist_from) == (2, 4), "past what nobody can load here"
    for rank, then in ((1, 4), (0, 9)):
        failed = vote(rank, 5, p.VoteKind.FAILED, attempt=2, incarnation=f"new{rank}")
        assert master.call(failed).cadence.persist_from == then


def test_ranks_that_store_different_generations_are_asked_anew() -> None:
    """One has left out what the other has stored: neither of them will be whole in storage."""
    master = training(save_to="/tree", persist_every=1, save_every=1)
    assert master.call(vote(0, 4, p.VoteKind.STORED)).cadence.persist_from == 1
    assert master.call(vote(1, 5, p.VoteKind.STORED)).cadence.persist_from == 6
    assert master.state.jobs["job"].saves.failures == 1


def test_a_snapshot_of_an_older_release_tells_who_has_stored() -> None:
    """It has no list of those that answered; a rank that has stored its file does not speak of it again."""
    master = training(save_to="/tree", persist_every=1, save_every=1)
    master.call(vote(0, 4, p.VoteKind.STORED))
    master.state.jobs["job"].saves.answered = None
    assert master.call(vote(1, 4, p.VoteKind.FAILED)).cadence.persist_from == 5


def test_persists_that_come_too_late_are_announced_earlier() -> None:
    """Fast steps: ranks are past a step before they hear that it is due. It is not waited for longer than 2 s."""
    master = training(save_to="/tree", persist_every=1, save_every=1)

    def failed(step: int, step_s: float) -> int | None:
        master.call(vote(0, step, p.VoteKind.FAILED, step_s=step_s))
        return master.call(vote(1, step, p.VoteKind.FAILED, step_s=step_s)).cadence.persist_from

    ahead = [(failed(step, 0.001) or 0) - step for step in range(1000, 20_000, 1000)]
    assert ahead == [1, 2, 4, 8, 16, 32, 64, 128] + [256] * 11
    stored = [master.call(vote(rank, 50_000, p.VoteKind.STORED)) for rank in range(2)][-1]
    assert stored.cadence.persist_from is not None
    beat = master.call(p.Heartbeat("job", "w0"))
    assert beat.cadence.persist_from == 50_000 + 255, "one less after a good one"
    for step in range(60_000, 100_000, 1000):
        failed(step, 1.0)
    assert failed(100_000, 1.0) == 100_002


def test_the_last_save_is_durable_though_a_rank_had_to_try_twice() -> None:
    """Its first try was left out, which the master takes for a word that there will be none."""
    master = training(save_to="/tree", persist_every=1000, save_every=1)
    for step in range(1, 12):
        master.call(vote(0, step, passed=step + 1))
    master.call(vote(1, 12, p.VoteKind.SKIPPED, passed=13))
    for rank in range(2):
        master.call(vote(rank, 12, passed=13))
    for rank in range(2):
        master.call(vote(rank, 12, p.VoteKind.STORED, passed=13))
    assert store(master).manifests[-1].generation.step == 12


def test_cadence_of_time() -> None:
    """`auto` stalls at most 3.5 %; durations become steps; persisting follows the clock."""
    master = training(save_to="/tree", persist_every="60s")
    assert ask(master).cadence == p.Cadence()
    assert master.call(vote(0, 1, step_s=0.1, copy_s=0.07)).cadence == p.Cadence(every=20)
    assert master.call(vote(1, 1, step_s=0.1, copy_s=0.08)).cadence == p.Cadence(every=20)
    quick = training()
    assert quick.call(vote(0, 1, step_s=0.002, copy_s=0.0002)).cadence.every == 250, "a save each 0.5 s is enough"
    master.advance(9.0)
    for _ in range(6):
        for worker in ("w0", "w1"):
            master.call(p.Heartbeat("job", worker))
        master.advance(9.0)
    assert master.call(vote(0, 20)).cadence == p.Cadence(every=20, persist_from=2), "time alone announces it"
    timed = training(save_every="5s")
    assert timed.call(vote(0, 1, step_s=0.1)).cadence.every == 50
    with pytest.raises(BadRequest, match="90s"):
        training(save_every="soon")


def test_the_interval_of_auto_follows_the_steps() -> None:
    """The first steps of a process are slow: an interval that fits them would save twice as often as is wanted."""
    master = training()

    def every(step_s: float) -> int:
        replies = [master.call(vote(0, 1, step_s=step_s, copy_s=1e-4)) for _ in range(save_votes.SAMPLES)]
        return replies[-1].cadence.every

    assert every(0.1) == 5
    assert every(0.06) == 9
    assert every(0.1) == 9, "less often than wanted, by less than a factor of two"
    assert every(0.2) == 3


def test_a_run_is_durable_after_its_first_minute() -> None:
    """From its first save on, however long that took: what loses it in its first ten minutes need not begin again."""
    master = training(save_to="/tree", persist_every="600s", save_every=1)

    def train(step: int, seconds: float) -> int | None:
        for _ in range(int(seconds / 9.0)):
            for worker in ("w0", "w1"):
                master.call(p.Heartbeat("job", worker))
            master.advance(9.0)
        return master.call(vote(0, step)).cadence.persist_from

    assert train(1, 90.0) is None, "it compiled, or loaded its data"
    assert train(2, 45.0) is None
    assert train(3, 18.0) == 3
    for rank in (0, 1):
        master.call(vote(rank, 3, p.VoteKind.STORED))
    assert train(4, 90.0) is None, "from here on each persist_every"
    assert train(5, 540.0) is not None


def test_two_ways_to_die() -> None:
    """A lost connection kills after 0.5 s, silence after a lease; a sign of life clears suspicion.

    While the connection is open the lease is long: a healthy worker may be silent for 10 s (C code that holds the GIL),
    and the kernel reports a real death at once.
    """
    every = Nodes(lease_s=10.0, suspicion_s=0.5)
    for name in ("x", "y"):
        heartbeats.beat(every, ("job", name), 0.0)
        heartbeats.opened(every, ("job", name), 0.0)
        heartbeats.closed(every, ("job", name), 1.0)
    heartbeats.opened(every, ("job", "y"), 1.2)
    heartbeats.beat(every, ("job", "z"), 1.2)
    assert [lost.incarnation for lost in heartbeats.verdicts(every, 1.5)] == ["x"]
    assert heartbeats.verdicts(every, 9.9) == []
    assert [lost.reason for lost in heartbeats.verdicts(every, 11.3)] == ["no heartbeat for 10 s"]
    assert heartbeats.verdicts(every, 61.1) == []
    heartbeats.beat(every, ("job", "y"), 61.15)
    assert heartbeats.verdicts(every, 121.1) == []
    assert [lost.reason for lost in heartbeats.verdicts(every, 121.2)] == ["no heartbeat for 60 s"]


def test_silence_counts_again_when_the_connection_ends() -> None:
    """A worker that comes back without a connection has the short lease."""
    every = Nodes(lease_s=10.0, suspicion_s=0.5)
    heartbeats.opened(every, ("job", "x"), 0.0)
    heartbeats.beat(every, ("job", "x"), 0.0)
    heartbeats.closed(every, ("job", "x"), 1.0)
    heartbeats.heard(every, ("job", "x"), 1.2, 0.0)
    assert heartbeats.verdicts(every, 10.9) == []
    assert len(heartbeats.verdicts(every, 11.1)) == 1


def test_silence_breaks_the_round() -> None:
    master = training()
    master.call(p.Heartbeat("job", "w1"))
    master.advance(9.0)
    assert not master.call(p.Heartbeat("job", "w0")).broken
    master.advance(1.5)
    assert master.call(p.Heartbeat("job", "w0")).broken
    with pytest.raises(Stale, match="lost"):
        master.call(vote(1, 3))


def test_a_round_waits_for_every_survivor() -> None:
    """Nobody is left behind: the next round forms only when each live member has joined again."""
    master = MasterFake()
    for node in ("a", "b", "c"):
        master.call(join(node, 1, lives=node, low=1, high=3, last_call_s=1.0))
    master.call(p.Exited("job", "a", "a0", -9))
    master.call(join("a", 1, lives="new", low=1, high=3, last_call_s=0.0))
    master.call(join("b", 1, lives="b", low=1, high=3, last_call_s=0.0))
    assert master.call(p.AwaitRound("job", "b", 1, timeout_s=0.0)).round is None
    master.call(p.Exited("job", "c", "c0", -9))
    seated = master.call(p.AwaitRound("job", "b", 1, timeout_s=0.0))
    assert (seated.ranks, seated.world_size) == ((0,), 2)


@pytest.mark.parametrize("attached", [True, False])
def test_a_sole_agent_gives_up_the_seats_of_its_predecessor(attached: bool) -> None:
    """A launcher that knows it is alone on its node waits for nobody there; other nodes' members stay."""
    master = MasterFake()
    for node in ("a", "b"):
        master.call(join(node, 1, lives=node, node=node))
    for worker in ("a0", "b0") if attached else ():
        master.call(attach(worker))
    master.call(join("a-next", 1, lives="next", node="a"))
    assert master.call(p.AwaitRound("job", "a-next", 1, timeout_s=0.0)).round is None
    master.call(join("a-next", 1, lives="next", node="a", sole=True))
    assert master.call(p.AwaitRound("job", "a-next", 1, timeout_s=0.0)).round is None
    master.call(join("b", 1, lives="b", node="b", sole=True))
    assert master.call(p.AwaitRound("job", "a-next", 1, timeout_s=0.0)).world_size == 2


def test_fresh_counts_for_a_sole_agent() -> None:
    """`fresh` starts at step 0 where only seats of a predecessor are left; not where another node works."""
    for node, run in (("a", "new"), ("b", "run0")):
        master = MasterFake()
        master.call(join("old", 1, node="a", low=1))
        master.call(join("next", 1, lives="n", node=node, low=1, sole=True, fresh=True, proposed_run="new"))
        assert master.call(p.ShowJob("job")).run == run


def test_a_job_tells_where_its_attempt_began() -> None:
    """The restored step, 0 for a fresh start, None until all have attached; and where it saves."""
    master = MasterFake()
    master.call(join())
    assert master.call(p.ShowJob("job")).begun_step is None
    assert training().call(p.ShowJob("job")).begun_step == 0
    view = training(stored=(stored(9),), save_to="/tree").call(p.ShowJob("job"))
    assert (view.begun_step, view.step, view.save_to) == (9, 9, "/tree")


def test_no_round_forms_behind_the_end() -> None:
    """A node that waits for a seat when the job ends hears of the end; it must not begin at step 0."""
    master = MasterFake()
    master.call(join("a", 1, lives="a", low=1, high=2))
    master.advance(1.0)
    master.call(attach("a0", "a"))
    late = join("b", 1, lives="b", low=1, high=2)
    master.call(late)
    master.call(p.Leave("job", "a0", p.Departure.DONE, 9))
    master.advance(1.0)
    view = master.call(p.ShowJob("job"))
    assert (view.finished, view.finished_step, view.round) == (True, 9, 1)
    with pytest.raises(Stale, match="is finished"):
        master.call(p.AwaitRound("job", "b"))
    assert master.call(late).finished


def test_the_end_is_that_of_the_last_round() -> None:
    """One rank was done when another died: all went back, and with another world size came to another step."""
    master = training()
    master.call(p.Leave("job", "w0", p.Departure.DONE, 9))
    master.call(p.Exited("job", "agent", "w1", -9))
    master.call(join(lives="v"))
    for name in ("v0", "v1"):
        master.call(attach(name))
    for name in ("v0", "v1"):
        master.call(p.Leave("job", name, p.Departure.DONE, 5))
    assert master.call(p.ShowJob("job")).finished_step == 5


def test_newest_complete_never_goes_back() -> None:
    """A generation that is completed late does not replace a newer one."""
    master = training()
    for rank, step in ((0, 4), (0, 6), (1, 6), (1, 4)):
        reply = master.call(vote(rank, step))
    assert reply.newest_complete == p.Generation(1, 6, "run0")


def test_a_repeated_event_is_answered_as_before() -> None:
    """Same key: the first answer. Same key for another event, or an older key: refused."""
    master = training()
    key = Key(incarnation="w0", channel="votes", seq=3)
    first = master.call(vote(0, 4), key=key)
    master.call(vote(1, 4))
    assert master.call(vote(0, 4), key=key) == first
    assert first.newest_complete is None
    with pytest.raises(Stale, match="count up"):
        master.call(vote(0, 5), key=key)


def test_a_job_that_starts_anew_keeps_only_its_counters() -> None:
    """Master row 13: every other field is as in a new job, the ones that are added later, too."""
    state = job_registry.Master()
    job_registry.apply(state, join(), 1.0)
    for worker in ("w0", "w1"):
        job_registry.apply(state, attach(worker), 2.0)
    change = p.KeyChange(p.Change.SET, "stale", b"1")
    job_registry.apply(state, p.ChangeKeys("job", "w0", 1, (change,)), 3.0)
    for worker in ("w0", "w1"):
        job_registry.apply(state, p.Leave("job", worker, p.Departure.DONE, 5), 4.0)
    job_registry.apply(state, join("late", 1, lives="n", low=2, high=2, fresh=True, proposed_run="run1"), 5.0)
    job, new = state.jobs["job"], Job(name="job", run="run1")
    kept = {"rounds", "plan", "fresh", "proposed", "replies", "changed_at"}
    changed = [name for name in Job.__struct_fields__ if getattr(job, name) != getattr(new, name)]
    assert set(changed) <= kept
    assert job.rounds.number == 1
    assert job.rounds.parted == {}


def test_newcomers_are_counted_when_the_membership_changes() -> None:
    """Master row 9: a heartbeat looks at no list, however many train and wait."""
    state = job_registry.Master()
    job_registry.apply(state, join(high=3), 1.0)
    for worker in ("w0", "w1"):
        job_registry.apply(state, attach(worker), 2.0)
    job_registry.apply(state, join("spare", 1, lives="s", low=2, high=3), 3.0)
    known = state.jobs["job"].rounds
    assert known.newcomers == rendezvous.count_newcomers(known) == 1
    job_registry.apply(state, p.Leave("job", "spare", p.Departure.STOPPED), 4.0)
    assert known.newcomers == rendezvous.count_newcomers(known) == 0


def test_parted_members_are_remembered_by_name() -> None:
    """Master row 9: the youngest few times the world size, found without a search; a snapshot changes nothing."""
    known = rendezvous.Rounds()
    for number in range(1000):
        rendezvous.remember(known, f"w{number % 7}-{number}")
        if number == 500:
            known = msgspec.msgpack.decode(msgspec.msgpack.encode(known, order="deterministic"), type=rendezvous.Rounds)
    assert 64 <= len(known.parted) <= 128
    assert min(known.parted.values()) == 1000 - len(known.parted)
    assert rendezvous.is_over(known, "w5-999")
    assert not rendezvous.is_over(known, "w5-5")
