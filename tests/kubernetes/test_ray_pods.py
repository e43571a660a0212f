"""A job on a Ray cluster whose nodes are Pods of a real control plane: what KubeRay would create for a RayJob."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dlrover_hooks.host.ports import free_port
from tests.integrations import ray_deployed
from tests.integrations.ray_nodes import REPOSITORY
from tests.kubernetes.job_cluster import LONG_S, Cluster
from tests.waiting import until

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(400)]

QUIET = "--disable-usage-stats --num-cpus=2"


class RayPods:
    """Pods that have the token of the cluster from a Secret. All are processes of this machine: Ray's files are in
    `folder`."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.port = cluster, free_port()
        self._env: list[dict[str, Any]] = [
            {"name": name, "value": value}
            for name, value in {
                "RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(folder), "RAY_ADDRESS": f"127.0.0.1:{self.port}",
                "PYTHONPATH": str(REPOSITORY), "RAY_worker_niceness": "0",
            }.items()
        ]  # fmt: skip
        self._env.append({"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": {"name": "ray", "key": "token"}}})
        cluster.apply({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "ray"},
            "stringData": {"token": secrets.token_hex(32)},
        })  # fmt: skip

    head_is_up = "until ray health-check; do sleep 0.2; done"
    """KubeRay's init container waits so."""

    def start(self, name: str, command: str) -> None:
        container = {"name": "main", "image": "none", "command": ["sh", "-c", command], "env": self._env}
        self.cluster.apply({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"restartPolicy": "Never", "containers": [container]},
        })  # fmt: skip

    def reaches(self, name: str, phase: str) -> None:
        def reached() -> bool:
            found = self.cluster.get("pod", name)["status"].get("phase")
            assert found == phase or found not in ("Failed", "Succeeded"), self.cluster.said()
            return found == phase

        until(reached, f"Pod {name} is {phase}", LONG_S, diagnostic=self.cluster.said, every_s=0.2)


@pytest.mark.requirement("DL-14")
def test_a_job_runs_on_a_ray_cluster_of_pods(bare_cluster: Cluster) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray has sockets in it, whose paths may not be long
    try:
        pods = RayPods(bare_cluster, folder)
        pods.start("head", f"ray start --head --block --port={pods.port} --include-dashboard=false {QUIET}")
        pods.start("worker", f"{pods.head_is_up}; exec ray start --block --address=$RAY_ADDRESS {QUIET}")
        pods.start("script", f"{pods.head_is_up}; exec python -m {ray_deployed.MODULE}")
        pods.reaches("script", "Succeeded")
        for node in ("head", "worker"):
            pods.reaches(node, "Running")
        bare_cluster.kubectl("delete", "pods", "--all")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
