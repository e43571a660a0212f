"""The Pods of a `DIJob`'s tasks: which there are to be, with ranks without gaps, and what each is told. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import msgspec

from dlrover_hooks.errors import UsageError
from dlrover_hooks.kubernetes import names, node_pods
from dlrover_hooks.kubernetes.api_server import Manifest
from dlrover_hooks.kubernetes.pod_status import pod_end
from dlrover_hooks.master.di_orchestrator.di_job_resource import API_VERSION, DIJobSpec, DIJobStatus, TaskType
from dlrover_hooks.master.di_orchestrator.phases import ReplicaCounts
from dlrover_hooks.protocol import NodeExit

PORT, PORT_NAME = 22270, "di-port"
"""Of a replica, as DI-engine expects them."""
OPERATOR_LABEL, JOB_LABEL, POD_LABEL = "diengine/operator", "diengine/job", "diengine/pod"
TASK_TYPE_LABEL, TASK_NAME_LABEL, RANK_LABEL = "diengine/task-type", "diengine/task-name", "diengine/rank"
REPLICAS_ANNOTATION, RANK_ANNOTATION = "diengine/replicas", "diengine/rank"
TASK_RANK_ANNOTATION, NODE_ANNOTATION = "diengine/task-rank", "diengine/node"
RESTARTS_ANNOTATION = "dlrover-hooks/restarts"
"""How often the job had been restarted when the Pod was made."""
DEFAULT_RESOURCES = {"cpu": "1", "memory": "2Gi"}
"""What a container requests that says nothing, as in DI Orchestrator."""
_DOMAIN = "svc.cluster.local"


class TaskReplica(msgspec.Struct, frozen=True, order=True):
    """One of a job. `rank`: among all; `task`: the number of its task; `task_rank`: within that."""

    rank: int
    task: int
    task_rank: int


def replicas(spec: DIJobSpec, total: int) -> tuple[TaskReplica, ...]:
    """The replicas of a job that is to have `total`, by rank: 0, 1, 2 and so on, each once.

    Tasks have the numbers of the spec; one of them grows and shrinks: the collectors, without these the last task. Its
    ranks come last, so a rank belongs to the same replica whatever `total` is. Raises `UsageError` if `total` leaves it
    without a replica.
    """
    kinds = [task.type for task in spec.tasks]
    elastic = kinds.index(TaskType.COLLECTOR) if TaskType.COLLECTOR in kinds else len(kinds) - 1
    fixed = [number for number in range(len(kinds)) if number != elastic]
    left = total - sum(spec.tasks[number].replicas for number in fixed)
    if left < 1:
        raise UsageError(
            f"{total} replicas are too few: task {spec.tasks[elastic].title} needs one besides the "
            f"{total - left} of the other tasks",
            hint="give more",
        )
    places = [(number, rank) for number in fixed for rank in range(spec.tasks[number].replicas)]
    places += [(elastic, rank) for rank in range(left)]
    return tuple(TaskReplica(rank, *place) for rank, place in enumerate(places))


def wanted_replicas(spec: DIJobSpec, status: DIJobStatus) -> tuple[TaskReplica, ...]:
    """Of a preemptible job as many as are allocated; of another one as its status says. Raises `UsageError`."""
    total = len(status.allocation) if spec.preemptible else status.replicas
    return replicas(spec, total) if total else ()


def pod_changes(
    job: str, spec: DIJobSpec, status: DIJobStatus, pods: Iterable[Manifest]
) -> tuple[list[TaskReplica], list[Manifest]]:
    """What is to be created and deleted, so that the Pods are those that are wanted.

    A Pod of an earlier restart, on another node than the allocated one, or of a replica that is too many, is deleted.
    A replica is created when no Pod of its name exists, also none that is being deleted.
    """
    wanted = {replica_name(job, spec, one): one for one in wanted_replicas(spec, status)}
    present, delete = set[str](), list[Manifest]()
    for pod in pods:
        name = pod["metadata"]["name"]
        present.add(name)
        good = name in wanted and _is_of(pod, status) and _is_placed(pod, status, wanted[name])
        if not good and "deletionTimestamp" not in pod["metadata"]:
            delete.append(pod)
    return [one for name, one in wanted.items() if name not in present], delete


def counted(job: str, spec: DIJobSpec, status: DIJobStatus, pods: Iterable[Manifest]) -> ReplicaCounts:
    """The Pods as `next_phase` needs them."""
    wanted = {replica_name(job, spec, one): one for one in wanted_replicas(spec, status)}
    kept = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and _is_of(pod, status)]
    ends = [end for pod in kept if (end := pod_end(pod)) is not None]
    succeeded = sum(end.exit is NodeExit.SUCCEEDED for end in ends)
    known = [pod for pod in kept if pod["metadata"]["name"] in wanted]
    placed = all(_is_placed(pod, status, wanted[pod["metadata"]["name"]]) for pod in known)
    return ReplicaCounts(
        wanted=len(wanted), created=len(kept), ready=sum(map(_is_ready, kept)), succeeded=succeeded,
        failed=len(ends) - succeeded, placed=placed and len(known) == len(kept),
    )  # fmt: skip


def replica_name(job: str, spec: DIJobSpec, replica: TaskReplica) -> str:
    """Of its Pod, which is its host name, too."""
    return names.object_name(job, spec.tasks[replica.task].title.lower(), str(replica.task_rank))


def replica_pod(
    manifest: Manifest, spec: DIJobSpec, status: DIJobStatus, replica: TaskReplica, server_url: str
) -> Manifest:
    """The Pod of a replica. `server_url`: of the di-server, for reports."""
    meta, task = manifest["metadata"], spec.tasks[replica.task]
    job, namespace, name = meta["name"], meta["namespace"], replica_name(meta["name"], spec, replica)
    every = wanted_replicas(spec, status)
    node = status.allocation[replica.rank] if spec.preemptible else ""
    pod = copy.deepcopy(task.template)
    labels = {**job_labels(job), TASK_TYPE_LABEL: task.type.value, RANK_LABEL: str(replica.rank)}
    labels |= {TASK_NAME_LABEL: names.label_value(task.title), POD_LABEL: name}
    given = pod.get("metadata", {})
    pod["metadata"] = {
        **given, "name": name, "labels": {**given.get("labels", {}), **labels}, "ownerReferences": [owner(manifest)],
        "annotations": {
            **given.get("annotations", {}), REPLICAS_ANNOTATION: str(len(every)), RANK_ANNOTATION: str(replica.rank),
            TASK_RANK_ANNOTATION: str(replica.task_rank), NODE_ANNOTATION: node,
            RESTARTS_ANNOTATION: str(status.restarts),
        },
    }  # fmt: skip
    body = pod.setdefault("spec", {})
    body |= {"restartPolicy": "Never", "hostname": name, "subdomain": service_name(job)}
    body["volumes"] = [*body.get("volumes", ()), *spec.volumes]
    if node:
        _require(body, node)
    addresses = [f"{replica_name(job, spec, one)}.{service_name(job)}.{namespace}.{_DOMAIN}" for one in every]
    own = [address for one, address in zip(every, addresses, strict=True) if one.task == replica.task]
    variables = {
        "DI_JOB_ID": job_id(manifest), "DI_SERVER_URL": server_url, "DI_RANK": str(replica.rank),
        "DI_NODES": ",".join(addresses), f"DI_{task.title.upper().replace('-', '_')}_NODES": ",".join(own),
    }  # fmt: skip
    for container in body.get("containers", ()):
        node_pods.add_variables(container, [{"name": key, "value": value} for key, value in variables.items()])
        container.setdefault("resources", {"requests": DEFAULT_RESOURCES})
    return {"apiVersion": "v1", "kind": "Pod"} | pod


def job_service(manifest: Manifest) -> Manifest:
    """A headless Service, so that each replica has a host name."""
    job = manifest["metadata"]["name"]
    labels = job_labels(job)
    return {
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": service_name(job), "labels": labels, "ownerReferences": [owner(manifest)]},
        "spec": {"clusterIP": "None", "selector": labels, "ports": [{"name": PORT_NAME, "port": PORT}]},
    }  # fmt: skip


def service_name(job: str) -> str:
    """Of the job's Service, which is the subdomain of its replicas."""
    return names.object_name(job)


