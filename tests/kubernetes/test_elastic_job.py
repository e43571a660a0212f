"""An `ElasticJob` from its YAML to its end, on process-backed Pods of a real control plane, with the real kubectl."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
import yaml

from dlrover_hooks.kubernetes import custom_resources
from dlrover_hooks.kubernetes.elastic_job_spec import CERTIFICATE, job_spec
from dlrover_hooks.master.operator import manifests
from dlrover_hooks.master.operator.job_objects import ACCOUNT
from dlrover_hooks.protocol import ShowVitals
from tests.e2e.etcd_process import EtcdProcess
from tests.e2e.test_tls import certificate
from tests.kubernetes.job_cluster import LONG_S, Cluster, waiting
from tests.kubernetes.trained_script import TrainedScript
from tests.waiting import until

pytestmark = pytest.mark.kubernetes
ROOT = Path(__file__).resolve().parents[2]


def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of one worker without a cluster."""
    folder.mkdir()
    script = TrainedScript(folder)
    script.hurry()
    env = os.environ | {"DLROVER_HOOKS_NODE": "alone", "DLROVER_HOOKS_JOB": f"alone-{folder.parent.name}"}
    command = [sys.executable, "-m", "dlrover_hooks", *script.command[1:]]
    subprocess.run(command, env=env, check=True, timeout=LONG_S, cwd=folder)
    return torch.load(script.weights, weights_only=True)


def trains(cluster: Cluster, script: TrainedScript, world: int, without: str = "") -> None:
    """Wait until a step is made by so many workers, all of which are other nodes than `without`."""
    seen = len(script.rows())
    until(lambda: script.stepped(world, without, seen), f"a world of {world}", LONG_S, diagnostic=cluster.said)


@pytest.mark.requirement("DL-7", "DL-41", "DL-42", "DL-44", "DL-45", "DL-54", "DL-83")
def test_a_job_is_scaled_and_loses_pods_and_its_master_and_no_sample(cluster: Cluster, tmp_path: Path) -> None:
    """1 -> 3 -> 2 by kubectl; a Pod is deleted, a node is drained, the master is killed, all while it trains."""
    script = TrainedScript(tmp_path)
    journal = {"name": "DLROVER_HOOKS_RUN_JOURNAL", "value": str(tmp_path / "master.db")}
    master = {"template": {"spec": {"containers": [{"env": [journal]}]}}}
    cluster.job(script.command, str(tmp_path / "saved"), master, replicas=1)

    trains(cluster, script, 1)
    cluster.kubectl("scale", "elasticjob/mine", "--replicas=3")
    trains(cluster, script, 3)
    cluster.kubectl("delete", "pod", "mine-worker-1", "--wait=false")
    trains(cluster, script, 3, without="worker-1")
    cluster.lose_the_master()
    trains(cluster, script, 3)
    try:
        cluster.kubectl("drain", "n1", "--force", "--pod-selector=elasticjob-name=mine")
        trains(cluster, script, 3)
    finally:
        cluster.kubectl("uncordon", "n1")
    cluster.kubectl("scale", "elasticjob/mine", "--replicas=2")
    trains(cluster, script, 2)
    script.hurry()
    cluster.ends("Succeeded")
    script.check_samples()
    weights, expected = torch.load(script.weights, weights_only=True), undisturbed(tmp_path / "alone")
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


SHARDS = """
import os, sys, threading
import torch
from torch.utils.data import DataLoader, Dataset
from dlrover_hooks import ShardDataset, elastic_loader

class Numbers(Dataset):
    def __len__(self):
        return 1200
    def __getitem__(self, index):
        return index

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = elastic_loader(DataLoader(ShardDataset(Numbers(), shard_size=20), batch_size=10), optimizer=optimizer)
with open(f"{sys.argv[1]}/{os.environ['DLROVER_HOOKS_NODE']}.seen", "a") as seen:
    for numbers in loader:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(*numbers.tolist(), file=seen, flush=True)
        if not os.path.exists(f"{sys.argv[1]}/hurry"):
            threading.Event().wait(0.3)
"""


