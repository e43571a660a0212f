"""The operator and `ElasticJobScaler` beyond what every scaler does: on a real control plane, with the real kubectl."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from dlrover_hooks.errors import KubernetesFailed, Stale
from dlrover_hooks.kubernetes import custom_resources, node_pods
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.master.operator.operator import Operator
from dlrover_hooks.protocol import Node, NodeExit, NodeGroupResource, NodeResource, NodeType, ScalePlan
from dlrover_hooks.scalers.elastic_job_scaler import ElasticJobScaler
from dlrover_hooks.scalers.node_reconciler import StartRetries
from dlrover_hooks.scalers.scaler import NodeState
from tests.kubernetes import operators
from tests.kubernetes.control_plane import control_plane
from tests.waiting import until

pytestmark = pytest.mark.kubernetes
SOON = StartRetries(attempts=3, first_s=0.01, longest_s=0.05)
SAMPLE_PLAN = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ScalePlan
metadata:
  name: scaleplan-sample
  labels:
    elasticjob-name: elasticjob-sample
spec:
  ownerJob: elasticjob-sample
  manualScaling: True
  replicaResourceSpecs:
    ps:
      replicas: 1
      resource:
        cpu: "0.5"
        memory: 256Mi
    worker:
      replicas: 2
      resource:
        cpu: "0.5"
        memory: 256Mi
"""
"""That of the design."""


class Job:
    """A namespace with an `ElasticJob`, and operators and scalers for it."""

    def __init__(self) -> None:
        self.plane = control_plane()
        self.namespace = self.plane.namespace()
        operators.install(self.plane.api)
        self.manifest = operators.apply_job(self.plane.api, self.namespace, "job")
        self.operators, self.scalers = list[Operator](), list[ElasticJobScaler]()

    def operator(self) -> Operator:
        made = operators.started(self.plane.api, self.namespace)
        self.operators.append(made)
        return made

    def scaler(self, api: ApiServer | None = None) -> ElasticJobScaler:
        made = ElasticJobScaler(self.manifest, api or self.plane.api, retries=SOON, grace_s=0.0)
        self.scalers.append(made)
        made.start()
        return made

    def abandon(self, scaler: ElasticJobScaler) -> None:
        """As a master that was killed: its threads do nothing any more, its Pods and its plan stay."""
        scaler._pods.stop()
        scaler._status.stop()
        with scaler._changed:
            scaler._stopped = scaler._over = True
            scaler._changed.notify_all()

    def pods(self) -> dict[str, str]:
        """Uid by name."""
        found = self.plane.api.get(node_pods.pods_path(self.namespace))["items"]
        return {one["metadata"]["name"]: one["metadata"]["uid"] for one in found}

    def plans(self) -> list[dict[str, Any]]:
        return self.plane.api.get(custom_resources.path(self.namespace, custom_resources.SCALE_PLANS))["items"]

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        ended = self.plane.kubectl("-n", self.namespace, *arguments, stdin=stdin)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    for scaler in made.scalers:
        scaler.stop(0.0)
    for operator in made.operators:
        operator.stop()
    assert made.plane.kubelet.alive(made.namespace) == []


def group(count: int) -> ScalePlan:
    return ScalePlan({"worker": NodeGroupResource(count)})


def states(scaler: ElasticJobScaler) -> dict[str, NodeState]:
    return {one.node.name: one.state for one in scaler.list_nodes()}


def run(scaler: ElasticJobScaler, *numbers: int) -> None:
    wanted = {f"worker-{number}": NodeState.RUNNING for number in numbers}
    until(lambda: states(scaler) == wanted, f"{wanted}", diagnostic=scaler.list_nodes)


@pytest.mark.requirement("SC-55", "SC-56", "SC-57", "SC-58", "SC-59", "SC-60")
def test_the_plan_of_the_design_can_be_applied_as_it_stands(job: Job) -> None:
    job.kubectl("apply", "-f", "-", stdin=SAMPLE_PLAN)
    (found,) = json.loads(job.kubectl("get", "scaleplans", "-l", "elasticjob-name=elasticjob-sample", "-o", "json"))[
        "items"
    ]
    assert (found["kind"], found["metadata"]["name"]) == ("ScalePlan", "scaleplan-sample")
    resource = {"cpu": "0.5", "memory": "256Mi"}
    assert found["spec"] == {
        "ownerJob": "elasticjob-sample", "manualScaling": True, "replicaResourceSpecs": {
            "ps": {"replicas": 1, "resource": resource}, "worker": {"replicas": 2, "resource": resource},
        },
    }  # fmt: skip
    assert job.kubectl("get", "scaleplans").split()[:4] == ["NAME", "JOB", "PHASE", "AGE"]


