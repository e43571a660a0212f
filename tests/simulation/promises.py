"""What must hold after every event, and what everybody outside the master was told. `check` breaks the run.

Nothing here asks the core whether the core is right: members, deaths, votes, leases and images are counted by hand,
from the events that were applied and from what the simulated machines really did.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrover_hooks import protocol as p
from dlrover_hooks.master.core.effects import CommitGeneration, Effect
from dlrover_hooks.master.core.events import Key, Lost
from dlrover_hooks.master.core.job import Job
from dlrover_hooks.master.core.job_registry import Master
from dlrover_hooks.protocol.ranges import Ranges
from tests.simulation.counted import Counted
from tests.simulation.loop import Loop, Process
from tests.simulation.model import SPAN, Model, bits, names
from tests.simulation.story import Checks, Story
from tests.simulation.swarm import Swarm

if TYPE_CHECKING:
    from dlrover_hooks.master.runtime import PendingEvent
    from tests.simulation.memory import Image
    from tests.simulation.progress import Progress


class Data:
    """The dataset of every job. A stream's ends are known here, and found out by a worker that reads that far."""

    def __init__(self, swarm: Swarm, dice: random.Random) -> None:
        self._swarm = swarm
        self._ends = {f"p{index}": dice.randint(8, swarm.samples) for index in range(swarm.partitions)}
        if not swarm.partitions:
            self._ends = {"": swarm.samples * swarm.epochs}
        self._index = {name: index for index, name in enumerate(sorted(self._ends))}
        self.whole = sum(bits(self._index[name], 0, end) for name, end in self._ends.items())
        self.size = sum(self._ends.values())

    def partitions(self, found: dict[str, int]) -> tuple[p.Partition, ...]:
        """As they are opened; `found`: ends that this worker has come to."""
        if not self._swarm.partitions:
            return (p.Partition(end=self._ends[""]),)
        return tuple(p.Partition(name, end=found.get(name)) for name in sorted(self._ends))

    def index(self, name: str) -> int:
        return self._index[name]

    def readable(self, name: str, lo: int, hi: int) -> int:
        """How far [lo, hi) can be read."""
        good = max(lo, min(hi, self._ends[name]))
        bad = self._swarm.unreadable
        return bad if bad >= 0 and name in ("", "p0") and lo <= bad < good else good

    def ended(self, name: str, at: int) -> bool:
        return at >= self._ends[name]

    def end(self, name: str) -> int:
        return self._ends[name]

    def mask(self, parts: dict[str, Ranges]) -> int:
        return sum(bits(self._index[name], lo, hi) for name, ranges in parts.items() for lo, hi in ranges)


class Told(NamedTuple):
    """One applied event."""

    event: p.Message
    reply: p.Message
    record: bytes


