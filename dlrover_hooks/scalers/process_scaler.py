"""The nodes of a job as processes on this machine."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.errors import LaunchError
from dlrover_hooks.host.child_process import Child, described
from dlrover_hooks.host.wake_pipe import WakePipe
from dlrover_hooks.protocol import Node, NodeExit
from dlrover_hooks.scalers.node_reconciler import StartRetries
from dlrover_hooks.scalers.reconciling_scaler import ReconcilingScaler
from dlrover_hooks.scalers.resource_limits import LimitMethods, NodeLimits

GRACE_S = 30.0
"""Kubernetes' default of `terminationGracePeriodSeconds`."""
_LOOK_S = 1.0


class _NodeProcess(msgspec.Struct):
    """`kill_at`: when it is killed if it has not ended, on the clock time.monotonic."""

    child: Child
    limits: NodeLimits
    watched: bool = False
    kill_at: float = math.inf


class ProcessScaler(ReconcilingScaler):
    """Each node is a process in a session of its own, with the limits of its `config_resource`, see `LimitMethods`.

    A node is removed by SIGTERM to its process; after `grace_s` its whole session is killed, as it is after its process
    has ended in any other way. If this process ends, however, the kernel kills the processes of all nodes. Processes
    that these have started have to see to that themselves, as workers of `dlrover-hooks run` do.

    Args:
        job: its name.
        command_of: the command of a node. Called on several threads; what it raises is a failed start.
        environment_of: variables of a node beyond those of this process. Called on several threads.
        user_errors: exit codes that say that the user's program or a setting is wrong (`NodeExit.USER_ERROR`).
        grace_s: seconds between SIGTERM and SIGKILL for a node that a plan removes.
        starts_at_once: so many nodes are started at the same time.
        retries: of failed starts.
        methods: how nodes are limited; by default by what this machine allows.
    """

    def __init__(
        self,
        job: str,
        command_of: Callable[[Node], Sequence[str]],
        environment_of: Callable[[Node], Mapping[str, str]],
        *,
        user_errors: Collection[int] = (),
        grace_s: float = GRACE_S,
        starts_at_once: int = 8,
        retries: StartRetries | None = None,
        methods: LimitMethods | None = None,
    ) -> None:
        super().__init__(job, starts_at_once=starts_at_once, retries=retries)
        self._command_of, self._environment_of = command_of, environment_of
        self._user_errors, self._usual_grace_s = frozenset(user_errors), grace_s
        self._methods = methods or LimitMethods(job)
        self._processes: dict[int, _NodeProcess] = {}
        """By launch, under `_changed`."""
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake = WakePipe(self._selector)
        self._watcher = self._thread("watch", self._watch, wake=self._wake.wake)
        self._threads.append(self._watcher)

    def pids(self) -> dict[str, int]:
        """Process ids of the nodes that run, by their names. Any thread."""
        launches = {one.launch: one.node.name for one in self.list_nodes()}
        with self._changed:
            return {launches[key]: one.child.pid for key, one in self._processes.items() if key in launches}

    # ---- of ReconcilingScaler ---------------------------------------------------------------------------------------

    def _create(self, launch: int, node: Node) -> bool:
        command, more = self._command_of(node), self._environment_of(node)
        limits = self._methods.limit(node.name, node.config_resource)
        try:
            with limits.entrance() as prepared:
                env = settings.worker_environment(**more)
                child = Child(node.name, command, env=env, die_with_parent=True, limits=prepared)
        except BaseException:
            limits.close()
            raise
        with self._changed:
            if not self._closed:
                self._processes[launch] = _NodeProcess(child, limits)
                self._wake.wake()
                return True
        child.end()
        limits.close()
        raise LaunchError(f"{node.name}: the scaler was stopped while it was started")

    def _remove(self, launch: int, node: Node, grace_s: float | None) -> None:
        grace = self._usual_grace_s if grace_s is None else grace_s
        with self._changed:
            process = self._processes.get(launch)
            if process is None:
                return
            if grace > 0:
                process.child.ask_to_end()
            process.kill_at = min(process.kill_at, time.monotonic() + grace)
            self._wake.wake()

    def _resize(self, launch: int, node: Node) -> None:
        with self._changed:
            if (process := self._processes.get(launch)) is not None:
                process.limits.resize(node.config_resource, process.child.pid)

    def _close(self) -> None:
        with self._changed:
            self._closed = True
            left, self._processes = list(self._processes.values()), {}
        for process in left:
            process.child.end()
            process.limits.close()
        self._methods.close()
        self._wake.close()
        self._selector.close()

    # ---- the thread that watches ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._watcher.stopping.is_set():
            with self._changed:
                for launch, process in self._processes.items():
                    if not process.watched:
                        self._selector.register(process.child, selectors.EVENT_READ, launch)
                        process.watched = True
                kill_at = min((process.kill_at for process in self._processes.values()), default=math.inf)
                idle = not self._processes
            wait_s = None if idle else min(max(0.0, kill_at - time.monotonic()), _LOOK_S)
            ready = self._selector.select(wait_s)
            self._wake.drain()
            for key, _ in ready:
                if key.data is not None:
                    self._reap(key.data)
            self._kill_late()
            self._methods.look()

    def _kill_late(self) -> None:
        now = time.monotonic()
        with self._changed:
            for process in self._processes.values():
                if process.kill_at <= now:
                    process.kill_at = math.inf
                    process.child.signal(signal.SIGKILL)

    def _reap(self, launch: int) -> None:
        """Its process has ended: end what is left of its session, and report it."""
        with self._changed:
            process = self._processes.pop(launch)
        self._selector.unregister(process.child)
        code = process.child.end()
        cause = self._cause(code, process.limits)
        detail = process.limits.explain(code) if cause is NodeExit.ERROR else ""
        process.limits.close()
        self._ended(launch, cause, code, detail or ("" if code == 0 else described(code)))

    def _cause(self, code: int, limits: NodeLimits) -> NodeExit:
        if code == 0:
            return NodeExit.SUCCEEDED
        if limits.killed_for_memory(code):
            return NodeExit.OUT_OF_MEMORY
        if code < 0:
            return NodeExit.KILLED
        return NodeExit.USER_ERROR if code in self._user_errors else NodeExit.ERROR
