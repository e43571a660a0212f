"""`PodScaler` beyond what every scaler does: on a real control plane, with process-backed Pods."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.errors import KubernetesFailed, UsageError
from dlrover_hooks.kubernetes import names
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.protocol import Node, NodeExit, NodeGroupResource, NodeResource, NodeType, ScalePlan
from dlrover_hooks.scalers.node_reconciler import StartRetries
from dlrover_hooks.scalers.pod_scaler import PodScaler
from dlrover_hooks.scalers.scaler import NodeState, ScaledNode
from tests.kubernetes.control_plane import ControlPlane, control_plane
from tests.waiting import until

pytestmark = pytest.mark.kubernetes
ANY = NodeResource()
SOON = StartRetries(attempts=3, first_s=0.01, longest_s=0.05)
HUNGRY = "x = bytearray(300 << 20); x[::4096] = b'1' * len(x[::4096]); import threading; threading.Event().wait(60)"


def pod(*command: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "image": "none", "command": list(command or ("sleep", "600"))}]}}


class Job:
    """A namespace, and scalers of one job in it."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane, self.namespace = plane, plane.namespace()
        self.path = f"/api/v1/namespaces/{self.namespace}/pods"
        self.scalers: list[PodScaler] = []

    def scaler(self, *command: str, api: ApiServer | None = None, **more: Any) -> PodScaler:
        template: Callable[[Node], dict[str, Any]] = more.pop("template", lambda node: pod(*command))
        made = PodScaler(
            "job", api or self.plane.api, self.namespace, template, retries=SOON, grace_s=0.0, user_errors={65}, **more
        )
        self.scalers.append(made)
        made.start()
        return made

    def pods(self) -> dict[str, dict[str, Any]]:
        return {one["metadata"]["name"]: one for one in self.plane.api.get(self.path)["items"]}

    def abandon(self, scaler: PodScaler) -> None:
        """As a master that was killed: its threads do nothing any more, its Pods stay."""
        scaler._pods.stop()
        with scaler._changed:
            scaler._stopped = scaler._over = True
            scaler._changed.notify_all()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(control_plane())
    yield made
    for scaler in made.scalers:
        scaler.stop(0.0)
    assert made.plane.kubelet.alive(made.namespace) == []


def group(count: int, resource: NodeResource = ANY) -> ScalePlan:
    return ScalePlan({"worker": NodeGroupResource(count, resource)})


def states(scaler: PodScaler) -> dict[str, NodeState]:
    return {one.node.name: one.state for one in scaler.list_nodes()}


def all_run(job: Job, scaler: PodScaler, *numbers: int) -> None:
    wanted = {f"worker-{number}": NodeState.RUNNING for number in numbers}
    until(lambda: states(scaler) == wanted, f"{wanted}", diagnostic=lambda: (scaler.list_nodes(), job.plane.logs()))


def ended(scaler: PodScaler, name: str) -> ScaledNode:
    def found() -> ScaledNode | None:
        return next((one for one in scaler.list_nodes() if one.node.name == name and one.exit is not None), None)

    return until(found, f"the end of {name}", diagnostic=scaler.list_nodes)


@pytest.mark.requirement("SC-48")
def test_a_node_is_a_pod_with_its_resources_and_labels(job: Job) -> None:
    scaler = job.scaler()
    resource = NodeResource(cpu=0.5, memory=256)
    scaler.scale(ScalePlan({"worker": NodeGroupResource(1, resource)}, [Node(NodeType.PS, 0, resource)]))
    until(lambda: set(states(scaler).values()) == {NodeState.RUNNING}, "both nodes")
    found = job.pods()
    assert set(found) == {"job-worker-0", "job-ps-0"}
    (container,) = found["job-ps-0"]["spec"]["containers"]
    assert container["resources"] == {kind: {"cpu": "500m", "memory": "256Mi"} for kind in ("requests", "limits")}
    selector = f"{names.JOB_LABEL}=job,{names.TYPE_LABEL}=ps,{names.INDEX_LABEL}=0"
    printed = job.plane.kubectl("-n", job.namespace, "get", "pods", "-l", selector, "-o", "name")
    assert printed.stdout == "pod/job-ps-0\n"


