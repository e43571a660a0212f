"""The control plane of these tests behaves as Kubernetes: what scalers and operator rely on, with the real kubectl."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlrover_hooks.errors import KubernetesFailed
from tests.kubernetes.control_plane import ControlPlane, control_plane
from tests.waiting import until

pytestmark = pytest.mark.kubernetes
GROUP, PLURAL = "tests.dlrover-hooks.io", "toys"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "properties": {
                "size": {"type": "integer", "minimum": 1, "default": 3},
                "color": {"type": "string", "enum": ["red", "green"], "default": "red"},
            },
        },
        "status": {
            "type": "object",
            "properties": {
                "size": {"type": "integer"},
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            },
        },
    },
}
CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{PLURAL}.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"plural": PLURAL, "singular": "toy", "kind": "Toy"},
        "versions": [
            {
                "name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": SCHEMA},
                "subresources": {
                    "status": {}, "scale": {"specReplicasPath": ".spec.size", "statusReplicasPath": ".status.size"}
                },
                "additionalPrinterColumns": [{"name": "COLOR", "type": "string", "jsonPath": ".spec.color"}],
            }
        ],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def plane() -> ControlPlane:
    found = control_plane()
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    found.api.create(crds, CRD)

    def established() -> bool:
        status = found.api.get(f"{crds}/{PLURAL}.{GROUP}").get("status", {})
        return any(one["type"] == "Established" and one["status"] == "True" for one in status.get("conditions") or ())

    until(established, "the resource")
    return found


@pytest.fixture
def toys(plane: ControlPlane) -> str:
    """The collection, in a new namespace."""
    path = f"/apis/{GROUP}/v1/namespaces/{plane.namespace()}/{PLURAL}"
    until(lambda: _served(plane, path), "the resource to be served")
    return path


def _served(plane: ControlPlane, path: str) -> bool:
    try:
        return bool(plane.api.get(path))
    except KubernetesFailed:
        return False


def toy(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": f"{GROUP}/v1", "kind": "Toy", "metadata": {"name": name}, "spec": spec}


def code(plane: ControlPlane, verb: str, *arguments: Any) -> int:
    with pytest.raises(KubernetesFailed) as caught:
        getattr(plane.api, verb)(*arguments)
    return caught.value.code


def test_defaults_limits_and_unknown_fields(plane: ControlPlane, toys: str) -> None:
    assert plane.api.create(toys, toy("a", other=1))["spec"] == {"size": 3, "color": "red"}
    assert code(plane, "create", toys, toy("b", size=0)) == 422
    assert code(plane, "create", toys, toy("b", color="blue")) == 422
    assert code(plane, "create", toys, toy("a")) == 409
    assert code(plane, "get", f"{toys}/b") == 404


def test_a_status_is_changed_by_its_own_path_alone(plane: ControlPlane, toys: str) -> None:
    made = plane.api.create(toys, toy("a"))
    changed = plane.api.replace(f"{toys}/a", made | {"status": {"size": 9}})
    assert "status" not in changed
    changed["status"], changed["spec"] = {"size": 9, "free": {"x": [1]}}, {"size": 5}
    status = plane.api.replace(f"{toys}/a/status", changed)
    assert (status["status"], status["spec"]["size"]) == ({"size": 9, "free": {"x": [1]}}, 3)
    assert status["metadata"]["generation"] == made["metadata"]["generation"]
    status["spec"]["size"] = 5
    assert plane.api.replace(f"{toys}/a", status)["metadata"]["generation"] == made["metadata"]["generation"] + 1


def test_a_change_of_an_old_version_is_refused(plane: ControlPlane, toys: str) -> None:
    made = plane.api.create(toys, toy("a"))
    plane.api.patch(f"{toys}/a", {"spec": {"size": 4}})
    assert code(plane, "replace", f"{toys}/a", made) == 409
    with pytest.raises(KubernetesFailed) as caught:
        plane.api.delete(f"{toys}/a", version=made["metadata"]["resourceVersion"])
    assert caught.value.code == 409


def test_a_watch_tells_changes_in_their_order(plane: ControlPlane, toys: str) -> None:
    version = plane.api.get(toys)["metadata"]["resourceVersion"]
    plane.api.create(toys, toy("a"))
    plane.api.patch(f"{toys}/a", {"spec": {"size": 4}})
    plane.api.delete(f"{toys}/a")
    with plane.api.watch(toys, version, 2) as stream:
        events = [json.loads(line) for line in b"".join(stream.stream()).splitlines()]
    assert [event["type"] for event in events] == ["ADDED", "MODIFIED", "DELETED"]


def test_an_object_with_a_finalizer_is_deleted_when_that_is_gone(plane: ControlPlane, toys: str) -> None:
    made = toy("a")
    made["metadata"]["finalizers"] = ["tests.dlrover-hooks.io/waits"]
    plane.api.create(toys, made)
    plane.api.delete(f"{toys}/a")
    assert "deletionTimestamp" in plane.api.get(f"{toys}/a")["metadata"]
    plane.api.patch(f"{toys}/a", {"metadata": {"finalizers": None}})
    assert code(plane, "get", f"{toys}/a") == 404


def test_two_candidates_for_a_lease(plane: ControlPlane) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{plane.namespace()}/leases"
    body = {"metadata": {"name": "leader"}, "spec": {"holderIdentity": "a", "leaseDurationSeconds": 5}}
    first = plane.api.create(path, body)
    first["spec"]["holderIdentity"] = "b"
    plane.api.replace(f"{path}/leader", first)
    first["spec"]["holderIdentity"] = "c"
    assert code(plane, "replace", f"{path}/leader", first) == 409


def test_kubectl_applies_prints_scales_and_deletes(plane: ControlPlane, toys: str) -> None:
    namespace = toys.split("/")[5]

    def kubectl(*arguments: str, stdin: str | None = None) -> str:
        ended = plane.kubectl("-n", namespace, *arguments, stdin=stdin)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    kubectl("apply", "-f", "-", stdin=json.dumps(toy("a")))
    assert kubectl("get", "toy", "a").split() == ["NAME", "COLOR", "a", "red"]
    kubectl("scale", "toy/a", "--replicas=7")
    assert plane.api.get(f"{toys}/a")["spec"]["size"] == 7
    kubectl("delete", "toy", "a", "--wait=true")
    assert plane.api.get(toys)["items"] == []


def test_two_owners_of_a_field_conflict(plane: ControlPlane, toys: str) -> None:
    namespace = toys.split("/")[5]
    apply = ("-n", namespace, "apply", "--server-side", "-f", "-", "--field-manager")
    assert plane.kubectl(*apply, "one", stdin=json.dumps(toy("a", size=2))).returncode == 0
    second = plane.kubectl(*apply, "two", stdin=json.dumps(toy("a", size=7)))
    assert (second.returncode, "conflict" in second.stderr) == (1, True)


def test_a_pod_without_containers_is_refused(plane: ControlPlane) -> None:
    pods = f"/api/v1/namespaces/{plane.namespace()}/pods"
    assert code(plane, "create", pods, {"metadata": {"name": "a"}, "spec": {"containers": []}}) == 422


def test_a_process_backed_pod_has_its_environment_and_its_grace(plane: ControlPlane) -> None:
    """Fields of the Pod and keys of Secrets; SIGTERM first, and gone from the API only after its process has gone."""
    namespace = plane.namespace()
    secret = {"metadata": {"name": "s"}, "stringData": {"token": "hidden"}}
    plane.api.create(f"/api/v1/namespaces/{namespace}/secrets", secret)
    env: list[dict[str, Any]] = [
        {"name": "PLAIN", "value": "1"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['rank']"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
    ]
    script = "trap 'echo asked; exit 0' TERM; echo $PLAIN $NAME $RANK $TOKEN; while :; do sleep 0.1; done"
    container = {"name": "main", "image": "none", "command": ["sh", "-c", script], "env": env}
    body = {"metadata": {"name": "a", "labels": {"rank": "3"}}, "spec": {"containers": [container]}}
    pods = f"/api/v1/namespaces/{namespace}/pods"
    plane.api.create(pods, body)
    until(lambda: "1 a 3 hidden" in plane.kubelet.output(namespace), "its output", diagnostic=plane.logs)
    pid = plane.kubelet.pid(namespace, "a")
    plane.api.delete(f"{pods}/a")
    until(lambda: not plane.api.get(pods)["items"], "its end")
    assert plane.kubelet.ended(pid) == 0
