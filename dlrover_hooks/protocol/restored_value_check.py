"""Checks that a restored value has the form that dlrover-hooks saves. Pure.

The hashes of a checkpoint only prove that its bytes are those that were written. A file with valid hashes can be
forged. So an adapter checks the keys and types that it relies on before it uses them. State of users' own objects is
not checked: an error there is an error of the object, not a sign of damage.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dlrover_hooks.errors import Corrupt


def require(value: Any, form: Any, where: str) -> None:
    """Compare `value` with `form`, a type that msgspec can convert to: a Struct with the required keys.

    Raises:
        Corrupt: it differs; names the place.
    """
    try:
        msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise Corrupt(f"{where} has a shape that no save gives it: {error}") from error
