"""A node's keeper: three slots for each worker's seat, proofs of what was hashed, replicas of a neighbour's images.

Stands for the processes behind `dlrover_hooks.checkpoint.keeper` and for `Checkpointer`, which work on shared memory
and sockets. The rule by which a slot is used again is the real one, `reuse`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrover_hooks import protocol as p
from dlrover_hooks.checkpoint.ipc.keeper_messages import Hashed, Persisted, PersistFailed
from dlrover_hooks.checkpoint.memory.segment import SLOTS, Slot
from dlrover_hooks.checkpoint.memory.slot_policy import Heard
from dlrover_hooks.checkpoint.save.generation_tracker import GenerationTracker
from dlrover_hooks.errors import CheckpointError, Corrupt, KeeperAway, StorageFailed
from tests.simulation.loop import Process
from tests.simulation.model import Model
from tests.simulation.promises import Promises
from tests.simulation.threads import Bell

if TYPE_CHECKING:
    from tests.simulation.world import World


LONE_S = 30.0
"""Deadline for the hash of a lone image."""


class Image(NamedTuple):
    """What one rank saved: the model, which is the same on all ranks, and this rank's part of the data state."""

    generation: p.Generation
    rank: int
    world_size: int
    model: Model
    leases: dict[str, Any]
    damaged: bool = False


class Store:
    """The checkpoint URL: files, and manifests that name whole generations. Implements the master's `Storage`."""

    def __init__(self, dice: random.Random, promises: Promises) -> None:
        self.files: dict[tuple[p.Generation, int], Image] = {}
        self.manifests: dict[p.Generation, p.Manifest] = {}
        self.failing = False
        self._dice, self._promises = dice, promises

    def pace(self, args: tuple[Any, ...]) -> tuple[float, float]:
        del args
        return self._dice.uniform(0.0, 0.5), self._dice.uniform(0.0, 0.1)

    def commit(self, url: str, options: Mapping[str, Any] | None, manifest: p.Manifest, keep: Any) -> None:
        del url, options
        if self.failing:
            raise StorageFailed("the store does not answer")
        if manifest.job != self._promises.job:
            return  # the job before was over, and its tree with it
        images = [self.files.get((manifest.generation, rank)) for rank in range(manifest.world_size)]
        self._promises.manifest(manifest, images)
        self.manifests[manifest.generation] = manifest
        for old in sorted(self.manifests)[: -max(1, keep if isinstance(keep, int) else keep.last)]:
            del self.manifests[old]
            for rank in [rank for generation, rank in self.files if generation == old]:
                del self.files[old, rank]

    def finish(self, url: str, options: Mapping[str, Any] | None, job: str, run: str, step: int) -> None:
        del url, options, job, run, step
        if self.failing:
            raise StorageFailed("the store does not answer")

    def claim(self, url: str, options: Mapping[str, Any] | None, job: str, owner: str) -> Store:
        del url, options, job, owner
        return self

    def release(self) -> None:
        """One job at a time: nobody else wants it."""


