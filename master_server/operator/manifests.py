"""What is installed in a cluster: definitions, accounts with the rights that they need, and the operator. Pure."""

from __future__ import annotations

from dlrover_hooks.kubernetes import custom_resources, names
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.master.di_orchestrator import di_job_resource, replicas
from dlrover_hooks.master.operator.job_objects import ACCOUNT

NAME = names.OPERATOR
HEALTH_PORT = 8781
_RBAC = "rbac.authorization.k8s.io"
_READ = ["get", "list", "watch"]
_FOLLOW = ["list", "watch"]


def _rule(group: str, resource: str, *verbs: str) -> Manifest:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


OPERATOR_RULES = [
    _rule(custom_resources.GROUP, "elasticjobs", *_FOLLOW, "patch", "delete"),
    _rule(custom_resources.GROUP, "elasticjobs/status", "patch"),
    _rule(custom_resources.GROUP, "elasticjobs/finalizers", "update"),  # to own objects, where that is checked
    _rule(custom_resources.GROUP, "scaleplans", *_FOLLOW, "delete"),
    _rule(custom_resources.GROUP, "scaleplans/status", "patch"),
    _rule("", "pods", *_READ, "create", "delete"),
    _rule("", "services", *_FOLLOW, "create"),
    _rule("", "secrets", "create"),
    _rule("", "events", "create"),
]
"""What the operator may do, in the namespaces of jobs."""
DI_RULES = [
    _rule(di_job_resource.GROUP, di_job_resource.DI_JOBS, *_FOLLOW),
    _rule(di_job_resource.GROUP, f"{di_job_resource.DI_JOBS}/status", "patch"),
    _rule(di_job_resource.GROUP, f"{di_job_resource.DI_JOBS}/finalizers", "update"),
]
"""What it may do besides, to run `DIJob`s."""
NODE_RULES = [_rule("", "nodes", *_FOLLOW)]
"""To tell which Pods will go with a node, and to place `DIJob`s: not for one namespace alone."""
LEASE_RULES = [_rule("coordination.k8s.io", "leases", "get", "create", "update")]
"""In its own namespace: of several operators one works."""
MASTER_RULES = [
    _rule(custom_resources.GROUP, "elasticjobs", *_READ),
    _rule(custom_resources.GROUP, "scaleplans", *_READ, "create", "update"),
    _rule("", "pods", *_FOLLOW),
]
"""What the master of a job may do, in its namespace."""
DI_SERVER, DI_SERVER_PORT = "dlrover-hooks-di-server", 8080
DI_SERVER_RULES = [
    _rule(di_job_resource.GROUP, di_job_resource.DI_JOBS, "get"),
    _rule(di_job_resource.GROUP, f"{di_job_resource.DI_JOBS}/status", "patch"),
    _rule("", "pods", "list"),
]
"""What the di-server may do."""
BRAIN = "dlrover-hooks-brain"
BRAIN_RULES = [_rule("", "nodes", *_FOLLOW), _rule("", "pods", *_FOLLOW)]
"""What a Brain may do that divides the cluster (`--monitor kubernetes`)."""


def operator_objects(
    namespace: str, image: str, only: str | None = None, *, di_policy: str | None = None
) -> list[Manifest]:
    """The operator in its namespace. `only`: the namespace whose jobs it follows; None: all of the cluster.
    `di_policy`: of `DIJob`s; None: it does not run them.
    """
    meta = {"name": NAME, "labels": {"app.kubernetes.io/name": NAME}}
    own = meta | {"namespace": namespace}
    arguments = ["--lease", namespace, "--health-port", str(HEALTH_PORT), "--log-level", "info"]
    arguments += [] if only is None else ["--namespace", only]
    if di_policy is not None:
        server = f"http://{names.service_host(DI_SERVER, namespace)}:{DI_SERVER_PORT}"
        arguments += ["--di-policy", di_policy, "--di-server", server]
    scope = "Cluster" if only is None else ""
    rules = OPERATOR_RULES + ([] if di_policy is None else DI_RULES) + (NODE_RULES if only is None else [])
    jobs = meta if only is None else meta | {"namespace": only}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        *_account(own, f"{scope}Role", rules, jobs),
        *_role("Role", own | {"name": f"{NAME}-leader"}, LEASE_RULES, own),
        _deployment(own, image, ["python", "-m", "dlrover_hooks.master.operator"], arguments, HEALTH_PORT),
    ]


def job_namespace_objects(namespace: str) -> list[Manifest]:
    """The account of the masters of jobs in this namespace."""
    return _account({"name": ACCOUNT, "namespace": namespace}, "Role", MASTER_RULES)


def di_server_objects(namespace: str, image: str) -> list[Manifest]:
    """The di-server. Its clients send no token, so only the Pods of `DIJob`s may reach it."""
    labels = {"app.kubernetes.io/name": DI_SERVER}
    meta = {"name": DI_SERVER, "namespace": namespace, "labels": labels}
    command = ["python", "-m", "dlrover_hooks.master.di_orchestrator", "serve"]
    arguments = ["--host", "0.0.0.0", "--port", str(DI_SERVER_PORT), "--no-token"]
    clients = {"namespaceSelector": {}, "podSelector": {"matchLabels": {replicas.OPERATOR_LABEL: names.OPERATOR}}}
    policy = {
        "podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"],
        "ingress": [{"from": [clients], "ports": [{"port": DI_SERVER_PORT}]}],
    }  # fmt: skip
    service = {"selector": labels, "ports": [{"name": "http", "port": DI_SERVER_PORT}]}
    return [
        *_account(meta, "ClusterRole", DI_SERVER_RULES),
        _deployment(meta, image, command, arguments, DI_SERVER_PORT),
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": meta, "spec": policy},
    ]


def brain_objects(namespace: str) -> list[Manifest]:
    """The account of a Brain in this namespace."""
    return _account({"name": BRAIN, "namespace": namespace}, "ClusterRole", BRAIN_RULES)


def _deployment(
    meta: Manifest, image: str, command: list[str], arguments: list[str], health_port: int
) -> Manifest:  # fmt: skip
    """Two Pods of the account and the labels of `meta`, which answer /healthz."""
    container = {
        "name": "main", "image": image, "command": command, "args": arguments,
        "ports": [{"containerPort": health_port}], "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": health_port}, "periodSeconds": 10},
        "securityContext": {
            "allowPrivilegeEscalation": False, "runAsNonRoot": True, "runAsUser": 65532,
            "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    pod = {"serviceAccountName": meta["name"], "containers": [container]}
    labels = meta["labels"]
    deployment = {
        "replicas": 2, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod},
    }  # fmt: skip
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": deployment}


def _account(meta: Manifest, kind: str, rules: list[Manifest], of_role: Manifest | None = None) -> list[Manifest]:
    """A service account, and its role. `of_role`: metadata of the role; None: those of the account, as far as it has a
    namespace.
    """
    if of_role is None:
        of_role = {"name": meta["name"]} if kind == "ClusterRole" else meta
    return [{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta}, *_role(kind, of_role, rules, meta)]


def _role(kind: str, meta: Manifest, rules: list[Manifest], account: Manifest) -> list[Manifest]:
    """A role, and the account of this metadata, which has it."""
    version = f"{_RBAC}/v1"
    subject = {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    reference = {"apiGroup": _RBAC, "kind": kind, "name": meta["name"]}
    return [
        {"apiVersion": version, "kind": kind, "metadata": meta, "rules": rules},
        {
            "apiVersion": version,
            "kind": f"{kind}Binding",
            "metadata": meta,
            "roleRef": reference,
            "subjects": [subject],
        },
    ]
