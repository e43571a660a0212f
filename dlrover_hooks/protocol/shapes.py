"""Is a restored value what dlrover-hooks saves in that place? Pure.

The hashes of a checkpoint only say that its bytes are those that were written. Anybody can make a file with valid
hashes: so an adapter asks for the keys and types that it relies on before it uses them. What users' own objects have
saved is not looked into: an error there is theirs, and no sign of damage.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dlrover_hooks.errors import Corrupt


def require(value: Any, form: Any, where: str) -> None:
    """Compare `value` with `form`, a type that msgspec knows: a Struct with the keys that are needed.

    Raises:
        Corrupt: it differs; names the place.
    """
    try:
        msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise Corrupt(f"{where} has a shape that no save gives it: {error}") from error
