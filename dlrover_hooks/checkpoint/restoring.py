"""What a round restores, out of this node's memory or out of storage, for one rank. Training thread."""

from __future__ import annotations

from typing import Any

from dlrover_hooks.checkpoint import snapshot, storage, wire
from dlrover_hooks.checkpoint.arena import Arena
from dlrover_hooks.checkpoint.copying import Copier
from dlrover_hooks.checkpoint.image import PARTS, Header, parse
from dlrover_hooks.checkpoint.line import Line, granted
from dlrover_hooks.checkpoint.tree import unflatten
from dlrover_hooks.errors import Corrupt, StorageFailed
from dlrover_hooks.protocol import Message, Restore, Source


class Restored(Message, frozen=True):
    """`tree` in fresh memory. `same_world`: its `rank` part is this very rank's of an equally large world.

    `leases`: the parts of that name of all saved ranks that this rank answers for. Over all ranks, each is there.
    """

    tree: dict[str, Any]
    same_world: bool
    leases: tuple[dict[str, Any], ...] = ()


class Restorer:
    """Opens what is to be restored at `rank` of `world_size`, through the keeper of this node (`line`) or storage."""

    def __init__(
        self,
        line: Line,
        copier: Copier,
        seat: int,
        rank: int,
        world_size: int,
        save_to: str | None,
        options: dict[str, Any],
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._line, self._copier, self._seat = line, copier, seat
        self._save_to, self._options = save_to, options

    def load(self, restore: Restore) -> Restored:
        """See `Checkpointer.load`."""
        same = restore.world_size == self.world_size
        if restore.source is Source.MEMORY:
            return self._from_memory(restore, same)
        return self._from_storage(restore, same)

    def _from_memory(self, restore: Restore, same: bool) -> Restored:
        tree = self._open(restore, self._memory_rank(restore, same), PARTS)
        if same:
            return Restored(tree, same, (tree["leases"],) if "leases" in tree else ())
        if self._seat != 0 or "leases" not in tree:  # seat 0 answers for all that its node holds
            return Restored(tree, same)
        return Restored(
            tree, same, tuple(self._open(restore, rank, ("leases",))["leases"] for rank in self._held_here(restore))
        )

    def _held_here(self, restore: Restore) -> list[int]:
        held = granted(self._line.ask(lambda ref: wire.Inventory(ref=ref))[0]).held
        return sorted({one.rank for one in held if one.generation == restore.generation})

    def _open(self, restore: Restore, rank: int, parts: tuple[str, ...]) -> dict[str, Any]:
        reply, fd = self._line.ask(lambda ref: wire.Open(ref=ref, generation=restore.generation, rank=rank))
        if isinstance(reply, wire.Refused):
            raise Corrupt(reply.reason, hint=reply.hint)
        arena = Arena.attach(fd, writable=False)
        try:
            view = arena.view(reply.slot, reply.image_bytes)
            header = parse(view)
            tree = self._tree(header, view, parts)
            if arena.seq(reply.slot) != reply.seq:
                raise Corrupt(f"slot {reply.slot} of seat {reply.seat} was overwritten while it was loaded")
            return tree
        finally:
            view = None
            arena.close()

    def _memory_rank(self, restore: Restore, same: bool) -> int:
        """Whose image to open. In another world size any will do for the replicated parts."""
        if same:
            return self.rank
        wanted = self.rank % restore.world_size
        here = self._held_here(restore)
        return wanted if wanted in here or not here else here[wanted % len(here)]

    def _from_storage(self, restore: Restore, same: bool) -> Restored:
        url = restore.url or self._save_to
        if url is None:
            raise StorageFailed(f"{restore.generation} is to be read from storage, but no URL is known")
        manifest = storage.manifest_of(url, self._options, restore.generation)
        first = storage.read(url, self._options, manifest, 0)
        tree = self._tree(parse(first), first, ("state", "data"))
        private: list[dict[str, Any]] = []
        for rank in [self.rank] if same else range(self.rank, manifest.world_size, self.world_size):
            own = first if rank == 0 else storage.read(url, self._options, manifest, rank)
            private.append(self._tree(parse(own), own, ("rank", "leases")))
        leases = tuple(part["leases"] for part in private if "leases" in part)
        return Restored(tree | (private[0] if same else {}), same, leases)

    def _tree(self, header: Header, buffer: memoryview, parts: tuple[str, ...]) -> dict[str, Any]:
        inside = header.inside()
        wanted = [name for name in header.tensors if name.split(".", 1)[0] in parts]
        tensors = snapshot.load(buffer, header, wanted, self._copier)
        return {part: unflatten(bytes(inside.skeletons[part]), tensors) for part in parts if part in inside.skeletons}
