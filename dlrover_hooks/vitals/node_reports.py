"""The launcher's reports to the master about its node, from a thread of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dlrover_hooks import protocol as p
from dlrover_hooks.errors import HooksError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.vitals.background_sample import BackgroundSample
from dlrover_hooks.vitals.disk_sampler import DiskSampler
from dlrover_hooks.vitals.node_sampler import NodeSampler
from dlrover_hooks.vitals.process_trees import ProcessTrees, uptime_s

if TYPE_CHECKING:
    from dlrover_hooks.client import Caller

log = logging.getLogger("dlrover_hooks.run")
FIRST_S = 1.0
"""From the start to the first report, which needs an interval for its rates, too."""
EVERY_S = 5.0
"""Interval while the master has not named another one."""
_SHORTEST_S, _LONGEST_S = 1.0, 600.0
_PATIENCE_S = 5.0
_STOP_S = 1.0
_LAUNCHER = ""
_AGAIN_S = 60.0
"""Pause after an unexpected error."""


class NodeReports:
    """Sends a `NodeVitals` at the interval that the master asks for. The owner calls `start` and `stop`.

    Args:
        caller: a client with the agent's incarnation.
        job: the job's name.
        incarnation: the agent's.
        node: its node's name.
        folder: whose file system is reported.
    """

    def __init__(self, caller: Caller, job: str, incarnation: str, node: str, folder: str) -> None:
        self._caller, self._job, self._incarnation, self._node = caller, job, incarnation, node
        self._workers: Mapping[str, int] = {}
        where = f"job {job}: node {node}"
        self._disk = BackgroundSample(
            "dlrover-hooks-disk", lambda: DiskSampler(folder).sample, where=where, what=f"the file system of {folder}"
        )
        self._thread = BackgroundThread(
            "dlrover-hooks-vitals", self._run, where=where, on_error="warn", again_s=_AGAIN_S
        )

    def start(self) -> None:
        """Start to report."""
        self._disk.start()
        self._thread.start()

    def stop(self) -> None:
        """End both threads; one that waits for the master or for a file system is abandoned. Idempotent."""
        self._disk.stop(_STOP_S)
        self._thread.stop(_STOP_S)

    def follow(self, workers: Mapping[str, int]) -> None:
        """Report the processes of these workers, or of these tasks of a parameter server job, from now on.

        Process ids by incarnation. Any thread; not copied.
        """
        self._workers = workers

    def _run(self) -> None:
        node, trees, wait_s = NodeSampler(), ProcessTrees(), FIRST_S
        trees.sample({_LAUNCHER: os.getpid(), **self._workers}, uptime_s())
        while not self._thread.stopping.wait(wait_s):
            wait_s = self._report(self.sample(node, trees))

    def sample(self, node: NodeSampler, trees: ProcessTrees) -> p.NodeVitals:
        """One report. Called by the thread."""
        trees_of = trees.sample({_LAUNCHER: os.getpid(), **self._workers}, uptime_s())
        return p.NodeVitals(
            job=self._job,
            incarnation=self._incarnation,
            node=self._node,
            cpu=node.cpu(),
            memory=node.memory(),
            network=node.network(),
            disk=self._disk.value,
            workers=tuple(tree for tree in trees_of if tree.incarnation != _LAUNCHER),
            launcher=next((tree for tree in trees_of if tree.incarnation == _LAUNCHER), None),
        )

    def _report(self, vitals: p.NodeVitals) -> float:
        """Seconds until the next report is due."""
        try:
            reply = self._caller.call(vitals, timeout_s=_PATIENCE_S, again=False)
        except HooksError as error:  # the master is away, or this node waits for its first round
            log.debug("job %s: the vitals of node %s: %s", self._job, self._node, error.message)
            return EVERY_S
        assert isinstance(reply, p.NextVitals)
        return min(max(reply.within_s, _SHORTEST_S), _LONGEST_S)
