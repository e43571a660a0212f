"""The key-value store of one round, for torch's rendezvous."""

from __future__ import annotations

import enum

from dlrover_hooks.protocol.base_messages import Count, Message, Seconds


class Change(enum.Enum):
    """What becomes of a key."""

    SET = "set"
    ADD = "add"
    """`value`, a decimal number, is added to the one that is there (none: to 0)."""
    SWAP = "swap"
    """Set, if the value is `expected`; with an empty `expected` also if there is none."""
    APPEND = "append"
    DELETE = "delete"


class KeyChange(Message, frozen=True):
    how: Change
    key: str
    value: bytes = b""
    expected: bytes = b""


class ChangeKeys(Message, frozen=True):
    """Change keys of the store that lives as long as `round`, all or none. Only its members may."""

    job: str
    incarnation: str
    round: Count
    changes: tuple[KeyChange, ...]


class AwaitKeys(Message, frozen=True):
    """Long-poll until all `keys` are there, or `timeout_s` passes. Stale where one can never come: the round broke."""

    job: str
    incarnation: str
    round: Count
    keys: tuple[str, ...]
    timeout_s: Seconds = 20.0


class KeyValues(Message, frozen=True):
    """`values` None: not all keys are there, ask again. After changes: the new values, for DELETE `1` or nothing."""

    values: tuple[bytes, ...] | None = None


class ListKeys(Message, frozen=True):
    job: str
    incarnation: str
    round: Count


class KeyNames(Message, frozen=True):
    names: tuple[str, ...]
