"""What Keras' own callbacks remember from epoch to epoch: patience counters, best values, the history.

Keras resets it when a training begins, so it is put back after that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

KEPT = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best", "_last_batch_seen", "_batches_seen_since_last_saving"),
    "History": ("epoch", "history"),
}
"""Attributes, by class. A callback of the user's own is kept if it has `state_dict` and `load_state_dict`."""


def states(callbacks: Iterable[Any]) -> dict[str, Any]:
    """The states of all callbacks that have one, by class and number."""
    return {name: _state(one) for name, one in _named(callbacks)}


def restore(callbacks: Iterable[Any], saved: dict[str, Any]) -> None:
    """Put back the saved states of the callbacks that are here; one that was added since begins afresh."""
    for name, one in _named(callbacks):
        if name not in saved:
            continue
        if hasattr(one, "load_state_dict"):
            one.load_state_dict(saved[name])
            continue
        for attribute, value in saved[name].items():
            setattr(one, attribute, value)


def _named(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    seen = Counter[str]()
    for one in callbacks:
        kind = type(one).__name__
        own = hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
        if own or _builtin(one):
            found.append((f"{kind}.{seen[kind]}", one))
            seen[kind] += 1
    return found


def _builtin(callback: Any) -> str | None:
    """The name of the Keras class in `KEPT` that it is, or is derived from."""
    return next((base.__name__ for base in type(callback).__mro__ if base.__name__ in KEPT), None)


def _state(callback: Any) -> dict[str, Any]:
    if hasattr(callback, "state_dict"):
        return callback.state_dict()
    kind = _builtin(callback)
    assert kind is not None
    return {name: _plain(getattr(callback, name)) for name in KEPT[kind] if hasattr(callback, name)}


def _plain(value: Any) -> Any:
    """A copy of the containers, so that a later change does not reach into the cut."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
