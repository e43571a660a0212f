"""A rank that reshards opens the few files that it needs, not those of all ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from dlrover_hooks.checkpoint.memory.memcpy import Copier
from dlrover_hooks.checkpoint.restore import generation_loader
from dlrover_hooks.checkpoint.restore.generation_loader import Restorer
from dlrover_hooks.checkpoint.restore.stored_image import StoredImage
from dlrover_hooks.checkpoint.state.pytree import flatten
from dlrover_hooks.checkpoint.state.safetensors_header import Inside, parse
from dlrover_hooks.checkpoint.state.safetensors_layout import subset
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation, Manifest, Restore, ShardFile, Source
from dlrover_hooks.pytorch.tensor_loading import Filling
from tests.images import image_of
from tests.unit.checkpoint.test_sharded import mesh

WORLD, WHICH = 16, Generation(0, 1, "a" * 32)
WHOLE = {
    "w": torch.arange(70.0 * 6).view(70, 6),
    "few": torch.arange(5.0),
    "columns": torch.arange(4.0 * 48).view(4, 48),
}
ALONG = {"w": 0, "few": 0, "columns": 1}


def sharded(name: str, on: Any) -> Any:
    """This rank's part, as `torch.chunk` cuts."""
    whole, along = WHOLE[name], ALONG[name]
    ranks, rank = on.size(-1), on.get_local_rank(on.ndim - 1)
    size = math.ceil(whole.shape[along] / ranks)
    begin, stop = (min(at * size, whole.shape[along]) for at in (rank, rank + 1))
    layout = [Replicate()] * (on.ndim - 1) + [Shard(along)]
    local = whole.narrow(along, begin, stop - begin).contiguous().clone()
    return DTensor.from_local(local, on, layout, run_check=False, shape=whole.shape, stride=whole.stride())


class Tree:
    """What 16 ranks saved; `opened`: the ranks whose files were."""

    def __init__(self, root: Path, *shape: int) -> None:
        self.url, self.opened = str(root), list[int]()
        files = tuple(self._file(rank, shape) for rank in range(WORLD))
        generations.commit(self.url, None, Manifest("job", WHICH, WORLD, files, 1.0), 2)

    def _file(self, rank: int, shape: tuple[int, ...]) -> ShardFile:
        with mesh(rank, *shape) as on:
            flat = flatten({name: sharded(name, on) for name in WHOLE}, where="state")
            inside = Inside(WHICH, rank, WORLD, {"state": msgspec.Raw(flat.skeleton)})
            data = image_of(flat.tensors, inside)
        header, view = parse(data), memoryview(data)
        mine = {name for name, whole in header.wholes().items() if not whole.copy}
        part = subset(header, lambda name: name in mine)
        pieces = [memoryview(part.header), *(view[a:b] for a, b in part.pieces)]
        return generations.write_shard(self.url, None, WHICH, rank, WORLD, pieces, part.nbytes, job="job")

    def restored(self, rank: int, world: int, targets: dict[str, Any]) -> None:
        self.opened.clear()
        restorer = Restorer(cast(Any, None), Copier(1), 0, rank, world, self.url, {}, lambda *_: None)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(generation_loader, "StoredImage", self._counted)
            named = {f"state.{name}": target for name, target in targets.items()}
            restorer.load(Restore(WHICH, WORLD, Source.STORAGE), lambda opening: Filling(opening, named)).fill()
        assert len(self.opened) == len(set(self.opened))

    def _counted(self, place: StorageFolder, manifest: Manifest, rank: int) -> StoredImage:
        self.opened.append(rank)
        return StoredImage(place, manifest, rank)


def fill(tree: Tree, rank: int, *shape: int) -> None:
    """Restore at `rank`, bit-equal; no file is opened twice."""
    with mesh(rank, *shape) as on:
        targets = {name: sharded(name, on) for name in WHOLE}
        wanted = {name: one._local_tensor.clone() for name, one in targets.items()}
        for one in targets.values():
            one._local_tensor.fill_(-1.0)
        tree.restored(rank, on.size(), targets)
        assert all(torch.equal(one._local_tensor, wanted[name]) for name, one in targets.items())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("tree"), WORLD)


def needed(rank: int, world: int) -> set[int]:
    """The saved ranks with rows (columns) of `rank`'s parts."""
    found: set[int] = set()
    for name, along in ALONG.items():
        length = WHOLE[name].shape[along]
        here, there = math.ceil(length / world), math.ceil(length / WORLD)
        found |= {at // there for at in range(rank * here, min((rank + 1) * here, length))}
    return found


@pytest.mark.parametrize("world", [16, 32, 12, 8, 5, 1])
def test_no_file_is_opened_that_is_not_needed(tree: Tree, world: int) -> None:
    """But the first one, for what is not sharded, and this rank's share of all, for their leases. Of all ranks together
    that is O(W), not O(W^2).
    """
    for rank in range(world):
        fill(tree, rank, world)
        leases = set(range(rank, WORLD, world))
        assert set(tree.opened) == {0} | leases | needed(rank, world), rank


def test_whatever_the_layout_all_is_found(tree: Tree, tmp_path: Path) -> None:
    """HSDP on either side; and what is whole here."""
    for rank in range(8):
        fill(tree, rank, 2, 4)
    replicas = Tree(tmp_path, 4, 4)
    for rank in range(6):
        fill(replicas, rank, 6)
    targets = {name: torch.full_like(whole, -1.0) for name, whole in WHOLE.items()}
    replicas.restored(0, 1, targets)
    assert all(torch.equal(one, WHOLE[name]) for name, one in targets.items())


def test_a_part_that_no_file_holds_is_corrupt(tmp_path: Path) -> None:
    tree = Tree(tmp_path, WORLD)
    (tmp_path / generations.folder(WHICH) / generations.shard_name(7)).unlink()
    with pytest.raises(Corrupt, match=r"shard-00008-model.*there is no such file"):
        fill(tree, 3, 8)