def job_labels(job: str) -> dict[str, str]:
    """Of all that belongs to a job."""
    return {OPERATOR_LABEL: names.OPERATOR, JOB_LABEL: names.label_value(job)}


def owner(manifest: Manifest) -> Manifest:
    """The `ownerReference` to a job."""
    return node_pods.owner_reference(API_VERSION, "DIJob", manifest)


def job_id(manifest: Manifest) -> str:
    """`namespace.name.generation`, by which the di-server knows a job."""
    meta = manifest["metadata"]
    return f"{meta['namespace']}.{meta['name']}.{meta['generation']}"


def split_job_id(text: str) -> tuple[str, str, int]:
    """Namespace, name and generation. A name may have dots; neither of the others has. Raises `UsageError`."""
    namespace, _, rest = text.partition(".")
    name, _, generation = rest.rpartition(".")
    if not (namespace and name and generation.isdecimal()):
        raise UsageError(f"{text!r} is no id of a job", hint="give namespace.name.generation")
    return namespace, name, int(generation)


def _is_of(pod: Manifest, status: DIJobStatus) -> bool:
    """It was made since the last restart of the job."""
    return pod["metadata"].get("annotations", {}).get(RESTARTS_ANNOTATION) == str(status.restarts)


def _is_placed(pod: Manifest, status: DIJobStatus, replica: TaskReplica) -> bool:
    if replica.rank >= len(status.allocation):
        return True
    return pod["metadata"].get("annotations", {}).get(NODE_ANNOTATION) == status.allocation[replica.rank]


def _require(body: Manifest, node: str) -> None:
    """The scheduler binds the Pod to this node, once there is room for it.

    With `nodeName` a kubelet would refuse it, as a failure, while the Pods that it takes the place of still end.
    """
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    affinity = body.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*term.get("matchFields", ()), field]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]


def _is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return pod_end(pod) is None and any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