@pytest.mark.requirement("SC-52")
def test_the_pod_of_a_removed_node_is_deleted_by_the_name_of_the_node(job: Job) -> None:
    scaler = job.scaler()
    scaler.scale(group(3))
    all_run(job, scaler, 0, 1, 2)
    scaler.scale(ScalePlan(remove_nodes=[Node(NodeType.WORKER, 1)]))
    until(lambda: "job-worker-1" not in job.pods(), "its Pod to go")
    assert set(job.pods()) == {"job-worker-0", "job-worker-2"}
    assert states(scaler) == {"worker-0": NodeState.RUNNING, "worker-2": NodeState.RUNNING}


def test_the_next_scaler_goes_on_with_the_pods_of_the_last_one(job: Job) -> None:
    """A master that was started again: what runs is neither started twice nor forgotten, nor is the end of a node."""
    first = job.scaler()
    first.scale(group(3))
    all_run(job, first, 0, 1, 2)
    before = {name: one["metadata"]["uid"] for name, one in job.pods().items()}
    job.abandon(first)
    os.kill(job.plane.kubelet.pid(job.namespace, "job-worker-2"), signal.SIGKILL)
    until(lambda: job.pods()["job-worker-2"]["status"]["phase"] == "Failed", "its end")
    second = job.scaler()
    until(lambda: states(second).get("worker-2") is NodeState.ENDED, "the end of worker-2")
    assert ended(second, "worker-2").exit is NodeExit.KILLED
    second.scale(group(3))
    until(lambda: states(second).get("worker-3") is NodeState.RUNNING, "a node more", diagnostic=second.list_nodes)
    assert {name: one["metadata"]["uid"] for name, one in job.pods().items() if name in before} == before
    second.scale(ScalePlan(remove_nodes=[Node(NodeType.WORKER, 0)]))
    until(lambda: "job-worker-0" not in job.pods(), "its Pod to go")


def test_the_name_of_a_node_that_failed_can_be_used_again(job: Job) -> None:
    scaler = job.scaler("sh", "-c", "exit 65")
    scaler.scale(group(1))
    assert (ended(scaler, "worker-0").exit, ended(scaler, "worker-0").exit_code) == (NodeExit.USER_ERROR, 65)
    first = job.pods()["job-worker-0"]["metadata"]["uid"]
    worker = Node(NodeType.WORKER, 0)
    scaler.scale(ScalePlan(remove_nodes=[worker]))
    assert job.pods()["job-worker-0"]["metadata"]["uid"] == first, "its Pod stays, with its log"
    scaler.scale(ScalePlan(launch_nodes=[worker]))
    until(
        lambda: job.pods().get("job-worker-0", {"metadata": {"uid": first}})["metadata"]["uid"] != first, "another one"
    )


def test_a_pod_beyond_its_memory_limit_is_a_node_without_memory(job: Job) -> None:
    scaler = job.scaler(sys.executable, "-c", HUNGRY)
    scaler.scale(group(1, NodeResource(memory=128)))
    found = ended(scaler, "worker-0")
    assert (found.exit, found.detail) == (NodeExit.OUT_OF_MEMORY, "OOMKilled")


def test_a_pod_that_a_user_deletes_is_a_preempted_node(job: Job) -> None:
    scaler = job.scaler()
    scaler.scale(group(2))
    all_run(job, scaler, 0, 1)
    deleted = job.plane.kubectl("-n", job.namespace, "delete", "pod", "job-worker-1", "--now")
    assert deleted.returncode == 0, deleted.stderr
    found = ended(scaler, "worker-1")
    assert (found.exit, found.exit_code) == (NodeExit.PREEMPTED, -15)
    assert states(scaler)["worker-0"] is NodeState.RUNNING