def test_kubectl_scales_the_workers_of_a_job(job: Job) -> None:
    job.kubectl("scale", "elasticjob/job", "--replicas=5")
    assert (
        json.loads(job.kubectl("get", "elasticjob", "job", "-o", "json"))["spec"]["replicaSpecs"]["worker"]["replicas"]
        == 5
    )


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("spec.ownerJob", {"ownerJob": ""}),
        ("spec.createPods.type", {"createPods": [{"name": "a", "type": "wroker", "id": 0}]}),
        ("spec.createPods.id", {"createPods": [{"name": "a", "type": "ps", "id": -1}]}),
        ("spec.replicaResourceSpecs.worker.replicas", {"replicaResourceSpecs": {"worker": {"replicas": -1}}}),
        ("spec.replicaResourceSpecs.ps.resource.cpu", {"replicaResourceSpecs": {"ps": {"resource": {"cpu": "much"}}}}),
    ],
)
def test_an_invalid_plan_is_refused_with_the_field(job: Job, field: str, change: dict[str, Any]) -> None:
    plan = {"apiVersion": custom_resources.API_VERSION, "kind": "ScalePlan", "metadata": {"name": "a"},
            "spec": {"ownerJob": "job"} | change}  # fmt: skip
    with pytest.raises(KubernetesFailed, match=field.replace(".", r"\.")) as found:
        job.plane.api.create(custom_resources.path(job.namespace, custom_resources.SCALE_PLANS), plan)
    assert found.value.code == 422


@pytest.mark.requirement("SC-53", "DL-50", "DL-51")
def test_all_nodes_are_in_one_plan_however_often_it_changes(job: Job) -> None:
    job.operator()
    scaler = job.scaler()
    for workers, servers in ((1, 1), (3, 2), (2, 1), (4, 1)):
        scaler.scale(ScalePlan({"worker": NodeGroupResource(workers), "ps": NodeGroupResource(servers)}))
        nodes = [f"ps-{number}" for number in range(servers)] + [f"worker-{number}" for number in range(workers)]
        wanted = dict.fromkeys(nodes, NodeState.RUNNING)
        until(lambda wanted=wanted: states(scaler) == wanted, f"{wanted}", diagnostic=scaler.list_nodes)
    (plan,) = job.plans()
    spec = custom_resources.plan_spec(plan)
    assert (spec.owner_job, sorted(one.name for one in spec.create_pods)) == ("job", nodes)
    assert {name: one.replicas for name, one in spec.replica_resource_specs.items()} == {"ps": 1, "worker": 4}
    until(lambda: custom_resources.plan_status(job.plans()[0]).phase == "Succeeded", "the end of the plan")


def test_an_operator_that_starts_later_finds_what_to_do(job: Job) -> None:
    first = job.operator()
    scaler = job.scaler()
    scaler.scale(group(2))
    run(scaler, 0, 1)
    first.stop()
    before = job.pods()
    scaler.scale(ScalePlan({"worker": NodeGroupResource(3)}, [], [Node(NodeType.WORKER, 0)]))
    until(lambda: len(custom_resources.plan_spec(job.plans()[0]).create_pods) == 3, "the plan")
    assert job.pods() == before
    job.operator()
    run(scaler, 1, 2, 3)
    assert job.pods()["job-worker-1"] == before["job-worker-1"]


def test_a_pod_that_a_user_deletes_is_reported_and_not_created_again(job: Job) -> None:
    """Whether the node is replaced is decided by the master."""
    job.operator()
    scaler = job.scaler()
    scaler.scale(group(2))
    run(scaler, 0, 1)
    job.kubectl("delete", "pod", "job-worker-1", "--wait=false")
    until(lambda: states(scaler)["worker-1"] is NodeState.ENDED, "the end")
    (ended,) = [one for one in scaler.list_nodes() if one.state is NodeState.ENDED]
    assert ended.exit is NodeExit.PREEMPTED
    scaler.scale(group(2))
    until(lambda: states(scaler) == {
        "worker-0": NodeState.RUNNING, "worker-1": NodeState.ENDED, "worker-2": NodeState.RUNNING,
    }, "another node", diagnostic=scaler.list_nodes)  # fmt: skip
    until(lambda: sorted(job.pods()) == ["job-worker-0", "job-worker-2"], "the deleted Pod to go")


