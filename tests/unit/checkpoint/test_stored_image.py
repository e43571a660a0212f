"""Of a file in storage only the chunks that are needed are read, each verified; nothing is written before."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES, digests
from dlrover_hooks.checkpoint.memory.memcpy import Copier
from dlrover_hooks.checkpoint.restore import stored_image
from dlrover_hooks.checkpoint.restore.generation_loader import Opening
from dlrover_hooks.checkpoint.restore.stored_image import StoredImage
from dlrover_hooks.checkpoint.storage import generations
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
from dlrover_hooks.checkpoint.storage.stall_guard import StallGuard
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.checkpoint.tensors.generation_images import Images, need_all
from dlrover_hooks.errors import Corrupt, StorageFailed, UsageError
from dlrover_hooks.protocol import Manifest, ShardFile
from dlrover_hooks.pytorch.dcp_reader import opened
from dlrover_hooks.pytorch.tensor_loading import Filling
from tests.unit.checkpoint.test_torch_backend import GENERATION, put
from tests.waiting import until

TENSORS = {f"state.{name}": torch.full((CHUNK_BYTES // 4,), float(number)) for number, name in enumerate("abcd")}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """One generation; chunk 1 of its file (tensors a and b) is damaged."""
    data = put(TENSORS)
    file = ShardFile(generations.shard_name(0), 0, len(data), CHUNK_BYTES, digests(memoryview(data)))
    home = tmp_path / generations.folder(GENERATION)
    home.mkdir()
    (home / "MANIFEST.json").write_bytes(msgspec.json.encode(Manifest("job", GENERATION, 1, (file,), 1.0)))
    data[CHUNK_BYTES + 100] ^= 1
    (home / file.name).write_bytes(data)
    return tmp_path


def open_tree(tree: Path) -> Images:
    images = opened(str(tree))
    images.everything()
    return images


def test_only_what_is_needed_is_read(tree: Path) -> None:
    images = open_tree(tree)
    index = images.index()
    assert torch.equal(torch_backend.load([index["state.d"]])["state.d"], TENSORS["state.d"])
    with pytest.raises(Corrupt, match=r"shard-00001.*: chunk 1 does not match its hash"):
        torch_backend.load([index["state.a"]])
    images.close()


def test_a_file_of_another_size_is_not_read(tree: Path) -> None:
    manifest = generations.manifest_of(str(tree), None, GENERATION)
    (file,) = manifest.files
    longer = msgspec.structs.replace(file, nbytes=file.nbytes + 8)
    with pytest.raises(Corrupt, match=rf"expected {longer.nbytes} bytes, found {file.nbytes}"):
        StoredImage(StorageFolder(str(tree)), msgspec.structs.replace(manifest, files=(longer,)), 0)


def test_nothing_is_written_before_all_is_verified(tree: Path) -> None:
    """What does not fit or is damaged is found while the targets are still what they were."""
    images = open_tree(tree)
    opening, size = Opening({}, images, Copier(1)), CHUNK_BYTES // 4
    targets = {name: torch.full((size,), -1.0) for name in TENSORS}
    with pytest.raises(Corrupt, match="chunk 1"):
        Filling(opening, targets)
    with pytest.raises(UsageError, match=r"state\.d was saved as .*float32, here it is .*int32"):
        Filling(opening, {"state.c": targets["state.c"], "state.d": torch.zeros(size, dtype=torch.int32)})
    good = {"state.d": targets["state.d"]}
    filling = Filling(opening, good)
    assert all(bool((target == -1).all()) for target in targets.values())
    filling.fill()
    assert torch.equal(targets["state.d"], TENSORS["state.d"])
    images.close()


ODD = (0, 1, 3, CHUNK_BYTES // 4 - 1, 2 * CHUNK_BYTES + 5, 17, 5 * CHUNK_BYTES // 4, 1)


@pytest.mark.parametrize("root", ["", "memory://odd"])
@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_of_any_size_are_read_straight_to_their_place(tmp_path: Path, root: str, threads: int) -> None:
    """On a local disk by several threads; what was needed before, for a tensor in place, is not read again."""
    torch.manual_seed(0)
    tensors = {f"state.{index}": torch.randint(256, (size,), dtype=torch.uint8) for index, size in enumerate(ODD)}
    tensors["state.f"] = torch.randn(CHUNK_BYTES // 3)
    data = put(tensors)
    file = ShardFile(generations.shard_name(0), 0, len(data), CHUNK_BYTES, digests(memoryview(data)))
    place = StorageFolder(root or str(tmp_path))
    manifest = Manifest("job", GENERATION, 1, (file,), 1.0)
    place.make(generations.folder(GENERATION))
    place.put(f"{generations.folder(GENERATION)}/MANIFEST.json", msgspec.json.encode(manifest))
    place.put(f"{generations.folder(GENERATION)}/{file.name}", bytes(data))
    for needed in ([], ["state.3"], list(tensors)):
        images = opened(place.url)
        images.everything()
        need_all(images.index()[name] for name in needed)
        loaded = torch_backend.load(images.index().values(), Copier(threads))
        images.close()
        assert {name: torch.equal(tensor, loaded[name]) for name, tensor in tensors.items()} == dict.fromkeys(
            tensors, True
        )


def test_a_file_that_is_cut_short_while_it_is_read_is_damaged(tree: Path) -> None:
    images = open_tree(tree)
    path = next(tree.rglob("shard-*"))
    with path.open("rb+") as file:
        file.truncate(3 * CHUNK_BYTES)
    with pytest.raises(Corrupt, match=r"chunk [3-9] does not match its hash"):
        torch_backend.load([images.index()["state.d"]])
    images.close()


def test_a_read_that_stands_still_is_given_up(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that it may still write to lives until its thread ends."""
    images, released, left = open_tree(tree), threading.Event(), threading.Event()
    index, made, seen = images.index(), list[weakref.ref[torch.Tensor]](), list[bool]()
    empty, read_at = torch.empty, stored_image._read_at

    def watched(*args: Any, **more: Any) -> torch.Tensor:
        tensor = empty(*args, **more)
        made.append(weakref.ref(tensor))
        return tensor

    def hangs(fd: int, start: int, pieces: list[memoryview]) -> None:
        assert released.wait(60)
        seen.append(made[0]() is not None)
        read_at(fd, start, pieces)
        left.set()

    monkeypatch.setattr(stored_image, "READS", StallGuard(stall_s=1.0))
    monkeypatch.setattr(torch, "empty", watched)
    monkeypatch.setattr(stored_image, "_read_at", hangs)
    with pytest.raises(StorageFailed, match=r"cannot read .*shard-00001.*: nothing moved for 1 s"):
        torch_backend.load([index["state.d"]], Copier(1))
    images.close()
    (thread,) = stored_image.READS._stuck
    released.set()
    assert left.wait(60)
    thread.join(60)
    assert seen == [True]
    until(lambda: gc.collect() >= 0 and made[0]() is None, "the end of the memory")
