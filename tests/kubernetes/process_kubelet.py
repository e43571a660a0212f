"""A kubelet for machines without a container runtime: a Pod is a process group here.

Real: Nodes, Pods that a real scheduler has bound, their environment (values with `$(NAME)`, fields of the Pod, keys of
Secrets), a folder of their own for temporary files, phases and conditions, exit codes, signals and grace periods, the
end of the log as termination message, an end for memory beyond the limit (`OOMKilled`), deletion only after the last
process has gone. The account of a Pod is in a file that KUBECONFIG names, not in a volume. Not here: images (`python`
is this one), volumes, probes, more than one container, init containers, networks (each Pod has 127.0.0.1, and a Service
any other loopback address), cgroups, restarts (`restartPolicy` other than Never). A test of it says "process-backed
Pods".
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.host.prepared_process import Preparation, prepared_command
from dlrover_hooks.kubernetes.api_server import ApiServer, Manifest
from dlrover_hooks.kubernetes.list_watch import ListWatch
from dlrover_hooks.kubernetes.object_cache import ObjectChange

KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables of this process that a Pod has, in place of those of an image."""
CAPACITY = {"cpu": "1000", "memory": "512Gi", "pods": "2000"}
_LOOK_S = 0.1
_AGAIN_S = 0.2
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9, "": 1}


class _Pod:
    """One Pod on a node of this kubelet. `process` is None until it was started."""

    def __init__(self, manifest: Manifest, log: Path) -> None:
        self.name: str = manifest["metadata"]["name"]
        self.namespace: str = manifest["metadata"]["namespace"]
        self.uid: str = manifest["metadata"]["uid"]
        self.manifest, self.log = manifest, log
        self.process: subprocess.Popen[bytes] | None = None
        self.deleted = threading.Event()
        """To end within `grace_s` seconds."""
        self.grace_s = 0.0

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"

    @property
    def container(self) -> Manifest:
        return self.manifest["spec"]["containers"][0]


