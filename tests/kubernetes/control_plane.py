"""A real control plane on loopback, for tests: etcd, kube-apiserver, kube-controller-manager and kube-scheduler.

Only the container runtime is ours: see `process_kubelet`. Made by `make kubernetes`.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import requests

from dlrover_hooks.host.ports import free_port
from dlrover_hooks.kubernetes.api_server import ApiServer
from tests.e2e.etcd_process import EtcdProcess
from tests.kubernetes import build
from tests.kubernetes.process_kubelet import ProcessKubelet
from tests.waiting import until

READY_S = 180.0
ADMIN = "admin-" + uuid.uuid4().hex
CONTROLLERS = "garbagecollector,namespace,podgc,serviceaccount,disruption"


class ControlPlane:
    """Its processes. `kubeconfig`: of its administrator; `api`: with it; `kubelet`: of two nodes."""

    def __init__(self, folder: Path) -> None:
        if not build.built():
            raise AssertionError(f"no Kubernetes in {build.cache()}: run `make kubernetes` first")
        self._folder, self._programs = folder, dict[str, subprocess.Popen[bytes]]()
        self._closers: list[Callable[[], object]] = []
        self._etcd = EtcdProcess(folder)
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _start_all(self) -> None:
        folder = self._folder
        self._port = free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.kubeconfig = str(folder / "kubeconfig")
        key = str(folder / "accounts.key")
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (folder / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
        self.start_api_server()
        self._write_kubeconfig("kubeconfig", ADMIN)
        common = ["--kubeconfig", self.kubeconfig, "--leader-elect=false", "--port=0", "--secure-port=0"]
        self._start("kube-controller-manager", *common, f"--controllers={CONTROLLERS}",
                    "--service-account-private-key-file", key)  # fmt: skip
        self._start("kube-scheduler", *common)
        self.api = ApiServer(kubeconfig=self.kubeconfig)
        self._closers.append(self.api.close)
        self.kubelet = ProcessKubelet(self.api, ("n1", "n2"), self.account_kubeconfig)
        self._closers.append(self.kubelet.close)

    def start_api_server(self) -> None:
        """Start it, again after `kill`; returns when it is ready."""
        folder = self._folder
        self._start(
            "kube-apiserver", "--etcd-servers", f"http://{self._etcd.members}", "--etcd-prefix", "/" + folder.name,
            "--bind-address=127.0.0.1", f"--secure-port={self._port}", "--insecure-port=0",
            "--cert-dir", str(folder / "certificates"), "--token-auth-file", str(folder / "tokens.csv"),
            "--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none", "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file", str(folder / "accounts.key"),
            "--service-account-signing-key-file", str(folder / "accounts.key"),
            "--service-cluster-ip-range=127.64.0.0/16",  # loopback: a Service is reached without kube-proxy
        )  # fmt: skip
        until(self._ready, "the API server", READY_S, diagnostic=self.logs)

    def kill(self, program: str) -> None:
        """SIGKILL, reaped."""
        self._programs[program].kill()
        self._programs[program].wait(60)

    def compact(self) -> None:
        """Have etcd forget all versions of objects but the newest: a watch that begins at an older one gets 410."""
        url = f"http://{self._etcd.members}/v3/kv"
        revision = requests.post(f"{url}/range", json={"key": "AA=="}, timeout=60).json()["header"]["revision"]
        requests.post(f"{url}/compaction", json={"revision": revision}, timeout=60).raise_for_status()

    def namespace(self) -> str:
        """A new one."""
        name = "test-" + uuid.uuid4().hex[:10]
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    def account(self, namespace: str, name: str) -> ApiServer:
        """The cluster as a new service account sees it, which may nothing that no role allows."""
        self.api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
        return ApiServer(kubeconfig=self.account_kubeconfig(namespace, name))

    def account_kubeconfig(self, namespace: str, name: str) -> str:
        """Of a service account that there is. Raises KubernetesFailed."""
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", request)
        return self._write_kubeconfig(f"kubeconfig-{namespace}-{name}", token["status"]["token"])

    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the real kubectl."""
        command = [str(build.cache() / "kubectl"), "--kubeconfig", self.kubeconfig, *arguments]
        env = os.environ | {"HOME": str(self._folder)}
        return subprocess.run(command, input=stdin, capture_output=True, text=True, env=env, timeout=120)

    def logs(self) -> str:
        """The last lines of all programs."""
        parts = [f"== {name}\n{self._log(name).read_text()[-3000:]}" for name in self._programs]
        return "\n".join(parts)

    def close(self) -> None:
        """End all processes, those of Pods too."""
        for end in reversed(self._closers):
            end()
        for process in self._programs.values():
            process.kill()
        for process in self._programs.values():
            process.wait(60)
        self._etcd.close()

    def _start(self, name: str, *flags: str) -> None:
        with self._log(name).open("ab") as log:
            self._programs[name] = subprocess.Popen(
                [str(build.cache() / name), *flags], stdout=log, stderr=log, start_new_session=True
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _ready(self) -> bool:
        assert self._programs["kube-apiserver"].poll() is None, self.logs()
        try:
            answer = requests.get(
                f"{self.url}/readyz", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=5,
                verify=str(self._folder / "certificates/apiserver.crt"),
            )  # fmt: skip
        except (requests.RequestException, OSError):
            return False
        return answer.status_code == 200

    def _write_kubeconfig(self, name: str, token: str) -> str:
        ca = base64.b64encode((self._folder / "certificates/apiserver.crt").read_bytes()).decode()
        found = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority-data": ca}}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
        }  # fmt: skip
        (self._folder / name).write_text(json.dumps(found))
        return str(self._folder / name)


class _Shared:
    """One for all tests of this process."""

    folder: tempfile.TemporaryDirectory[str] | None = None
    plane: ControlPlane | None = None
    failure = ""
    """Why it did not start: it is not tried again for each test."""


def control_plane() -> ControlPlane:
    """Started with the first call; `close` ends it."""
    if _Shared.plane is None:
        _Shared.folder = _Shared.folder or tempfile.TemporaryDirectory(prefix="dlrover-hooks-kubernetes-")
        assert not _Shared.failure, _Shared.failure
        try:
            _Shared.plane = ControlPlane(Path(_Shared.folder.name))
        except BaseException as error:
            _Shared.failure = f"the control plane did not start: {error}"
            raise
    return _Shared.plane


def close() -> None:
    """End the shared one, if there is one."""
    if _Shared.plane is not None:
        _Shared.plane.close()
        _Shared.plane = None
    if _Shared.folder is not None:
        _Shared.folder.cleanup()
        _Shared.folder = None
