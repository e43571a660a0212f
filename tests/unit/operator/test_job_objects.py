"""The objects that the operator makes for a job."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover_hooks.kubernetes.elastic_job_spec import job_spec
from dlrover_hooks.master.operator import job_objects
from dlrover_hooks.master.operator.job_objects import MasterOptions


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
    assert container["env"] == [
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
        "DLROVER_HOOKS_RUN_JOURNAL", "DLROVER_HOOKS_TOKEN",
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
    assert job_objects.master_url({"spec": {"clusterIP": address, "ports": [{"port": 9}]}}) == url


def test_a_node_finds_master_and_job_by_its_environment_and_keeps_its_own() -> None:
    manifest = job()
    found = job_objects.node_template(manifest, job_spec(manifest), "worker", "worker-3", "http://m:1")
    assert found is not None
    values = {one["name"]: one.get("value") for one in found["spec"]["containers"][0]["env"]}
    assert values == {
        "DLROVER_HOOKS_RUN_NNODES": "2", "DLROVER_HOOKS_JOB": "mine", "DLROVER_HOOKS_MASTER": "http://m:1",
        "DLROVER_HOOKS_NODE": "worker-3", "DLROVER_HOOKS_TOKEN": None,
    }  # fmt: skip
    assert job_objects.node_template(manifest, job_spec(manifest), "ps", "ps-0", "http://m:1") is None
    template = manifest["spec"]["replicaSpecs"]["worker"]["template"]
    assert job_objects.node_template(manifest, job_spec(manifest), "worker", "worker-3", None) == template
