"""A small file system that is nearly full."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """2 MB, full but for what an owner's note needs; delete `filler` to make room. For root only."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount here")
    (folder / "filler").write_bytes(bytes((2 << 20) - (128 << 10)))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
