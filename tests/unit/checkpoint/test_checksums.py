"""Hashes of images: the way past the caches gives the same ones."""

from __future__ import annotations

import random

import pytest

from dlrover_hooks.checkpoint.memory import checksums
from dlrover_hooks.checkpoint.memory.checksums import CHUNK_BYTES, digests, digests_beside


@pytest.mark.parametrize("nbytes", [0, 1, 63, 131072, 131135, CHUNK_BYTES, 2 * CHUNK_BYTES + 77])
@pytest.mark.parametrize("native", [True, False])
def test_hashes_made_beside_others_are_the_same(nbytes: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the C helper and without it, of memory that can be written and of what is only read."""
    if not native:
        monkeypatch.setattr(checksums, "_copy", None)
    data = random.Random(nbytes).randbytes(nbytes)
    assert digests_beside(memoryview(bytearray(data))) == digests_beside(memoryview(data)) == digests(memoryview(data))
