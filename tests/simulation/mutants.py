"""The core, broken in one place each: what the simulation must notice. Each breaks it for as long as `patch` holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import Stale
from dlrover_hooks.master import clock
from dlrover_hooks.master.core import dispatch, heartbeats
from dlrover_hooks.master.core.checkpoints import restore_sources, save_votes
from dlrover_hooks.master.core.effects import Wake, parting_topic
from dlrover_hooks.master.core.leased_data import ledger, partitions
from dlrover_hooks.master.core.ps_clusters import decisions, task_requests
from dlrover_hooks.master.core.rounds import member_changes, preemption_agreement, rank_assignment, rendezvous
from dlrover_hooks.master.journal.sqlite_journal import SqliteJournal
from dlrover_hooks.worker.preemption import DepartureGate

Patch = pytest.MonkeyPatch


def lease_twice(patch: Patch) -> None:
    """Now and then positions are handed out and stay in TODO."""
    real, turn = partitions.take, itertools.count(1)

    def take(books: Any, span: Any, size: int, batch: int) -> Any:
        before = books.next
        piece = real(books, span, size, batch)
        if piece is not None and piece.lo == before and next(turn) % 7 == 0:
            books.next = before
        return piece

    patch.setattr(partitions, "take", take)


def commit_early(patch: Patch) -> None:
    """The last file is not waited for."""
    real: Any = save_votes._COUNT[p.VoteKind.STORED]

    def count(saves: Any, settings: Any, job: str, entry: Any, event: Any, now: float) -> Any:
        if entry.in_storage == entry.world_size - 2 and entry.stored[event.rank] is None:
            entry.in_storage += 1
        return real(saves, settings, job, entry, event, now)

    patch.setitem(save_votes._COUNT, p.VoteKind.STORED, count)


def complete_early(patch: Patch) -> None:
    """The last rank's memory is not waited for."""
    real: Any = save_votes._COUNT[p.VoteKind.MEMORY]

    def count(saves: Any, settings: Any, job: str, entry: Any, event: Any, now: float) -> Any:
        if entry.in_memory == entry.world_size - 2 and not entry.memory[event.rank]:
            entry.in_memory += 1
        return real(saves, settings, job, entry, event, now)

    patch.setitem(save_votes._COUNT, p.VoteKind.MEMORY, count)


def count_echoes(patch: Patch) -> None:
    """A worker that dies of a broken round costs a restart, too."""
    real = member_changes._part

    def part(job: Any, incarnation: str, how: str, *rest: Any) -> Any:
        current = job.rounds.round
        if current is not None and current.phase is p.Phase.BROKEN and incarnation in current.members:
            job.failures += how == rendezvous.LOST and current.members[incarnation].live
        return real(job, incarnation, how, *rest)

    patch.setattr(member_changes, "_part", part)


def forget_an_event(patch: Patch) -> None:
    """Now and then an event does not reach the journal."""
    real, turn = SqliteJournal.append, itertools.count(1)

    def append(self: SqliteJournal, records: Iterable[bytes], snapshot: bytes | None = None) -> None:
        real(self, [record for record in records if next(turn) % 11], snapshot)

    patch.setattr(SqliteJournal, "append", append)


def answer_early(patch: Patch) -> None:
    """A repeated request is answered though the first one is not durable yet."""
    from dlrover_hooks.master.runtime import Runtime

    patch.setattr(Runtime, "_answer_after_commits", lambda self, done, reply: done.set_result(reply))


def count_the_stale(patch: Patch) -> None:
    """A vote of an older life, or for an older attempt, counts."""
    real: Any = dispatch._TABLE[p.Vote]

    def vote(job: Any, event: p.Vote, now: float, effects: Any) -> Any:
        try:
            return real(job, event, now, effects)
        except Stale:
            if not job.attempt or job.finished or event.rank >= job.rounds.round.world_size:
                raise
            event = msgspec.structs.replace(event, world_size=job.rounds.round.world_size)
            save_votes.vote(job.saves, job.settings, job.name, event, now)
            return save_votes.voted(job.saves)

    patch.setitem(dispatch._TABLE, p.Vote, vote)


def seat_the_dead(patch: Patch) -> None:
    """A worker that dies while it waits for a seat still gets it."""
    real = rendezvous.part

    def part(known: Any, incarnation: str, how: str) -> bool:
        return incarnation not in known.seats and real(known, incarnation, how)

    patch.setattr(rendezvous, "part", part)


