"""The threads of a scaler: some start nodes, one removes and resizes them, as `NodeReconciler` decides."""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable

from dlrover_hooks.errors import UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.protocol import Node, NodeExit, ScalePlan
from dlrover_hooks.scalers.node_reconciler import ActionKind, NodeAction, NodeReconciler, StartRetries
from dlrover_hooks.scalers.scaler import NodeChanges, NodeState, ScaledNode, Scaler

log = logging.getLogger("dlrover_hooks.scaler")
_LONGEST_WAIT_S = 60.0
_END_S = 5.0
"""Timeout of the threads at the end."""
_AGAIN_S = 1.0


class ReconcilingScaler(Scaler):
    """What all scalers share. A platform says how one node is started, removed and resized, and reports ends.

    Args:
        job: its name, for the log.
        starts_at_once: so many nodes are started at the same time.
        retries: of failed starts.
    """

    killed_s = 5.0
    """A killed node is gone within so many seconds, unless the kernel or the platform does not answer."""

    def __init__(self, job: str, *, starts_at_once: int = 8, retries: StartRetries | None = None) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._nodes = NodeReconciler(retries or StartRetries())
        self._stopped, self._over = False, False
        """`stop` was called; it has removed all nodes."""
        self._grace_s: float | None = None
        self._threads = [
            *(self._thread(f"start-{number}", self._start_nodes) for number in range(starts_at_once)),
            self._thread("change", self._change_nodes),
        ]

    # ---- of a platform ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _create(self, launch: int, node: Node) -> bool:
        """Start the node; on one of `starts_at_once` threads. Whatever it raises, there must be no node then.

        True: it runs. False: that is reported by `_runs` later.
        """

    @abc.abstractmethod
    def _remove(self, launch: int, node: Node, grace_s: float | None) -> None:
        """Make a started node end, within `grace_s` seconds (None: as usual), and return at once.

        Its end is reported by `_ended`, also if it has just ended by itself. Is called again after an exception, and by
        `stop` with a grace that may be shorter.
        """

    @abc.abstractmethod
    def _resize(self, launch: int, node: Node) -> None:
        """Give a running node the resources that `node` has now. May raise: the node is left as it is."""

    def _open(self) -> None:
        """Called once, before the first node is started."""

    def _close(self) -> None:
        """Called once, after the last node has gone."""

    def _runs(self, launch: int) -> None:
        """Report that the node runs. Any thread; also before `_create` has returned."""
        with self._changed:
            self._nodes.started(launch, time.monotonic())
            self._changed.notify_all()

    def _ended(self, launch: int, exit_: NodeExit, exit_code: int, detail: str = "") -> None:
        """Report that the node is gone for certain. Any thread; also before `_create` has returned."""
        with self._changed:
            self._nodes.ended(launch, exit_, exit_code, detail, time.monotonic())
            self._changed.notify_all()

    def _thread(
        self, name: str, run: Callable[[], object], wake: Callable[[], object] = lambda: None
    ) -> BackgroundThread:
        """A thread for `_threads`. `run` ends when `_over` is set and `_changed` notified, or `wake` was called."""
        where = f"job {self._job}"
        return BackgroundThread(f"dlrover-hooks-scaler-{name}", run, where=where, again_s=_AGAIN_S, wake=wake)

    # ---- Scaler -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See `Scaler`."""
        with self._changed:
            if self._stopped or self._threads[0].started:
                return
            self._open()
            for thread in self._threads:
                thread.start()

    def scale(self, plan: ScalePlan) -> None:
        """See `Scaler`."""
        self._check()
        with self._changed:
            if self._stopped:
                raise UsageError(f"job {self._job}: its scaler is stopped", hint="make a new one")
            self._nodes.merge(plan, time.monotonic())
            self._changed.notify_all()

    def list_nodes(self) -> tuple[ScaledNode, ...]:
        """See `Scaler`."""
        self._check()
        with self._changed:
            return self._nodes.nodes()

    def watch_nodes(self, after: int, within_s: float) -> NodeChanges:
        """See `Scaler`."""
        self._check()
        with self._changed:
            self._changed.wait_for(lambda: self._nodes.number > after or self._over, max(0.0, within_s))
            return self._nodes.changes(after)

    def stop(self, grace_s: float) -> None:
        """See `Scaler`."""
        with self._changed:
            if self._stopped:
                return
            self._stopped, self._grace_s = True, grace_s
            self._nodes.remove_all(time.monotonic())
            self._changed.notify_all()
            started = self._threads[0].started
            if started and not self._changed.wait_for(lambda: self._nodes.idle, grace_s + self.killed_s):
                left = ", ".join(one.node.name for one in self._nodes.nodes())
                log.error("job %s: these nodes did not end, and are abandoned: %s", self._job, left)
            self._over = True
            self._changed.notify_all()
        self._end_threads()

    def _end_threads(self) -> None:
        """After `_over` was set."""
        deadline = time.monotonic() + _END_S
        for thread in self._threads:
            thread.stop(max(0.0, deadline - time.monotonic()))
        self._close()

    def _check(self) -> None:
        for thread in self._threads:
            thread.check()

    # ---- the threads ------------------------------------------------------------------------------------------------

    def _next(self, take: Callable[[float], NodeAction | None], due: Callable[[], float]) -> NodeAction | None:
        """Waits for an action. None: the scaler is stopped."""
        with self._changed:
            while not self._over:
                now = time.monotonic()
                if (action := take(now)) is not None:
                    self._changed.notify_all()
                    return action
                self._changed.wait(min(max(0.0, due() - now), _LONGEST_WAIT_S))
        return None

    def _start_nodes(self) -> None:
        while (action := self._next(self._nodes.next_start, self._nodes.start_due)) is not None:
            try:
                runs = self._create(action.launch, action.node)
            except BaseException as error:
                self._start_failed(action, error)
                if not isinstance(error, Exception):
                    raise
            else:
                with self._changed:
                    report = self._nodes.started if runs else self._nodes.created
                    report(action.launch, time.monotonic())
                    self._changed.notify_all()

    def _start_failed(self, action: NodeAction, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        with self._changed:
            self._nodes.start_failed(action.launch, reason, time.monotonic())
            self._changed.notify_all()
            given_up = any(one.launch == action.launch and one.state is NodeState.ENDED for one in self._nodes.nodes())
        log.warning("job %s: %s could not be started (%s); %s", self._job, action.node.name, reason,
                    "it is given up" if given_up else "it is tried again", exc_info=error)  # fmt: skip

    def _change_nodes(self) -> None:
        while (action := self._next(self._nodes.next_change, self._nodes.change_due)) is not None:
            try:
                if action.kind is ActionKind.REMOVE:
                    self._remove(action.launch, action.node, self._grace_s)
                else:
                    self._resize(action.launch, action.node)
            except Exception as error:
                self._change_failed(action, error)

    def _change_failed(self, action: NodeAction, error: Exception) -> None:
        verb = "removed" if action.kind is ActionKind.REMOVE else "resized"
        log.warning("job %s: %s could not be %s (%s)", self._job, action.node.name, verb, error, exc_info=error)
        if action.kind is ActionKind.REMOVE:
            with self._changed:
                self._nodes.removal_failed(action.launch, f"{type(error).__name__}: {error}", time.monotonic())
                self._changed.notify_all()
