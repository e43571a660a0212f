"""What is known of watched objects is what there is, however lists and events follow each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes.object_cache import ObjectCache, ObjectChange


def manifest(uid: str, version: int) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "name": f"name-{uid}", "resourceVersion": str(version)}}


class Server:
    """A collection with its history, as an API server has it."""

    def __init__(self) -> None:
        self.version = 1
        self.objects: dict[str, dict[str, Any]] = {}
        self.events: list[tuple[int, dict[str, Any]]] = []

    def change(self, uid: str, delete: bool) -> None:
        self.version += 1
        if delete and uid not in self.objects:
            return
        kind = "DELETED" if delete else "MODIFIED" if uid in self.objects else "ADDED"
        self.objects[uid] = manifest(uid, self.version)
        self.events.append((self.version, {"type": kind, "object": self.objects[uid]}))
        if delete:
            del self.objects[uid]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sampled_from("abcd"), st.booleans()),
        st.tuples(st.just("list"), st.just(""), st.just(False)),
        st.tuples(st.just("watch"), st.just(""), st.booleans()),
    ),
    max_size=40,
)


@given(actions=ACTIONS)
@settings(max_examples=200)
def test_changes_lead_to_what_there_is(actions: list[tuple[str, str, bool]]) -> None:
    server, cache, seen = Server(), ObjectCache(), dict[str, str]()

    def take(change: ObjectChange | None) -> None:
        if change is None:
            return
        if change.deleted:
            seen.pop(change.uid, None)
        else:
            version = change.manifest["metadata"]["resourceVersion"]
            assert seen.get(change.uid) != version, "told twice"
            seen[change.uid] = version

    def list_all() -> None:
        for change in cache.listed(list(server.objects.values()), str(server.version)):
            take(change)

    def watch() -> None:
        for version, event in server.events:
            if version > int(cache.version):
                take(cache.watched(event))

    for what, uid, flag in actions:
        if what == "change":
            server.change(uid, flag)
        elif what == "list" or not cache.version:
            list_all()
        elif flag:  # compacted: the watch is refused
            with pytest.raises(KubernetesFailed, match="too old") as caught:
                cache.watched({"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}})
            assert (caught.value.code, cache.version) == (410, "")
        else:
            watch()
    if not cache.version:
        list_all()
    watch()
    assert seen == {uid: one["metadata"]["resourceVersion"] for uid, one in server.objects.items()}
    assert cache.objects == server.objects


def test_a_bookmark_only_says_how_far_the_watch_is() -> None:
    cache = ObjectCache()
    cache.listed([manifest("a", 1)], "1")
    assert cache.watched({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "70"}}}) is None
    assert (cache.version, list(cache.objects)) == ("70", ["a"])


def test_an_object_that_was_made_again_under_its_name_was_deleted_first() -> None:
    cache = ObjectCache()
    first, second = manifest("a", 1), manifest("b", 5)
    second["metadata"]["name"] = first["metadata"]["name"]
    cache.listed([first], "1")
    assert cache.listed([second], "9") == [ObjectChange(first, deleted=True), ObjectChange(second)]
