"""What is kept of the objects of owners."""

from __future__ import annotations

from dlrover_hooks.kubernetes.object_cache import ObjectChange
from dlrover_hooks.kubernetes.owned_objects import OwnedObjects


def change(name: str, uid: str, owner: str = "", *, deleted: bool = False) -> ObjectChange:
    owners = [{"kind": "Job", "name": owner}, {"kind": "Other", "name": "other"}] if owner else []
    meta = {"namespace": "here", "name": name, "uid": uid, "ownerReferences": owners}
    return ObjectChange({"metadata": meta}, deleted=deleted)


def test_objects_are_found_by_their_owner() -> None:
    found = OwnedObjects("Job")
    assert found.take(change("a", "1", "mine")) == ("here", "mine")
    assert found.take(change("b", "2", "mine")) == ("here", "mine")
    assert found.take(change("c", "3")) is None
    assert found.take(change("d", "4"), "yours") == ("here", "yours")
    assert [one["metadata"]["name"] for one in found.of(("here", "mine"))] == ["a", "b"]
    assert [one["metadata"]["name"] for one in found.every()] == ["a", "b", "d"]


def test_the_deletion_of_an_earlier_object_of_a_name_changes_nothing() -> None:
    found = OwnedObjects("Job")
    found.take(change("a", "1", "mine"))
    found.take(change("a", "2", "mine"))
    found.take(change("a", "1", "mine", deleted=True))
    assert [one["metadata"]["uid"] for one in found.of(("here", "mine"))] == ["2"]
    assert found.take(change("a", "2", "mine", deleted=True)) == ("here", "mine")
    assert found.of(("here", "mine")) == found.every() == []
