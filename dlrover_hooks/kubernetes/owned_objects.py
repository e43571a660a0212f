"""The objects that belong to owners of one kind, such as the Pods of jobs, as watches tell of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.object_cache import ObjectChange

Key = TypeVar("Key", bound=Hashable)
OwnerKey = tuple[str, str]
"""Namespace and name of an owner."""


def key_of(manifest: Manifest) -> OwnerKey:
    """Of an object that may be an owner."""
    meta = manifest["metadata"]
    return meta["namespace"], meta["name"]


class OwnedObjects:
    """By owner, then by name. Not thread-safe: one lock owns it.

    Args:
        kind: of the owners, as in an `ownerReference`.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._found: dict[OwnerKey, dict[str, Manifest]] = {}

    def take(self, change: ObjectChange, owner: str | None = None) -> OwnerKey | None:
        """Take a change in. Returns the owner; None: there is none of this kind.

        `owner`: its name, in the namespace of the object, whatever its `ownerReferences` say.
        """
        meta = change.manifest["metadata"]
        names = [one["name"] for one in meta.get("ownerReferences", ()) if one["kind"] == self._kind]
        if owner is None and not names:
            return None
        key = meta["namespace"], owner or names[0]
        mine = self._found.setdefault(key, {})
        keep(mine, meta["name"], change)
        if not mine:
            del self._found[key]
        return key

    def of(self, key: OwnerKey) -> list[Manifest]:
        """Those of this owner."""
        return list(self._found.get(key, {}).values())

    def owners(self, holds: Callable[[Manifest], bool]) -> list[OwnerKey]:
        """Those that have an object for which this holds."""
        return [key for key, mine in self._found.items() if any(holds(one) for one in mine.values())]

    def every(self) -> list[Manifest]:
        """Those of all owners."""
        return [one for mine in self._found.values() for one in mine.values()]


def keep(found: dict[Key, Manifest], key: Key, change: ObjectChange) -> None:
    """Take a change in. The deletion of an earlier object of this name changes nothing."""
    if not change.deleted:
        found[key] = change.manifest
    elif found.get(key, change.manifest)["metadata"]["uid"] == change.uid:
        found.pop(key, None)
