"""Operators and `ElasticJob`s, for tests."""

from __future__ import annotations

from typing import Any

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes import custom_resources, node_pods
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.master.operator.operator import Operator
from tests.waiting import until


def install(api: ApiServer, *definitions: dict[str, Any]) -> None:
    """The definitions, if they are not there yet. Without any: those of `ElasticJob` and `ScalePlan`."""
    for one in definitions or custom_resources.definitions():
        try:
            api.create(custom_resources.DEFINITIONS, one)
        except KubernetesFailed as error:
            if error.code != node_pods.CONFLICT:
                raise
        until(lambda one=one: _established(api, one["metadata"]["name"]), one["metadata"]["name"])


def _established(api: ApiServer, name: str) -> bool:
    conditions = api.get(f"{custom_resources.DEFINITIONS}/{name}").get("status", {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def started(api: ApiServer, namespace: str | None = None) -> Operator:
    """One that runs in this process."""
    install(api)
    made = Operator(api, namespace)
    made.start()
    return made


def elastic_job(name: str, command: list[str] | None = None, **more: Any) -> dict[str, Any]:
    """With workers and parameter servers of one container, which runs `command`. Its master is run elsewhere."""
    container = {"name": "main", "image": "none", "command": command or ["sleep", "600"]}
    replica = {"template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": custom_resources.API_VERSION, "kind": "ElasticJob", "metadata": {"name": name},
        "spec": {"replicaSpecs": {"worker": replica, "ps": replica, "chief": replica, "evaluator": replica,
                                  "dlrover-master": {"replicas": 0}}, **more},
    }  # fmt: skip


def apply_job(api: ApiServer, namespace: str, name: str, command: list[str] | None = None) -> dict[str, Any]:
    """Create it; as the API has it then."""
    return api.create(custom_resources.path(namespace, custom_resources.ELASTIC_JOBS), elastic_job(name, command))
