"""Images of tensors as a save makes them, in plain memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrover_hooks.checkpoint.copying import Copier, place_of
from dlrover_hooks.checkpoint.header import Inside
from dlrover_hooks.checkpoint.image import Layout, header_bytes
from dlrover_hooks.checkpoint.recipe import Recipe


def image_of(tensors: Mapping[str, Any], inside: Inside, *, threads: int = 1) -> bytearray:
    recipe = Recipe(tensors)
    header = b"".join(recipe.header(inside))
    data = bytearray(recipe.layout.total_bytes)
    data[: len(header)] = header
    found, places = recipe.sources(tensors), range(len(recipe.places))
    Copier(threads).fill(recipe.pieces(places), place_of(memoryview(data)), found.addresses)
    return data


def image_with(layout: Layout, inside: Inside, payload: bytes) -> bytearray:
    """An image of this layout whose tensors are `payload`."""
    return bytearray(header_bytes(layout, inside) + payload)
