"""The master's books against a count by hand: rounds and members, deaths, votes, leases. Made from the events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core.events import Lost
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.leased_data.ledger import DatasetLedger
from dlrover_hooks.protocol import Phase, Source, VoteKind
from tests.simulation.model import bits, names

if TYPE_CHECKING:
    from tests.simulation.promises import Promises

World = tuple[tuple[str, int], ...]
_GOING = (Phase.RESTORING, Phase.TRAINING)


class Waits(NamedTuple):
    """Workers that wait for a seat: since when (true time), with how many in one join, and which node sent that."""

    since: float
    size: int
    speaker: str


class Counted:
    """`event` counts, `job` compares."""

    def __init__(self, promises: Promises) -> None:
        self._promises, self._check = promises, promises.check
        self._dead: dict[str, set[str]] = {}
        self._ended = set[str]()
        """Newcomers, by their launchers' word, which may come twice."""
        self._votes: dict[tuple[str, p.Generation, VoteKind], set[int]] = {}
        self._held: dict[str, dict[str, tuple[p.Held, ...]]] = {}
        """By job and node, what was said of its memory."""
        self._worlds: dict[str, dict[int, World]] = {}
        self._numbers: dict[str, tuple[int, int, int, bool]] = {}
        self._attempts: dict[str, tuple[int, int]] = {}
        self._sizes: dict[tuple[str, int], int] = {}
        self._places: dict[tuple[str, int], frozenset[tuple[str, int]]] = {}
        """By job and attempt, the seats: node and rank."""
        self.places: dict[str, tuple[str, int]] = {}
        """By incarnation, node and local rank."""
        self.least: dict[str, int] = {}
        """By name, the smallest round that its join asked for: launches of other sizes may still be on their way."""
        self._speakers: dict[str, set[str]] = {}
        """By incarnation, which agent has joined for it, and which reaps it."""
        self._stored: dict[str, set[p.Generation]] = {}
        """By job, what the newest rank 0 found in storage."""
        self._waiting: dict[str, dict[str, Waits]] = {}
        """By job and incarnation."""
        self._attached: dict[str, set[str]] = {}
        """By job, the workers that have come to the current round."""
        self._before: dict[str, World] = {}
        """By job, the round before the current one."""
        self._failures: dict[str, tuple[int, bool]] = {}
        """By job, how many were counted, and whether the round is broken."""
        self._early: dict[str, set[str]] = {}
        """By job, members whose process ended with 0, and that had not said that they leave."""
        self._rises = 0, 0
        """The least and the most by which the newest event may add to them."""
        self._touched = True
        self._voted: p.Vote | None = None

    def event(self, event: Any, reply: Any) -> None:
        """It was applied, and so answered."""
        job = event.job
        self._voted = event if isinstance(event, p.Vote) else None
        self._touched = not isinstance(event, p.Vote)
        dead = self._dead.setdefault(job, set())
        self._rises = self._rise(event, dead)
        if isinstance(event, p.Join):
            if not reply.finished:
                self._joined(event, dead)
        elif isinstance(event, p.Exited):
            self._exited(event)
            if event.exit_code == 0 and event.worker in self._attached.get(job, ()) and event.worker not in dead:
                self._early.setdefault(job, set()).add(event.worker)
            if event.newcomer:
                self._ended.add(event.worker)
            dead.add(event.worker)
        elif isinstance(event, (Lost, p.Leave)):
            dead.add(event.incarnation)
            dead |= self._taken_along(event.job, event.incarnation)
        elif isinstance(event, p.Attach):
            self._attached.setdefault(job, set()).add(event.incarnation)
            if event.held or self.places[event.incarnation][1] == 0:  # the speaker of its node may hold nothing
                self._held.setdefault(job, {})[event.node] = event.held
            if reply.rank == 0:
                self._stored[job] = {manifest.generation for manifest in event.stored}
        elif isinstance(event, p.Vote):
            self._count_vote(event)
        elif isinstance(event, p.TakeLeases):
            self._lent(event, reply)

    def _joined(self, event: p.Join, dead: set[str]) -> None:
        """Those it speaks for live; those that it, or its node, had before are over."""
        names = {seat.incarnation for seat in event.seats}
        for name, (node, _) in self.places.items():
            gone = event.incarnation in self._speakers[name] or (event.sole and node == event.node)
            if gone and name not in names and name != event.incarnation:
                dead.add(name)
        dead -= names  # their agent says that they live, after all
        waiting = self._waiting.setdefault(event.job, {})
        for seat in event.seats:
            self.places[seat.incarnation] = event.node, seat.local_rank
            self.least[seat.incarnation] = event.min_workers
            self._speakers.setdefault(seat.incarnation, set()).update({event.incarnation, event.launcher})
            since = waiting[seat.incarnation].since if seat.incarnation in waiting else self._promises.now
            waiting[seat.incarnation] = Waits(since, len(names), event.incarnation)

    def _taken_along(self, job: str, agent: str) -> set[str]:
        """Those that it asked for seats for, and its members that never came."""
        waiting, came = self._waiting.get(job, {}), self._attached.get(job, set())
        absent = {name for name, _ in self._before.get(job, ()) if name not in came and name not in waiting}
        return {name for name in absent if agent in self._speakers[name]} | {
            name for name, one in waiting.items() if one.speaker == agent
        }

    def _rise(self, event: Any, dead: set[str]) -> tuple[int, int]:
        """A seated worker's death breaks its round, and costs one; those that die of it cost nothing."""
        if isinstance(event, p.Exited):
            failed, broken = event.exit_code not in (0, p.REQUEUE), self._failures.get(event.job, (0, False))[1]
            if any(event.worker in dict(world) for world in self._worlds.get(event.job, {}).values()):
                first = not broken and event.worker in dict(self._before[event.job]) and event.worker not in dead
                return failed and first, failed and first
            counts = failed and event.newcomer and event.worker not in self._ended
            return counts, counts
        if isinstance(event, p.Join) and not event.sole:
            members, broken = dict(self._before.get(event.job, ())), self._failures.get(event.job, (0, False))[1]
            needs = event.incarnation in members and members.keys() & self._early.get(event.job, set())
            return (1, 1) if needs and not broken else (0, 0)
        died = isinstance(event, Lost) or (isinstance(event, p.Leave) and event.reason is p.Departure.FAILED)
        return 0, died or (isinstance(event, p.Join) and event.sole)

    def _exited(self, event: p.Exited) -> None:
        known = self._speakers.get(event.worker)
        believed = known is None or event.incarnation in known or not self.lives(event.job, event.worker)
        self._check(believed, f"{event.incarnation} is believed that {event.worker} ended, and is a stranger to it")

    def lives(self, job: str, name: str) -> bool:
        """Nobody has said that it ended."""
        return name not in self._dead.get(job, ())

    def size_of(self, job: str, attempt: int) -> int:
        """Of its world; 0 if that is not known any more."""
        return self._sizes.get((job, attempt), 0)

    def waits_since(self, job: str, number: int) -> dict[str, float]:
        """Since when a worker that could be added to round `number` waits; none if it is not the newest one."""
        numbers, dead = self._numbers.get(job), self._dead.get(job, ())
        world = self._worlds.get(job, {}).get(number, ())
        if numbers is None or numbers[0] != number:
            return {}
        room = self._promises.most - sum(name not in dead for name, _ in world)
        waiting = self._waiting.get(job, {})
        return {name: one.since for name, one in waiting.items() if one.size <= room and name not in dead}

    def _count_vote(self, event: p.Vote) -> None:
        stored = (event.job, event.generation, VoteKind.STORED)
        if event.kind is VoteKind.SKIPPED:
            return
        if event.kind is VoteKind.FAILED:
            self._votes.get(stored, set()).discard(event.rank)
        else:
            self._votes.setdefault((event.job, event.generation, event.kind), set()).add(event.rank)

    def _lent(self, event: p.TakeLeases, reply: p.Leases) -> None:
        del event
        spans = [(lease.partition, lease.lo, lease.hi) for lease in reply.leases]
        self._check(all(lo < hi for _, lo, hi in spans), "an empty lease")

    def adopt(self, job: Job) -> None:
        """A new life, or a journal that refused: what has been compared before goes on from here."""
        current = job.rounds.round
        self._numbers[job.name] = job.rounds.number, job.plan.number, job.attempt, job.finished
        self._failures[job.name] = job.failures, current is not None and current.phase is Phase.BROKEN
        if current is not None:
            world = self._worlds.setdefault(job.name, {})
            members = tuple((name, one.rank) for name, one in current.members.items())
            world[current.number] = self._before[job.name] = members
            self._seated(job.name, members)
            if current.attempt:
                self._attempts[job.name] = current.number, current.attempt
                self._sizes[job.name, current.attempt] = current.world_size
                self._places[job.name, current.attempt] = _places(job)
            self._attached[job.name] = {name for name, one in current.members.items() if one.attached}
            self._early[job.name] = {name for name, one in current.members.items() if one.gone == "exited"}
            # events alone do not tell when a round was seated, so an agent's end took its waiting seats along
            self._dead.get(job.name, set()).difference_update(name for name, one in current.members.items() if one.live)
        self._held[job.name] = dict(job.offers.held)

    # ---- comparing ---------------------------------------------------------------------------------------------------

    def job(self, job: Job) -> None:
        """After an event."""
        self._upwards(job)
        self._budget(job)
        current = job.rounds.round
        if current is not None:
            self._round(job)
        if self._voted is not None:
            self._vote(job, self._voted)
            self._voted = None
        if self._touched:
            for ledger in job.ledgers.named.values():
                self._ledger(job, ledger)
        self._complete(job)

    def _budget(self, job: Job) -> None:
        (least, most), (before, _), current = self._rises, self._failures.get(job.name, (0, False)), job.rounds.round
        said = f"{before} failures of {job.name} became {job.failures}, and not {before + least} to {before + most}"
        self._check(least <= job.failures - before <= most, said)
        self._failures[job.name] = job.failures, current is not None and current.phase is Phase.BROKEN

    def _upwards(self, job: Job) -> None:
        before = self._numbers.get(job.name, (0, 0, 0, False))
        numbers = job.rounds.number, job.plan.number, job.attempt, job.finished
        if numbers == before:
            return
        same = all(new >= old for new, old in zip(numbers, before, strict=True))
        self._check(same, f"(round, plan, attempt, finished) went from {before} to {numbers}")
        self._numbers[job.name] = numbers

    def _round(self, job: Job) -> None:
        current = job.rounds.round
        assert current is not None
        worlds = self._worlds.setdefault(job.name, {})
        world = worlds.get(current.number)
        if world is None:
            world = worlds[current.number] = tuple((name, one.rank) for name, one in current.members.items())
            self._formed(job, world)
        if {name: one.rank for name, one in current.members.items()} != dict(world):
            self._check(False, f"round {current.number} of {job.name} changed its members")
        phase, members = current.phase, current.members.items()
        if phase is not Phase.BROKEN and (
            gone := [name for name, one in members if one.gone not in (None, "done", "exited")]
        ):
            self._check(False, f"round {current.number} goes on without {gone}")
        if phase in _GOING and (absent := [name for name, one in members if not one.attached]):
            self._check(False, f"round {current.number} is {phase.value} without {absent}")
        if current.attempt and self._attempts.get(job.name) != (current.number, current.attempt):
            self._attempts[job.name] = current.number, current.attempt
            self._sizes[job.name, current.attempt] = len(world)
            self._places[job.name, current.attempt] = _places(job)
            self._chosen(job)

    def _formed(self, job: Job, world: World) -> None:
        self._check(not job.finished, f"round {job.rounds.number} was formed, and the job is over")
        ranks = sorted(rank for _, rank in world)
        self._check(ranks == list(range(len(world))), f"ranks {ranks} in round {job.rounds.number}")
        low, high = job.rounds.min_workers, job.rounds.max_workers
        if job.rounds.round is not None and job.rounds.round.phase is Phase.ATTACHING:
            self._held[job.name], self._attached[job.name] = {}, set()
        self._check(low <= len(world) <= high, f"a round of {len(world)}, allowed are {low} to {high}")
        current = job.rounds.round
        assert current is not None
        dead = sorted(
            name for name, _ in world if name in self._dead.get(job.name, ()) and current.phase is Phase.ATTACHING
        )
        self._check(not dead, f"round {current.number} was formed with the dead {dead}")
        self._promises.progress.formed(self, job, dict(self._before.get(job.name, ())), dict(world))
        self._before[job.name] = world
        self._seated(job.name, world)

    def _seated(self, job: str, world: World) -> None:
        names = {name for name, _ in world}
        self._waiting[job] = {name: one for name, one in self._waiting.get(job, {}).items() if name not in names}

    def _chosen(self, job: Job) -> None:
        """An attempt begins: from a generation that is whole, and from none older than what was promised."""
        choice, current = job.plan.restore, job.rounds.round
        assert current is not None
        promises = self._promises
        if job.name != promises.job:
            return
        begins = f"attempt {job.attempt} begins with {choice.generation if choice is not None else 'nothing'}"
        newest = promises.committed
        refused = {refusal.generation for refusal in job.refusals}
        older = newest is not None and (choice is None or choice.generation < newest) and newest not in refused
        self._check(not older, f"{begins}, but {newest} is committed")
        self._not_forgotten(job, begins)
        self._promises.progress.chosen(job, begins)
        anew = choice is None and self._stored.get(job.name, set()) - refused
        self._check(not anew, f"{begins}, and storage holds {anew}")
        for generation in self._whole(job):
            older = choice is None or choice.generation < generation
            self._check(not older, f"{begins}, but {generation} lies whole in memory")
        if choice is None:
            return
        if choice.world_size < self.size_of(job.name, choice.generation.attempt):
            promises.lone.add(choice.generation)
        if choice.source is Source.STORAGE:
            self._check(choice.generation in promises.manifests, f"{choice.generation} is in no storage")
            return
        nodes = {one.node for one in current.members.values()}
        held = {node: slots for node, slots in self._held.get(job.name, {}).items() if node in nodes}
        ranks = {
            slot.rank
            for slots in held.values()
            for slot in slots
            if slot.generation == choice.generation and slot.world_size == choice.world_size
        }
        lacking = sorted(set(range(choice.world_size)) - ranks)
        self._check(not lacking, f"{choice.generation} is restored, and nobody holds the images of ranks {lacking}")
        models = {promises.image(choice.generation, rank, choice.world_size) for rank in ranks}
        self._check(len(models) == 1, f"{choice.generation} is restored, and its ranks saved different models")

    def _not_forgotten(self, job: Job, begins: str) -> None:
        """While all keepers live, and every rank is where it was, what was complete in memory is so to this day."""
        choice, complete = job.plan.restore, self._promises.complete
        if complete is None or complete in self._promises.lone or self._promises.memory_lost or job.refusals:
            return
        if self._places.get((job.name, complete.attempt)) != _places(job):
            return
        older = choice is None or choice.generation < complete
        self._check(not older, f"{begins}, but {complete} was complete in memory, and no keeper has ended")

    def _whole(self, job: Job) -> list[p.Generation]:
        """Generations that every node of the round holds for all its ranks, and that nobody refused."""
        current, held = job.rounds.round, self._held.get(job.name, {})
        assert current is not None
        size = current.world_size
        refused = {refusal.generation for refusal in job.refusals if refusal.source is Source.MEMORY}
        lying = [
            {slot.generation for slot in held.get(one.node, ()) if (slot.rank, slot.world_size) == (one.rank, size)}
            for one in current.members.values()
        ]
        return sorted(set.intersection(*lying) - refused)

    def _vote(self, job: Job, vote: p.Vote) -> None:
        world = dict(self._worlds.get(job.name, {}).get(job.rounds.number, ()))
        who = f"vote of {vote.incarnation} as rank {vote.rank} for {vote.generation}"
        self._check(world.get(vote.incarnation) == vote.rank, f"{who}, which holds no such rank")
        self._check(vote.incarnation not in self._dead.get(job.name, ()), f"{who}, which is dead")
        self._check(vote.generation.attempt == job.attempt, f"{who} counts in attempt {job.attempt}")
        if vote.kind in (VoteKind.MEMORY, VoteKind.STORED):
            image = self._promises.image(vote.generation, vote.rank, vote.world_size)
            self._check(image is not None, f"{who}, which saved nothing")

    def _complete(self, job: Job) -> None:
        newest = job.saves.newest_complete
        if newest is None or newest.attempt != job.attempt or (job.name, newest.attempt) not in self._sizes:
            return
        ranks = self._votes.get((job.name, newest, VoteKind.MEMORY), set())
        wanted = self._sizes[job.name, newest.attempt]
        if len(ranks) != wanted:
            self._check(False, f"{newest} is complete by the votes of {sorted(ranks)} of {wanted}")

    def commits(self, job: Job, manifest: p.Manifest) -> None:
        """A manifest is about to be written."""
        generation = manifest.generation
        ranks = self._votes.get((job.name, generation, VoteKind.STORED), set())
        wanted = self._sizes.get((job.name, generation.attempt), 0)
        whole = sorted(ranks) == list(range(wanted)) and manifest.world_size == wanted
        self._check(whole, f"{generation} is committed by the votes of {sorted(ranks)} of {wanted}")

    # ---- the ledger --------------------------------------------------------------------------------------------------

    def _ledger(self, job: Job, ledger: DatasetLedger) -> None:
        """Each position is done, lent to one living holder, to be handed out, or given up: exactly one of these."""
        seen, index = 0, self._promises.data.index
        for name, books in ledger.books.items():
            part = index(name)
            spans = [*books.done, *((piece.lo, piece.hi) for piece in (*books.returned, *books.bad))]
            spans += [(lent.at, lent.hi) for lent in ledger.leases.values() if lent.partition == name]
            for lo, hi in spans:
                mask = bits(part, lo, hi)
                if seen & mask:
                    self._check(False, f"two ways in the books of {job.name}: {names(seen & mask)}")
                seen |= mask
            if missing := bits(part, books.begin, books.next) & ~seen:
                self._check(False, f"lost from the books of {job.name}: {names(missing)}")
        current = job.rounds.round
        members = current.members if current is not None else {}
        if not ledger.free and (current is None or current.phase is not Phase.TRAINING):
            return  # the next attempt begins without these leases
        for number, lent in ledger.leases.items():
            holder = lent.holder
            alive = holder in job.ledgers.free if ledger.free else holder in members and members[holder].live
            self._check(alive, f"lease {number} is held by {holder}, which is gone")
            self._check(number in ledger.holders[holder].leases, f"lease {number} is not on its holder's list")


def _places(job: Job) -> frozenset[tuple[str, int]]:
    assert job.rounds.round is not None
    return frozenset((one.node, one.rank) for one in job.rounds.round.members.values())
