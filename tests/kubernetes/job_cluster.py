"""A namespace of the control plane with an operator, and the `ElasticJob` of a test in it."""

from __future__ import annotations

import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

from dlrover_hooks.client import MasterClient
from dlrover_hooks.host.ports import free_port
from dlrover_hooks.kubernetes import custom_resources
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.master.operator import manifests
from dlrover_hooks.master.operator.job_objects import MasterOptions
from dlrover_hooks.master.operator.operator import Operator
from tests.kubernetes import operators
from tests.kubernetes.control_plane import control_plane
from tests.waiting import until

LONG_S = 180.0


class Cluster:
    """A namespace where the operator follows jobs, with the account that `dlrover-hooks manifest` gives it."""

    def __init__(self) -> None:
        self.plane = control_plane()
        self.namespace = self.plane.namespace()
        operators.install(self.plane.api)
        self.apply(*manifests.operator_objects(self.namespace, "none", self.namespace))
        self.apply(*manifests.job_namespace_objects(self.namespace))
        self.kubeconfig = self.plane.account_kubeconfig(self.namespace, manifests.NAME)
        self.port = free_port()
        self._api = ApiServer(kubeconfig=self.kubeconfig)
        self._operator: Operator | None = None

    def start_operator(self, *, nodes: bool = False) -> None:
        """`nodes`: it follows them, with the rights of an operator of the whole cluster."""
        api = self.plane.api if nodes else self._api
        self._operator = Operator(api, self.namespace, MasterOptions(port=self.port), nodes=nodes)
        self._operator.start()

    def apply(self, *objects: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(listed))

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        ended = self.plane.kubectl("-n", self.namespace, *arguments, stdin=stdin)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def job(
        self, command: list[str], save_to: str = "", master: dict[str, Any] | None = None,
        spec: dict[str, Any] | None = None, env: dict[str, str] | None = None, **worker: Any,
    ) -> None:  # fmt: skip
        """Apply `mine`. Its workers are spread over the nodes, if that is possible. `spec`: more of its fields.
        `env`: of the workers.
        """
        variables = (env or {}) | ({"DLROVER_HOOKS_SAVE_TO": save_to} if save_to else {})
        given = [{"name": name, "value": value} for name, value in variables.items()]
        container = {"name": "main", "image": "none", "command": command, "env": given}
        spread = {
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"elasticjob-name": "mine", "replica-type": "worker"}},
        }  # fmt: skip
        pod = {"containers": [container], "topologySpreadConstraints": [spread]}
        replicas = {"worker": {"template": {"spec": pod}} | worker}
        if master is not None:
            replicas["dlrover-master"] = master
        self.apply({
            "apiVersion": custom_resources.API_VERSION, "kind": "ElasticJob", "metadata": {"name": "mine"},
            "spec": {"replicaSpecs": replicas} | (spec or {}),
        })  # fmt: skip

    def lose_the_master(self) -> None:
        """Kill it, and wait for the next one."""
        first = self.get("pod", "mine-master")["metadata"]["uid"]
        os.kill(self.plane.kubelet.pid(self.namespace, "mine-master"), signal.SIGKILL)
        self.another_master(first)

    def another_master(self, first: str) -> None:
        """Wait for a Pod of the master that has another uid than `first`, and runs."""

        def runs() -> bool:
            found = [pod for pod in self.get("pods")["items"] if pod["metadata"]["name"] == "mine-master"]
            return [pod["status"]["phase"] for pod in found if pod["metadata"]["uid"] != first] == ["Running"]

        until(runs, "another master", LONG_S, diagnostic=self.said)

    def master(self) -> MasterClient:
        """Of the job's master, with its token. Close it."""
        (secret,) = self.get("secrets", "-l", "elasticjob-name=mine")["items"]
        token = base64.b64decode(secret["data"]["token"]).decode()
        return MasterClient(f"http://127.0.0.1:{self.port}", token, incarnation="test")

    @property
    def phase(self) -> str:
        return self.get("elasticjob", "mine").get("status", {}).get("phase", "")

    def condition(self, kind: str) -> dict[str, Any]:
        return {one["type"]: one for one in self.get("elasticjob", "mine")["status"]["conditions"]}[kind]

    def ends(self, phase: str, within_s: float = LONG_S) -> None:
        until(lambda: self.phase == phase, f"the phase {phase}", within_s, diagnostic=self.said)

    def said(self) -> str:
        objects = self.kubectl("get", "elasticjobs,scaleplans,pods,events")
        return f"{objects}\n{self.plane.kubelet.output(self.namespace)}"

    def close(self) -> None:
        self.kubectl("delete", "elasticjobs", "--all")
        until(lambda: not self.get("pods")["items"], "the Pods to go", LONG_S, diagnostic=self.said)
        if self._operator is not None:
            self._operator.check()
            self._operator.stop()
        self._api.close()
        assert self.plane.kubelet.alive(self.namespace) == []


def waiting(folder: Path) -> list[str]:
    """The command of a worker that is done when a file `done` is there, or has failed when a file `fail` is."""
    script = folder / "wait.py"
    script.write_text(
        "import os, sys, threading\n"
        "print('begins', os.environ['DLROVER_HOOKS_NODE'], flush=True)\n"
        f"while not os.path.exists({str(folder / 'done')!r}):\n"
        f"    if os.path.exists({str(folder / 'fail')!r}):\n"
        "        raise ValueError('no such column')\n"
        "    threading.Event().wait(0.05)\n"
    )
    return ["dlrover-hooks", "run", "--standby", "0", str(script)]
