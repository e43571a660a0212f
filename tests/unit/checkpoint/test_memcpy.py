"""Copies by plain threads, with the C helper and without it, are byte for byte the same."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.checkpoint.memory import memcpy
from dlrover_hooks.checkpoint.memory.memcpy import PIECE_BYTES, Copier, Pieces

NATIVE = pytest.mark.parametrize("native", [True, False], ids=["C", "Python"])


def random_bytes(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@NATIVE
@given(
    places=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 3000), st.integers(0, 70)), max_size=12),
    threads=st.integers(1, 4),
)
def test_any_alignment_and_size(native: bool, places: list[tuple[int, int, int]], threads: int) -> None:
    """Gaps before each place, sizes, and misaligned sources: what lies between the places stays as it is."""
    offsets, sizes, sources, at = [], [], [], 0
    for seed, (gap, size, shift) in enumerate(places):
        offsets.append(at + gap)
        sizes.append(size)
        sources.append(random_bytes(size + shift, seed)[shift:])
        at += gap + size
    target = np.full(at + 100, 7, np.uint8)
    expected = target.copy()
    for offset, source in zip(offsets, sources, strict=True):
        expected[offset : offset + len(source)] = source
    addresses = [source.ctypes.data for source in sources]
    Copier(threads, native=native).fill(Pieces(offsets, sizes), target.ctypes.data, addresses)
    assert (target == expected).all()


@NATIVE
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_large_places_are_cut_and_shared_out(native: bool, threads: int) -> None:
    sizes = [2 * PIECE_BYTES + 1, 1, PIECE_BYTES, 77]
    sources = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    target = np.zeros(sum(sizes), np.uint8)
    begins = np.cumsum([0, *sizes[:-1]]) + target.ctypes.data
    moves = zip(begins.tolist(), (source.ctypes.data for source in sources), sizes, strict=True)
    Copier(threads, native=native).copy(moves)
    assert (target == np.concatenate(sources)).all()


@given(st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=20), st.integers(1, 8))
def test_shares_cover_all_pieces_once_and_evenly(sizes: list[int], threads: int) -> None:
    pieces = Pieces([0] * len(sizes), sizes)
    assert pieces.nbytes == sum(sizes)
    shares = pieces.shares(threads)
    assert len(shares) <= threads
    assert [index for begin, end in shares for index in range(begin, end)] == list(range(len(pieces.sizes)))
    loads = [int(pieces.sizes[begin:end].sum()) for begin, end in shares]
    assert all(load <= sum(sizes) / threads + PIECE_BYTES for load in loads) or len(shares) == 1


def test_where_no_thread_may_be_started_one_copies_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    source = np.random.default_rng(0).integers(0, 256, 9 << 20, np.uint8)
    target = np.zeros_like(source)
    Copier(3).copy([(target.ctypes.data, source.ctypes.data, source.nbytes)])
    assert np.array_equal(source, target)


def test_an_error_of_any_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that a helper did not copy would be published as copied."""
    source, target, copy = random_bytes(4 * PIECE_BYTES), np.zeros(4 * PIECE_BYTES, np.uint8), memcpy._memcpy
    failed = threading.Event()

    def copy_here(to: int, at: int, size: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert failed.wait(60.0)
            copy(to, at, size)
        else:
            failed.set()
            raise MemoryError("in a helper")

    monkeypatch.setattr(memcpy, "_memcpy", copy_here)
    with pytest.raises(MemoryError, match="in a helper"):
        Copier(2, native=False).copy([(target.ctypes.data, source.ctypes.data, source.nbytes)])
