"""A simulated API server: objects in memory, versions, owners, watches that lag, and answers that are lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes.api_server import CONFLICT, NOT_FOUND, ApiServer, Manifest
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.object_cache import ObjectChange
from tests.simulation.cluster.events import Timeline

Changed = Callable[[ObjectChange], object]
_EPOCH = "2026-01-{day:02d}T{hour:02d}:{minute:02d}:{second:02d}Z"
LAG_S = 0.5


class Follower:
    """A watch. It gets the changes of one collection in order, each up to `LAG_S` late, until it is closed."""

    def __init__(self, path: str, labels: dict[str, tuple[str, ...]], changed: Changed) -> None:
        self.path, self.labels, self.changed = path, labels, changed
        self.due, self.open = 0.0, True


class SimulatedApi(ApiServer):
    """See `ApiServer`: only what is sent is another thing.

    Args:
        time: virtual.
        dice: of lags and failures.
        failure_pct: so many of 100 requests get no answer; a half of these were carried out.
    """

    def __init__(self, time: Timeline, dice: random.Random, failure_pct: float) -> None:
        self.url = "simulated"
        self.requests = 0
        self._time, self._dice, self._failure = time, dice, failure_pct / 100
        self._objects: dict[str, dict[str, Manifest]] = {}
        """By collection, then by name."""
        self._owned: dict[str, set[tuple[str, str]]] = {}
        """Collection and name of objects by the uid of their owner."""
        self._followers = list[Follower]()
        self._versions, self._uids = itertools.count(1), itertools.count(1)
        self.followers_of_pods = list[Changed]()
        """Are told of every change of a Pod, at once: by it machines learn what they run."""
        self._pods = dict[str, Manifest]()

    # ---- requests -----------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, body: Any, query: dict[str, Any]) -> Manifest:
        del query
        self.requests += 1
        lost = self._dice.random() < self._failure
        if lost and self._dice.random() < 0.5:
            raise KubernetesFailed(f"{path}: no answer")
        answer = self.carry_out(method, path, body)
        if lost:
            raise KubernetesFailed(f"{path}: the answer was lost")
        return answer

    def carry_out(self, method: str, path: str, body: Any = None) -> Manifest:
        """One request, which is not lost. Raises KubernetesFailed."""
        if method == "post":
            return self._create(path, body)
        path, status = path.removesuffix("/status"), path.endswith("/status")
        collection, _, name = path.rpartition("/")
        found = self._objects.get(collection, {}).get(name)
        if found is None:
            raise KubernetesFailed(f"{path} is not there", code=NOT_FOUND)
        if method == "get":
            return found
        if method == "delete":
            return self._delete(collection, found, body or {})
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, found["metadata"]["resourceVersion"]):
            raise KubernetesFailed(f"{path} has changed", code=CONFLICT)
        if status:
            new = found | {"status": _merged(found.get("status") or {}, body["status"])}
        else:
            changes = {key: value for key, value in body.items() if key not in ("metadata", "status")}
            new = _merged(found, changes if method == "patch" else {})
            new = new if method == "patch" else found | changes
        if new == found:
            return found
        generation = found["metadata"]["generation"] + (new.get("spec") != found.get("spec"))
        return self._store(collection, new | {"metadata": found["metadata"] | {"generation": generation}})

    def objects(self, collection: str) -> list[Manifest]:
        """All that are there."""
        return list(self._objects.get(collection, {}).values())

    def every(self, plural: str) -> list[Manifest]:
        """Of all namespaces."""
        found = (one for collection, one in self._objects.items() if collection.endswith(f"/{plural}"))
        return [manifest for one in found for manifest in one.values()]

    def remove(self, collection: str, name: str, uid: str) -> None:
        """It is gone, with all that it owns."""
        found = self._objects.get(collection, {}).get(name)
        if found is None or found["metadata"]["uid"] != uid:
            return
        del self._objects[collection][name]
        self._tell(collection, ObjectChange(found, deleted=True))
        for where, owned in sorted(self._owned.pop(uid, ())):
            one = self._objects.get(where, {}).get(owned)
            if one is not None and any(each["uid"] == uid for each in one["metadata"].get("ownerReferences", ())):
                self._delete(where, one, {})

    def _create(self, collection: str, body: Manifest) -> Manifest:
        name = body["metadata"]["name"]
        if name in self._objects.get(collection, {}):
            raise KubernetesFailed(f"{collection}/{name} is there already", code=CONFLICT)
        meta = {**body["metadata"], "uid": f"u{next(self._uids)}", "generation": 1, "creationTimestamp": self._stamp()}
        if "/namespaces/" in collection:
            meta["namespace"] = collection.split("/namespaces/")[1].split("/")[0]
        new = {**body, "metadata": meta}
        if collection.endswith("/services"):
            new["spec"] = {**body["spec"], "clusterIP": "10.0.0.1"}
        for owner in meta.get("ownerReferences", ()):
            self._owned.setdefault(owner["uid"], set()).add((collection, name))
        return self._store(collection, new)

    def _delete(self, collection: str, found: Manifest, options: Manifest) -> Manifest:
        meta = found["metadata"]
        wanted = options.get("preconditions", {})
        if any(meta[key] != value for key, value in wanted.items()):
            raise KubernetesFailed(f"{collection}/{meta['name']} is another one", code=CONFLICT)
        if not (collection.endswith("/pods") and found["spec"].get("nodeName")):
            self.remove(collection, meta["name"], meta["uid"])
            return found
        if "deletionTimestamp" in meta:
            return found
        return self._store(collection, found | {"metadata": meta | {"deletionTimestamp": self._stamp()}})

    def _store(self, collection: str, manifest: Manifest) -> Manifest:
        meta = manifest["metadata"] | {"resourceVersion": str(next(self._versions))}
        new = manifest | {"metadata": meta}
        self._objects.setdefault(collection, {})[meta["name"]] = new
        self._tell(collection, ObjectChange(new))
        return new

    def _stamp(self) -> str:
        minutes, second = divmod(int(self._time.now), 60)
        hours, minute = divmod(minutes, 60)
        day, hour = divmod(hours, 24)
        return _EPOCH.format(day=day + 1, hour=hour, minute=minute, second=second)

    # ---- watches ------------------------------------------------------------------------------------------------

    def follow(self, watch: ListWatch) -> Follower:
        """Tell what there is at once, and changes as they come."""
        selector = watch.query.get("label_selector", "")
        one = Follower(watch.path, _selected(selector), watch.changed)
        for collection in list(self._objects):
            if _covers(one.path, collection):
                for manifest in self.objects(collection):
                    if _matches(one.labels, manifest):
                        one.changed(ObjectChange(manifest))
        self._followers.append(one)
        return one

    def leave(self, follower: Follower) -> None:
        """End its watch."""
        follower.open = False
        self._followers.remove(follower)

    def by_uid(self, uid: str) -> Manifest | None:
        """A Pod."""
        return self._pods.get(uid)

    def _tell(self, collection: str, change: ObjectChange) -> None:
        if collection.endswith("/pods"):
            if change.deleted:
                self._pods.pop(change.uid, None)
            else:
                self._pods[change.uid] = change.manifest
            for changed in self.followers_of_pods:
                changed(change)
        for one in self._followers:
            if _covers(one.path, collection) and _matches(one.labels, change.manifest):
                one.due = max(one.due, self._time.now + LAG_S * self._dice.random())
                self._time.at(one.due, lambda one=one: one.changed(change) if one.open else None)


def _covers(path: str, collection: str) -> bool:
    """Whether a watch at `path`, of a namespace or of the cluster, has the objects of a collection."""
    if path == collection:
        return True
    group, _, plural = path.rpartition("/")
    return (
        "/namespaces/" not in path
        and collection.startswith(f"{group}/namespaces/")
        and collection.endswith(f"/{plural}")
    )


def _selected(selector: str) -> dict[str, tuple[str, ...]]:
    """Of `a=b` and `a in (b,c)`."""
    if " in (" in selector:
        name, _, values = selector.partition(" in (")
        return {name: tuple(values.rstrip(")").split(","))}
    found = dict(part.split("=", 1) for part in selector.split(",") if part)
    return {name: (value,) for name, value in found.items()}


def _matches(labels: dict[str, Any], manifest: Manifest) -> bool:
    own = manifest["metadata"].get("labels", {})
    return all(own.get(name) in values for name, values in labels.items())


def _merged(old: Manifest, changes: Manifest) -> Manifest:
    """A JSON merge patch (RFC 7396)."""
    new = dict(old)
    for key, value in changes.items():
        if value is None:
            new.pop(key, None)
        elif isinstance(value, dict):
            before: Any = old.get(key)
            new[key] = _merged(before if isinstance(before, dict) else {}, value)
        else:
            new[key] = value
    return new