def restore_a_half(patch: Patch) -> None:
    """A generation that some ranks have in memory is taken for whole."""
    real = restore_sources.in_memory

    def in_memory(offers: Any, ranks_by_node: Any) -> Any:
        held = [slot for node, slots in offers.held.items() if node in ranks_by_node for slot in slots]
        halves = [p.Restore(slot.generation, slot.world_size, p.Source.MEMORY) for slot in held]
        return real(offers, ranks_by_node) + halves

    patch.setattr(restore_sources, "in_memory", in_memory)


def keep_the_done(patch: Patch) -> None:
    """A ledger does not go back with the model."""
    real = ledger.roll_back

    def roll_back(books: Any, cut: Any, fence: int) -> None:
        done = {name: one.done.copy() for name, one in books.books.items()}
        for name, more in done.items():
            more.update(cut.get(name, type(more)()))
        real(books, done, fence)

    patch.setattr(ledger, "roll_back", roll_back)


def hear_no_death(patch: Patch) -> None:
    """A lease that ran out means nothing."""

    def verdicts(known: Any, now: float) -> list[Any]:
        real(known, now)
        return []

    real = heartbeats.verdicts
    patch.setattr(heartbeats, "verdicts", verdicts)


def restore_the_oldest(patch: Patch) -> None:
    """Not the newest generation is chosen."""
    real = restore_sources.newest

    def newest(candidates: Any, run: str, refused: Any) -> Any:
        found = real(candidates, run, refused)
        older = [one for one in candidates if found is not None and one.generation < found.generation]
        return real(older, run, refused) or found

    patch.setattr(restore_sources, "newest", newest)


def tell_of_no_newcomer(patch: Patch) -> None:
    """Nobody makes room."""
    patch.setattr(rendezvous, "count_newcomers", lambda known: 0)


def wait_for_nobody(patch: Patch) -> None:
    """A round forms before all survivors are back."""

    def enough(known: Any) -> bool:
        return len(known.seats) >= known.min_workers

    patch.setattr(rank_assignment, "_enough", enough)


def believe_strangers(patch: Patch) -> None:
    """Any caller that says that a worker ended is believed."""

    real = rendezvous.reapers

    def reapers(known: Any, worker: str) -> set[str]:
        return real(known, worker) | set(known.round.agents if known.round else ()) | set(known.waiting)

    patch.setattr(rendezvous, "reapers", reapers)


def forget_who_sat_where(patch: Patch) -> None:
    """A replaced worker's rank goes to the next one."""
    patch.setattr(rank_assignment, "_heirs", lambda known: {})


def move_survivors_up(patch: Patch) -> None:
    """Those behind a gap take lower ranks."""

    def order(known: Any, joins: list[Any]) -> list[Any]:
        pairs = [(join, seat) for join in joins for seat in join.seats]
        return sorted(
            pairs, key=lambda pair: (*rank_assignment._standing(known, pair[0].node, pair[1]), pair[1].incarnation)
        )

    patch.setattr(rank_assignment, "_order", order)


def prefer_votes(patch: Patch) -> None:
    """A lone image does not count."""
    real = restore_sources.in_memory

    def in_memory(offers: Any, ranks_by_node: Any) -> Any:
        alone = sum(map(len, ranks_by_node.values())) == 1
        return [one for one in real(offers, ranks_by_node) if alone or one.world_size > 1]

    patch.setattr(restore_sources, "in_memory", in_memory)


def make_do_with_less(patch: Patch) -> None:
    """One worker fewer than asked for will do."""
    real = rendezvous.add

    def add(known: Any, join: Any, now: float) -> bool:
        broken = real(known, join, now)
        known.min_workers = max(1, known.min_workers - 1)
        return broken

    patch.setattr(rendezvous, "add", add)


def part_too_early(patch: Patch) -> None:
    """All are to leave at a step that some have passed."""
    real = preemption_agreement._decide

    def decide(job: Any, effects: Any) -> None:
        before = job.leaving.step
        real(job, effects)
        if before is None and job.leaving.step is not None:
            job.leaving.step = max(0, job.leaving.step - 1)

    patch.setattr(preemption_agreement, "_decide", decide)


def ask_one_for_all(patch: Patch) -> None:
    """The first promise counts for everybody."""

    def decide(job: Any, effects: Any) -> None:
        if job.leaving.step is None and job.leaving.promised:
            job.leaving.step = job.leaving.passed + 1
            effects.append(Wake(topic=parting_topic(job.name)))

    patch.setattr(preemption_agreement, "_decide", decide)


def promise_in_vain(patch: Patch) -> None:
    """A rank says where it is, and goes on."""
    patch.setattr(DepartureGate, "promise", lambda gate: gate.passed)


def count_pauses(patch: Patch) -> None:
    """Leases, short ones, go on while the master is stopped, or waits for its journal."""
    patch.setattr(clock.Uptime, "seconds", lambda uptime: uptime._monotonic())
    patch.setattr(heartbeats, "lease_of", lambda known, pulse: known.lease_s)


