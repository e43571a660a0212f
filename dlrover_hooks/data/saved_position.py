"""The saved form of a place in an `Order`, and the check that it belongs to this dataset and order.

Without the check, wrong samples would be used silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrover_hooks.data.batch_plan import Tail
from dlrover_hooks.data.order import Order
from dlrover_hooks.errors import DataMismatch

VERSION = 2

_HINTS = {
    "v": "the state was written by another version of dlrover_hooks: use that version, or start over",
    "n": "the dataset changed its length: give the old dataset back, or start over (--fresh or resume='never')",
    "seed": "give the seed of the first start, or start over",
    "order": "give the order (shuffle) of the first start, or start over",
    "block": "give the block of the first start, or start over",
    "window": "give the window of the first start, or start over",
    "algo": "the order of this version differs: use the version that wrote the state, or start over",
}


def saved_position(order: Order, cursor: int, tail: Tail, global_batch_size: int) -> dict[str, Any]:
    """The position `cursor`, and what determines which samples come after it. ~150 bytes of JSON."""
    return _fingerprint(order) | {"cursor": cursor, "tail": tail, "G": global_batch_size}


def refuse_other(state: Mapping[str, Any], order: Order) -> None:
    """Raise DataMismatch naming the first field of `state` that differs from `order`, or an invalid cursor or G."""
    for name, value in _fingerprint(order).items():
        if state.get(name) != value or type(state[name]) is not type(value):
            raise DataMismatch(
                f"the data state has {name}={state.get(name)!r}, here it is {value!r}", hint=_HINTS[name]
            )
    for name, least in (("cursor", 0), ("G", 1)):
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise DataMismatch(f"the data state has {name}={value!r}: not a count", hint="the state is damaged")


def _fingerprint(order: Order) -> dict[str, Any]:
    return {"v": VERSION} | order.fingerprint()
