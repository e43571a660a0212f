"""The actor that `ActorScaler` starts for each node: it runs the command of the node as a child process."""

from __future__ import annotations

import logging
import select
import signal
import threading

import ray

from dlrover_hooks import config as settings
from dlrover_hooks.host.child_process import Child

log = logging.getLogger("dlrover_hooks.scaler")

CONCURRENCY_GROUPS = {"hold": 1, "run": 1, "control": 8}
"""Threads of an actor for each group of its methods."""


class NodeActor:
    """Runs the command of one node in its own session.

    Ray calls each method on a thread of its concurrency group. The constructor must not raise: the caller would only
    get a traceback. All arguments and results are numbers, strings, and lists, tuples and dictionaries of these.

    Args:
        name: name of the node.
        command: the program and its arguments.
        environment: variables of the program in addition to those of the actor's process.
    """

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self._name, self._command, self._environment = name, command, environment
        self._lock = threading.Lock()
        self._tried, self._over = threading.Event(), threading.Event()
        """`_tried`: the command was started, or its start failed. `_over`: it has ended."""
        self._child: Child | None = None
        self._removed = False
        self._outcome: tuple[int | None, str] | None = None

    @ray.method(concurrency_group="hold")
    def hold(self) -> None:
        """Never returns: the call fails when the actor has ended."""
        threading.Event().wait()

    @ray.method(concurrency_group="control")
    def ready(self) -> None:
        """Returns as soon as the actor is placed and its process runs."""

    @ray.method(concurrency_group="control")
    def begun(self) -> bool:
        """Waits until `run` has tried to start the command. False: the start failed."""
        self._tried.wait()
        return self._child is not None

    @ray.method(concurrency_group="run")
    def run(self) -> tuple[int | None, str]:
        """Start the command, wait for its end, and return its exit code (negative for a signal) and "".

        Returns (None, reason) if it was not started. A later call returns the same.
        """
        if self._outcome is None:
            self._outcome = self._lived()
            self._over.set()
            self._tried.set()
        return self._outcome

    @ray.method(concurrency_group="control")
    def end(self, grace_s: float) -> None:
        """Send SIGTERM to the process of the command, and SIGKILL to its session if it runs after `grace_s` seconds.

        Returns after at most `grace_s` seconds. With `grace_s` 0 only SIGKILL is sent. A command that was not started
        yet is never started.
        """
        self._removed = True
        if grace_s > 0:
            self._signal(signal.SIGTERM)
            self._over.wait(grace_s)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:  # the process is reaped under this lock, so its process id cannot be reused meanwhile
            if self._child is None or self._over.is_set():
                return
            if number is signal.SIGTERM:
                self._child.ask_to_end()
            else:
                self._child.signal(number)

    def _lived(self) -> tuple[int | None, str]:
        """Start the command and wait, on one thread: the kernel kills it when the thread that started it ends."""
        try:
            child = self._started()
        except Exception as error:
            log.warning("%s could not be started", self._name, exc_info=error)
            return None, f"{type(error).__name__}: {error}"
        if child is None:
            return None, "it was removed before it was started"
        self._tried.set()
        watch = select.poll()
        watch.register(child, select.POLLIN)
        while not watch.poll():
            pass
        with self._lock:
            self._over.set()
            return child.end(), ""

    def _started(self) -> Child | None:
        with self._lock:
            if self._removed:
                return None
            env = settings.worker_environment(**self._environment)
            self._child = Child(self._name, self._command, env=env, die_with_parent=True)
            return self._child
