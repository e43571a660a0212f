"""Images of tensors as a save makes them, in plain memory; and how they are read back from storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrover_hooks.checkpoint.memory.memcpy import Copier, place_of
from dlrover_hooks.checkpoint.restore.stored_image import StoredImage
from dlrover_hooks.checkpoint.state.safetensors_header import Inside
from dlrover_hooks.checkpoint.state.safetensors_layout import Layout, TensorSpec, header_bytes, plan
from dlrover_hooks.checkpoint.storage.filesystem import StorageFolder
from dlrover_hooks.checkpoint.tensors.layout_cache import CachedLayout
from dlrover_hooks.protocol import Generation, Manifest


def image_of(tensors: Mapping[str, Any], inside: Inside, *, threads: int = 1) -> bytearray:
    recipe = CachedLayout(tensors)
    header = b"".join(recipe.header(inside))
    data = bytearray(recipe.layout.total_bytes)
    data[: len(header)] = header
    found, places = recipe.sources(tensors), range(len(recipe.places))
    Copier(threads).fill(recipe.pieces(places), place_of(memoryview(data)), found.addresses)
    return data


def image_with(layout: Layout, inside: Inside, payload: bytes) -> bytearray:
    """An image of this layout whose tensors are `payload`."""
    return bytearray(header_bytes(layout, inside) + payload)


def image_around(payload: bytes, which: Generation) -> bytes:
    """An image of rank 0, alone, whose one tensor is `payload`."""
    layout = plan([TensorSpec("state.w", "U8", (len(payload),), len(payload))])
    return bytes(image_with(layout, Inside(which, 0, 1, {}), payload))


def read_back(url: str, manifest: Manifest, rank: int) -> bytes:
    """All of `rank`'s file, every chunk verified. Raises as `StoredImage`."""
    image = StoredImage(StorageFolder(url), manifest, rank)
    try:
        image.need([(0, len(image.view))])
        return bytes(image.view)
    finally:
        image.close()
