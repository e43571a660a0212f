"""Where a rank's part of a DTensor lies, and which rank writes it. Each rank of a mesh in turn, without any traffic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlrover_hooks.checkpoint.state import safetensors_layout
from dlrover_hooks.checkpoint.state.safetensors_header import Inside, holds_shards, parse
from dlrover_hooks.checkpoint.storage.shard_writer import _own
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.checkpoint.tensors.layout_cache import CachedLayout
from dlrover_hooks.errors import UnsupportedState, UsageError
from dlrover_hooks.protocol import Generation
from dlrover_hooks.pytorch.tensor_loading import refuse_sharded


@contextlib.contextmanager
def mesh(rank: int, *shape: int) -> Iterator[Any]:
    world = 1
    for length in shape:
        world *= length
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield dist.init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def saved(tensor: Any, **others: torch.Tensor) -> tuple[safetensors_layout.TensorSpec, bytes]:
    tensors = {"state.w": tensor, **others}
    recipe = CachedLayout(tensors)
    header = b"".join(recipe.header(Inside(Generation(0, 1, "a" * 32), 0, 1, {})))
    return torch_backend.specs(tensors)[0], header + bytes(recipe.layout.total_bytes - len(header))


@pytest.mark.parametrize(("rank", "rows", "begin"), [(0, 3, 0), (1, 3, 3), (2, 1, 6)])
def test_uneven_shards(rank: int, rows: int, begin: int) -> None:
    with mesh(rank, 3) as three:
        part = DTensor.from_local(
            torch.ones(rows, 2), three, [Shard(0)], run_check=False, shape=torch.Size((7, 2)), stride=(2, 1)
        )
        spec, data = saved(part)
    assert (spec.shape, spec.offsets) == ((rows, 2), (begin, 0))
    assert spec.whole is not None
    assert (spec.whole.shape, spec.whole.sharded, spec.whole.copy) == ((7, 2), True, False)
    assert holds_shards(memoryview(data))
    assert parse(data).offsets() == {"state.w": (begin, 0)}


def test_empty_shards_are_named_only() -> None:
    with mesh(3, 4) as four:
        part = DTensor.from_local(
            torch.ones(0, 2), four, [Shard(0)], run_check=False, shape=torch.Size((3, 2)), stride=(2, 1)
        )
        _, data = saved(part, **{"state.b": torch.ones(2)})
    header = parse(data)
    assert set(header.tensors) == {"state.b"}
    assert header.wholes()["state.w"].shape == (3, 2)


@pytest.mark.parametrize(("rank", "writes"), [(0, True), (1, True), (2, False), (3, False)])
def test_of_replicas_the_first_is_written(rank: int, writes: bool) -> None:
    """HSDP: rows of the mesh are replicas of each other."""
    with mesh(rank, 2, 2) as four:
        layout = [Replicate(), Shard(0)]
        part = DTensor.from_local(
            torch.ones(2, 2), four, layout, run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
        )
        _, data = saved(part, **{"rank.0.x": torch.ones(1), "state.b": torch.ones(1)})
    wanted = _own(parse(data))
    assert [wanted(name) for name in ("state.w", "state.b", "rank.0.x")] == [writes, False, True]


def test_replicated_tensors_are_as_plain_ones() -> None:
    with mesh(1, 2) as two:
        _, data = saved(DTensor.from_local(torch.ones(2), two, [Replicate()], run_check=False))
    assert not holds_shards(memoryview(data))
    assert not _own(parse(data))("state.w")


def test_adapters_that_restore_whole_tensors_refuse_parts() -> None:
    with mesh(1, 2) as two:
        part = DTensor.from_local(torch.ones(2), two, [Shard(0)], run_check=False)
    refuse_sharded({"state.b": torch.ones(1)})
    with pytest.raises(UsageError, match=r"not kept under this framework: state\.w"):
        refuse_sharded({"state.b": torch.ones(1), "state.w": part})


def test_partial_sums_are_refused() -> None:
    with mesh(0, 2) as two, pytest.raises(UnsupportedState, match=r"state\.w is a DTensor of partial sums"):
        torch_backend.specs({"state.w": DTensor.from_local(torch.ones(2), two, [Partial()], run_check=False)})
