"""Parameter server training with a loop of the library's own: it survives lost servers, and the cluster may change.

    PSTrainer(build, samples=len(data), shard_size=256, epochs=3, save_to="saved").run()

The chief runs this. A planned change of the cluster: what is scheduled is completed and saved, the chief connects to
the new servers, restores and acknowledges; then the master releases the old ones. A lost parameter server: the chief
waits for the version with its replacement, and restores the newest checkpoint. A lost worker: TensorFlow's coordinator
gives its step to another one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import tensorflow as tf

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.config import Config
from dlrover_hooks.errors import UsageError
from dlrover_hooks.integrations.tensorflow import _private_api as private
from dlrover_hooks.integrations.tensorflow.checkpoints import VERSION, PSCheckpoints, PSCheckpointState
from dlrover_hooks.integrations.tensorflow.cluster_connection import Build, ClusterConnection, PSProgram
from dlrover_hooks.integrations.tensorflow.cluster_switch import ClusterSwitch, Reconnect, task_of_this_process
from dlrover_hooks.integrations.tensorflow.server import serve_and_exit
from dlrover_hooks.ps.shard_order import Shard, ShardOrder

log = logging.getLogger("dlrover_hooks")
SAVE_EVERY = "30s"
_LOOK_S = 0.05
"""Interval at which the chief looks for news while it waits for a step."""


class PSReport(msgspec.Struct, frozen=True):
    """How a training went. `applied`: optimizer steps; more than `steps` if a worker was lost in the middle of one."""

    steps: int
    applied: int
    reconnects: tuple[Reconnect, ...] = ()


class PSTrainer:
    """Trains on the cluster that the master announces. One per process.

    Args:
        build: `build(strategy) -> PSProgram`. Called once per cluster version, in the strategy's scope: it makes all
            variables again, and their values are restored afterwards.
        samples: number of samples in an epoch.
        shard_size: samples of a step.
        epochs: passes over the data.
        save_to: folder or URL for checkpoints that the chief and all servers reach under this name.
        save_every: steps, or a duration such as `"30s"`. Each save waits until the scheduled steps are completed.
        keep: the newest so many checkpoints stay.
        shuffle, seed: another order of the shards in each epoch.
        partitioner: cuts large variables into parts, one on each server. Not with Keras 3.
        inflight: steps that are scheduled ahead.
        on_result: called with the number of a step and its result (NumPy), in order, on the training thread. It costs
            a request to the worker for each step.
        on_end: called with the program when all is trained and saved, before the servers end: to export the model. It
            is called again if a server or the chief is lost meanwhile, or if a training that is over is started again.
        watchdog_s: longer than any step, `on_result` and `on_end`. If no step is completed for 80 % of it, all workers
            are replaced, and the training returns to the newest checkpoint. After all of it without progress, the
            process writes its stacks and ends with 1, and the launcher starts it again. It also limits the wait for a
            new cluster version.
        max_reconnects: TensorFlow keeps about 40 MB and 90 threads for each cluster that it has been connected to.
            After so many reconnects the chief saves and is started again.
        resume: `"auto"` or `"never"`.
        job, master, token: as in `dlrover_hooks.config.Config`.

    Raises:
        UsageError: settings that cannot work.
    """

    def __init__(
        self,
        build: Build,
        *,
        samples: int,
        shard_size: int,
        save_to: str,
        epochs: int = 1,
        save_every: int | str = SAVE_EVERY,
        keep: int = 2,
        shuffle: bool = True,
        seed: int = 0,
        partitioner: tf.distribute.experimental.partitioners.Partitioner | None = None,
        inflight: int = 16,
        on_result: Callable[[int, Any], object] | None = None,
        on_end: Callable[[PSProgram], object] | None = None,
        watchdog_s: float = 120.0,
        max_reconnects: int = 10,
        resume: str = "auto",
        job: str | None = None,
        master: str | None = None,
        token: str | None = None,
    ) -> None:
        if resume not in ("auto", "never"):
            raise UsageError(f"resume={resume!r}", hint="give 'auto' or 'never'")
        self.config: Config = settings.load(
            save_to=save_to, save_every=save_every, resume=resume, job=job, master=master, token=token
        )
        self._build, self._partitioner = build, partitioner
        self._on_result, self._on_end = on_result, on_end
        self._inflight, self._watchdog_s, self._max_reconnects = inflight, watchdog_s, max_reconnects
        self._order = ShardOrder(samples, shard_size, epochs, shuffle=shuffle, seed=seed)
        self._saved = PSCheckpoints(save_to, keep)
        self._cadence = SaveCadence(self.config.save_every)
        self._pending: deque[tuple[Shard, Any]] = deque()
        self._switch: ClusterSwitch | None = None
        self._applied, self._exported = 0, on_end is None
        self.step = 0
        """Steps whose results were received, over all restarts."""

    @property
    def cluster(self) -> p.PSCluster:
        """The cluster version in use; its `version` is 0 before the first one."""
        return self._switch.cluster if self._switch is not None else p.PSCluster()

    def run(self) -> PSReport:
        """Train until all shards are in the model. In a process that TF_CONFIG makes a server: serve, then exit.

        Raises:
            UsageError: no task, no master, or a program that cannot work.
            MasterError: the master refuses this process, for example because another chief is alive.
            MasterAway: no cluster was announced in time.
            OpError: an error of the user's step.
        """
        place = task_of_this_process("PSTrainer")
        if place.type is not p.NodeType.CHIEF:
            serve_and_exit(self.config, place)
        self._load()
        switch = self._switch = ClusterSwitch(
            self.config,
            place,
            watchdog_s=self._watchdog_s,
            max_reconnects=self._max_reconnects,
            step=lambda: self.step,
        )
        switch.run(
            lambda cluster: self._connected(cluster, switch.host),
            lambda connection: self._train(switch, connection),
            lambda: self._over,
        )
        return PSReport(self._order.committed, self._applied, tuple(switch.reconnects))

    @property
    def _over(self) -> bool:
        return self._order.committed == self._order.total and self._exported

    # ---- the steps on one cluster -----------------------------------------------------------------------------------

    def _train(self, switch: ClusterSwitch, connection: ClusterConnection) -> None:
        """Returns when all is trained and saved, or the cluster has changed. Raises OpError."""
        while not switch.changed:
            while len(self._pending) < self._inflight and (shard := self._order.take()) is not None:
                self._pending.append((shard, connection.schedule(shard.begin, shard.end)))
            if not self._pending:
                break
            self._receive(switch, connection)
            if self._cadence.due(self.step):
                self._save(switch, connection)
        if not switch.changed or switch.planned:
            self._save(switch, connection)
        if self._order.committed == self._order.total and self._on_end is not None:
            self._on_end(connection.program)
            self._exported = True

    def _receive(self, switch: ClusterSwitch, connection: ClusterConnection) -> None:
        """Wait a moment for the oldest step; count those that are complete."""
        ready = private.wait_ready(self._pending[0][1], _LOOK_S)
        connection.check()
        while self._pending and private.wait_ready(self._pending[0][1], 0.0):
            shard, value = self._pending.popleft()
            self.step = shard.number + 1
            if self._on_result is not None:
                self._on_result(self.step, value.fetch())
        if ready:
            switch.alive()
        else:
            switch.check()

    def _save(self, switch: ClusterSwitch, connection: ClusterConnection) -> None:
        """Complete what is scheduled, then save. Does nothing if the newest checkpoint has it all."""
        while self._pending:
            self._receive(switch, connection)
        if self._order.next == self._order.committed:
            return
        state = PSCheckpointState(VERSION, self.config.job, self._order.next, self._order.state_dict(), tf.__version__)
        self._saved.write(connection.checkpoint, state)
        self._order.commit()
        self._cadence.saved(self.step)
        self._applied = int(connection.counter.numpy())
        switch.alive()

    # ---- restore ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """The place in the data from the newest checkpoint."""
        if self.config.resume == "never" or (newest := self._saved.newest()) is None:
            return
        _, state = newest
        self._order.load_state_dict(state.data)
        self.step = self._applied = state.steps
        over = ": the training is over" if self._order.committed == self._order.total else ""
        log.info("job %s: resumed behind step %d from %s%s", self.config.job, self.step, self._saved.save_to, over)

    def _connected(self, cluster: p.PSCluster, host: str) -> ClusterConnection:
        """The program on this cluster, with the values of the newest checkpoint."""
        self._pending.clear()
        connection = ClusterConnection(cluster, host, self._build, self._partitioner)
        try:
            if self._order.committed:
                newest = self._saved.newest()
                assert newest is not None
                self._saved.restore(connection.checkpoint, newest[0])
            self._order.rollback()
            self.step, self._applied = self._order.next, int(connection.counter.numpy())
        except BaseException:
            connection.close()
            raise
        self._cadence.saved(self.step)
        return connection


class SaveCadence:
    """When a save is due: after so many steps, or seconds."""

    def __init__(self, every: int | str) -> None:
        self._steps = every if isinstance(every, int) else 0
        self._seconds = 0.0 if isinstance(every, int) else 30.0 if every == "auto" else float(every.removesuffix("s"))
        self._step, self._at = 0, time.monotonic()

    def due(self, step: int) -> bool:
        """A save is due behind `step`."""
        if self._steps:
            return step - self._step >= self._steps
        return time.monotonic() - self._at >= self._seconds

    def saved(self, step: int) -> None:
        """A checkpoint has `step`."""
        self._step, self._at = step, time.monotonic()
