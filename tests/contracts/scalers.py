"""Every scaler, for one suite: how a test makes one, and looks at its nodes past it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import pytest

from dlrover_hooks.errors import KubernetesFailed
from dlrover_hooks.kubernetes import names
from dlrover_hooks.kubernetes.api_server import ApiServer
from dlrover_hooks.protocol import Node
from dlrover_hooks.scalers.elastic_job_scaler import ElasticJobScaler
from dlrover_hooks.scalers.node_reconciler import StartRetries
from dlrover_hooks.scalers.pod_scaler import PodScaler
from dlrover_hooks.scalers.process_scaler import ProcessScaler
from dlrover_hooks.scalers.scaler import Scaler
from dlrover_hooks.testing import FakeScaler
from tests.kubernetes import operators
from tests.kubernetes.control_plane import control_plane

SOON = StartRetries(attempts=3, first_s=0.01, longest_s=0.05)
AT_ONCE = 8
NODE = "DLROVER_TEST_NODE"


class Platform(Protocol):
    """Where nodes are started. `before_start`: called with each node that is started; raising is a failed start."""

    before_start: Callable[[Node], object]
    groups: int
    """A test starts so many groups of `AT_ONCE` nodes: few where each start takes a second of CPU time."""

    @property
    def scaler(self) -> Scaler: ...

    def alive(self) -> list[str]:
        """Names of the nodes that really exist."""
        ...

    def end(self, name: str, exit_code: int) -> None:
        """Make a node end by itself. Negative: by that signal."""
        ...


class InMemory:
    """`FakeScaler`."""

    groups = 6

    def __init__(self, folder: Path) -> None:
        del folder
        self.scaler = FakeScaler(starts_at_once=AT_ONCE, retries=SOON)
        self.before_start: Callable[[Node], object] = lambda node: None
        self.scaler.before_start = lambda node: self.before_start(node)

    def alive(self) -> list[str]:
        return sorted(node.name for node in list(self.scaler.running.values()))

    def end(self, name: str, exit_code: int) -> None:
        self.scaler.end(name, exit_code)


class OnThisMachine:
    """`ProcessScaler`: each node waits until a line is written to its pipe, and exits with that number."""

    groups = 6

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.before_start: Callable[[Node], object] = lambda node: None
        self.scaler = ProcessScaler(
            "contract", self._command, self._environment, starts_at_once=AT_ONCE, retries=SOON, grace_s=0.0
        )

    def alive(self) -> list[str]:
        return [name for name, _ in _processes()]

    def end(self, name: str, exit_code: int) -> None:
        if exit_code < 0:
            os.kill(self.scaler.pids()[name], -exit_code)
        else:
            _pipe(self._folder, name).write_text(f"{exit_code}\n")

    def _command(self, node: Node) -> Sequence[str]:
        self.before_start(node)
        return _waits(self._folder, node.name)

    def _environment(self, node: Node) -> Mapping[str, str]:
        return {NODE: node.name}


class OnRay:
    """`ActorScaler`, on a cluster of this process alone. Nodes end as those of `OnThisMachine`."""

    groups = 2

    def __init__(self, folder: Path) -> None:
        import ray

        from dlrover_hooks.integrations.ray.actor_scaler import ActorScaler

        if not ray.is_initialized():
            ray.init(
                address="local", num_cpus=16, include_dashboard=False, namespace="dlrover_hooks", log_to_driver=False
            )
        self._folder = folder
        self.before_start: Callable[[Node], object] = lambda node: None
        self.scaler: Scaler = ActorScaler(
            "contract", self._command, lambda node: {NODE: node.name}, starts_at_once=AT_ONCE, retries=SOON, grace_s=0.0
        )

    def alive(self) -> list[str]:
        return [name for name, _ in _processes()]

    def end(self, name: str, exit_code: int) -> None:
        if exit_code < 0:
            os.kill(dict(_processes())[name], -exit_code)
        else:
            _pipe(self._folder, name).write_text(f"{exit_code}\n")

    def _command(self, node: Node) -> Sequence[str]:
        self.before_start(node)
        return _waits(self._folder, node.name)


def end_ray() -> None:
    """End the cluster of `OnRay`, if it was started. Another one of this process may follow."""
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()


def _processes() -> list[tuple[str, int]]:
    """Names and process ids of the nodes that are descendants of this process, in this order."""
    found = list[tuple[str, int]]()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and (name := child.environ().get(NODE)):
                found.append((name, child.pid))
    return sorted(found)


class Pods:
    """`PodScaler` on a real control plane, with process-backed Pods. Nodes end as those of `OnThisMachine`."""

    groups = 6

    def __init__(self, folder: Path) -> None:
        self._folder, self._plane = folder, control_plane()
        self._namespace = self._plane.namespace()
        self.before_start: Callable[[Node], object] = lambda node: None
        self.scaler = self._scaler()

    def _scaler(self) -> Scaler:
        return PodScaler(
            "contract", self._plane.api, self._namespace, self._pod, starts_at_once=AT_ONCE, retries=SOON, grace_s=0.0
        )

    def close(self) -> None:
        """After the scaler has stopped."""

    def alive(self) -> list[str]:
        return [name.removeprefix("contract-") for name in self._plane.kubelet.alive(self._namespace)]

    def end(self, name: str, exit_code: int) -> None:
        if exit_code < 0:
            os.kill(self._plane.kubelet.pid(self._namespace, f"contract-{name}"), -exit_code)
        else:
            _pipe(self._folder, name).write_text(f"{exit_code}\n")

    def _pod(self, node: Node) -> dict[str, Any]:
        self.before_start(node)
        command = list(_waits(self._folder, node.name))
        return {"spec": {"containers": [{"name": "main", "image": "none", "command": command}]}}


class OperatedPods(Pods):
    """`ElasticJobScaler`, with an operator in this process. A Pod whose `before_start` raises is refused."""

    def _scaler(self) -> Scaler:
        self.operator = operators.started(_Refusing(self._plane.kubeconfig, self._before), self._namespace)
        job = operators.apply_job(self._plane.api, self._namespace, "contract", command=list(_by_name(self._folder)))
        return ElasticJobScaler(job, self._plane.api, starts_at_once=AT_ONCE, retries=SOON, grace_s=0.0)

    def close(self) -> None:
        """See `Pods`."""
        self.operator.stop()

    def _before(self, node: Node) -> None:
        _waits(self._folder, node.name)
        self.before_start(node)


class _Refusing(ApiServer):
    """Refuses to create a Pod as `before` says."""

    def __init__(self, kubeconfig: str, before: Callable[[Node], object]) -> None:
        super().__init__(kubeconfig=kubeconfig)
        self._before = before

    def create(self, path: str, body: Mapping[str, Any], **query: Any) -> dict[str, Any]:
        if body["kind"] == "Pod":
            try:
                self._before(msgspec.json.decode(body["metadata"]["annotations"][names.NODE_ANNOTATION], type=Node))
            except BaseException as error:
                raise KubernetesFailed(str(error), code=403) from error
        return super().create(path, body, **query)


def _pipe(folder: Path, name: str) -> Path:
    return folder / f"{name}.pipe"


def _waits(folder: Path, name: str) -> tuple[str, ...]:
    """A program that exits with the number that is written to its pipe."""
    with contextlib.suppress(FileExistsError):
        os.mkfifo(_pipe(folder, name))
    return "sh", "-c", 'read code < "$1"; exit "$code"', "sh", str(_pipe(folder, name))


def _by_name(folder: Path) -> tuple[str, ...]:
    """The same for a template that all nodes share: the node is known by the name of its Pod, in HOSTNAME."""
    return "sh", "-c", 'read code < "$1/${HOSTNAME#contract-}.pipe"; exit "$code"', "sh", str(folder)


PLATFORMS: dict[str, Callable[[Path], Platform]] = {
    "memory": InMemory, "processes": OnThisMachine, "actors": OnRay, "pods": Pods, "operator": OperatedPods,
}  # fmt: skip
_MARKS = {"actors": pytest.mark.ray, "pods": pytest.mark.kubernetes, "operator": pytest.mark.kubernetes}


def _parameters(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=_MARKS.get(name, ())) for name in names]


PARAMETERS = _parameters(PLATFORMS)
STARTING_HERE = _parameters(name for name in PLATFORMS if name != "operator")
"""Those that run `before_start` in a thread of the scaler. An operator is another process, as a rule."""


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[Platform]:
    """A platform with a scaler that is started, and stopped at the end."""
    platform = PLATFORMS[name](folder)
    platform.scaler.start()
    try:
        yield platform
    finally:
        platform.scaler.stop(0.0)
        if isinstance(platform, Pods):
            platform.close()