class ProcessKubelet:
    """That of several nodes. Its threads end with `close`, and with them all processes.

    `kubeconfig`: writes the file of a service account, by namespace and name.
    """

    def __init__(self, api: ApiServer, nodes: Sequence[str], kubeconfig: Callable[[str, str], str]) -> None:
        self._api, self._nodes, self._kubeconfig = api, nodes, kubeconfig
        self._folder = tempfile.TemporaryDirectory(prefix="dlrover-hooks-kubelet-")
        self._pods, self._lock = dict[str, _Pod](), threading.Lock()
        self._ends: dict[int, int] = {}
        self._threads, self._closing = list[threading.Thread](), threading.Event()
        for node in nodes:
            self._register(node)
        self._watch = ListWatch(api, "/api/v1/pods", self._changed)
        self._watch.start(60)

    def alive(self, namespace: str) -> list[str]:
        """Names of the Pods whose process lives."""
        with self._lock:
            pods = [pod for pod in self._pods.values() if pod.namespace == namespace]
        return sorted(pod.name for pod in pods if pod.process is not None and pod.process.returncode is None)

    def pid(self, namespace: str, name: str) -> int:
        """Of the process of a Pod. Raises LookupError."""
        with self._lock:
            found = [pod for pod in self._pods.values() if (pod.namespace, pod.name) == (namespace, name)]
        process = next((pod.process for pod in reversed(found) if pod.process is not None), None)
        if process is None:
            raise LookupError(name)
        return process.pid

    def ended(self, pid: int) -> int:
        """The exit code of a process that has ended; negative: by that signal. Raises LookupError."""
        return self._ends[pid]

    def output(self, namespace: str) -> str:
        """What all Pods of a namespace have printed."""
        with self._lock:
            pods = [pod for pod in self._pods.values() if pod.namespace == namespace]
        return "\n".join(f"== {pod.name}\n{pod.log.read_text()}" for pod in pods if pod.log.exists())

    def close(self) -> None:
        """Kill all processes."""
        self._closing.set()
        self._watch.stop()
        with self._lock:
            pods, threads = list(self._pods.values()), list(self._threads)
        for pod in pods:
            _kill(pod)
            pod.deleted.set()
        for thread in threads:
            thread.join(10)
        self._folder.cleanup()

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def _register(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name}
        self._api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "process kubelet"}
        status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": [ready]}
        self._api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        self._api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})  # "not ready", of an admission plug-in

    # ---- Pods -------------------------------------------------------------------------------------------------------

    def _changed(self, change: ObjectChange) -> None:
        manifest = change.manifest
        if manifest["spec"].get("nodeName") not in self._nodes:
            return
        meta = manifest["metadata"]
        with self._lock:
            pod = self._pods.get(change.uid)
            if pod is None:
                if change.deleted:
                    return
                pod = self._pods[change.uid] = _Pod(manifest, Path(self._folder.name) / f"{change.uid}.log")
                thread = threading.Thread(target=self._live, args=(pod,), name=f"pod-{pod.name}", daemon=True)
                self._threads = [one for one in self._threads if one.is_alive()] + [thread]
                thread.start()
        if change.deleted:
            _kill(pod)
            pod.deleted.set()
        elif "deletionTimestamp" in meta:
            pod.grace_s = float(meta.get("deletionGracePeriodSeconds") or 0)
            pod.deleted.set()

    def _live(self, pod: _Pod) -> None:
        """The whole life of a Pod, on a thread of its own: its process ends with this thread."""
        if pod.manifest["status"].get("phase") in ("Succeeded", "Failed"):  # in an earlier life of this kubelet
            pod.deleted.wait()
        elif not pod.deleted.is_set():
            state, phase = self._run(pod)
            self._report(pod, phase, state)
            pod.deleted.wait()
        self._until_done(lambda: self._api.delete(pod.path, grace_s=0, uid=pod.uid))
        with self._lock:
            self._pods.pop(pod.uid, None)

    def _run(self, pod: _Pod) -> tuple[Manifest, str]:
        container = pod.container
        command = [*container.get("command", ()), *container.get("args", ())]
        limit = container.get("resources", {}).get("limits", {}).get("memory")
        try:
            env = self._environment(pod)
            with pod.log.open("ab") as log:
                pod.process = subprocess.Popen(
                    prepared_command(command, Preparation(death_signal=signal.SIGKILL)), env=env,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
        except (OSError, KubernetesFailed) as error:
            ended = {"exitCode": 128, "reason": "StartError", "message": str(error)}
            return {"terminated": ended}, "Failed"
        self._report(pod, "Running", {"running": {}})
        out_of_memory = self._wait(pod, pod.process, None if limit is None else amount(limit))
        _kill(pod)
        code = self._ends[pod.process.pid] = pod.process.wait()
        number = 128 - code if code < 0 else code
        reason = "OOMKilled" if out_of_memory else "Error" if code else "Completed"
        ended: Manifest = {"exitCode": 137 if out_of_memory else number, "reason": reason}
        if code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            ended["message"] = _end_of(pod.log)
        return {"terminated": ended}, "Failed" if ended["exitCode"] else "Succeeded"

    def _wait(self, pod: _Pod, process: subprocess.Popen[bytes], limit: float | None) -> bool:
        """Until its end. True: it was killed because it had more memory than its limit."""
        kill_in_s: float | None = None
        while not self._closing.is_set():
            try:
                process.wait(_LOOK_S if kill_in_s is None or limit is not None else min(_LOOK_S, kill_in_s))
                return False
            except subprocess.TimeoutExpired:
                pass
            if limit is not None and _used(process.pid) > limit:
                _kill(pod)
                return True
            if pod.deleted.is_set():
                if kill_in_s is None:
                    kill_in_s = pod.grace_s
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGTERM)
                elif (kill_in_s := kill_in_s - _LOOK_S) <= 0:
                    return False
        return False

    def _report(self, pod: _Pod, phase: str, state: Manifest) -> None:
        ready = phase == "Running"
        container = pod.container
        status = {
            "phase": phase, "podIP": "127.0.0.1", "hostIP": "127.0.0.1",
            "conditions": [{"type": kind, "status": str(ready)} for kind in ("Ready", "ContainersReady")]
            + [{"type": kind, "status": "True"} for kind in ("Initialized", "PodScheduled")],
            "containerStatuses": [
                {"name": container["name"], "image": container["image"], "imageID": "", "ready": ready,
                 "restartCount": 0, "state": state}
            ],
        }  # fmt: skip
        self._until_done(lambda: self._api.patch(f"{pod.path}/status", {"status": status}))

    def _until_done(self, request: Any) -> None:
        """Through an API server that is away. An object that is not there any more is no error."""
        while not self._closing.is_set():
            try:
                request()
                return
            except KubernetesFailed as error:
                if error.code in (404, 409):
                    return
                if error.code not in (0, 500, 503):
                    raise
            self._closing.wait(_AGAIN_S)

    def _environment(self, pod: _Pod) -> dict[str, str]:
        env = {name: os.environ[name] for name in KEPT if name in os.environ}
        env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
        private = Path(self._folder.name) / pod.uid[:8]
        private.mkdir(exist_ok=True)
        env["TMPDIR"] = env["XDG_RUNTIME_DIR"] = str(private)
        env["HOSTNAME"] = pod.manifest["metadata"]["name"]
        if account := pod.manifest["spec"].get("serviceAccountName"):
            env["KUBECONFIG"] = self._kubeconfig(pod.namespace, account)
        for entry in pod.container.get("env", ()):
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                env[entry["name"]] = _field(pod.manifest, source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source:
                secret = self._api.get(f"/api/v1/namespaces/{pod.namespace}/secrets/{source['secretKeyRef']['name']}")
                env[entry["name"]] = base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()
            else:
                env[entry["name"]] = _expanded(entry.get("value", ""), env)
        return env


def amount(text: str) -> float:
    """A quantity of Kubernetes in bytes."""
    found = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text)
    assert found is not None, text
    return float(found[1]) * _UNITS[found[2]]


def _end_of(log: Path) -> str:
    """The last lines, as many as a kubelet takes."""
    return "\n".join(log.read_text(errors="replace")[-2048:].splitlines()[-80:])


def _expanded(value: str, known: dict[str, str]) -> str:
    """With the values of the variables before it, written as $(NAME)."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda found: known.get(found[1], found[0]), value)


def _field(manifest: Manifest, path: str) -> str:
    if path in ("status.podIP", "status.hostIP"):
        return "127.0.0.1"
    found = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if found is not None:
        return manifest["metadata"][found[1]][found[2]]
    top, name = path.split(".")
    return str(manifest[top][name])


def _used(pid: int) -> int:
    """Bytes of a process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        total = process.memory_info().rss
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += child.memory_info().rss
        return total
    return 0


def _kill(pod: _Pod) -> None:
    """Its whole session."""
    if pod.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.process.pid, signal.SIGKILL)
