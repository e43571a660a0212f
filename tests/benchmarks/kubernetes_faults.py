"""Nodes of a job that come, go and are killed while parts of the control plane are killed: is every change seen?"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading

import msgspec

from dlrover_hooks.kubernetes import node_pods
from dlrover_hooks.kubernetes.pod_status import pod_end
from dlrover_hooks.protocol import Node, NodeExit, NodeType, ScalePlan
from dlrover_hooks.scalers.elastic_job_scaler import ElasticJobScaler
from dlrover_hooks.scalers.scaler import NodeState, ScaledNode
from tests.kubernetes import operators
from tests.kubernetes.control_plane import ControlPlane
from tests.waiting import until

FAULTS = ("api server", "compaction", "operator")
LONG_S = 120.0
_LATEST_S = 1.0
"""A fault comes so long after the first change of a round, at most."""


class FaultFigures(msgspec.Struct):
    """`relists`: how often the scaler has listed Pods again, after a gap of its watch."""

    rounds: int = 0
    events: int = 0
    lost: int = 0
    plans_left: int = 0
    relists: int = 0
    problems: list[str] = []


class FaultRounds:
    """A job whose nodes sleep, its scaler in this process, and an operator as a process of its own."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane, self.namespace = plane, plane.namespace()
        operators.install(plane.api)
        job = operators.apply_job(plane.api, self.namespace, "job")
        self._operator = self._start_operator()
        self._scaler = ElasticJobScaler(job, plane.api, grace_s=0.0)
        self._scaler.start()
        self._number, self._seen = 0, 0
        self._alive = list[Node]()
        self.found = FaultFigures()

    def close(self) -> None:
        """End the job and its operator."""
        self._scaler.stop(0.0)
        self._operator.kill()
        self._operator.wait(60)

    def play(self, seed: int) -> None:
        """One round: some nodes are added, removed and killed, and one part of the control plane is lost meanwhile."""
        dice = random.Random(seed)
        launched = [Node(NodeType.WORKER, self._number + index) for index in range(dice.randint(1, 5))]
        self._number += len(launched)
        dice.shuffle(self._alive)
        removed, killed = self._alive[: dice.randint(0, 2)], self._alive[2 : 2 + dice.randint(0, 2)]
        fault = threading.Timer(_LATEST_S * dice.random(), self._strike, (FAULTS[seed % len(FAULTS)],))
        fault.start()
        self._scaler.scale(ScalePlan(launch_nodes=launched[:1]))
        threading.Event().wait(_LATEST_S * dice.random())  # changes come at random moments, too
        self._scaler.scale(ScalePlan(launch_nodes=launched[1:], remove_nodes=removed))
        for node in killed:
            os.kill(self._plane.kubelet.pid(self.namespace, self._scaler.pod_name(node)), signal.SIGKILL)
        fault.join()
        self._check(launched, removed, killed)
        self._alive = [one for one in self._alive if one not in removed + killed] + launched
        self._scaler.scale(ScalePlan(remove_nodes=killed))
        self.found.rounds += 1

    def _check(self, launched: list[Node], removed: list[Node], killed: list[Node]) -> None:
        """Wait for what must be told of each node, and count what is not."""
        told = dict[str, ScaledNode]()

        def missing() -> list[str]:
            changes = self._scaler.watch_nodes(self._seen, 0.0)
            self._seen = changes.number
            told.update({one.node.name: one for one in changes.nodes})
            lost = [f"{one.name} does not run" for one in launched if not _is(told, one, NodeState.RUNNING)]
            lost += [f"{one.name} was not removed" for one in removed if not _is(told, one, NodeState.GONE)]
            ended = [told[one.name].exit if _is(told, one, NodeState.ENDED) else None for one in killed]
            return lost + [f"{one.name} ended: {how}" for one, how in zip(killed, ended, strict=True)
                           if how is not NodeExit.KILLED]  # fmt: skip

        self.found.events += len(launched) + len(removed) + len(killed)
        try:
            until(lambda: not missing(), "all that has changed", LONG_S)
        except AssertionError:
            lost = missing()
            self.found.lost += len(lost)
            self.found.problems += lost

    def left(self) -> None:
        """Compare with what the API server has in the end."""
        pods = self._plane.api.get(node_pods.pods_path(self.namespace))["items"]
        live = {one["metadata"]["name"] for one in pods if pod_end(one) is None}
        wanted = {self._scaler.pod_name(one) for one in self._alive}
        self.found.lost += len(live ^ wanted)
        self.found.problems += sorted(live ^ wanted)
        plans = f"/apis/elastic.iml.github.io/v1alpha1/namespaces/{self.namespace}/scaleplans"
        self.found.plans_left = len(self._plane.api.get(plans)["items"])
        self.found.relists = self._scaler._pods.lists - 1

    def _strike(self, what: str) -> None:
        if what == "api server":
            self._plane.kill("kube-apiserver")
            self._plane.start_api_server()
        elif what == "compaction":  # watches that have to begin again then get 410
            self._plane.kill("kube-apiserver")
            self._plane.compact()
            self._plane.start_api_server()
        else:
            self._operator.kill()
            self._operator.wait(60)
            self._operator = self._start_operator()

    def _start_operator(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dlrover_hooks.master.operator", "--namespace", self.namespace,
                   "--kubeconfig", self._plane.kubeconfig, "--log-level", "error"]  # fmt: skip
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def _is(told: dict[str, ScaledNode], node: Node, state: NodeState) -> bool:
    return node.name in told and told[node.name].state is state
