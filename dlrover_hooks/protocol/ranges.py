"""Sets of positions as sorted, disjoint, coalesced ranges `[lo, hi)`.

The done part of a dataset, and the part to hand out again, are a few long ranges with holes where leases are out.
Pure: shared by the workers and the master's state machines. Positions are integers from 0 to 2**63 - 1.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

import msgspec

LONGEST = 1 << 22
"""Bytes of an encoded set before compression: what is longer is refused unread."""
END = (1 << 63) - 1


class Ranges(msgspec.Struct, forbid_unknown_fields=True):
    """A mutable set of positions: range number i is `[lows[i], highs[i])`, and `highs[i] < lows[i + 1]`.

    Compares by value and is encoded like any message. Iterating gives the ranges, `in` asks for one position.
    With k ranges a change costs O(log k) and the move of a few words. Not safe for several threads.
    """

    lows: list[int] = []
    highs: list[int] = []

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Ranges:
        """The union of `pairs`, in any order, overlapping or not."""
        ranges = cls()
        for lo, hi in pairs:
            ranges.add(lo, hi)
        return ranges

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.lows, self.highs, strict=True)

    @property
    def size(self) -> int:
        """How many positions. (No `__len__`: `list(ranges)` would take it for the number of ranges and allocate.)"""
        return sum(self.highs) - sum(self.lows)

    def __bool__(self) -> bool:
        return bool(self.lows)

    def __contains__(self, position: int) -> bool:
        return self.covers(position, position + 1)

    def copy(self) -> Ranges:
        """A set of its own."""
        return Ranges(lows=self.lows[:], highs=self.highs[:])

    def add(self, lo: int, hi: int) -> None:
        """Put `[lo, hi)` in; parts that are in already stay. `lo == hi` changes nothing. Raises ValueError."""
        lows, highs = self.lows, self.highs
        if not 0 <= lo < hi <= END:
            _check(lo, hi)
            return
        first = bisect_left(highs, lo)  # the first range that touches or follows
        last = bisect_right(lows, hi, first)
        if first == last:
            lows.insert(first, lo)
            highs.insert(first, hi)
            return
        lows[first] = min(lo, lows[first])
        highs[first] = max(hi, highs[last - 1])
        if last - first > 1:
            del lows[first + 1 : last], highs[first + 1 : last]

    def remove(self, lo: int, hi: int) -> None:
        """Take `[lo, hi)` out, whatever of it is in. Raises ValueError."""
        lows, highs = self.lows, self.highs
        _check(lo, hi)
        first = bisect_right(highs, lo)  # the first range that ends behind lo
        last = bisect_left(lows, hi, first)
        if lo == hi or first == last:
            return
        left, right = lows[first], highs[last - 1]
        rest_lows = [left] * (left < lo) + [hi] * (hi < right)
        rest_highs = [lo] * (left < lo) + [right] * (hi < right)
        lows[first:last], highs[first:last] = rest_lows, rest_highs

    def update(self, other: Ranges) -> None:
        """Put all of `other` in: O(k) over both, or O(m log k) for a small one."""
        if 16 * len(other.lows) < len(self.lows):
            for lo, hi in other:
                self.add(lo, hi)
            return
        pairs = sorted([*self, *other])
        lows: list[int] = []
        highs: list[int] = []
        for lo, hi in pairs:
            if highs and lo <= highs[-1]:
                highs[-1] = max(hi, highs[-1])
            else:
                lows.append(lo)
                highs.append(hi)
        self.lows, self.highs = lows, highs

    def covers(self, lo: int, hi: int) -> bool:
        """Is every position of `[lo, hi)` in?"""
        at = bisect_right(self.lows, lo) - 1
        return lo >= hi or (at >= 0 and hi <= self.highs[at])

    def overlaps(self, lo: int, hi: int) -> bool:
        """Is any position of `[lo, hi)` in?"""
        at = bisect_right(self.highs, lo)
        return lo < hi and at < len(self.lows) and self.lows[at] < hi

    def missing(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """The parts of `[lo, hi)` that are not in, in order: O(log k) and their number."""
        found: list[tuple[int, int]] = []
        for at in range(bisect_right(self.highs, lo), len(self.lows)):
            if self.lows[at] >= hi:
                break
            if lo < self.lows[at]:
                found.append((lo, self.lows[at]))
            lo = self.highs[at]
        if lo < hi:
            found.append((lo, hi))
        return found

    def within(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """The parts of `[lo, hi)` that are in, in order."""
        found: list[tuple[int, int]] = []
        for at in range(bisect_right(self.highs, lo), len(self.lows)):
            if self.lows[at] >= hi:
                break
            found.append((max(lo, self.lows[at]), min(hi, self.highs[at])))
        return found

    def encode(self) -> str:
        """ASCII text for a message or a checkpoint: base64 of zlib of varints, a unit and then gap, length, gap, ...

        The unit divides every bound: a batch size, mostly.
        """
        if not self.lows:
            return ""
        unit = math.gcd(*self.lows, *self.highs)
        raw = bytearray()
        _put(raw, unit)
        last = 0
        for lo, hi in self:
            _put(raw, (lo - last) // unit)
            _put(raw, (hi - lo) // unit)
            last = hi
        return base64.b64encode(zlib.compress(raw, 9)).decode()

    @classmethod
    def decode(cls, text: str) -> Ranges:
        """What `encode` wrote. Raises ValueError on anything else, and reads no more than `LONGEST` bytes."""
        if not text:
            return cls()
        numbers = _numbers(_inflate(text))
        unit = next(numbers, 0)
        ranges, last = cls(), 0
        for gap, length in zip(numbers, numbers, strict=True):
            lo = last + gap * unit
            last = lo + length * unit
            if not (lo < last <= END) or (gap == 0 and ranges):
                raise ValueError(f"Encoded ranges are damaged: [{lo}, {last}) follows position {last}.")
            ranges.lows.append(lo)
            ranges.highs.append(last)
        if not ranges:
            raise ValueError("Encoded ranges are damaged: they hold no range.")
        return ranges


def _check(lo: int, hi: int) -> None:
    if not 0 <= lo <= hi <= END:
        raise ValueError(f"[{lo}, {hi}) is no range of positions.")


def _put(raw: bytearray, number: int) -> None:
    while number > 127:
        raw.append(number & 127 | 128)
        number >>= 7
    raw.append(number)


def _inflate(text: str) -> bytes:
    try:
        packed = base64.b64decode(text.encode("ascii"), validate=True)
        reader = zlib.decompressobj()
        raw = reader.decompress(packed, LONGEST)
    except (UnicodeError, binascii.Error, zlib.error) as error:
        raise ValueError(f"Encoded ranges are damaged: {error}.") from error
    if not reader.eof or reader.unused_data:
        raise ValueError(f"Encoded ranges are cut short, longer than {LONGEST} bytes, or have something behind them.")
    return raw


def _numbers(raw: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in raw:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield number
            number = shift = 0
        elif shift > 63:
            break
    if shift:
        raise ValueError("Encoded ranges are damaged: a number does not end.")
