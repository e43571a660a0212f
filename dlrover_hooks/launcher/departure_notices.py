"""Tells the master of a job that Pods will go soon, so that their workers leave at a step before they are ended."""

from __future__ import annotations

import logging

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import MasterAway, MasterError
from dlrover_hooks.scalers.elastic_job_scaler import ElasticJobScaler, LeavingNode

log = logging.getLogger("dlrover_hooks.run")
_MIGRATED = (p.NodeType.PS, p.NodeType.WORKER)


class DepartureNotices:
    """Main thread only.

    Args:
        job: its name.
        client: of its master.
        scaler: knows which Pods will go.
        tasks: its nodes are tasks of a parameter server job: another one takes the place of each, before it goes.
    """

    def __init__(self, job: str, client: MasterClient, scaler: ElasticJobScaler, *, tasks: bool) -> None:
        self._job, self._client, self._scaler, self._tasks = job, client, scaler, tasks
        self._told = set[int]()
        """Launches."""

    def look(self) -> None:
        """Tell what is new. Call it at every turn. Raises `MasterAway`."""
        for one in self._scaler.leaving_nodes():
            if one.launch not in self._told and self._tell(one):
                self._told.add(one.launch)

    def _tell(self, one: LeavingNode) -> bool:
        """False: try it again."""
        node, incarnation = one.node, self._client.incarnation
        try:
            if not self._tasks:
                asked = p.Preempt(self._job, incarnation, node.name, one.seconds, one.reason)
                if not self._client.call(asked).round:
                    return False  # it has no round now
            elif node.type in _MIGRATED:
                self._client.call(p.MigrateTask(self._job, incarnation, node.type, node.index or 0))
        except MasterAway:
            raise
        except MasterError as error:  # it does not run yet, or not any more
            log.debug("job %s: %s: %s", self._job, node.name, error)
            return False
        log.warning("job %s: %s is moved: %s", self._job, node.name, one.reason)
        return True
