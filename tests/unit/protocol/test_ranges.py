"""Sets of positions: against plain sets of integers, and what is written of them."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given, strategies as st

from dlrover_hooks.protocol import ranges as module
from dlrover_hooks.protocol.ranges import END, Ranges

TOP = 40
bounds = st.tuples(st.integers(0, TOP), st.integers(0, TOP)).map(lambda pair: (min(pair), max(pair)))
changes = st.lists(st.tuples(st.booleans(), bounds), max_size=20)


def built(steps: list[tuple[bool, tuple[int, int]]]) -> tuple[Ranges, set[int]]:
    ranges, model = Ranges(), set()
    for put, (lo, hi) in steps:
        if put:
            ranges.add(lo, hi)
            model |= set(range(lo, hi))
        else:
            ranges.remove(lo, hi)
            model -= set(range(lo, hi))
    return ranges, model


@given(changes, bounds)
def test_it_is_a_set(steps: list[tuple[bool, tuple[int, int]]], span: tuple[int, int]) -> None:
    """Every question has the answer of a set; ranges stay sorted, disjoint and apart."""
    ranges, model = built(steps)
    wanted = set(range(*span))
    assert {position for lo, hi in ranges for position in range(lo, hi)} == model
    assert ranges.size == len(model)
    assert bool(ranges) == bool(model)
    assert ranges.covers(*span) == (wanted <= model)
    assert ranges.overlaps(*span) == bool(wanted & model)
    assert {at for lo, hi in ranges.missing(*span) for at in range(lo, hi)} == wanted - model
    assert {at for lo, hi in ranges.within(*span) for at in range(lo, hi)} == wanted & model
    assert all(at in ranges for at in model)
    edges = [edge for pair in ranges for edge in pair]
    assert edges == sorted(set(edges)), "ranges touch or are out of order"


@given(changes, changes)
def test_union(one: list[tuple[bool, tuple[int, int]]], two: list[tuple[bool, tuple[int, int]]]) -> None:
    """The union of two ranks' cuts, both for a few and for many ranges."""
    (ranges, model), (other, also) = built(one), built(two)
    many = Ranges.of((at, at + 1) for at in range(100, 2000, 2))
    ranges.update(other)
    assert ranges == Ranges.of((at, at + 1) for at in model | also)
    many.update(ranges)
    assert many.size == 950 + len(model | also)
    assert many.within(0, TOP) == list(ranges)


@given(changes, st.sampled_from([1, 7, 8192, END // (TOP + 1)]))
def test_what_is_written_is_read(steps: list[tuple[bool, tuple[int, int]]], unit: int) -> None:
    """Also near the greatest position there may be; equal sets give equal text."""
    ranges, _ = built(steps)
    big = Ranges.of((lo * unit, hi * unit) for lo, hi in ranges)
    assert Ranges.decode(big.encode()) == big
    assert big.encode() == Ranges.of(reversed(list(big))).encode()
    assert big.encode().isascii()


def packed(*numbers: int) -> str:
    raw = bytearray()
    for number in numbers:
        module._put(raw, number)
    return base64.b64encode(zlib.compress(raw)).decode()


@pytest.mark.parametrize(
    "text",
    [
        "!!!",
        "é",
        "AAAA",
        packed(1, 0, 1)[:-6],
        base64.b64encode(zlib.compress(b"\x01\x00\x01") + b"more").decode(),
        base64.b64encode(zlib.compress(b"\x01\x00\x80")).decode(),
        base64.b64encode(zlib.compress(b"\xff" * 12)).decode(),
        packed(1),
        packed(1, 0),
        packed(1, 0, 0),
        packed(0, 0, 1),
        packed(1, 0, 1, 0, 1),
        packed(2**62, 1, 1),
        packed(1, 0, 2**64),
    ],
)
def test_damage_is_refused(text: str) -> None:
    """No garbage becomes positions: nothing would be worse than samples that were silently skipped."""
    with pytest.raises(ValueError, match=r"damaged|cut short|shorter"):
        Ranges.decode(text)


def test_a_bomb_is_not_unpacked() -> None:
    """A small text cannot make the master hold a huge set."""
    bomb = base64.b64encode(zlib.compress(b"\x01" * (module.LONGEST + 2), 9)).decode()
    assert len(bomb) < 20_000
    with pytest.raises(ValueError, match="longer than"):
        Ranges.decode(bomb)


@pytest.mark.parametrize(("lo", "hi"), [(-1, 3), (3, 2), (0, END + 1)])
def test_what_is_no_range(lo: int, hi: int) -> None:
    for change in (Ranges().add, Ranges().remove):
        with pytest.raises(ValueError, match="no range"):
            change(lo, hi)
