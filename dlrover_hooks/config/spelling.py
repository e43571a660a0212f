"""Unknown settings: an unknown keyword raises an error, an unknown environment variable logs a warning."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from dlrover_hooks.errors import UsageError

_COMMANDS = (
    "RUN_",
    "CHECK_",
    "VITALS_",
    "SCALE_",
    "PLANS_",
    "ROLES_",
    "BRAIN_",
    "REHEARSE_",
    "MASTER_",
    "FORGET_",
    "CKPT_",
    "MANIFEST_",
)
"""Prefixes, after `PREFIX`, of the variables for command options, which click reads."""
_said = set[str]()
_log = logging.getLogger("dlrover_hooks")


def keywords(local: Mapping[str, Any], misspelt: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the `locals()` of an `__init__` that ends with `**misspelt`. Raises as `refuse_unknown`."""
    given = {name: value for name, value in local.items() if name not in ("self", "__class__", "misspelt")}
    refuse_unknown(misspelt, list(given))
    return given


def refuse_unknown(given: Iterable[str], known: list[str]) -> None:
    """Raises UsageError if one of the names `given` is not `known`; suggests the closest known name."""
    for name in sorted(set(given) - set(known)):
        near = difflib.get_close_matches(name, known, 1)
        raise UsageError(
            f"there is no keyword {name!r}",
            hint=f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}",
        )


def warn_of_unknown(env: Mapping[str, str], prefix: str, known: list[str]) -> None:
    """Warns once of each variable that begins with `prefix` and is not `known`. No error: a cluster may set others."""
    for name in sorted(set(env) - set(known) - _said):
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith(_COMMANDS):
            _said.add(name)
            near = difflib.get_close_matches(name, known, 1, cutoff=0.8)
            _log.warning("%s is set, but means nothing here%s", name, f": did you mean {near[0]}?" if near else "")
