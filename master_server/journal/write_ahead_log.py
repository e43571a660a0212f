"""Finds damage in SQLite's write-ahead log, which SQLite itself takes for a write that a crash interrupted.

SQLite ends its recovery at the first frame that does not match its checksum, and drops all frames from there on without
a message. Right for the last transaction, which may not have been complete. Wrong for one that others follow: a master
begins a transaction after the previous one is on disk and answered. Format: https://sqlite.org/walformat.html.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

_HEADER, _FRAME_HEADER = 32, 24
_MAGIC = {0x377F0682: "little", 0x377F0683: "big"}
"""First word of a log, and the byte order of the words that its checksums add up."""
_MASK = 0xFFFFFFFF


def damage(path: str | Path) -> str:
    """Describes the damage to the log file `path`; "" if there is none, or no file. Raises OSError."""
    try:
        log = Path(path).read_bytes()
    except FileNotFoundError:
        return ""
    if len(log) <= _HEADER:
        return ""
    order = _MAGIC.get(int.from_bytes(log[:4], "big"))
    if order is None or _stored(log[24:_HEADER]) != (sums := _sums(log[:24], order, (0, 0))):
        return "its header does not match its checksum"
    size, salts = int.from_bytes(log[8:12], "big"), log[16:24]
    frames = [log[at : at + _FRAME_HEADER + size] for at in range(_HEADER, len(log), _FRAME_HEADER + size)]
    sound = 0
    for frame in frames:
        sums = _sums(frame[_FRAME_HEADER:], order, _sums(frame[:8], order, sums))
        if frame[8:16] != salts or len(frame) < _FRAME_HEADER + size or _stored(frame[16:_FRAME_HEADER]) != sums:
            break
        sound += 1
    # a log is written from its start again after a checkpoint: frames with other salts are of its previous use
    commits = [frame[4:8] != bytes(4) for frame in frames[sound:] if frame[8:16] == salts]
    if True in commits[:-1]:  # a transaction ends there, and another one follows
        return f"frame {sound + 1} of {len(frames)} does not match its checksum, and transactions follow it"
    return ""


def _sums(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """SQLite's checksum of `data`, in addition to `sums`. Bytes behind the last whole pair of words are left out."""
    words = array("I", data[: len(data) // 8 * 8])
    if order != sys.byteorder:
        words.byteswap()
    first, second = sums
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & _MASK
        second = (second + other + first) & _MASK
    return first, second


def _stored(data: bytes) -> tuple[int, int]:
    return int.from_bytes(data[:4], "big"), int.from_bytes(data[4:], "big")