def test_with_their_owner_all_pods_are_deleted(job: Job) -> None:
    """By the garbage collector of the cluster, also if no master is left."""
    path = f"/api/v1/namespaces/{job.namespace}/configmaps"
    made = job.plane.api.create(path, {"metadata": {"name": "owner"}})
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": made["metadata"]["uid"]}
    scaler = job.scaler(owner=owner)
    scaler.scale(group(3))
    all_run(job, scaler, 0, 1, 2)
    job.abandon(scaler)
    assert len(job.pods()) == 3, "they do not need the scaler"
    job.plane.api.delete(f"{path}/owner")
    until(lambda: not job.pods(), "the Pods to go")
    assert job.plane.kubelet.alive(job.namespace) == []


def test_pods_of_another_job_that_had_the_name_are_left_alone(job: Job) -> None:
    path = f"/api/v1/namespaces/{job.namespace}/configmaps"
    made = job.plane.api.create(path, {"metadata": {"name": "owner"}})
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": made["metadata"]["uid"]}
    old = job.scaler()
    old.scale(group(1))
    all_run(job, old, 0)
    scaler = job.scaler(owner=owner)
    assert scaler.list_nodes() == ()
    scaler.scale(group(1))
    found = ended(scaler, "worker-0")
    assert (found.exit, "already exists" in found.detail) == (NodeExit.NEVER_STARTED, True)
    all_run(job, old, 0)


class LosesAnswers(ApiServer):
    """Carries out each creation and then says that it does not know: the connection broke off."""

    lost = 0

    def create(self, path: str, body: Any, **query: Any) -> dict[str, Any]:
        super().create(path, body, **query)
        self.lost += 1
        raise KubernetesFailed("gave no answer", code=0)


def test_a_pod_whose_creation_was_not_answered_is_the_node(job: Job) -> None:
    api = LosesAnswers(kubeconfig=job.plane.kubeconfig)
    scaler = job.scaler(api=api)
    scaler.scale(group(2))
    all_run(job, scaler, 0, 1)
    assert (api.lost, set(job.pods())) == (2, {"job-worker-0", "job-worker-1"})


@pytest.mark.requirement("SC-49", "SC-50", "SC-51")
def test_a_pod_that_cannot_be_created_is_tried_again_and_given_up_with_the_servers_reason(job: Job) -> None:
    tries = list[str]()

    def template(node: Node) -> dict[str, Any]:
        tries.append(node.name)
        wrong = pod()
        wrong["spec"]["containers"][0]["image"] = None
        return wrong if len(tries) < 3 or node.id else pod()

    scaler = job.scaler(template=template, starts_at_once=1)
    scaler.scale(ScalePlan(launch_nodes=[Node(NodeType.WORKER, 0)]))
    all_run(job, scaler, 0)
    assert tries == ["worker-0"] * 3
    scaler.scale(group(2))
    found = ended(scaler, "worker-1")
    assert (found.exit, "spec.containers[0].image: Required value" in found.detail) == (NodeExit.NEVER_STARTED, True)


def test_a_template_without_containers_is_refused(job: Job) -> None:
    scaler = job.scaler(template=lambda node: {"spec": {}})
    scaler.scale(group(1))
    assert "no containers" in ended(scaler, "worker-0").detail


def test_the_api_server_dies_while_a_job_grows(job: Job) -> None:
    """What it was doing is done when it is back: each node once."""
    scaler = job.scaler()
    scaler.scale(group(2))
    all_run(job, scaler, 0, 1)
    job.plane.kill("kube-apiserver")
    scaler.scale(group(12))
    job.plane.start_api_server()
    all_run(job, scaler, *range(12))
    assert set(job.pods()) == {f"job-worker-{number}" for number in range(12)}


def test_a_namespace_that_may_not_be_read_is_an_error_of_the_start(job: Job) -> None:
    account = job.plane.account(job.namespace, "nobody")
    with pytest.raises(KubernetesFailed, match=r"cannot list resource \"pods\"") as caught:
        job.scaler(api=account)
    assert caught.value.code == 403


def test_a_cluster_that_is_not_configured_is_an_error_that_says_so(job: Job, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such Kubernetes cluster"):
        ApiServer(kubeconfig=str(tmp_path / "missing"))
    with pytest.raises(UsageError, match=r"no such Kubernetes cluster: .*elsewhere"):
        ApiServer("elsewhere", kubeconfig=job.plane.kubeconfig)
