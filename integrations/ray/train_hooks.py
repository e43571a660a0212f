"""The hooks under Ray Train: the workers of a run get a master, so that they restore from memory after a restart.

    trainer = TorchTrainer(train, run_config=RunConfig(name="run", callbacks=[RayTrainHooks()], ...))

Or set RAY_TRAIN_CALLBACKS=dlrover_hooks.integrations.ray.RayTrainHooks and leave the code unchanged. Ray Train still
places, starts and restarts the workers. `elastic_loader`, `AsyncCheckpointer`, `ElasticCallback` and `ShardDataset` in
the workers connect to the master, and resume at the newest step in memory, on a peer or in storage.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from dlrover_hooks import config as settings
from dlrover_hooks.host.ports import listen
from dlrover_hooks.job.prime_master import HttpMaster

log = logging.getLogger("dlrover_hooks.job")

_SILENT_S = 60.0
_KEEPER_S = "300"
"""Ray Train may take minutes to restart its workers; the keeper of their node holds the checkpoint meanwhile."""


class RayTrainHooks(ControllerCallback, WorkerGroupCallback):
    """Runs a master in the process of a run's controller, and passes its address to the workers. Use one for each run.

    Args:
        job: the job name for the hooks; by default the name of the run.
        state: folder of the master's journal. The default is a temporary folder on the controller's node: a controller
            that is started again resumes from the newest checkpoint in memory or storage.
    """

    def __init__(self, *, job: str = "", state: str = "") -> None:
        self._job, self._state = job, state
        self._token = secrets.token_hex(16)
        self._http: HttpMaster | None = None
        self._listener: socket.socket | None = None
        self._url, self._temporary = "", ""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Called by Ray Train: starts the master."""
        name = self._job or train_run_context.run_config.name or train_run_context.run_id
        self._job = "".join(one if one.isalnum() or one in "-_." else "-" for one in name)
        if not self._state:
            self._temporary = tempfile.mkdtemp(prefix="dlrover-hooks-ray-train-")
        folder = self._state or self._temporary
        os.makedirs(folder, exist_ok=True)
        listener = self._listener = listen(0, ray.util.get_node_ip_address())
        self._http = HttpMaster(listener, os.path.join(folder, f"{self._job}.journal"), self._token, _SILENT_S)
        self._url = f"http://{listener.getsockname()[0]}:{listener.getsockname()[1]}"
        log.info("run %s: master at %s", self._job, self._url)

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Called by Ray Train each time it has started the workers, before the training function."""
        assert self._http is not None
        self._http.revive()
        told = {
            "DLROVER_HOOKS_MASTER": self._url,
            "DLROVER_HOOKS_TOKEN": self._token,
            "DLROVER_HOOKS_JOB": self._job,
            "DLROVER_HOOKS_KEEPER_LINGER_S": _KEEPER_S,
        }
        ray.get([worker.execute_async(_tell, told) for worker in worker_group.get_workers()], timeout=60.0)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Called by Ray Train about every second: starts the master again if it has ended."""
        del worker_group_status
        if self._http is not None:
            self._http.revive()

    async def before_controller_shutdown(self) -> None:
        """Called by Ray Train at the end of the run."""
        self._end()

    def before_controller_abort(self) -> None:
        """Called by Ray Train when the run is stopped."""
        self._end()

    def _end(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            http.close()
        if self._listener is not None:
            self._listener.close()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _tell(variables: dict[str, str]) -> None:
    """Called in a worker."""
    settings.change_environment(variables)
