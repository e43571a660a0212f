"""What is known of a watched collection of objects. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from dlrover_hooks.errors import KubernetesFailed

GONE = 410
"""HTTP status of a version that the server does not have any more."""


class ObjectChange(msgspec.Struct, frozen=True):
    """An object that is new or changed, or was deleted. `manifest`: its last known JSON."""

    manifest: dict[str, Any]
    deleted: bool = False

    @property
    def uid(self) -> str:
        return self.manifest["metadata"]["uid"]


class ObjectCache:
    """The objects by their uid, and the version up to which they are known. One thread at a time.

    An object that is deleted and created again under its name has another uid: its deletion is never missed.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.version = ""
        """For the next watch. Empty: list first."""

    def listed(self, manifests: Iterable[dict[str, Any]], version: str) -> list[ObjectChange]:
        """Take a whole list; what has changed since, also while nothing was watched. Deletions come first."""
        found = {one["metadata"]["uid"]: one for one in manifests}
        gone = [ObjectChange(one, deleted=True) for uid, one in self.objects.items() if uid not in found]
        new = [ObjectChange(one) for uid, one in found.items() if _version(one) != _version(self.objects.get(uid))]
        self.objects, self.version = found, version
        return gone + new

    def watched(self, event: dict[str, Any]) -> ObjectChange | None:
        """Take one event of a watch. None: it only says how far the watch is.

        Raises `KubernetesFailed` for an event of type ERROR; after one with code 410 the collection is to be listed.
        """
        kind, manifest = event["type"], event["object"]
        if kind == "ERROR":
            code = int(manifest.get("code") or 0)
            if code == GONE:
                self.version = ""
            raise KubernetesFailed(f"watch: {manifest.get('message')}", code=code)
        self.version = _version(manifest)
        if kind == "BOOKMARK":
            return None
        uid = manifest["metadata"]["uid"]
        if kind == "DELETED":
            self.objects.pop(uid, None)
        else:
            self.objects[uid] = manifest
        return ObjectChange(manifest, deleted=kind == "DELETED")


def _version(manifest: dict[str, Any] | None) -> str:
    return "" if manifest is None else manifest["metadata"]["resourceVersion"]
