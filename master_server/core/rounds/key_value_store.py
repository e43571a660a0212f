"""The key-value store of one round for torch's rendezvous (torch's `Store`): small, and deleted with the round.

The agents of a round use it to agree on ranks and on the end. It is journaled, so a restart of the master loses
nothing, and bounded, so that no job can fill the master's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import filterfalse

import msgspec

from dlrover_hooks.errors import BadRequest, TooLarge
from dlrover_hooks.protocol import Change, KeyChange

MOST_KEYS = 100_000
MOST_BYTES = 64 * 2**20
"""Of all keys and values of a round. Those of one agent take a few hundred bytes."""
LONGEST_KEY = 1024
LARGEST_VALUE = 2**20


class Keys(msgspec.Struct):
    """The keys that are set. `nbytes`: size of all keys and values."""

    values: dict[str, bytes] = {}
    nbytes: int = 0


def change(keys: Keys, changes: Iterable[KeyChange]) -> tuple[bytes, ...]:
    """Apply all of `changes`, in order. Returns the reply to each.

    Raises:
        BadRequest: a number is added to a value that is not a number.
        TooLarge: a key, a value or the store would be too large. In both cases nothing was changed.
    """
    draft: dict[str, bytes | None] = {}
    replies = tuple([_draft(keys, draft, one) for one in changes])
    grown = sum(_size(name, value) - _size(name, keys.values.get(name)) for name, value in draft.items())
    count = len(keys.values) + sum((value is not None) - (name in keys.values) for name, value in draft.items())
    if (grown > 0 and keys.nbytes + grown > MOST_BYTES) or count > max(MOST_KEYS, len(keys.values)):
        raise TooLarge(
            f"The store would hold {count} keys and {keys.nbytes + grown} bytes.",
            hint=f"It is for messages between agents: at most {MOST_KEYS} keys and {MOST_BYTES} bytes a round.",
        )
    for name, value in draft.items():
        if value is None:
            keys.values.pop(name, None)
        else:
            keys.values[name] = value
    keys.nbytes += grown
    return replies


def _draft(keys: Keys, draft: dict[str, bytes | None], one: KeyChange) -> bytes:
    """Put the new value of the key of `one` into `draft` (None: it is deleted). Returns the reply."""
    now = draft[one.key] if one.key in draft else keys.values.get(one.key)
    if one.how is Change.DELETE:
        draft[one.key] = None
        return b"" if now is None else b"1"
    if one.how is Change.SWAP and one.expected != (now or b""):
        return one.expected if now is None else now
    value = one.value
    if one.how is Change.ADD:
        value = b"%d" % (_number(one.key, now or b"0") + _number(one.key, value))
    elif one.how is Change.APPEND:
        value = (now or b"") + value
    if len(one.key) > LONGEST_KEY or len(value) > LARGEST_VALUE:
        raise TooLarge(
            f"Key {one.key[:80]!r} ({len(one.key)} characters) with a value of {len(value)} bytes.",
            hint=f"Keys have at most {LONGEST_KEY} characters, values {LARGEST_VALUE} bytes.",
        )
    draft[one.key] = value
    return value


def _number(key: str, text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if digits.isdigit() and len(digits) <= 19:
        return int(text)
    raise BadRequest(f"Key {key!r}: {text[:40]!r} is not a number that can be added to.")


def _size(name: str, value: bytes | None) -> int:
    return 0 if value is None else len(name) + len(value)


def missing(keys: Keys, names: Iterable[str]) -> str | None:
    """The first of `names` that is not set. Rank 0 may wait for a key of each rank, and is woken for many of them."""
    return next(filterfalse(keys.values.__contains__, names), None)