@pytest.mark.requirement("DL-52")
def test_a_node_is_replaced_by_one_with_more_resources(job: Job) -> None:
    job.operator()
    scaler = job.scaler()
    scaler.scale(group(1))
    run(scaler, 0)
    larger = Node(NodeType.WORKER, 1, NodeResource(cpu=0.5))
    scaler.scale(ScalePlan(launch_nodes=[larger], remove_nodes=[Node(NodeType.WORKER, 0)]))
    run(scaler, 1)
    pod = job.plane.api.get(f"{node_pods.pods_path(job.namespace)}/job-worker-1")
    assert pod["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "500m"}


def test_the_scaler_of_a_restarted_master_goes_on_with_the_pods(job: Job) -> None:
    job.operator()
    first = job.scaler()
    first.scale(group(3))
    run(first, 0, 1, 2)
    before = job.pods()
    job.abandon(first)
    second = job.scaler()
    run(second, 0, 1, 2)
    second.scale(group(2))
    run(second, 0, 1)
    left = {name: uid for name, uid in before.items() if name != "job-worker-2"}
    until(lambda: job.pods() == left, "the Pod of the removed one to go")


def test_of_two_scalers_of_a_job_the_older_one_stops(job: Job) -> None:
    job.operator()
    first = job.scaler()
    first.scale(group(1))
    run(first, 0)
    second = job.scaler()
    run(second, 0)
    second.scale(group(2))
    run(second, 0, 1)

    def stale() -> bool:
        try:
            first.scale(group(0))
        except Stale:
            return True
        return False

    until(stale, "the older one to notice")
    run(second, 0, 1)
    job.scalers.remove(first)
    job.abandon(first)


def test_with_the_job_all_its_objects_are_deleted(job: Job) -> None:
    job.operator()
    scaler = job.scaler()
    scaler.scale(group(3))
    run(scaler, 0, 1, 2)
    job.abandon(scaler)
    job.kubectl("delete", "elasticjob", "job")
    until(lambda: not job.pods() and not job.plans(), "its Pods and its plan to go")


def test_a_type_without_a_template_is_a_failed_start_that_says_so(job: Job) -> None:
    path = f"{custom_resources.path(job.namespace, custom_resources.ELASTIC_JOBS)}/job"
    job.manifest = job.plane.api.patch(path, {"spec": {"replicaSpecs": {"ps": None}}})
    job.operator()
    scaler = job.scaler()
    scaler.scale(ScalePlan({"ps": NodeGroupResource(1)}))
    until(lambda: states(scaler) == {"ps-0": NodeState.ENDED}, "the end", diagnostic=scaler.list_nodes)
    (ended,) = scaler.list_nodes()
    assert ended.exit is NodeExit.NEVER_STARTED
    assert "has no template of a ps" in ended.detail
    assert job.pods() == {}


def test_an_operator_process_that_is_killed_is_replaced(job: Job) -> None:
    command = [sys.executable, "-m", "dlrover_hooks.master.operator", "--namespace", job.namespace,
               "--kubeconfig", job.plane.kubeconfig]  # fmt: skip
    scaler = job.scaler()
    running = list[subprocess.Popen[str]]()

    def start() -> subprocess.Popen[str]:
        made = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        running.append(made)
        assert made.stderr is not None
        assert made.stderr.readline().startswith("dlrover-hooks operator: follows https://127.0.0.1:")
        return made

    try:
        first = start()
        scaler.scale(group(8))
        until(lambda: len(job.pods()) >= 2, "some Pods")
        first.kill()
        first.wait(60)
        second = start()
        run(scaler, *range(8))
        assert len(job.pods()) == 8
        scaler.scale(group(1))
        run(scaler, 0)
        scaler.scale(group(0))
        run(scaler)
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0
    finally:
        for one in running:
            one.kill()
            one.wait(60)
            assert one.stderr is not None
            one.stderr.close()


def test_the_account_of_a_master_may_not_create_or_delete_pods(job: Job) -> None:
    """It lists Pods and writes plans: no more is needed."""
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{job.namespace}"
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]},
        {"apiGroups": [custom_resources.GROUP], "resources": ["scaleplans"],
         "verbs": ["get", "list", "watch", "create", "update"]},
    ]  # fmt: skip
    job.plane.api.create(f"{roles}/roles", {"metadata": {"name": "master"}, "rules": rules})
    job.plane.api.create(f"{roles}/rolebindings", {
        "metadata": {"name": "master"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "master"},
        "subjects": [{"kind": "ServiceAccount", "name": "master", "namespace": job.namespace}],
    })  # fmt: skip
    master = job.plane.account(job.namespace, "master")
    job.operator()
    scaler = job.scaler(master)
    scaler.scale(group(2))
    run(scaler, 0, 1)
    with pytest.raises(KubernetesFailed, match="forbidden"):
        master.delete(f"{node_pods.pods_path(job.namespace)}/job-worker-0")
    scaler.scale(group(1))
    run(scaler, 0)


def test_an_operator_that_may_not_list_jobs_says_so(job: Job) -> None:
    account = job.plane.account(job.namespace, "without-roles")
    with pytest.raises(KubernetesFailed, match="forbidden"):
        Operator(account, job.namespace).start()
    account.close()