@pytest.mark.requirement("DL-46", "DL-60")
def test_a_master_hands_out_shards_and_knows_what_its_pods_use(cluster: Cluster, tmp_path: Path) -> None:
    """It writes the plan, collects what the Pods use, and leases the data to their workers."""
    (tmp_path / "train.py").write_text(SHARDS)
    cluster.job(["dlrover-hooks", "run", "--standby", "0", str(tmp_path / "train.py"), str(tmp_path)], replicas=2)

    def seen(node: str) -> list[int]:
        path = tmp_path / f"{node}.seen"
        return [int(one) for one in path.read_text().split()] if path.exists() else []

    until(lambda: seen("worker-0") and seen("worker-1"), "both workers", LONG_S, diagnostic=cluster.said)
    client = cluster.master()
    try:
        until(lambda: {one.node for one in client.call(ShowVitals("mine")).nodes} == {"worker-0", "worker-1"},
              "reports of both", LONG_S, diagnostic=cluster.said)  # fmt: skip
    finally:
        client.close()
    (plan,) = cluster.get("scaleplans")["items"]
    assert [one["name"] for one in plan["spec"]["createPods"]] == ["worker-0", "worker-1"]
    (tmp_path / "hurry").touch()
    cluster.ends("Succeeded")
    assert sorted(seen("worker-0") + seen("worker-1")) == list(range(1200))


def test_a_worker_that_finds_no_machine_holds_no_other_one_up(cluster: Cluster, tmp_path: Path) -> None:
    """There is room for two. Under DLRover a pending Pod has blocked the others for 5,400 s (its issue 1175)."""
    script = TrainedScript(tmp_path)
    cluster.job(script.command, str(tmp_path / "saved"), replicas=2, resource={"cpu": "600"})
    trains(cluster, script, 2)
    cluster.kubectl("scale", "elasticjob/mine", "--replicas=3")
    until(lambda: [one["status"]["phase"] for one in cluster.get("pods", "-l", "replica-type=worker")["items"]
                   if one["metadata"]["name"] == "mine-worker-2"] == ["Pending"],
          "the Pod without a machine", LONG_S, diagnostic=cluster.said)  # fmt: skip
    trains(cluster, script, 2)
    script.hurry()
    cluster.ends("Succeeded")
    script.check_samples()


def test_workers_leave_a_node_that_is_cordoned_before_their_pods_are_ended(
    bare_cluster: Cluster, tmp_path: Path
) -> None:
    """The operator tells the master, the master the workers: they leave at one step, before their Pod is deleted."""
    cluster, script = bare_cluster, TrainedScript(tmp_path)
    cluster.start_operator(nodes=True)
    cluster.job(script.command, str(tmp_path / "saved"), replicas=2)
    trains(cluster, script, 2)
    (gone,) = [one["metadata"]["name"] for one in cluster.get("pods", "-l", "replica-type=worker")["items"]
               if one["spec"]["nodeName"] == "n1"]  # fmt: skip
    try:
        cluster.kubectl("cordon", "n1")
        trains(cluster, script, 2, without=gone.removeprefix("mine-"))
        (container,) = cluster.get("pod", gone)["status"]["containerStatuses"]
        assert container["state"]["terminated"]["exitCode"] == 75, "it ended by itself"
    finally:
        cluster.kubectl("uncordon", "n1")
    script.hurry()
    cluster.ends("Succeeded")
    script.check_samples()


