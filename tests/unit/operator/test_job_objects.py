"""The objects that the operator makes for a job."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks.kubernetes.elastic_job_spec import CERTIFICATE, job_spec
from dlrover_hooks.master.operator import job_objects
from dlrover_hooks.master.operator.job_objects import MasterOptions
from dlrover_hooks.protocol import Node, NodeType


def job(master: dict[str, Any] | None = None, **worker: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "mine", "env": [{"name": "DLROVER_HOOKS_RUN_NNODES", "value": "2"}]}
    replicas = {"worker": {"maxReplicas": 4, "template": {"spec": {"containers": [container]}}} | worker}
    if master is not None:
        replicas["dlrover-master"] = master
    meta = {"name": "mine", "namespace": "here", "uid": "0123456789"}
    return {"metadata": meta, "spec": {"replicaSpecs": replicas}}


def master_pod(manifest: dict[str, Any], **options: Any) -> dict[str, Any]:
    return job_objects.master_pod(manifest, job_spec(manifest), MasterOptions(**options))


def test_the_master_has_the_image_of_the_workers_and_the_token_of_its_secret() -> None:
    found = master_pod(job(), port=9000)
    (container,) = found["spec"]["containers"]
    assert (container["image"], container["args"][-2:]) == ("mine", ["--port", "9000"])
    assert container["env"][1:] == [
        {"name": "DLROVER_HOOKS_TOKEN", "valueFrom": {"secretKeyRef": {"name": "mine-master-01234567", "key": "token"}}}
    ]
    assert found["spec"]["serviceAccountName"] == "dlrover-hooks-master"
    assert found["metadata"]["ownerReferences"][0]["uid"] == "0123456789"
    assert job_objects.is_master(found)
    assert master_pod(job(), image="other")["spec"]["containers"][0]["image"] == "other"


def test_a_template_of_the_master_is_kept() -> None:
    container = {"image": "own", "env": [{"name": "DLROVER_HOOKS_RUN_JOURNAL", "value": "/j/master.db"}]}
    template = {"metadata": {"labels": {"team": "a"}},
                "spec": {"containers": [container], "serviceAccountName": "own", "volumes": ["v"]}}  # fmt: skip
    manifest = job({"template": template})
    found = master_pod(manifest)
    assert found["metadata"]["labels"]["team"] == "a"
    assert (found["spec"]["serviceAccountName"], found["spec"]["volumes"]) == ("own", ["v"])
    assert [one["name"] for one in found["spec"]["containers"][0]["env"]] == [
        "DLROVER_HOOKS_RUN_JOURNAL", "DLROVER_HOOKS_POD_IP", "DLROVER_HOOKS_TOKEN",
    ]  # fmt: skip
    assert "ownerReferences" not in manifest["spec"]["replicaSpecs"]["dlrover-master"]["template"]["metadata"]


def test_the_service_selects_the_master_alone() -> None:
    manifest, options = job(), MasterOptions(port=9000)
    service = job_objects.master_service(manifest, options)
    labels = master_pod(manifest)["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["selector"]["replica-type"] == "dlrover-master"


@pytest.mark.parametrize(("address", "url"), [("10.0.0.1", "http://10.0.0.1:9"), ("fd00::1", "http://[fd00::1]:9")])
def test_the_address_of_a_master(address: str, url: str) -> None:
    service = {"metadata": {"name": "m", "namespace": "n"}, "spec": {"clusterIP": address, "ports": [{"port": 9}]}}
    assert job_objects.master_url(service) == url
    assert job_objects.master_url(service, tls=True) == "https://m.n.svc:9"


def test_a_master_with_a_certificate_serves_tls() -> None:
    env = [{"name": CERTIFICATE, "value": "/tls/tls.crt"}]
    assert job_spec(job({"template": {"spec": {"containers": [{"env": env}]}}})).master_serves_tls
    assert not job_spec(job({"template": {"spec": {"containers": [{"image": "own"}]}}})).master_serves_tls
    assert not job_spec(job()).master_serves_tls


def test_a_node_finds_master_and_job_by_its_environment_and_keeps_its_own() -> None:
    manifest, worker = job(), Node(NodeType.WORKER, 3)
    found = job_objects.node_template(manifest, job_spec(manifest), worker, "http://m:1")
    assert found is not None
    values = {one["name"]: one.get("value") for one in found["spec"]["containers"][0]["env"]}
    assert values == {
        "DLROVER_HOOKS_RUN_NNODES": "2", "DLROVER_HOOKS_JOB": "mine", "DLROVER_HOOKS_MASTER": "http://m:1",
        "DLROVER_HOOKS_NODE": "worker-3", "DLROVER_HOOKS_TOKEN": None,
    }  # fmt: skip
    assert job_objects.node_template(manifest, job_spec(manifest), Node(NodeType.PS, 0), "http://m:1") is None
    template = manifest["spec"]["replicaSpecs"]["worker"]["template"]
    assert job_objects.node_template(manifest, job_spec(manifest), worker, None) == template


def ps_job(**others: Any) -> dict[str, Any]:
    """`others`: more templates, by type."""
    manifest = job(replicas=2)
    replicas = manifest["spec"]["replicaSpecs"]
    container = replicas["worker"]["template"]["spec"]["containers"][0]
    container |= {"command": ["python", "train.py"], "args": ["--big"]}
    replicas["ps"] = {"replicas": 2}
    for kind, template in others.items():
        replicas.setdefault(kind, {})["template"] = {"spec": {"containers": [template]}}
    return manifest


def ps_container(manifest: dict[str, Any], node: Node) -> dict[str, Any]:
    found = job_objects.node_template(manifest, job_spec(manifest), node, "http://m:1")
    assert found is not None
    return found["spec"]["containers"][0]


def test_of_one_template_the_chief_runs_the_command_and_all_others_are_servers() -> None:
    manifest = ps_job()
    chief = ps_container(manifest, Node(NodeType.CHIEF, 1, index=0))
    assert (chief["command"], chief["args"], chief["image"]) == (["python", "train.py"], ["--big"], "mine")
    for node in (Node(NodeType.PS, 7, index=1), Node(NodeType.WORKER, 8, index=0)):
        found = ps_container(manifest, node)
        assert (found["command"], found.get("args"), found["image"]) == (list(job_objects.SERVER), None, "mine")
    names = [one["name"] for one in found["env"]]
    assert names.index("DLROVER_HOOKS_POD_IP") < names.index("DLROVER_HOOKS_TASK"), "which refers to it"
    values = {one["name"]: one.get("value") for one in found["env"]}
    assert values["DLROVER_HOOKS_TASK"] == "worker:0:8:$(DLROVER_HOOKS_POD_IP):22228"


def test_beside_a_chief_a_command_of_servers_is_kept() -> None:
    server = {"name": "main", "image": "small", "command": ["serve"]}
    manifest = ps_job(chief={"name": "main", "image": "mine", "command": ["train"]}, ps=server)
    assert ps_container(manifest, Node(NodeType.CHIEF, 1))["command"] == ["train"]
    assert ps_container(manifest, Node(NodeType.PS, 2))["command"] == ["serve"]
    without = ps_job(ps=server)
    assert ps_container(without, Node(NodeType.PS, 2))["command"] == list(job_objects.SERVER), "as DLRover's jobs are"
