"""The di-server on a real control plane: its own process, over HTTP, as DI-engine's jobs use it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from dlrover_hooks.master.operator import manifests
from tests.kubernetes.test_di_controller import Cluster, until_file
from tests.waiting import until

pytestmark = pytest.mark.kubernetes
MODULE = "dlrover_hooks.master.di_orchestrator"


class Served:
    """A cluster with a di-server, and a controller if the test starts one."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        plane, namespace = self.cluster.plane, self.cluster.namespace
        for one in manifests.di_server_objects(namespace, "none"):
            applied = plane.kubectl("apply", "-f", "-", stdin=json.dumps(one))
            assert applied.returncode == 0, applied.stderr
        account = plane.account_kubeconfig(namespace, manifests.DI_SERVER)
        command = [sys.executable, "-m", MODULE, "serve", "--port", "0", "--kubeconfig", account]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        self.url = self._process.stderr.readline().split()[2]

    @property
    def job_id(self) -> str:
        meta = self.cluster.api.get(f"{self.cluster.path}/mine")["metadata"]
        return f"{meta['namespace']}.mine.{meta['generation']}"

    def ask(self, method: str, what: str, body: Any = None, job: str = "", **headers: str) -> requests.Response:
        url = f"{self.url}/v2alpha1/{job or self.job_id}/{what}"
        return requests.request(
            method, url, json=body, headers={name.replace("_", "-"): v for name, v in headers.items()}, timeout=60
        )

    def close(self) -> None:
        self.cluster.close()
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stderr is not None
        self._process.stderr.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


@pytest.mark.requirement("DI-2", "DI-51", "DI-52", "DI-53", "DI-54", "DI-57", "DI-58", "DI-60", "DI-80")
def test_a_job_asks_for_replicas_and_finds_them(served: Served, tmp_path: Path) -> None:
    served.cluster.controller(period_s=0.2)
    served.cluster.create(until_file(tmp_path), 1, preemptible=True)
    served.cluster.ranks(0)
    assert served.ask("POST", "replicas", {"replicas": 2}).status_code == 200
    assert served.cluster.status.replicas == 3
    served.cluster.ranks(0, 1, 2)
    found = served.ask("GET", "replicas").json()
    assert found == {"success": True, "code": 0, "message": "", "data": ["127.0.0.1:22270"] * 3}
    assert served.ask("DELETE", "replicas", {"replicas": 1}).status_code == 200
    served.cluster.ranks(0, 1)
    until(lambda: len(served.ask("GET", "replicas").json()["data"]) == 2, "two addresses")
    served.cluster.set_replicas(1)  # by a client of Kubernetes
    served.cluster.ranks(0)


@pytest.mark.requirement("DI-55", "DI-61", "DI-62", "DI-70", "DI-71")
def test_profilings_are_kept_in_the_status(served: Served, tmp_path: Path) -> None:
    served.cluster.controller()
    served.cluster.create(until_file(tmp_path), 1, preemptible=True)
    served.cluster.ranks(0)
    assert served.ask("POST", "profilings", {"data": {"speeds": {"1": 10.5}, "own": [1, 2]}}).status_code == 200
    assert served.ask("POST", "profilings", {"data": {"speeds": {"2": 19}}}).status_code == 200
    assert served.cluster.status.profilings == {"speeds": {"1": 10.5, "2": 19}, "own": [1, 2]}


def test_both_forms_of_a_path_are_answered(served: Served) -> None:
    served.cluster.create("true", 1, preemptible=True)
    for place in ("", "job/"):
        answer = requests.get(f"{served.url}/v2alpha1/{place}{served.job_id}/replicas", timeout=60)
        assert (answer.status_code, answer.json()["data"]) == (200, [])
    assert requests.get(f"{served.url}/healthz", timeout=60).status_code == 200


@pytest.mark.requirement("DI-59")
def test_jobs_that_are_not_preemptible_are_left_alone(served: Served) -> None:
    served.cluster.create("true", 2)
    for method in ("POST", "DELETE"):
        answer = served.ask(method, "replicas", {"replicas": 1})
        assert answer.status_code == 400
        assert "is not preemptible" in answer.json()["message"]
    assert served.cluster.status.replicas == 0


def test_what_is_wrong_is_said(served: Served) -> None:
    served.cluster.create("true", 1, preemptible=True)
    for body in ({"replicas": 0}, {"replicas": -1}, {"replicas": "two"}, {}, []):
        assert served.ask("POST", "replicas", body).status_code == 400, body
    for job, status in (("nonsense", 400), ("default.none.1", 404), (served.job_id + "7", 409)):
        answer = served.ask("GET", "replicas", job=job)
        assert (answer.status_code, answer.json()["success"], answer.json()["code"]) == (status, False, 1)
    too_few = served.ask("DELETE", "replicas", {"replicas": 1})
    assert too_few.status_code == 400
    assert "0 replicas are too few" in too_few.json()["message"]
    assert served.ask("POST", "profilings", {"data": {"speeds": {"2": "fast"}}}).status_code == 400
    assert served.ask("PUT", "replicas", {"replicas": 1}).status_code == 405


def test_a_version_that_is_not_the_newest_is_a_conflict(served: Served) -> None:
    served.cluster.create("true", 1, preemptible=True)
    version = served.ask("GET", "replicas").headers["ETag"]
    assert served.ask("POST", "replicas", {"replicas": 1}, If_Match=version).status_code == 200
    answer = served.ask("POST", "replicas", {"replicas": 1}, If_Match=version)
    assert answer.status_code == 409
    assert "has changed" in answer.json()["message"]
    assert served.cluster.status.replicas == 2


def test_of_many_clients_none_is_lost(served: Served) -> None:
    """Twenty at a time: what was answered with 200 counts once, and everything else is a conflict."""
    served.cluster.create("true", 1, preemptible=True)
    with ThreadPoolExecutor(20) as clients:
        asked = [clients.submit(served.ask, "POST", "replicas", {"replicas": 1}) for _ in range(60)]
        answers = Counter(one.result().status_code for one in asked)
    assert set(answers) <= {200, 409}
    assert served.cluster.status.replicas == 1 + answers[200]


@pytest.mark.requirement("DI-49")
def test_a_user_sets_the_replicas_by_a_command(served: Served, tmp_path: Path) -> None:
    """Of a job that is not preemptible, too."""
    cluster = served.cluster
    cluster.controller()
    cluster.create(until_file(tmp_path), 1)
    cluster.ranks(0)

    def update(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", MODULE, "update-replicas", "--kubeconfig", cluster.plane.kubeconfig, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = update("--ns", cluster.namespace, "--n", "mine", "--r", "3")
    assert (done.returncode, done.stdout) == (0, f"dijob {cluster.namespace}/mine: 3 replicas\n")
    cluster.ranks(0, 1, 2)
    refused = update("--ns", cluster.namespace, "--n", "none", "--r", "3")
    assert refused.returncode == 1
    assert "There is no DIJob" in refused.stderr
