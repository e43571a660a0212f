"""What Keras' own callbacks remember from epoch to epoch: patience counters, best values, the history.

Keras resets it when a training begins, so it is put back after that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from dlrover_hooks.errors import UsageError

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
        if _keeps_own_state(one):
            one.load_state_dict(saved[name])
            continue
        for attribute in _attributes(one):
            if attribute in saved[name]:
                setattr(one, attribute, saved[name][attribute])


def _named(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    seen = Counter[str]()
    for one in callbacks:
        kind = type(one).__name__
        if _keeps_own_state(one) or _attributes(one):
            found.append((f"{kind}.{seen[kind]}", one))
            seen[kind] += 1
    return found


def _keeps_own_state(callback: Any) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _attributes(callback: Any) -> tuple[str, ...]:
    """Those in `KEPT` of the Keras class that it is, or is derived from."""
    return next((KEPT[base.__name__] for base in type(callback).__mro__ if base.__name__ in KEPT), ())


def _state(callback: Any) -> dict[str, Any]:
    if not _keeps_own_state(callback):
        return {name: _plain(getattr(callback, name)) for name in _attributes(callback) if hasattr(callback, name)}
    state = callback.state_dict()
    if not isinstance(state, dict):
        raise UsageError(
            f"{type(callback).__name__}.state_dict() returned a {type(state).__name__}: it cannot be saved",
            hint="return a dict",
        )
    return state


def _plain(value: Any) -> Any:
    """A copy of the containers, so that a later change does not reach into the cut."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