class Keeper:
    """One life of a node's keeper."""

    def __init__(self, world: World, node: str) -> None:
        self.process = Process(f"{node}.keeper", world.loop)
        self.slots: dict[int, list[Slot]] = {}
        self.images: dict[tuple[int, int], Image] = {}
        """By seat and slot."""
        self.proofs: dict[tuple[int, int], int] = {}
        """By seat and slot, the sequence word that was hashed."""
        self.replicas: dict[tuple[str, int], list[Image]] = {}
        """By home and seat there, the two newest."""
        self.to: p.KeeperAddress | None = None
        self._world, self._node, self._dice = world, node, world.dice

    def seat(self, seat: int) -> list[Slot]:
        return self.slots.setdefault(seat, [Slot(index=index, seq=0) for index in range(SLOTS)])

    def take_seat(self, seat: int) -> None:
        """Its trainer before is gone: what was torn is free."""
        self.slots[seat] = [Slot(one.index, one.seq + 1) if one.torn else one for one in self.seat(seat)]

    def held(self) -> tuple[p.Held, ...]:
        """The inventory."""
        own = [
            p.Held(image.generation, image.rank, image.world_size, seat, index)
            for (seat, index), image in sorted(self.images.items())
            if self._proved(seat, index)
        ]
        others = [
            p.Held(image.generation, image.rank, image.world_size, seat, 0, home=home)
            for (home, seat), images in sorted(self.replicas.items())
            for image in images
        ]
        return (*own, *others)

    def find(self, generation: p.Generation, rank: int, world_size: int) -> Image | None:
        """A hashed image: this node's own, or a replica. Damage is noticed when it is read."""
        own = [image for (seat, index), image in sorted(self.images.items()) if self._proved(seat, index)]
        others = [image for images in self.replicas.values() for image in images]
        found = (one for one in (*own, *others) if image_identity(one) == (generation, rank, world_size))
        return next(found, None)

    def _proved(self, seat: int, index: int) -> bool:
        return self.proofs.get((seat, index)) == self.slots[seat][index].seq

    def begin(self, seat: int, index: int) -> None:
        """A copy begins: the slot is torn."""
        slot = self.seat(seat)[index]
        self.slots[seat][index] = Slot(index, slot.seq + 1)

    def publish(self, seat: int, index: int, image: Image, notify: Callable[[Any], None]) -> None:
        """The copy is whole. It counts once it is hashed."""
        slot = self.slots[seat][index]
        self.slots[seat][index] = Slot(index, slot.seq + 1, image.generation, 1, image.rank, image.world_size)
        for other, old in enumerate(self.slots[seat]):
            if other != index and image_identity(old) == image_identity(image):
                self.proofs.pop((seat, other), None)
        self.images[seat, index] = image
        self.process.spawn(self._hash(seat, index, slot.seq + 1, notify))

    async def _hash(self, seat: int, index: int, seq: int, notify: Callable[[Any], None]) -> None:
        await self.process.sleep(self._dice.uniform(0.001, 0.3))
        if self.slots[seat][index].seq != seq:
            return
        self.proofs[seat, index] = seq
        image = self.images[seat, index]
        self._world.promises.hashed(image)
        notify(Hashed(generation=image.generation, rank=image.rank, world_size=image.world_size))
        if self.to is not None:
            await self._replicate(seat, image, self.to)

    async def _replicate(self, seat: int, image: Image, to: p.KeeperAddress) -> None:
        await self.process.sleep(self._dice.uniform(0.01, 2.0))
        peer = self._world.keeper_at(to)
        if peer is not None and self._world.connected(self._node, to.node):
            images = peer.replicas.setdefault((self._node, seat), [])
            images.append(image)
            images.sort(key=lambda one: one.generation)
            del images[:-2]

    async def persist(
        self, seat: int, generation: p.Generation, rank: int, world_size: int, notify: Callable[[Any], None]
    ) -> None:
        """Write this rank's file."""
        await self.process.sleep(self._dice.uniform(0.01, 3.0))
        image = self.find(generation, rank, world_size)
        if image is None or image.damaged:
            notify(PersistFailed(generation=generation, reason="its slot was used again", gone=True))
        elif self._world.store.failing:
            notify(PersistFailed(generation=generation, reason="the store does not answer"))
        else:
            self._world.store.files[generation, rank] = image
            file = p.ShardFile(f"rank-{rank}", rank, 1, 1, (f"{image.model.uid:016x}",))
            notify(Persisted(generation=generation, file=file))
        del seat


