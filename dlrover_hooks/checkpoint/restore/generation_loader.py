"""Loads what a round restores, from this node's memory or from storage, for one rank. Training thread.

There are two phases, so that a failed load leaves the model unchanged. `Restorer.load` opens and verifies all that this
rank needs. Once every rank has reported success, `LoadedTree.fill` copies it into the adapter's own tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_client import KeeperClient
from dlrover_hooks.checkpoint.memory.memcpy import Copier
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.checkpoint.restore.stored_image import READS, StoredImage
from dlrover_hooks.checkpoint.state.pytree import unflatten
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
from dlrover_hooks.checkpoint.storage.retention import reading
from dlrover_hooks.checkpoint.tensors.generation_images import Image, Images, KeeperSlotImage, chosen
from dlrover_hooks.checkpoint.tensors.numpy_backend import library
from dlrover_hooks.errors import Corrupt, StorageFailed
from dlrover_hooks.protocol import Generation, Restore, Source


class Fit(Protocol):
    """How the adapter's own tensors take the saved values. All needed parts of the images are verified already."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """By saved name, the tensors that `fill` will write; they are part of the restored tree."""
        ...

    def fill(self) -> None:
        """Copy. The only possible error is that memory was overwritten during the copy."""
        ...


class Opening(NamedTuple):
    """What an adapter may inspect: `state` is the saved one with a `Stored` in the place of each tensor."""

    state: Any
    images: Images
    copier: Copier
    weights_only: bool = False


Fitting = Callable[[Opening], Fit]
"""Raises UsageError if what was saved does not fit."""


class LoadedTree(NamedTuple):
    """`tree` in new memory, except for tensors of the adapter, which are unchanged until `fill`.

    `same_world`: the world is as large as the saved one, so the `rank` part is this rank's own. `leases`: the parts of
    that name of the saved ranks for which this rank is responsible. Over all ranks, each is returned once.
    """

    tree: dict[str, Any]
    same_world: bool
    leases: tuple[dict[str, Any], ...]
    images: Images
    fit: Fit | None = None

    def fill(self) -> None:
        """The second phase; it ends with `close`.

        Raises:
            Corrupt: the memory was overwritten during the copy. The tensors are unusable then.
        """
        try:
            if self.fit is not None:
                self.fit.fill()
            self.images.check()
        finally:
            self.close()

    def close(self) -> None:
        """Close the images. Idempotent."""
        self.images.close()