class Promises(Checks):
    """All checks of one world."""

    progress: Progress

    def __init__(self, swarm: Swarm, loop: Loop, story: Story, data: Data) -> None:
        super().__init__(loop, story)
        self.data, self._swarm = data, swarm
        self.most = swarm.bounds[1]
        """Workers of a round."""
        self.state = Master()
        self._applied: list[Told] = []
        self._index: dict[str, int] = {}
        """By idempotency key, the place of its event among the applied ones."""
        self.counted = Counted(self)
        self.new_job("")

    def new_job(self, job: str) -> None:
        """Another job begins; what was outside the master is of the one before."""
        self.job = job
        self.speakers: dict[str, Process] = {}
        """By incarnation, the process that speaks for it."""
        self._images: dict[tuple[p.Generation, int, int], Model] = {}
        self._seats: dict[tuple[str, int], str] = {}
        self._sizes: dict[str, int] = {}
        self._begun: dict[int, Model] = {}
        self._partings: dict[int, int] = {}
        """By round, the step where all leave, as the first of them was told."""
        self._last: Model | None = None
        self.silent = False
        """Some worker left without a reply of the master."""
        self.exited = False
        """All have ended with exit code 0, and some of them in training: the job is over for its launchers alone."""
        self._seen = 0
        self.manifests: set[p.Generation] = set()
        self.committed: p.Generation | None = None
        """The newest generation that somebody was told is committed."""
        self.complete: p.Generation | None = None
        """The newest one that somebody was told is complete in memory."""
        self.lone: set[p.Generation] = set()
        """Complete in one image, which need not be on every node."""
        self.memory_lost = False
        """Some keeper ended, or what it holds was damaged, or a rank saved on without a word from the master."""

    @property
    def now(self) -> float:
        """The true time."""
        return self._loop.now

    def tell(self, who: str, what: str) -> None:
        self._story.tell(self._loop.now, who, what)

    # ---- the master's events -----------------------------------------------------------------------------------------

    def applied(self, state: Master, event: Any, key: Key | None, entry: PendingEvent | None, *, now: float) -> None:
        """The core has applied `event`, or recognized it (`entry` None)."""
        del now
        self.state = state
        name = f"{key.incarnation}/{key.channel}/{key.seq}" if key is not None else None
        self._story.note(self._loop.now, type(event).__name__)
        if entry is None:
            self.check(name in self._index, f"{type(event).__name__} {name} was taken for a repetition")
            return
        if name is not None:
            self._index[name] = len(self._applied)
        told = Told(event, entry.reply, entry.record)
        self._applied.append(told)
        job = state.jobs.get(event.job)
        if job is None:
            self._broken(f"{type(event).__name__} was applied to no job")
        self._narrate(job, event)
        if isinstance(event, Lost) and self._swarm.masterly and event.job == self.job:
            speaker = self.speakers.get(event.incarnation)
            alive = speaker is not None and not speaker.dead
            self.check(not alive, f"{event.incarnation} is lost ({event.reason}), and it could speak all the time")
        self.counted.event(event, entry.reply)
        self.counted.job(job)
        for effect in entry.effects:
            if isinstance(effect, CommitGeneration):
                self.counted.commits(job, effect.manifest)

    def _narrate(self, job: Job, event: Any) -> None:
        if isinstance(event, (Lost, p.Exited, p.Leave)):
            whom = event.worker if isinstance(event, p.Exited) else event.incarnation
            how = event.reason if isinstance(event, Lost) else getattr(event, "reason", "")
            self.tell("master", f"{type(event).__name__} {whom} {getattr(how, 'value', how)}")
        current = job.rounds.round
        if current is not None and (current.number, current.phase) != self._said:
            self._said = current.number, current.phase
            seats = " ".join(f"{one.rank}={name}" for name, one in current.members.items())
            choice = job.plan.restore
            what = f"from {choice.generation} in {choice.source.value}" if choice else "anew"
            more = {p.Phase.ATTACHING: seats, p.Phase.BROKEN: ""}.get(current.phase, f"attempt {job.attempt} {what}")
            self.tell("master", f"{job.name} round {current.number} is {current.phase.value} {more}")
        if job.finished and self._finished != job.name:
            self._finished = job.name
            self.tell("master", f"{job.name} is finished at step {job.finished_step}")

    _said: tuple[int, p.Phase] | None = None
    _finished = ""

    def answered(self, key: str | None, durable: list[bytes]) -> None:
        """The answer goes out: what it answers must be on disk."""
        if key is None:
            return
        at = self._index.get(key)
        if at is None:
            self._broken(f"{key} is answered and was never applied")
        if not (at < len(durable) and durable[at] == self._applied[at].record):
            self._broken(f"{type(self._applied[at].event).__name__} {key} is answered before it is durable")

    def started(self, state: Master, durable: list[bytes]) -> None:
        """A life begins: it has all that was durable, in order, and nothing else."""
        same = [told.record for told in self._applied[: len(durable)]] == durable
        self.check(same, "the journal does not hold the events that were applied, in their order")
        self._forget(state, len(durable))

    def rolled_back(self, state: Master, durable: int) -> None:
        """The journal refused: what it did not take has never happened."""
        self._forget(state, durable)

    def _forget(self, state: Master, keep: int) -> None:
        del self._applied[keep:]
        self._index = {key: at for key, at in self._index.items() if at < keep}
        self.state = state
        self.counted = Counted(self)
        for told in self._applied:
            self.counted.event(told.event, told.reply)
        for job in state.jobs.values():
            self.counted.adopt(job)

    def effect(self, effect: Effect) -> None:
        """Done only behind the commit of its event."""
        self._story.note(self._loop.now, type(effect).__name__)

    # ---- what the machines did ---------------------------------------------------------------------------------------

    def hashed(self, image: Image) -> None:
        """A rank's image lies whole in memory."""
        self._images[image.generation, image.rank, image.world_size] = image.model

    def image(self, generation: p.Generation, rank: int, world_size: int) -> Model | None:
        """What that rank of so many saved, if it ever did."""
        return self._images.get((generation, rank, world_size))

    def manifest(self, manifest: p.Manifest, images: list[Image | None]) -> None:
        """The store is told that a generation is whole."""
        missing = [rank for rank, image in enumerate(images) if image is None]
        self.check(not missing, f"{manifest.generation} is committed without the files of ranks {missing}")
        models = {image.model for image in images if image is not None}
        self.check(len(models) == 1, f"{manifest.generation} is committed, and its ranks saved different models")
        self.manifests.add(manifest.generation)
        self.tell("storage", f"has {manifest.generation}")

    def passed(self, who: str, round_: int, step: int, left: int | None) -> None:
        """A member that is bound by the agreement passes the step boundary of `step`; `left`: or leaves there, and has
        begun at that step."""
        agreed = self._partings.get(round_)
        if left is None:
            self.check(agreed is None or step < agreed, f"{who} passes step {step}, and all leave at {agreed}")
        else:
            right = agreed is not None and step == max(agreed, left)
            self.check(right, f"{who} leaves round {round_} at step {step}, and {agreed} was agreed on")

    def offered(self, attach: p.Attach) -> None:
        """A worker says what its node holds."""
        for held in attach.held:
            known = self.image(held.generation, held.rank, held.world_size)
            self.check(
                known is not None, f"{attach.node} offers {held.generation} of rank {held.rank}: nobody saved it"
            )

    def told(self, request: Any, reply: Any) -> None:
        """The master's word to a worker or an agent."""
        if getattr(request, "job", None) != self.job:
            return
        newest, complete = getattr(reply, "newest_committed", None), getattr(reply, "newest_complete", None)
        if isinstance(reply, p.Parting) and reply.step is not None:
            agreed = self._partings.setdefault(reply.round, reply.step)
            self.check(agreed == reply.step, f"all leave round {reply.round} at {agreed}, and then at {reply.step}")
        if newest is not None and (self.committed is None or newest > self.committed):
            self.check(newest in self.manifests, f"{newest} is said to be committed, and is not")
            self.committed = newest
        if complete is not None and (self.complete is None or complete > self.complete):
            self.complete = complete

    def entered(self, prefix: str, rank: int, world_size: int, incarnation: str) -> None:
        """A process joins the process group."""
        holder = self._seats.setdefault((prefix, rank), incarnation)
        self.check(holder == incarnation, f"rank {rank} of {prefix} is held by {holder} and by {incarnation}")
        size = self._sizes.setdefault(prefix, world_size)
        self.check(size == world_size and rank < size, f"{prefix} has {size} members, {incarnation} sees {world_size}")

    def loaded(self, choice: p.Restore, image: Image) -> None:
        """A rank has read what it was told to."""
        same = choice.generation == image.generation and choice.world_size == image.world_size
        self.check(same, f"told to load {choice.generation}, it found {image.generation}")

    def begun(self, job: str, plan: p.Plan, model: Model, base: dict[str, str] | None) -> None:
        """A rank trains on from here."""
        other = self._begun.setdefault(plan.attempt, model)
        self.check(other == model, f"attempt {plan.attempt} of {job} begins with different models on its ranks")
        self.check(not model.twice, f"attempt {plan.attempt} begins with samples trained twice: {names(model.twice)}")
        if base is not None:
            done = self.data.mask({name: Ranges.decode(text) for name, text in base.items()})
            wrong = done ^ model.once
            self.check(not wrong, f"the ledger and the restored model disagree about {names(wrong)}")

    def sampled(self, model: Model, cursor: int) -> None:
        """A rank's sampler goes on from here."""
        wrong = model.once ^ bits(0, 0, cursor)
        self.check(not wrong, f"the sampler goes on at {cursor}, and the model disagrees about {names(wrong)}")

    def alike(self, prefix: str, models: list[Model]) -> None:
        """All ranks take a step."""
        if len(set(models)) != 1:
            self._broken(f"ranks of {prefix} step from different models: {models}")

    # ---- the end -----------------------------------------------------------------------------------------------------

    def trained(self, job: str, model: Model) -> None:
        """A rank says that training is over."""
        bad = self._bad(job)
        missing = self.data.whole & ~bad & ~model.once
        self.check(not missing, f"training ended without {names(missing)}")
        self.check(not model.twice, f"training ended with samples trained twice: {names(model.twice)}")
        self._last = model

    def saw(self, batch: int) -> None:
        """A worker without a seat trained on it."""
        self._seen |= batch

    def free_done(self, job: str) -> None:
        """A worker without a seat was told that nothing is left."""
        missing = self.data.whole & ~self._bad(job) & ~self._seen
        self.check(not missing, f"{job} is over, and nobody has trained on {names(missing)}")

    def over(self, job: str) -> bool:
        found = self.state.jobs.get(job)
        return found is not None and found.finished

    def ended(self, job: str) -> None:
        """Everybody has gone home."""
        found = self.state.jobs[job]
        if self._swarm.free:
            books = found.ledgers.named["data"].books
            done = self.data.mask({name: one.done for name, one in books.items()})
            self.check(done | self._bad(job) == self.data.whole, "the books are not closed")
            return
        if (self.silent or self.exited) and not found.finished:
            return
        self.check(found.finished, f"all workers of {job} left, and it is not finished")
        self.check(self._last is not None and found.finished_step == self._last.step, "it finished at another step")

    def _bad(self, job: str) -> int:
        """What was given up because it could not be read, or was lost with its holders too often."""
        ledger = self.state.jobs[job].ledgers.named.get("data")
        books = ledger.books if ledger is not None else {}
        pieces = [(name, piece) for name, one in books.items() for piece in one.bad]
        return sum(bits(self.data.index(name), piece.lo, piece.hi) for name, piece in pieces)


__all__ = ["SPAN", "Data", "Promises", "Told"]
