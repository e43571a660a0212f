"""`DIJob`s on process-backed Pods of a real control plane: all phases, whatever their Pods, users and policies do."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover_hooks.kubernetes import node_pods
from dlrover_hooks.master.di_orchestrator import di_job_resource
from dlrover_hooks.master.di_orchestrator.allocator import Allocator, NodeList, Policy
from dlrover_hooks.master.di_orchestrator.controller import DIJobController
from dlrover_hooks.master.di_orchestrator.di_job_resource import DIJobPhase, di_job_status
from dlrover_hooks.master.di_orchestrator.policies import FitPolicy, Placement
from tests.di_policies import ScriptedPolicy, broken
from tests.kubernetes import operators
from tests.kubernetes.control_plane import control_plane
from tests.waiting import until

pytestmark = pytest.mark.kubernetes
LONG_S = 120.0
Manifest = dict[str, Any]


class Cluster:
    """A namespace whose `DIJob`s a controller follows."""

    def __init__(self) -> None:
        self.plane = control_plane()
        self.api, self.namespace = self.plane.api, self.plane.namespace()
        operators.install(self.api, di_job_resource.definition())
        self.path = f"/apis/{di_job_resource.API_VERSION}/namespaces/{self.namespace}/{di_job_resource.DI_JOBS}"
        self.controllers = list[DIJobController]()

    def controller(self, policy: Policy | None = None, period_s: float = 3600.0) -> DIJobController:
        made = DIJobController(self.api, Allocator(policy or FitPolicy()), self.namespace, period_s=period_s)
        made.start()
        self.controllers.append(made)
        return made

    def create(self, command: str, replicas: int = 1, **spec: Any) -> Manifest:
        """The job `mine`, of one task whose replicas run `command` in a shell."""
        container = {"name": "main", "image": "none", "command": ["sh", "-c", command]}
        task = {
            "type": "none",
            "name": "serial",
            "replicas": replicas,
            "template": {"spec": {"containers": [container]}},
        }
        return self.api.create(self.path, {
            "apiVersion": di_job_resource.API_VERSION, "kind": "DIJob", "metadata": {"name": "mine"},
            "spec": {"tasks": [task], **spec},
        })  # fmt: skip

    @property
    def status(self) -> di_job_resource.DIJobStatus:
        return di_job_status(self.api.get(f"{self.path}/mine"))

    def condition(self, kind: str) -> Manifest:
        found = self.api.get(f"{self.path}/mine")["status"]["conditions"]
        return {one["type"]: one for one in found}[kind]

    def phases(self) -> list[str]:
        """Those that the job was in, in the order in which it came to each first."""
        return [one["type"] for one in self.api.get(f"{self.path}/mine")["status"]["conditions"]]

    def ends(self, phase: DIJobPhase) -> None:
        until(lambda: self.status.phase is phase, phase.value, LONG_S, diagnostic=self.said)

    def set_replicas(self, count: int) -> None:
        self.api.patch(f"{self.path}/mine/status", {"status": {"replicas": count}})

    def pods(self) -> dict[str, Manifest]:
        """Those that run, by rank."""
        found = self.api.get(node_pods.pods_path(self.namespace))["items"]
        return {
            pod["metadata"]["annotations"]["diengine/rank"]: pod for pod in found
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        }  # fmt: skip

    def ranks(self, *wanted: int) -> dict[str, Manifest]:
        """Wait until exactly these run."""
        until(
            lambda: sorted(self.pods()) == [str(one) for one in wanted], f"ranks {wanted}", LONG_S, diagnostic=self.said
        )
        return self.pods()

    def said(self) -> str:
        return self.plane.kubectl("-n", self.namespace, "get", "dijobs,pods", "-o", "wide").stdout + json.dumps(
            self.api.get(f"{self.path}/mine").get("status"), indent=1
        )

    def close(self) -> None:
        self.plane.kubectl("-n", self.namespace, "delete", "dijobs", "--all")
        until(lambda: not self.api.get(node_pods.pods_path(self.namespace))["items"], "the Pods to go", LONG_S)
        for one in self.controllers:
            one.check()
            one.stop()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def until_file(folder: Path) -> str:
    """A command that ends well when a file `done` is there."""
    return f"until [ -e {folder}/done ]; do sleep 0.1; done"


@pytest.mark.requirement(
    "DI-4", "DI-63", "DI-67", "DI-28", "DI-29", "DI-30", "DI-31", "DI-32", "DI-46", "DI-50", "DI-68"
)
def test_a_job_comes_to_its_end(cluster: Cluster, tmp_path: Path) -> None:
    cluster.controller()
    cluster.create(until_file(tmp_path), 3)
    cluster.ends(DIJobPhase.RUNNING)
    assert (cluster.status.replicas, cluster.status.ready_replicas) == (3, 3)
    assert sorted(cluster.pods()) == ["0", "1", "2"]
    (tmp_path / "done").touch()
    cluster.ends(DIJobPhase.SUCCEEDED)
    assert cluster.phases() == ["Pending", "Starting", "Running", "Succeeded"]
    assert (cluster.status.restarts, cluster.status.reschedules) == (0, 0)
    assert "completionTimestamp" in cluster.api.get(f"{cluster.path}/mine")["status"]


@pytest.mark.requirement("DI-33", "DI-79")
def test_a_replica_that_fails_is_restarted(cluster: Cluster, tmp_path: Path) -> None:
    cluster.controller()
    cluster.create(f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 1; }}; {until_file(tmp_path)}")
    until(lambda: cluster.status.restarts == 1, "the restart", LONG_S, diagnostic=cluster.said)
    cluster.ends(DIJobPhase.RUNNING)
    assert cluster.condition("Restarting")["message"] == "1 of 1 replicas failed; restart 1"
    (tmp_path / "done").touch()
    cluster.ends(DIJobPhase.SUCCEEDED)
    assert cluster.status.restarts == 1


@pytest.mark.requirement("DI-34")
def test_a_job_that_fails_too_often_has_failed(cluster: Cluster) -> None:
    cluster.controller()
    cluster.create("exit 3", 2, backoffLimit=1)
    cluster.ends(DIJobPhase.FAILED)
    assert cluster.status.restarts == 1
    assert cluster.condition("Failed")["reason"] == "BackoffLimitExceeded"


@pytest.mark.requirement("DI-35", "DI-36")
def test_a_pod_that_is_deleted_comes_back_with_its_rank(cluster: Cluster, tmp_path: Path) -> None:
    cluster.controller()
    cluster.create(until_file(tmp_path), 3)
    cluster.ends(DIJobPhase.RUNNING)
    before = cluster.pods()
    cluster.api.delete(f"{node_pods.pods_path(cluster.namespace)}/{before['1']['metadata']['name']}", grace_s=1)
    until(lambda: cluster.status.reschedules == 1, "the rescheduling", LONG_S, diagnostic=cluster.said)
    cluster.ends(DIJobPhase.RUNNING)
    after = cluster.ranks(0, 1, 2)
    same = {rank for rank in after if after[rank]["metadata"]["uid"] == before[rank]["metadata"]["uid"]}
    assert same == {"0", "2"}, "the others go on"
    assert cluster.status.restarts == 0


@pytest.mark.requirement("DI-1", "DI-47", "DI-64")
def test_a_user_changes_the_number_of_replicas(cluster: Cluster, tmp_path: Path) -> None:
    """Ranks have no gap, whatever the number was before. Others join without a restart of those that run."""
    cluster.controller()
    cluster.create(until_file(tmp_path), 2)
    first = cluster.ranks(0, 1)
    cluster.set_replicas(4)
    more = cluster.ranks(0, 1, 2, 3)
    assert all(more[rank]["metadata"]["uid"] == first[rank]["metadata"]["uid"] for rank in first)
    assert cluster.status.restarts == 0
    cluster.ends(DIJobPhase.RUNNING)
    cluster.set_replicas(1)
    last = cluster.ranks(0)
    assert last["0"]["metadata"]["uid"] == first["0"]["metadata"]["uid"]
    cluster.ends(DIJobPhase.RUNNING)
    assert cluster.status.replicas == 1


def test_a_status_that_was_decided_from_an_older_job_is_not_written(cluster: Cluster, tmp_path: Path) -> None:
    controller = cluster.controller()
    cluster.create(until_file(tmp_path), 2)
    cluster.ranks(0, 1)
    before = cluster.api.get(f"{cluster.path}/mine")
    cluster.set_replicas(3)
    controller._write(before, di_job_status(before), "Late", "", [])
    assert cluster.status.replicas == 3
    cluster.ranks(0, 1, 2)


@pytest.mark.requirement("DI-65", "DI-66", "DI-69")
def test_replicas_of_a_preemptible_job_run_where_they_are_allocated(cluster: Cluster, tmp_path: Path) -> None:
    cluster.controller(FitPolicy(Placement.SPREAD))
    cluster.create(until_file(tmp_path), 4, preemptible=True)
    pods = cluster.ranks(0, 1, 2, 3)
    allocation = cluster.status.allocation
    assert Counter(allocation) == {"n1": 2, "n2": 2}
    assert [pods[str(rank)]["spec"]["nodeName"] for rank in range(4)] == list(allocation)
    assert [pods[str(rank)]["metadata"]["annotations"]["diengine/node"] for rank in range(4)] == list(allocation)
    (tmp_path / "done").touch()
    cluster.ends(DIJobPhase.SUCCEEDED)


@pytest.mark.requirement("DI-37", "DI-72", "DI-74", "DI-75", "DI-76")
def test_preemptible_jobs_are_rescheduled_in_each_period(cluster: Cluster, tmp_path: Path) -> None:
    cluster.controller(period_s=0.5)
    cluster.create(until_file(tmp_path), 2, preemptible=True)
    first = cluster.ranks(0, 1)
    cluster.set_replicas(3)
    after = cluster.ranks(0, 1, 2)
    assert len(cluster.status.allocation) == 3
    assert all(after[rank]["metadata"]["uid"] == first[rank]["metadata"]["uid"] for rank in first), "they go on"
    cluster.ends(DIJobPhase.RUNNING)


@pytest.mark.requirement("DI-73")
def test_other_jobs_are_not_rescheduled(cluster: Cluster, tmp_path: Path) -> None:
    cluster.controller(period_s=0.2)
    cluster.create(until_file(tmp_path), 2)
    before = cluster.ranks(0, 1)
    cluster.ends(DIJobPhase.RUNNING)
    (tmp_path / "done").touch()
    cluster.ends(DIJobPhase.SUCCEEDED)
    assert len(before) == 2
    assert cluster.status.allocation == ()
    assert cluster.status.reschedules == 0


@pytest.mark.parametrize("answer", [broken, lambda: ("n9",)])
def test_with_a_policy_that_fails_a_job_waits_and_says_so(
    cluster: Cluster, answer: Callable[[], NodeList], tmp_path: Path
) -> None:
    first = cluster.controller(ScriptedPolicy(answer), period_s=0.2)
    cluster.create(until_file(tmp_path), preemptible=True)
    until(lambda: cluster.condition("Pending")["reason"] == "NoNodes", "the reason", LONG_S)
    assert cluster.pods() == {}
    first.stop()
    cluster.controller(period_s=0.2)
    cluster.ranks(0)


def test_a_job_larger_than_the_cluster_waits(cluster: Cluster, tmp_path: Path) -> None:
    cluster.controller(period_s=0.2)
    job = cluster.create(until_file(tmp_path), 2, preemptible=True)
    cluster.ranks(0, 1)
    resources = {"requests": {"cpu": "900"}}
    job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["resources"] = resources
    cluster.api.patch(f"{cluster.path}/mine", {"spec": {"tasks": job["spec"]["tasks"]}})
    cluster.set_replicas(9)
    until(lambda: sorted(cluster.status.allocation) == ["n1", "n2"], "what fits", LONG_S, diagnostic=cluster.said)
    assert cluster.status.replicas == 9, "what its user wants stays"


@pytest.mark.requirement("DI-77")
@pytest.mark.parametrize(("policy", "left"), [("All", []), ("None", ["0", "1"]), ("Running", ["0", "1"])])
def test_pods_are_cleaned_up_as_the_job_says(cluster: Cluster, policy: str, left: list[str]) -> None:
    cluster.controller()
    cluster.create("true", 2, cleanPodPolicy=policy)
    cluster.ends(DIJobPhase.SUCCEEDED)

    def ranks() -> list[str]:
        pods = cluster.api.get(node_pods.pods_path(cluster.namespace))["items"]
        return sorted(pod["metadata"]["annotations"]["diengine/rank"] for pod in pods)

    until(lambda: ranks() == left, f"the Pods of ranks {left}", LONG_S)
    assert cluster.api.get(f"{cluster.path}/mine")["status"]["taskStatus"]["serial"]["Succeeded"] in (2, len(left))


def test_a_job_that_makes_no_sense_says_why(cluster: Cluster, tmp_path: Path) -> None:
    cluster.controller()
    template = {"spec": {"containers": [{"name": "main", "image": "none", "command": ["true"]}]}}
    cluster.create("true", tasks=[{"type": "learner", "template": template}] * 2)
    until(lambda: cluster.condition("Pending")["reason"] == "Refused", "the refusal", LONG_S)
    assert "spec.tasks[1]: there is a task learner already" in cluster.condition("Pending")["message"]
    assert cluster.pods() == {}


def test_a_controller_that_starts_later_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.controller()
    cluster.create(until_file(tmp_path), 2)
    before = cluster.ranks(0, 1)
    first.stop()
    cluster.set_replicas(3)
    cluster.controller()
    after = cluster.ranks(0, 1, 2)
    assert all(after[rank]["metadata"]["uid"] == before[rank]["metadata"]["uid"] for rank in before)
    (tmp_path / "done").touch()
    cluster.ends(DIJobPhase.SUCCEEDED)


@pytest.mark.requirement("DI-78")
def test_the_job_of_the_page_runs(cluster: Cluster) -> None:
    """With one command of kubectl. Its image and its command are those of this machine."""
    page = (Path(__file__).resolve().parents[2] / "docs/operate/kubernetes.md").read_text()
    (job,) = [
        yaml.safe_load(one) for one in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S) if "kind: DIJob" in one
    ]
    job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["command"] = ["true"]
    cluster.controller()
    done = cluster.plane.kubectl("-n", cluster.namespace, "apply", "-f", "-", stdin=yaml.safe_dump(job))
    assert done.stdout == "dijob.diengine.opendilab.org/mine created\n"
    cluster.ends(DIJobPhase.SUCCEEDED)
    assert cluster.status.restarts == 0