class Restorer:
    """Opens what `rank` of `world_size` restores, through the keeper of this node (`line`) or from storage."""

    def __init__(
        self,
        line: KeeperClient,
        copier: Copier,
        seat: int,
        rank: int,
        world_size: int,
        save_to: str | None,
        options: dict[str, Any],
        fetch: Callable[[Generation, int, int], None],
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._line, self._copier, self._seat = line, copier, seat
        self._save_to, self._options, self._fetch = save_to, options, fetch

    def load(self, restore: Restore, fitting: Fitting | None = None) -> LoadedTree:
        """See `Checkpointer.load`."""
        with self._noted(restore):
            return self._load(restore, fitting)

    def _noted(self, restore: Restore) -> contextlib.AbstractContextManager[None]:
        """Protect a generation at another URL from the retention of the job that may save there meanwhile."""
        if restore.source is not Source.STORAGE or restore.url in (None, self._save_to):
            return contextlib.nullcontext()
        return reading(StorageFolder(restore.url, self._options), restore.generation)

    def _load(self, restore: Restore, fitting: Fitting | None) -> LoadedTree:
        memory = restore.source is not Source.STORAGE
        opener = self._opener(restore) if memory else self._files(restore)
        images = Images(restore.generation, restore.world_size, opener)
        try:
            first, leases = self._here(restore) if memory else (0, self._shares(restore))
            found = self._restored(restore, images, first, fitting)
            leases = [] if restore.weights else leases
            leases = [images.image(rank).header.inside().skeletons for rank in leases]
            parts = tuple(unflatten(bytes(part["leases"]), {}) for part in leases if "leases" in part)
            return found._replace(leases=parts)
        except BaseException:
            images.close()
            raise

    def _restored(self, restore: Restore, images: Images, first: int, fitting: Fitting | None) -> LoadedTree:
        same = restore.world_size == self.world_size and not restore.weights
        skeletons = images.image(first).header.inside().skeletons
        own = images.image(self.rank).header.inside().skeletons if same else {}
        index = images.index()
        if fitting is None and any(stored.sharded for stored in index.values()):
            index = images.everything()
        if "state" not in skeletons:
            raise Corrupt(f"{restore.generation}: the image of rank {first} has no state, only {sorted(skeletons)}")
        opening = Opening(unflatten(bytes(skeletons["state"]), index), images, self._copier, restore.weights)
        fit = fitting(opening) if fitting is not None else None
        given = dict(fit.tensors) if fit is not None else {}
        parts = ("state", "data", *(("rank",) if same else ()))
        wanted = [one for one in chosen(index, parts) if one.name not in given]
        if restore.weights and fit is not None:
            wanted, given = [], index | given  # the rest of the state stays unchanged: named, not read
        if not all(one.is_whole for one in wanted):
            index = images.everything()
            wanted = [one for one in chosen(index, parts) if one.name not in given]
        fresh = library().load(wanted, self._copier)
        images.check()
        tree = {
            part: unflatten(bytes(skeletons[part]), fresh | given) for part in ("state", "data") if part in skeletons
        }
        if "rank" in own:
            tree["rank"] = unflatten(bytes(own["rank"]), fresh)
        return LoadedTree(tree, same, (), images, fit)

    # ---- memory

    def _here(self, restore: Restore) -> tuple[int, list[int]]:
        """The rank whose image is opened first, and the ranks for whose leases this one is responsible."""
        if restore.world_size == self.world_size:
            return self.rank, [self.rank]
        held = self._line.inventory().held
        this = restore.generation, restore.world_size
        here = sorted({one.rank for one in held if (one.generation, one.world_size) == this})
        wanted = self.rank % restore.world_size
        first = wanted if wanted in here or not here else here[wanted % len(here)]
        unasked = here if self._seat == 0 else []
        return first, unasked if restore.answers is None else list(restore.answers)

    def _opener(self, restore: Restore) -> Callable[[int], Image]:
        def ask(rank: int) -> tuple[Any, int]:
            which = {"generation": restore.generation, "rank": rank, "world_size": restore.world_size}
            return self._line.ask(lambda ref: keeper_messages.OpenImage(ref=ref, **which))

        def open_slot(rank: int) -> Image:
            reply, fd = ask(rank)
            if isinstance(reply, keeper_messages.Refused) and restore.source is Source.PEER:  # not here, or damaged
                self._fetch(restore.generation, rank, restore.world_size)
                reply, fd = ask(rank)
            if isinstance(reply, keeper_messages.Refused):
                raise Corrupt(reply.reason, hint=reply.hint)
            shared = SharedSegment.attach(fd, writable=False)
            try:
                return KeeperSlotImage(shared, reply.slot, reply.seq, reply.image_bytes, reply.seat)
            except BaseException:
                shared.close()
                raise

        return open_slot

    # ---- storage

    def _shares(self, restore: Restore) -> list[int]:
        """The ranks for whose leases this one is responsible."""
        if restore.world_size == self.world_size:
            return [self.rank]
        return list(range(self.rank, restore.world_size, self.world_size))

    def _files(self, restore: Restore) -> Callable[[int], Image]:
        url = restore.url or self._save_to
        if url is None:
            raise StorageFailed(f"{restore.generation} is to be read from storage, but no URL is known")
        what = f"read the MANIFEST of {restore.generation} at {url}"
        manifest = READS.run(lambda _: generations.manifest_of(url, self._options, restore.generation), what)
        place = StorageFolder(url, self._options)
        return lambda rank: StoredImage(place, manifest, rank)