def keep_leases_short(patch: Patch) -> None:
    """A longer interval between heartbeats has no longer lease."""
    patch.setattr(heartbeats, "silence_s", lambda known, pulse=None, more=0: known.lease_s)


def count_from_nothing(patch: Patch) -> None:
    """While step times are unknown, saves are due at powers of two of the job's steps, not the attempt's."""
    real = save_votes.begin

    def begin(saves: Any, *args: Any, **more: Any) -> None:
        real(saves, *args, **more)
        saves.cadence = msgspec.structs.replace(saves.cadence, begun_step=0)

    patch.setattr(save_votes, "begin", begin)


def charge_no_exit(patch: Patch) -> None:
    """Survivors that go on without a process that ended with 0 in training cost no restart."""
    real: Any = dispatch._TABLE[p.Join]

    def join(job: Any, event: p.Join, now: float, effects: Any) -> Any:
        before, members = job.failures, job.rounds.round.members.values() if job.rounds.round else ()
        exited = any(member.gone == rendezvous.EXITED for member in members)
        reply = real(job, event, now, effects)
        job.failures = before if exited and not event.sole else job.failures
        return reply

    patch.setitem(dispatch._TABLE, p.Join, join)


def count_launches_twice(patch: Patch) -> None:
    """Behind a launch that goes on from storage, the next generation is made durable at twice its step."""
    real = save_votes.begin

    def begin(saves: Any, settings: Any, step: int, *args: Any, **more: Any) -> None:
        real(saves, settings, step, *args, **more)
        if step:
            saves.persisted_step = 2 * step
            saves.cadence = msgspec.structs.replace(saves.cadence, persist_from=2 * step + 100)

    patch.setattr(save_votes, "begin", begin)


def announce_at_once(patch: Patch) -> None:
    """The next persist is announced as soon as one rank could not make the one before; others still write that."""
    real = save_votes._answer

    def answer(saves: Any, settings: Any, event: p.Vote) -> None:
        start = saves.cadence.persist_from
        failed = event.kind in (p.VoteKind.FAILED, p.VoteKind.REFUSED)
        if failed and start is not None and event.generation.step >= start:
            save_votes._give_up(saves, settings)
        else:
            real(saves, settings, event)

    patch.setattr(save_votes, "_answer", answer)


def announce_before_the_fence(patch: Patch) -> None:
    """A crash version is announced while the lost server may still run."""
    patch.setattr(decisions, "_unfenced", lambda clusters: False)


def release_at_once(patch: Patch) -> None:
    """Servers that are left out are not kept until the chief has left them."""
    real = decisions._release_left_out

    def release(clusters: Any) -> None:
        kept, clusters.connected = clusters.connected, clusters.version
        real(clusters)
        clusters.connected = kept

    patch.setattr(decisions, "_release_left_out", release)


def hide_the_crash(patch: Patch) -> None:
    """A version without a lost server is announced as a planned one."""
    real = decisions._issue

    def issue(clusters: Any, *args: Any) -> None:
        clusters.lost_ps = False
        real(clusters, *args)

    patch.setattr(decisions, "_issue", issue)


def admit_a_second_chief(patch: Patch) -> None:
    """A new chief is given a version while the old one may still run."""
    real = task_requests.awaited_cluster

    def awaited(job: Any, request: Any) -> Any:
        given = real(job, request)
        announced = job.ps.announced
        if given is None and announced is not None and not job.ps.void and announced.number > request.after:
            return announced.addresses
        return given

    patch.setattr(task_requests, "awaited_cluster", awaited)


def never_roll_back(patch: Patch) -> None:
    """A chief that cannot connect to a version is not given another one."""
    patch.setattr(decisions, "roll_back", lambda clusters, problem: None)


MUTANTS: tuple[Callable[[Patch], None], ...] = (
    lease_twice,
    commit_early,
    complete_early,
    count_echoes,
    forget_an_event,
    answer_early,
    count_the_stale,
    seat_the_dead,
    restore_a_half,
    keep_the_done,
    hear_no_death,
    keep_leases_short,
    restore_the_oldest,
    tell_of_no_newcomer,
    wait_for_nobody,
    believe_strangers,
    forget_who_sat_where,
    move_survivors_up,
    prefer_votes,
    make_do_with_less,
    part_too_early,
    ask_one_for_all,
    promise_in_vain,
    count_pauses,
    count_from_nothing,
    charge_no_exit,
    count_launches_twice,
    announce_at_once,
    announce_before_the_fence,
    release_at_once,
    hide_the_crash,
    admit_a_second_chief,
    never_roll_back,
)
