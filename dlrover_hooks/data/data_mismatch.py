"""Checks that a saved data state belongs to this dataset and order: otherwise wrong samples would be used silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrover_hooks.errors import DataMismatch

_HINTS = {
    "v": "the state was written by another version of dlrover_hooks: use that version, or start over",
    "n": "the dataset changed its length: give the old dataset back, or start over (--fresh or resume='never')",
    "seed": "give the seed of the first start, or start over",
    "order": "give the order (shuffle) of the first start, or start over",
    "block": "give the block of the first start, or start over",
    "window": "give the window of the first start, or start over",
    "algo": "the order of this version differs: use the version that wrote the state, or start over",
}


def refuse_other(state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise DataMismatch naming the first field of `state` that differs from `here`, or an invalid cursor or G."""
    for name, value in here.items():
        if state.get(name) != value or type(state[name]) is not type(value):
            raise DataMismatch(
                f"the data state has {name}={state.get(name)!r}, here it is {value!r}", hint=_HINTS[name]
            )
    for name, least in (("cursor", 0), ("G", 1)):
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise DataMismatch(f"the data state has {name}={value!r}: not a count", hint="the state is damaged")
