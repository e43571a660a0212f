"""Tensors go in without torch's thread pool and come out in memory of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlrover_hooks.checkpoint.memory.memcpy import Copier
from dlrover_hooks.checkpoint.state import safetensors_layout
from dlrover_hooks.checkpoint.state.safetensors_header import Inside
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.checkpoint.tensors.generation_images import Images, deliver_from_view
from dlrover_hooks.errors import UnsupportedState
from dlrover_hooks.protocol import Generation
from tests.images import image_of

GENERATION = Generation(0, 7, "a" * 32)


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Memory:
    """An image in plain memory."""

    def __init__(self, data: bytearray) -> None:
        self.view, self.header = memoryview(data), safetensors_layout.parse(data)

    def need(self, spans: Any) -> None:
        pass

    def deliver(self, moves: Any, copier: Any, memory: Any) -> None:
        deliver_from_view(self, moves, copier)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def loaded(data: bytearray, names: Any = None, threads: int = 2) -> dict[str, torch.Tensor]:
    images = Images(GENERATION, 1, lambda _: Memory(data))
    images.image(0)
    return torch_backend.load(
        [one for one in images.index().values() if names is None or one.name in names], Copier(threads)
    )


def put(tensors: dict[str, Any], threads: int = 2) -> bytearray:
    return image_of(tensors, Inside(GENERATION, 0, 1, {}), threads=threads)


def every_dtype() -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(-8, 8).abs().to(torch.float32).to(dtype).reshape(4, 4)
        for name, dtype in torch_backend.DTYPES.items()
    }


def test_every_dtype_round_trips() -> None:
    tensors = every_dtype() | {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    tensors |= {
        "complex": torch.tensor([[1 + 2j], [3j]], dtype=torch.complex128),
        "point": tensors["C64"][0, 0].to(torch.complex128),
    }
    tensors |= {"nothing": torch.empty(2, 0, dtype=torch.complex128)}
    data = put(tensors)
    for name, tensor in loaded(data).items():
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
    data = put(tensors)
    for name, tensor in loaded(data).items():
        assert torch.equal(tensor, tensors[name])


def test_numpy_arrays_too() -> None:
    tensors = {"a": np.arange(12.0).reshape(3, 4).T, "b": np.array(True)}
    data = put(tensors)
    found = loaded(data)
    assert (found["a"].numpy() == tensors["a"]).all()
    assert found["b"].item() is True


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_bytes_are_shared_out_exactly(threads: int) -> None:
    tensors = {
        f"t{i}": torch.randint(0, 255, (size,), dtype=torch.uint8) for i, size in enumerate((9 << 20, 1, 4 << 20, 77))
    }
    data = put(tensors, threads)
    found = loaded(data, threads=threads)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_loaded_tensors_never_alias_the_buffer() -> None:
    tensors = every_dtype()
    data = put(tensors)
    found = loaded(data)
    data[:] = b"\xff" * len(data)
    for name, tensor in found.items():
        assert tensor.untyped_storage().tolist() == tensors[name].untyped_storage().tolist()


class Stands(torch.Tensor):
    """For another tensor, as quantized weights do: it has no bytes of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def _cut(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(2).to_sparse(),
        torch.empty(2, device="meta"),
        torch.zeros(2, dtype=torch.float8_e8m0fnu),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        Stands(torch.ones(3)),
        _cut(torch.ones(300), 0),
        _cut(torch.ones(300), 1000),
        _cut(torch.ones(30, 10).T, 1000),
    ],
    ids=["sparse", "meta", "float8_e8m0fnu", "jagged", "subclass", "freed", "cut", "cut view"],
)
def test_what_an_image_cannot_hold_is_named(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedState, match=r"state\.odd"):
        torch_backend.specs({"state.odd": tensor})