class Engine:
    """What a worker knows of its saves; the master's `Checkpointer` calls go to the node's keeper of the moment."""

    def __init__(self, world: World, node: str, seat: int, notify: Callable[[Any], None]) -> None:
        self._world, self._node, self._seat, self._notify = world, node, seat, notify
        self.attempt, self.run, self.rank, self.world_size = 0, "", 0, 0
        self.generations = GenerationTracker()
        self._known: Keeper | None = None

    def begin_session(self) -> GenerationTracker:
        """A session begins, in the same process and with the same memory at the keeper."""
        self.generations = self.generations.next_session()
        return self.generations

    @property
    def keeper(self) -> Keeper | None:
        """The living one."""
        self.look()
        return self._known if self._known is not None and not self._known.process.dead else None

    def look(self) -> None:
        """With another life of the keeper everything is forgotten."""
        keeper = self._world.nodes[self._node].keeper
        if keeper is not self._known:
            self._known, self.generations.complete_here = keeper, None
            self._gone()

    def _gone(self) -> None:
        for generation in sorted(self.generations.pending):
            self._noticed(PersistFailed(generation=generation, reason="the keeper is gone", gone=True))

    def _noticed(self, notice: Any) -> None:
        if isinstance(notice, (Persisted, PersistFailed)):
            refused = isinstance(notice, PersistFailed) and not notice.gone
            self.generations.ended(notice.generation, stored=isinstance(notice, Persisted), refused=refused)
        if (notice.generation.run, notice.generation.attempt) == (self.run, self.attempt):
            self._notify(notice)

    async def save(
        self, process: Process, model: Model, leases: dict[str, Any], world_size: int, *, last: bool
    ) -> bool:
        """See `Checkpointer.save`; False: skipped."""
        generation = p.Generation(self.attempt, model.step, self.run)
        heard = self.generations.heard(alone=world_size == 1)
        image = Image(generation, self.rank, world_size, model, leases)
        return await self._write(process, image, heard, self._noticed, last=last)

    async def save_lone(self, process: Process, generation: p.Generation, model: Model, state: dict[str, Any]) -> bool:
        """See `Checkpointer.save_lone`."""
        held = self.keeper.seat(self._seat) if self.keeper is not None else ()
        heard = self.generations.heard(alone=False)
        heard = heard._replace(hopeless=frozenset(slot.generation for slot in held if slot.generation is not None))
        hashed = Bell(self._world.loop, process)
        image = Image(generation, 0, 1, model, state)
        return await self._write(process, image, heard, hashed.put, last=True) and await hashed.wait(LONE_S)

    async def _write(
        self, process: Process, image: Image, heard: Heard, notify: Callable[[Any], None], *, last: bool
    ) -> bool:
        """Into a slot that may be written over; False: there is none, or no keeper."""
        keeper, seat = self.keeper, self._seat
        if keeper is None:
            return False
        index = self.generations.choose_slot(keeper.seat(seat), heard, image.generation, last=last)
        if index is None:
            return False
        keeper.begin(seat, index)
        await process.sleep(self._world.dice.uniform(0.0, 0.02))
        if keeper.process.dead:
            return False
        keeper.publish(seat, index, image, notify)
        return True

    def complete(self, generation: p.Generation) -> None:
        if self.keeper is not None:
            self.generations.complete_here = generation

    def fail_if_keeper_gone(self) -> None:
        if self.keeper is None:
            self._gone()

    def persist(self, generation: p.Generation) -> None:
        keeper = self.keeper
        if keeper is None:
            self._noticed(PersistFailed(generation=generation, reason="the keeper is gone", gone=True))
        else:
            keeper.process.spawn(keeper.persist(self._seat, generation, self.rank, self.world_size, self._noticed))

    def restored(self, generation: p.Generation) -> None:
        """It lies whole in memory."""
        if self.keeper is not None:
            self.generations.complete_here = generation

    # ---- loading -----------------------------------------------------------------------------------------------------

    async def load(self, choice: p.Restore, rank: int, world_size: int, locate: Callable[..., Any]) -> list[Image]:
        """The image to begin with, and those whose leases this rank answers for. Raises CheckpointError."""
        first, leases = self._wanted(choice, rank, world_size)
        wanted = [first, *(one for one in leases if one != first)]
        images = {one: await self._open(choice, one, locate) for one in wanted}
        return [images[first], *(images[one] for one in leases)]

    def _wanted(self, choice: p.Restore, rank: int, world_size: int) -> tuple[int, list[int]]:
        """See `Restorer._here` and `_shares`."""
        if choice.world_size == world_size:
            return rank, [rank]
        if choice.source is p.Source.STORAGE:
            return rank % choice.world_size, list(range(rank, choice.world_size, world_size))
        keeper = self.keeper
        if keeper is None:
            raise KeeperAway("the keeper is gone")
        this = choice.generation, choice.world_size
        here = sorted({one.rank for one in keeper.held() if (one.generation, one.world_size) == this})
        wanted = rank % choice.world_size
        first = wanted if wanted in here or not here else here[wanted % len(here)]
        unasked = here if self._seat == 0 else []
        return first, unasked if choice.answers is None else list(choice.answers)

    async def _open(self, choice: p.Restore, rank: int, locate: Callable[..., Any]) -> Image:
        if choice.source is p.Source.STORAGE:
            image = self._world.store.files.get((choice.generation, rank))
            if self._world.store.failing or image is None or choice.generation not in self._world.store.manifests:
                raise StorageFailed(f"{choice.generation}: no file of rank {rank}")
            return _sound(image)
        if self.keeper is None:
            raise KeeperAway("the keeper is gone")
        image = self.keeper.find(choice.generation, rank, choice.world_size)
        if choice.source is p.Source.PEER and (image is None or image.damaged):
            image = await self._fetch(choice, rank, locate)
        if image is None:
            raise Corrupt(f"{choice.generation}: no image of rank {rank}")
        return _sound(image)

    async def _fetch(self, choice: p.Restore, rank: int, locate: Callable[..., Any]) -> Image | None:
        located = await locate(choice.generation, rank)
        for address in located.at:
            peer = self._world.keeper_at(address)
            if peer is not None and self._world.connected(self._node, address.node):
                image = peer.find(choice.generation, rank, choice.world_size)
                if image is not None and not image.damaged:
                    return image
        return None


def image_identity(one: Image | Slot) -> tuple[p.Generation | None, int, int]:
    """See `checkpoint.holdings.whose`."""
    return one.generation, one.rank, one.world_size


def _sound(image: Image) -> Image:
    if image.damaged:
        raise Corrupt(f"{image.generation}: the image of rank {image.rank} does not match its hash")
    return image


__all__ = ["CheckpointError", "Engine", "Image", "Keeper", "Store"]
