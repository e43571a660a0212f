"""Checks that a restored value has the form that dlrover-hooks saves. Pure.

The hashes of a checkpoint only prove that its bytes are those that were written. A file with valid hashes can be
forged. So an adapter checks the keys and types that it relies on before it uses them. State of users' own objects is
not checked: an error there is an error of the object, not a sign of damage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dlrover_hooks.errors import Corrupt, UsageError

_SHOWN = 5


def require(value: Any, form: Any, where: str) -> None:
    """Compare `value` with `form`, a type that msgspec can convert to: a Struct with the required keys.

    Raises:
        Corrupt: it differs; names the place.
    """
    try:
        msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise Corrupt(f"{where} has a shape that no save gives it: {error}") from error


def own_state(state: Mapping[str, Any], key: str, adapter: str) -> Any:
    """`state[key]`, where `adapter` keeps its state.

    Raises:
        UsageError: another adapter has saved this state.
        Corrupt: `state` is not the state of any adapter.
    """
    require(state, dict[str, Any], "the state")
    if key not in state:
        raise UsageError(
            f"the checkpoint was not saved by {adapter}: it holds {listed(sorted(state))}",
            hint="resume with the adapter that saved it, or export it: dlrover-hooks ckpt export",
        )
    return state[key]


def listed(names: Sequence[str]) -> str:
    """The first few of `names`, and their total number."""
    more = f"; {len(names)} in all" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more
