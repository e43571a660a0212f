"""The objects that the operator makes for a job, and what it tells the Pods of its nodes. Pure."""

from __future__ import annotations

import copy

import msgspec

from dlrover_hooks.kubernetes import custom_resources, names, node_pods
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.elastic_job_spec import ElasticJobSpec
from dlrover_hooks.protocol import Node, NodeType

PORT = 8780
"""The master's own default."""
ACCOUNT = "dlrover-hooks-master"
SERVER = ("python", "-u", "-m", "dlrover_hooks.integrations.tensorflow")
"""The command of parameter servers, and of workers of a parameter server job."""
_FIRST_PORT, _PORTS = 22220, 1000
"""Of the servers of TensorFlow. Two tasks of a job have different ones, for Pods in the network of their machine."""
_POD_IP: Manifest = {"name": "DLROVER_HOOKS_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
_TOKEN_KEY = "token"
_REQUESTS = {"cpu": "100m", "memory": "256Mi"}
"""Of a master whose template has no resources."""


class MasterOptions(msgspec.Struct, frozen=True):
    """Of the Pods of masters. `image` "": that of the workers. `account`: their service account."""

    port: int = PORT
    image: str = ""
    account: str = ACCOUNT


def secret_name(job: Manifest) -> str:
    """Of the Secret with the token. It is another one for a later job of the same name: that of the earlier job may be
    deleted at any time.
    """
    return names.object_name(job["metadata"]["name"], "master", job["metadata"]["uid"][:8])


def master_secret(job: Manifest, token: str) -> Manifest:
    """With the token of the master."""
    meta = _meta(job) | {"name": secret_name(job)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {_TOKEN_KEY: token}}


def master_service(job: Manifest, options: MasterOptions) -> Manifest:
    """The master's address, which stays when its Pod is replaced."""
    labels = _labels(job["metadata"]["name"])
    ports = [{"name": "http", "port": options.port, "protocol": "TCP"}]
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": _meta(job), "spec": {"selector": labels, "ports": ports},
    }  # fmt: skip


def master_url(service: Manifest, *, tls: bool = False) -> str:
    """For Pods. It needs no DNS, unless the master serves TLS: a certificate has a name."""
    spec, meta = service["spec"], service["metadata"]
    if tls:
        return f"https://{names.service_host(meta['name'], meta['namespace'])}:{spec['ports'][0]['port']}"
    address = spec["clusterIP"]
    return f"http://{f'[{address}]' if ':' in address else address}:{spec['ports'][0]['port']}"


def master_pod(job: Manifest, spec: ElasticJobSpec, options: MasterOptions) -> Manifest:
    """Of `spec.replicaSpecs.dlrover-master.template`, or with the image of the workers."""
    meta = job["metadata"]
    pod = copy.deepcopy(spec.master.template or {})
    pod["metadata"] = _meta(job, pod.get("metadata", {}))
    body = pod.setdefault("spec", {})
    container = (body.setdefault("containers", []) or body["containers"].append({}) or body["containers"])[0]
    container.setdefault("name", "master")
    container.setdefault("image", options.image or _worker_image(spec))
    if "command" not in container:
        container["command"] = ["python", "-m", "dlrover_hooks.launcher.elastic_job"]
        container["args"] = ["--job", meta["name"], "--namespace", meta["namespace"], "--port", str(options.port)]
    container.setdefault("resources", {"requests": _REQUESTS})
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"  # why a job failed: shown in its status
    node_pods.add_variables(container, [_POD_IP, _token(job)])
    body.setdefault("serviceAccountName", options.account)
    body["restartPolicy"] = "Never"
    return {"apiVersion": "v1", "kind": "Pod"} | pod


def node_template(job: Manifest, spec: ElasticJobSpec, node: Node, url: str | None) -> Manifest | None:
    """The Pod of a node, with the variables by which its process finds master and job. None: the job has no such type.

    `url`: of the master; None: it is run elsewhere, so the template says where.
    """
    kind = node.type.value
    if url is None:
        return spec.replica(kind).template
    template = copy.deepcopy(spec.template(kind))
    if template is None:
        return None
    limits, name = spec.limits, job["metadata"]["name"]
    values = {"DLROVER_HOOKS_JOB": name, "DLROVER_HOOKS_MASTER": url, "DLROVER_HOOKS_NODE": node.name}
    for container in template.get("spec", {}).get("containers", ())[:1]:
        variables = [_token(job)]
        if spec.has_ps:
            variables += _of_task(node)
            if not spec.runs_script(kind):
                container["command"] = list(SERVER)
                container.pop("args", None)
        else:
            values["DLROVER_HOOKS_RUN_NNODES"] = f"{limits.min_workers}:{limits.max_workers}"
        given = [{"name": key, "value": value} for key, value in values.items()]
        node_pods.add_variables(container, given + variables)
    return template


def _of_task(node: Node) -> list[Manifest]:
    """Of a task of a TensorFlow cluster. Its address is known when its Pod has a machine."""
    port = _FIRST_PORT + node.id % _PORTS
    place = f"{node.type.value}:{node.index}:{node.id}:$(DLROVER_HOOKS_POD_IP):{port}"
    return [
        _POD_IP, {"name": "DLROVER_HOOKS_TASK", "value": place},
        {"name": "GRPC_FAIL_FAST", "value": "use_caller"},
    ]  # fmt: skip


def is_master(pod: Manifest) -> bool:
    """Whether this Pod is that of a master."""
    return pod["metadata"].get("labels", {}).get(names.MANAGED_BY) == names.OPERATOR


def _meta(job: Manifest, given: Manifest | None = None) -> Manifest:
    name, given = job["metadata"]["name"], given or {}
    labels = {**given.get("labels", {}), **_labels(name), names.MANAGED_BY: names.OPERATOR}
    owners = [custom_resources.owner_reference(job)]
    return {**given, "name": names.master_name(name), "labels": labels, "ownerReferences": owners}


def _labels(job: str) -> dict[str, str]:
    return {names.JOB_LABEL: names.label_value(job), names.TYPE_LABEL: names.MASTER_TYPE}


def _token(job: Manifest) -> Manifest:
    source = {"secretKeyRef": {"name": secret_name(job), "key": _TOKEN_KEY}}
    return {"name": "DLROVER_HOOKS_TOKEN", "valueFrom": source}


def _worker_image(spec: ElasticJobSpec) -> str:
    containers = (spec.template(NodeType.WORKER.value) or {}).get("spec", {}).get("containers") or [{}]
    return containers[0].get("image", "")
