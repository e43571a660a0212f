"""Keeps the processes of this machine equal to the nodes that the master lists for a planned job, until it is over."""

from __future__ import annotations

import logging
import selectors
import signal
from collections.abc import Callable, Sequence

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import MasterAway
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.wake_pipe import WakePipe
from dlrover_hooks.launcher.failures.restart_budget import Over
from dlrover_hooks.launcher.plan_log import PlanLog
from dlrover_hooks.scalers.scaler import NodeState, ScaledNode, Scaler

log = logging.getLogger("dlrover_hooks.run")
_POLL_S = 5.0
"""What became of a plan may not change the nodes, so it is looked for as often."""
_AGAIN_S = 0.5
_TURN_S = 1.0
_CLOSE_S = 2.0


class NodeHost:
    """Main thread only. It offers what the launcher needs of its workers to end them: `children`, `end`, `signal`.

    Args:
        request: starts the planning; sent first.
        client: a master client of this launcher.
        scaler: starts and removes nodes. The host starts and stops it.
        selector: wakes on ends of services and on signals.
        look: called at every turn: handles signals (raises Over), restarts services.
        leave: called in place of `scaler.stop` when the host ends before the job does, so that its nodes go on without
            it. None: they end with it.
    """

    def __init__(
        self,
        request: p.StartScaling,
        client: MasterClient,
        scaler: Scaler,
        selector: selectors.BaseSelector,
        look: Callable[[], None],
        leave: Callable[[], None] | None = None,
    ) -> None:
        self._leave = leave or (lambda: scaler.stop(0.0))
        self._request, self._job, self._client, self._scaler = request, request.job, client, scaler
        self._selector, self._look = selector, look
        self._wanted = p.DesiredNodes()
        self._seen = 0
        """Number of the scaler's last change that woke the main thread."""
        self._running, self._ended = set[str](), set[str]()
        """Names of nodes that were reported so."""
        self._plan_log = PlanLog(self._job, client)
        self._wake = WakePipe(selector)
        where = f"job {self._job}"
        self._listener = BackgroundThread("dlrover-hooks-plans", self._listen, where=where, again_s=_AGAIN_S)
        self._watcher = BackgroundThread("dlrover-hooks-nodes", self._watch, where=where, again_s=_AGAIN_S)

    # ---- what the launcher needs -------------------------------------------------------------------------------------

    @property
    def children(self) -> Sequence[ScaledNode]:
        """The nodes whose processes live, or are about to be started."""
        return [one for one in self._scaler.list_nodes() if one.state is not NodeState.ENDED]

    def end(self, grace_s: float = 0.0) -> list[int]:
        """End all nodes; their exit codes."""
        alive = {one.launch for one in self.children}
        self._scaler.stop(grace_s)
        return [one.exit_code for one in self._scaler.watch_nodes(0, 0.0).nodes if one.launch in alive]

    def signal(self, number: signal.Signals) -> None:
        """The second Ctrl-C: end all nodes at once."""
        self._scaler.stop(0.0)

    def refill(self) -> None:
        """Standbys are kept by the agents."""

    # ---- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until the job is over; the exit code."""
        try:
            self._scaler.start()
            self._wanted = self._client.call(self._request)
            self._look()  # it may have more to say to the master before the first list counts
            self._listener.start()
            self._watcher.start()
            while True:
                self._turn()
        except Over as over:
            if over.why:
                log.error("job %s: %s", self._job, over.why)
            return over.code
        finally:
            self._close()

    def _turn(self) -> None:
        self._look()
        wanted = self._wanted
        if wanted.finished:
            self._scaler.stop(0.0 if wanted.exit_code else _CLOSE_S)
            raise Over(wanted.exit_code, wanted.failure)
        if wanted.nodes:  # without the first plan the nodes of an earlier host are not too many
            self._carry_out(wanted)
        self._report()
        self._selector.select(_TURN_S)
        self._wake.drain()
        self._listener.check()
        self._watcher.check()

    def _carry_out(self, wanted: p.DesiredNodes) -> None:
        """The scaler's set becomes the one that the master lists."""
        listed = {node.name for node in wanted.nodes}
        known = {one.node.name: one.node for one in self._scaler.list_nodes()}
        launched = [node for node in wanted.nodes if node.name not in self._ended and _differs(node, known)]
        removed = [node for name, node in known.items() if name not in listed]
        if launched or removed:
            self._scaler.scale(p.ScalePlan(launch_nodes=launched, remove_nodes=removed))

    def _report(self) -> None:
        """Tell the master of nodes that run or have ended since the last turn."""
        changes: list[p.NodeChange] = []
        listed = {one.node.name: one for one in self._scaler.list_nodes()}
        for name, one in listed.items():
            if one.state is NodeState.RUNNING and name not in self._running:
                changes.append(p.NodeChange(name))
            elif one.state is NodeState.ENDED and name not in self._ended:
                changes.append(p.NodeChange(name, one.exit, one.exit_code, one.detail))
        gone = self._running - self._ended - set(listed)
        changes += [p.NodeChange(name, p.NodeExit.REMOVED) for name in sorted(gone)]
        if not changes:
            return
        try:
            self._client.call(p.ReportNodes(self._job, self._client.incarnation, tuple(changes)))
        except MasterAway as away:  # sent again at the next turn
            log.warning("job %s: %s", self._job, away.message)
            return
        for change in changes:
            (self._running if change.exit is None else self._ended).add(change.name)
            if change.exit not in (None, p.NodeExit.SUCCEEDED, p.NodeExit.REMOVED):
                log.warning("job %s: %s ended (%s)", self._job, change.name, change.exit.value)

    def _close(self) -> None:
        self._listener.stop(_CLOSE_S)
        self._watcher.stop(_CLOSE_S)
        self._leave()
        self._wake.close()

    # ---- the threads -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._listener.stopping.is_set():
            request = p.AwaitNodes(self._job, self._client.incarnation, self._wanted.number, _POLL_S)
            try:
                found: p.DesiredNodes = self._client.call(request, timeout_s=2 * _POLL_S)
                if found.number != self._wanted.number:
                    self._wanted = found
                    self._wake.wake()
                self._plan_log.look(_POLL_S)
            except MasterAway:
                self._listener.stopping.wait(_AGAIN_S)

    def _watch(self) -> None:
        while not self._watcher.stopping.is_set():
            changed = self._scaler.watch_nodes(self._seen, _TURN_S).number
            if changed != self._seen:
                self._seen = changed
                self._wake.wake()


def _differs(node: p.Node, known: dict[str, p.Node]) -> bool:
    """The scaler does not have this node, or in another size."""
    return node.name not in known or known[node.name].config_resource != node.config_resource
