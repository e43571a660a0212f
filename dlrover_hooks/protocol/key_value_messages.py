"""The key-value store of one round, for torch's rendezvous."""

from __future__ import annotations

import enum

from dlrover_hooks.protocol.base_messages import Count, Message, Seconds


class Change(enum.Enum):
    """How a key is changed."""

    SET = "set"
    ADD = "add"
    """Adds `value`, a decimal number, to the stored number (0 without one)."""
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
    """Change keys of the store of `round`, all or none. Only members may. The store is deleted with the round."""

    job: str
    incarnation: str
    round: Count
    changes: tuple[KeyChange, ...]


class AwaitKeys(Message, frozen=True):
    """Long-poll until all `keys` are there, or `timeout_s` passes. Raises Stale if the round broke: then a
    missing key can no longer be set."""

    job: str
    incarnation: str
    round: Count
    keys: tuple[str, ...]
    timeout_s: Seconds = 20.0


class KeyValues(Message, frozen=True):
    """`values` None: a key is missing, send the request again. After changes: the new values; DELETE: `1` or empty."""

    values: tuple[bytes, ...] | None = None


class ListKeys(Message, frozen=True):
    job: str
    incarnation: str
    round: Count


class KeyNames(Message, frozen=True):
    names: tuple[str, ...]
