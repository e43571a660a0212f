"""The slot image is a safetensors file that stock safetensors and stock torch DCP read."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from dlrover_hooks.checkpoint.state import safetensors_layout
from dlrover_hooks.checkpoint.state.safetensors_layout import ITEM_BYTES, PAGE, Inside, Outgrown, TensorSpec
from dlrover_hooks.checkpoint.tensors import torch_backend
from dlrover_hooks.errors import Corrupt
from dlrover_hooks.protocol import Generation
from tests.images import image_of

GENERATION = Generation(0, 7, "a" * 32)


def build(tensors: dict[str, torch.Tensor], *, rank: int = 0) -> bytearray:
    return image_of(tensors, Inside(GENERATION, rank, 2, {"state": msgspec.Raw(b"{}")}))


def some(rank: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    return {
        "state.w": torch.randn(5, 3),
        "state.half": torch.randn(7).bfloat16(),
        "state.step": torch.tensor(3.0),
        "state.mask": torch.tensor([True, False, True]),
        "state.none": torch.empty(0, 4),
        f"rank.{rank}.rng": torch.arange(9, dtype=torch.uint8),
    }


SPECS = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=8), st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=3)
    ),
    max_size=12,
    unique_by=lambda row: row[0],
)


@given(SPECS)
def test_layout_is_aligned_and_dense(rows: list[tuple[str, str, list[int]]]) -> None:
    specs = []
    for name, dtype, shape in rows:
        size = ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        specs.append(TensorSpec(f"s.{name}", dtype, tuple(shape), size))
    layout = safetensors_layout.plan(specs)
    assert layout.header_bytes % PAGE == 0
    at = layout.header_bytes
    for spec, start in zip(layout.specs, layout.starts, strict=True):
        assert start == at
        assert start % ITEM_BYTES[spec.dtype] == 0
        at += spec.nbytes
    assert at == layout.total_bytes
    header = safetensors_layout.header_bytes(layout, Inside(GENERATION, 1, 2, {}))
    parsed = safetensors_layout.parse(header + bytes(layout.total_bytes - len(header)))
    assert set(parsed.tensors) == {spec.name for spec in specs}
    assert parsed.inside() == Inside(GENERATION, 1, 2, {})


def grown(size: int) -> Inside:
    return Inside(GENERATION, 1, 2, {"state": msgspec.Raw(b"[%s]" % (b"7" * size))})


def test_header_takes_changing_metadata_until_outgrown() -> None:
    layout = safetensors_layout.plan(torch_backend.specs(some()), 1000)
    for size in (0, 500):
        assert len(safetensors_layout.header_bytes(layout, grown(size))) == layout.header_bytes
    with pytest.raises(Outgrown) as caught:
        safetensors_layout.header_bytes(layout, grown(9000))
    again = safetensors_layout.plan(torch_backend.specs(some()), layout.header_bytes + caught.value.needed)
    safetensors_layout.header_bytes(again, grown(9000))


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 8) + b'{"a":{}}'],
)
def test_garbage_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        safetensors_layout.parse(data)


def test_truncated_image_is_corrupt() -> None:
    data = build(some())
    with pytest.raises(Corrupt, match="fit"):
        safetensors_layout.parse(data[:-1])


def write(folder: Path, rank: int) -> Path:
    data = memoryview(build(some(rank), rank=rank))
    path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    if rank == 0:
        path.write_bytes(data)
    else:
        part = safetensors_layout.subset(safetensors_layout.parse(data), lambda name: name.startswith("rank."))
        path.write_bytes(part.header + b"".join(data[a:b] for a, b in part.pieces))
        assert path.stat().st_size == part.nbytes
    return path


def test_stock_safetensors_reads_whole_and_subset(tmp_path: Path) -> None:
    whole, part = load_file(write(tmp_path, 0)), load_file(write(tmp_path, 1))
    assert set(whole) == set(some())
    assert all(torch.equal(whole[name], tensor) for name, tensor in some().items())
    assert set(part) == {"rank.1.rng"}


def test_subset_without_tensors_is_a_file_too(tmp_path: Path) -> None:
    part = safetensors_layout.subset(safetensors_layout.parse(bytes(build(some()))), lambda _: False)
    (tmp_path / "none.safetensors").write_bytes(part.header)
    assert load_file(tmp_path / "none.safetensors") == {}
    assert safetensors_layout.parse(part.header).inside().generation == GENERATION


def test_stock_dcp_reads_all_ranks_files(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    for rank in (0, 1):
        write(tmp_path, rank)
    expected: dict[str, Any] = {**some(0), "rank.1.rng": some(1)["rank.1.rng"]}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items() if tensor.numel()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about running without a process group
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    info = json.loads(
        safetensors_layout.parse((tmp_path / "shard-00002-model-00001-of-00001.safetensors").read_bytes()).metadata[
            "DCP_SHARDING_INFO"
        ]
    )
    assert info == {"rank.1.rng": {"saved_offsets": [0]}}
