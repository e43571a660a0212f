"""DL-90: tensors go in without torch's thread pool and come out in memory of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlrover_hooks.checkpoint import image, snapshot
from dlrover_hooks.checkpoint.copying import Copier
from dlrover_hooks.checkpoint.image import Inside
from dlrover_hooks.checkpoint.recipe import Recipe
from dlrover_hooks.errors import Corrupt, UnsupportedState
from dlrover_hooks.protocol import Generation


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def put(tensors: dict[str, Any], threads: int = 2) -> tuple[bytearray, image.Header]:
    recipe = Recipe(tensors)
    data = bytearray(recipe.layout.total_bytes)
    data[: recipe.layout.header_bytes] = recipe.header(Inside(Generation(0, 1, "a" * 32), 0, 1, {}))
    recipe.fill(memoryview(data), recipe.sources(tensors), Copier(threads))
    return data, image.parse(data)


def every_dtype() -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(-8, 8).abs().to(torch.float32).to(dtype).reshape(4, 4)
        for name, dtype in snapshot.DTYPES.items()
    }


def test_every_dtype_round_trips() -> None:
    tensors = every_dtype() | {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    data, header = put(tensors)
    for name, tensor in snapshot.load(memoryview(data), header, tensors).items():
        assert tensor.dtype == tensors[name].dtype
        assert tensor.shape == tensors[name].shape
        assert tensor.untyped_storage().tolist() == tensors[name].untyped_storage().tolist()


def test_no_torch_operation_runs_for_contiguous_cpu_tensors() -> None:
    """Copies on torch's pool cost ten times as much when cores are busy (measured)."""
    tensors = {"a": torch.randn(1 << 20), "p": torch.nn.Parameter(torch.randn(3, 3)), "s": torch.tensor(1)}
    with Ops() as ops:
        put(tensors)
    assert ops.seen == []


def test_views_and_conjugates_are_saved_as_they_read() -> None:
    base = torch.randn(6, 4)
    tensors = {
        "t": base.t(),
        "part": base[::2, 1],
        "conj": torch.tensor([1 + 2j]).conj(),
        "wide": base[:1].expand(5, 4),
    }
    data, header = put(tensors)
    for name, tensor in snapshot.load(memoryview(data), header, tensors).items():
        assert torch.equal(tensor, tensors[name])


def test_numpy_arrays_too() -> None:
    tensors = {"a": np.arange(12.0).reshape(3, 4).T, "b": np.array(True)}
    data, header = put(tensors)
    loaded = snapshot.load(memoryview(data), header, tensors)
    assert (loaded["a"].numpy() == tensors["a"]).all()
    assert loaded["b"].item() is True


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_bytes_are_shared_out_exactly(threads: int) -> None:
    tensors = {
        f"t{i}": torch.randint(0, 255, (size,), dtype=torch.uint8) for i, size in enumerate((9 << 20, 1, 4 << 20, 77))
    }
    data, header = put(tensors, threads)
    loaded = snapshot.load(memoryview(data), header, tensors, Copier(threads))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_loaded_tensors_never_alias_the_buffer() -> None:
    tensors = every_dtype()
    data, header = put(tensors)
    loaded = snapshot.load(memoryview(data), header, tensors)
    data[:] = b"\xff" * len(data)
    for name, tensor in loaded.items():
        assert tensor.untyped_storage().tolist() == tensors[name].untyped_storage().tolist()


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.zeros(2, dtype=torch.complex128)],
    ids=["sparse", "meta", "complex128"],
)
def test_what_an_image_cannot_hold_is_named(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedState, match=r"state\.odd"):
        snapshot.specs({"state.odd": tensor})


def test_missing_tensor_is_corrupt() -> None:
    data, header = put({"a": torch.ones(1)})
    with pytest.raises(Corrupt, match="b"):
        snapshot.load(memoryview(data), header, ["b"])