def live_workers(cluster: Cluster) -> list[str]:
    pods = [
        pod for pod in cluster.get("pods", "-l", "replica-type=worker")["items"] if pod["status"]["phase"] == "Running"
    ]
    return sorted(pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"])


def workers(cluster: Cluster, *names: str) -> None:
    wanted = [f"mine-{name}" for name in names]
    until(lambda: live_workers(cluster) == wanted, f"{wanted}", LONG_S, diagnostic=cluster.said)


def test_a_failed_job_says_why_and_its_logs_stay(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "fail").touch()
    cluster.job(waiting(tmp_path), replicas=1)
    cluster.ends("Failed")
    assert "worker-0 ended with exit code 1" in cluster.condition("Failed")["message"]
    assert "ValueError: no such column" in cluster.plane.kubelet.output(cluster.namespace)
    assert cluster.get("pod", "mine-worker-0")["status"]["phase"] == "Failed"
    assert "no such column" not in cluster.kubectl("get", "pods")


def test_a_job_that_is_suspended_gives_all_pods_back_and_goes_on_later(cluster: Cluster, tmp_path: Path) -> None:
    cluster.job(waiting(tmp_path), replicas=2)
    workers(cluster, "worker-0", "worker-1")
    cluster.kubectl("patch", "elasticjob", "mine", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    until(lambda: not cluster.get("pods")["items"], "the Pods to go", LONG_S, diagnostic=cluster.said)
    cluster.ends("Suspended")
    assert cluster.get("scaleplans")["items"] == []
    cluster.kubectl("patch", "elasticjob", "mine", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    cluster.ends("Running")
    (tmp_path / "done").touch()
    cluster.ends("Succeeded")


@pytest.mark.requirement("DL-51")
def test_a_scale_plan_of_a_user_becomes_a_part_of_its_job(cluster: Cluster, tmp_path: Path) -> None:
    cluster.job(waiting(tmp_path), replicas=1)
    workers(cluster, "worker-0")
    resource = {"cpu": "0.5", "memory": "256Mi"}
    plan = {
        "apiVersion": custom_resources.API_VERSION, "kind": "ScalePlan", "metadata": {"name": "more"},
        "spec": {"ownerJob": "mine", "manualScaling": True,
                 "replicaResourceSpecs": {"worker": {"replicas": 3, "resource": resource}}},
    }  # fmt: skip
    cluster.apply(plan)
    workers(cluster, "worker-0", "worker-1", "worker-2")
    assert cluster.get("scaleplan", "more")["status"]["phase"] == "Succeeded"
    assert cluster.get("elasticjob", "mine")["spec"]["replicaSpecs"]["worker"]["replicas"] == 3
    (container,) = cluster.get("pod", "mine-worker-2")["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "500m", "memory": "256Mi"}
    plan["spec"]["replicaResourceSpecs"] = {"ps": {"replicas": 1}}
    cluster.apply(plan)
    until(lambda: cluster.get("scaleplan", "more")["status"]["phase"] == "Failed", "its refusal")
    assert (
        "spec.replicaResourceSpecs.ps: the job has no such nodes"
        in cluster.get("scaleplan", "more")["status"]["message"]
    )
    workers(cluster, "worker-0", "worker-1", "worker-2")


def test_a_spec_that_cannot_be_carried_out_is_said_and_what_runs_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    cluster.job(waiting(tmp_path), replicas=9, maxReplicas=2)
    until(lambda: cluster.phase == "Pending", "a status")
    refused = cluster.condition("Valid")
    assert (refused["status"], refused["reason"]) == ("False", "Refused")
    assert "spec.replicaSpecs.worker.replicas is 9, but 1 to 2 workers are allowed" in refused["message"]
    assert cluster.get("pods")["items"] == []
    cluster.kubectl("scale", "elasticjob/mine", "--replicas=2")
    workers(cluster, "worker-0", "worker-1")
    cluster.kubectl("scale", "elasticjob/mine", "--replicas=3")
    until(lambda: cluster.condition("Valid")["status"] == "False", "the refusal")
    cluster.kubectl("delete", "pod", "mine-worker-1", "--now", "--wait=false")
    workers(cluster, "worker-0", "worker-2")
    assert cluster.phase == "Running"


def test_a_master_that_the_cluster_refuses_is_said_in_the_status(cluster: Cluster, tmp_path: Path) -> None:
    limits = {"limits": [{"type": "Container", "max": {"memory": "10Mi"}}]}
    cluster.apply({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "small"}, "spec": limits})
    cluster.job(waiting(tmp_path), replicas=1)
    until(lambda: cluster.condition("Pending")["reason"] == "MasterRefused", "the refusal", diagnostic=cluster.said)
    assert 'Pod "mine-master" is invalid' in cluster.condition("Pending")["message"]
    cluster.kubectl("delete", "limitrange", "small")
    cluster.kubectl("label", "elasticjob", "mine", "look=again")
    workers(cluster, "worker-0")
    (tmp_path / "done").touch()
    cluster.ends("Succeeded")


def test_a_job_of_a_name_that_was_just_deleted_runs(cluster: Cluster, tmp_path: Path) -> None:
    cluster.job(waiting(tmp_path), replicas=1)
    workers(cluster, "worker-0")
    cluster.kubectl("delete", "elasticjob", "mine", "--wait=false")
    until(lambda: not cluster.get("elasticjobs")["items"], "the job to go")
    cluster.job(waiting(tmp_path), replicas=1)
    (tmp_path / "done").touch()
    cluster.ends("Succeeded")
    assert len(cluster.get("secrets", "-l", "elasticjob-name=mine")["items"]) >= 1, "a token of its own"


def test_after_its_end_a_job_is_cleaned_up_and_deleted_as_it_says(cluster: Cluster, tmp_path: Path) -> None:
    cluster.job(waiting(tmp_path), replicas=1)
    workers(cluster, "worker-0")
    change = {"spec": {"cleanPodPolicy": "All", "ttlSecondsAfterFinished": 3600}}
    cluster.kubectl("patch", "elasticjob", "mine", "--type=merge", "-p", json.dumps(change))
    (tmp_path / "done").touch()
    cluster.ends("Succeeded")
    until(lambda: not cluster.get("pods")["items"], "the Pods to go", LONG_S, diagnostic=cluster.said)
    assert cluster.phase == "Succeeded"
    cluster.kubectl("patch", "elasticjob", "mine", "--type=merge", "-p", '{"spec":{"ttlSecondsAfterFinished":0}}')
    until(lambda: not cluster.get("elasticjobs,scaleplans,services,secrets", "-l", "elasticjob-name=mine")["items"]
          and not cluster.get("elasticjobs")["items"], "the job to go", LONG_S, diagnostic=cluster.said)  # fmt: skip


def test_without_a_journal_a_master_that_is_deleted_loses_no_worker(cluster: Cluster, tmp_path: Path) -> None:
    cluster.job(waiting(tmp_path), replicas=2)
    workers(cluster, "worker-0", "worker-1")
    before = {pod["metadata"]["uid"] for pod in cluster.get("pods", "-l", "replica-type=worker")["items"]}
    first = cluster.get("pod", "mine-master")["metadata"]["uid"]
    cluster.kubectl("delete", "pod", "mine-master")
    cluster.another_master(first)
    cluster.kubectl("scale", "elasticjob/mine", "--replicas=3")
    workers(cluster, "worker-0", "worker-1", "worker-2")
    assert before < {pod["metadata"]["uid"] for pod in cluster.get("pods", "-l", "replica-type=worker")["items"]}
    (tmp_path / "done").touch()
    cluster.ends("Succeeded")


def test_a_master_that_is_lost_finds_its_journal_in_etcd(cluster: Cluster, tmp_path: Path) -> None:
    """It knows the nodes, and that the number that a user has given does not hold any more."""
    etcd = EtcdProcess(tmp_path)
    try:
        env = [{"name": "DLROVER_HOOKS_RUN_JOURNAL", "value": etcd.journal("mine")}]
        cluster.job(waiting(tmp_path), master={"template": {"spec": {"containers": [{"env": env}]}}}, replicas=2)
        workers(cluster, "worker-0", "worker-1")
        cluster.kubectl("scale", "elasticjob/mine", "--replicas=1")
        workers(cluster, "worker-0")
        before = cluster.get("pod", "mine-worker-0")["metadata"]["uid"]
        cluster.lose_the_master()
        cluster.kubectl("scale", "elasticjob/mine", "--replicas=2")
        workers(cluster, "worker-0", "worker-2")  # a master that knew nothing would begin with worker-1
        assert cluster.get("pod", "mine-worker-0")["metadata"]["uid"] == before
        (tmp_path / "done").touch()
        cluster.ends("Succeeded")
    finally:
        etcd.close()


def test_operator_and_master_may_do_what_they_need_and_no_more(cluster: Cluster, tmp_path: Path) -> None:
    """With real RBAC, as kubectl asks it."""

    def may(account: str, verb: str, what: str, namespace: str = cluster.namespace) -> bool:
        resource, _, part = what.partition("/")
        user = f"--as=system:serviceaccount:{cluster.namespace}:{account}"
        asked = ["auth", "can-i", verb, resource, user, "-n", namespace, *([f"--subresource={part}"] if part else [])]
        return cluster.plane.kubectl(*asked).stdout.strip() == "yes"

    operator, master = manifests.NAME, ACCOUNT
    assert may(operator, "create", "pods")
    assert may(operator, "delete", "pods")
    assert may(operator, "create", "secrets")
    for verb, what in (("get", "secrets"), ("list", "secrets"), ("create", "pods/exec"), ("update", "pods"),
                       ("create", "rolebindings"), ("delete", "services"), ("create", "elasticjobs")):  # fmt: skip
        assert not may(operator, verb, what), (verb, what)
    assert not may(operator, "create", "pods", "default")
    assert may(master, "create", "scaleplans.elastic.iml.github.io")
    for verb, what in (("create", "pods"), ("delete", "pods"), ("get", "secrets"), ("patch", "elasticjobs"),
                       ("delete", "scaleplans"), ("create", "events")):  # fmt: skip
        assert not may(master, verb, what), (verb, what)


class OperatorProcess:
    """`python -m dlrover_hooks.master.operator`, one of several."""

    def __init__(self, cluster: Cluster) -> None:
        command = [sys.executable, "-m", "dlrover_hooks.master.operator", "--namespace", cluster.namespace,
                   "--lease", cluster.namespace, "--lease-duration", "3", "--health-port", "0",
                   "--master-port", str(cluster.port), "--kubeconfig", cluster.kubeconfig]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.port = int(self.process.stderr.readline().rpartition(" ")[2])

    def says(self, path: str) -> str:
        return requests.get(f"http://127.0.0.1:{self.port}{path}", timeout=30).text.strip()

    @property
    def leads(self) -> bool:
        return self.says("/readyz") == "leads"

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)
        assert self.process.stderr is not None
        self.process.stderr.close()


def test_of_several_operators_one_works_and_another_takes_over(bare_cluster: Cluster, tmp_path: Path) -> None:
    cluster, operators = bare_cluster, list[OperatorProcess]()
    try:
        operators += [OperatorProcess(cluster) for _ in range(3)]
        cluster.job(waiting(tmp_path), replicas=1)
        workers(cluster, "worker-0")
        (first,) = [one for one in operators if one.leads]
        assert all(one.says("/healthz") == "ok" for one in operators)
        lease = cluster.get("lease", manifests.NAME)["spec"]
        standbys = [one for one in operators if one is not first]
        until(lambda: all(lease["holderIdentity"] in one.says("/readyz") for one in standbys), "standbys that follow")
        first.process.kill()
        cluster.kubectl("scale", "elasticjob/mine", "--replicas=2")
        workers(cluster, "worker-0", "worker-1")
        (second,) = [one for one in standbys if one.leads]
        assert cluster.get("lease", manifests.NAME)["spec"]["leaseTransitions"] == lease["leaseTransitions"] + 1
        second.process.terminate()
        assert second.process.wait(60) == 0
        (third,) = [one for one in standbys if one is not second]
        until(lambda: third.leads, "the third one")
        (tmp_path / "done").touch()
        cluster.ends("Succeeded")
    finally:
        for one in operators:
            one.close()


def test_a_master_serves_tls(cluster: Cluster, tmp_path: Path) -> None:
    """A worker finds it by a name. Here is no DNS, so its template gives the address."""
    cert, key = certificate(tmp_path, "master")
    url = f"https://127.0.0.1:{cluster.port}"
    told = {CERTIFICATE: cert, "DLROVER_HOOKS_MASTER_SSL_KEYFILE": key, "DLROVER_HOOKS_CA_FILE": cert}
    env = [{"name": name, "value": value} for name, value in told.items()]
    cluster.job(waiting(tmp_path), master={"template": {"spec": {"containers": [{"env": env}]}}}, replicas=1,
                env={"DLROVER_HOOKS_MASTER": url, "DLROVER_HOOKS_CA_FILE": cert})  # fmt: skip
    workers(cluster, "worker-0")
    assert requests.get(url + "/healthz", timeout=30, verify=cert).ok
    with pytest.raises(requests.RequestException):
        requests.get(url.replace("https", "http") + "/healthz", timeout=30)
    (tmp_path / "done").touch()
    cluster.ends("Succeeded")


def test_an_operator_that_was_stopped_does_no_harm_when_it_goes_on(bare_cluster: Cluster, tmp_path: Path) -> None:
    """It has led, and does not know that another one does now."""
    cluster, operators = bare_cluster, list[OperatorProcess]()
    try:
        first = OperatorProcess(cluster)
        operators.append(first)
        cluster.job(waiting(tmp_path), replicas=2)
        workers(cluster, "worker-0", "worker-1")
        second = OperatorProcess(cluster)
        operators.append(second)
        os.kill(first.process.pid, signal.SIGSTOP)
        cluster.kubectl("scale", "elasticjob/mine", "--replicas=1")
        workers(cluster, "worker-0")
        assert second.leads
        os.kill(first.process.pid, signal.SIGCONT)
        assert first.process.wait(60) == 70, "start it again: it stands by then"
        cluster.kubectl("scale", "elasticjob/mine", "--replicas=2")
        workers(cluster, "worker-0", "worker-2")
        (tmp_path / "done").touch()
        cluster.ends("Succeeded")
    finally:
        for one in operators:
            one.close()


def test_what_manifest_prints_can_be_applied(bare_cluster: Cluster, tmp_path: Path) -> None:
    """By kubectl, also through the folder for kustomize."""
    cluster, name = bare_cluster, bare_cluster.namespace
    words = ["manifest", "--image", "dlrover-hooks", "--namespace", name, "--only", name]
    command = [sys.executable, "-m", "dlrover_hooks", *words]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    shutil.copytree(ROOT / "docs/operate/kustomize", tmp_path / "folder")
    (tmp_path / "folder/dlrover-hooks.yaml").write_text(printed)
    cluster.kubectl("apply", "-k", str(tmp_path / "folder"))
    deployment = cluster.get("deployment", manifests.NAME)["spec"]
    assert deployment["replicas"] == 2
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/train:1"
    assert container["args"][:2] == ["--lease", name]
    assert cluster.get("serviceaccount", ACCOUNT)["metadata"]["namespace"] == name


def test_the_example_trains(cluster: Cluster, tmp_path: Path) -> None:
    """Its image and its volume are those of this machine; all else is as it stands."""
    folder = ROOT / "examples/kubernetes"
    cluster.kubectl("apply", "--dry-run=server", "-f", str(folder / "job.yaml"))
    job = yaml.safe_load((folder / "job.yaml").read_text())
    pod = job["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
    del pod["volumes"], pod["containers"][0]["volumeMounts"]
    assert pod["containers"][0]["command"].pop() == "/train.py"
    pod["containers"][0]["command"] += [str(folder / "train.py"), "--epochs", "2"]
    (save_to,) = [one for one in pod["containers"][0]["env"] if one["name"] == "DLROVER_HOOKS_SAVE_TO"]
    save_to["value"] = str(tmp_path / "saved")
    cluster.apply(job)
    cluster.ends("Succeeded")
    assert list((tmp_path / "saved").rglob("*.json")), "a checkpoint"


PAGE = (ROOT / "docs/operate/kubernetes.md").read_text()


@pytest.mark.parametrize(
    "block", [one for one in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S) if "DIJob" not in one]
)
def test_the_jobs_of_the_page_can_be_applied(bare_cluster: Cluster, block: str) -> None:
    job = yaml.safe_load(block)
    worker: dict[str, Any] = {"template": {"spec": {"containers": [{"name": "main", "image": "none"}]}}}
    if "optimizeMode" not in job["spec"]:
        worker["replicas"] = 1
    replicas = job["spec"].setdefault("replicaSpecs", {})
    replicas["worker"] = worker | replicas.get("worker", {})
    job = {"apiVersion": custom_resources.API_VERSION, "kind": "ElasticJob", "metadata": {"name": "mine"}} | job
    job_spec(job).check()
    shown = bare_cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(job))
    assert json.loads(shown)["spec"] == job["spec"], "no field is unknown"


@pytest.mark.parametrize("name", ["job.yaml", "dijob.yaml"])
def test_the_page_shows_the_example(name: str) -> None:
    assert (ROOT / "examples/kubernetes" / name).read_text() in PAGE
