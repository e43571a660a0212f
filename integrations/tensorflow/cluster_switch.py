"""The chief's changes of the cluster: it connects to each version that the master announces, and acknowledges it.

Also the guards around it: workers that complete no step are replaced, the watchdog of C, and the limit of reconnects in
one process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

import msgspec
import tensorflow as tf

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.config import Config, TaskPlace
from dlrover_hooks.errors import MasterAway, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.protocol import AGAIN
from dlrover_hooks.ps.failure_kind import FailureKind, failure_kind, named_tasks
from dlrover_hooks.ps.membership import ChiefMembership
from dlrover_hooks.ps.reachability import unreachable

log = logging.getLogger("dlrover_hooks")
_REPORT_S = 3.0
"""The master usually knows of a lost server before the chief. After so long without news the chief reports it."""
_STALLED = 0.8
"""Part of `watchdog_s` without progress, after which the workers are replaced: before the watchdog ends the chief."""
_REACH_S = 10.0
"""Limit for reaching all servers of a version."""
_CONNECTS = 3
"""Failed connects in a row, after which the training ends with the error."""


class Reconnect(msgspec.Struct, frozen=True):
    """One change of the cluster. `seconds`: from the moment the chief left the old one until its model was restored."""

    version: int
    crash: bool
    seconds: float
    step: int
    why: str


class ClusterBound(Protocol):
    """Something that belongs to one cluster version."""

    def close(self) -> None:
        """Drop it."""
        ...


AnyConnection = TypeVar("AnyConnection", bound=ClusterBound)


class Stalled(Exception):
    """No step was completed for most of `watchdog_s`: all workers are replaced, and another version is announced."""


def task_of_this_process(name: str) -> TaskPlace:
    """The task. Raises UsageError if this process has none; `name`: of the function that needs it."""
    place = settings.task()
    if place is None:
        raise UsageError(
            f"{name} needs a cluster: this process is no task of one",
            hint="dlrover-hooks run --ps 1 --workers 1 train.py, or set TF_CONFIG for each process",
        )
    return place


class ClusterSwitch:
    """The chief's place in the job. Training thread only.

    Args:
        config: of the job.
        place: of this process.
        watchdog_s: see `alive`; also the longest wait for a cluster version.
        max_reconnects: in this process; then it is replaced.
        step: the number of the current step.
    """

    def __init__(
        self, config: Config, place: TaskPlace, *, watchdog_s: float, max_reconnects: int, step: Callable[[], int]
    ) -> None:
        self._launched = place.id is not None
        self._config, self._watchdog_s, self._most, self._step = config, watchdog_s, max_reconnects, step
        self.host = place.address.rpartition(":")[0] or settings.place().host or "127.0.0.1"
        """Address of this process for the servers."""
        self.cluster = p.PSCluster()
        """The version in use; its `version` is 0 before the first one."""
        self.reconnects: list[Reconnect] = []
        self._progress_at, self._training = time.monotonic(), False
        self._stalled = 0
        """The newest version whose workers completed no step."""
        self._membership = ChiefMembership(config, place, step=step)
        self._membership.start()

    @property
    def changed(self) -> bool:
        """A newer version is announced. Raises a thread's error, and Stale if the master declared this chief dead."""
        self._membership.check()
        return self._membership.changed(self.cluster.version)

    @property
    def planned(self) -> bool:
        """The newer version is no consequence of a crash: the old servers still have the model."""
        return not self._membership.newest.crash

    @property
    def spent(self) -> bool:
        """This process must be replaced before it connects again."""
        return len(self.reconnects) >= self._most

    def run(
        self,
        make: Callable[[p.PSCluster], AnyConnection],
        train: Callable[[AnyConnection], object],
        over: Callable[[], bool],
    ) -> None:
        """Connect and `train`, on one cluster version after the other, until the training is `over`.

        Args:
            make: connects to a version and restores the model there.
            train: returns when the version has changed, or all is done. Its OpError may mean a lost server. It calls
                `alive` after each completed step, and `check` while it waits for one.
            over: all is done.

        Raises:
            MasterAway, MasterError, OpError: see `connect` and `lost`.
        """
        try:
            with self._watched():
                while not over():
                    connection = self.connect(make)
                    try:
                        self._training = True
                        train(connection)
                    except Stalled:
                        pass
                    except tf.errors.OpError as error:
                        self.lost(error)
                    finally:
                        self._training = False
                        connection.close()
                    if self.spent and not over():
                        self.start_again()
        except BaseException:
            self.close()
            raise
        self.finish()

    def connect(self, make: Callable[[p.PSCluster], AnyConnection]) -> AnyConnection:
        """Call `make`, which connects and restores, with the newest version, then acknowledge it.

        Raises:
            MasterAway: no version was announced in time.
            OpError: the third failure in a row, or an error of the user.
        """
        began, failures, first = time.monotonic(), 0, self.cluster.version == 0
        version = self.cluster.version
        while True:
            cluster = self._await(version)
            version = cluster.version
            try:
                self._reach(cluster)
                connection = make(cluster)
                break
            except tf.errors.OpError as error:
                failures += 1
                if _kind(error) is FailureKind.USER or failures == _CONNECTS:
                    raise
                log.warning("cluster version %d cannot be used: %s", version, first_line(error))
                if not self._membership.changed(version):
                    self._membership.connected(version, failed=first_line(error))
            self.alive()
        self.cluster = cluster
        self._membership.connected(version)
        seconds, step = time.monotonic() - began, self._step()
        log.info(
            "connected to cluster version %d (%d parameter servers, %d workers) at step %d in %.2f s%s",
            version, len(cluster.ps), len(cluster.workers), step, seconds, cluster.why and f": {cluster.why}",
        )  # fmt: skip
        if not first:
            self.reconnects.append(Reconnect(version, cluster.crash, seconds, step, cluster.why))
        self.alive()
        return connection

    def _await(self, version: int) -> p.PSCluster:
        deadline = time.monotonic() + self._watchdog_s
        while time.monotonic() < deadline:
            self.alive()
            if (found := self._membership.newer(version, min(1.0, self._watchdog_s))) is not None:
                return found
            self._membership.check()
        raise MasterAway(
            f"job {self._config.job}: no cluster version after {version} was announced within {self._watchdog_s:g} s",
            hint="dlrover-hooks scale --job JOB shows which tasks are missing; watchdog_s sets the limit",
        )

    def _reach(self, cluster: p.PSCluster) -> None:
        """Raises UnavailableError if a server of `cluster` cannot be reached, and no newer version is announced."""

        def wait(seconds: float) -> bool:
            self.alive()
            return self._membership.newer(cluster.version, seconds) is not None

        if problem := unreachable(cluster, min(_REACH_S, self._watchdog_s / 4), wait):
            raise tf.errors.UnavailableError(None, None, problem)

    def lost(self, error: tf.errors.OpError) -> None:
        """A server was lost: see that the master knows. Raises `error` if it is one of the user's step."""
        kind, version = _kind(error), self.cluster.version
        if kind is FailureKind.USER:
            raise error
        log.warning("a server of cluster version %d was lost at step %d: %s", version, self._step(), first_line(error))
        if self.spent:
            self.start_again()
        if self._membership.newer(version, _REPORT_S) is not None:
            return
        # The worker that met the loss of a parameter server is named, too.
        named = [index for task, index in named_tasks(str(error)) if task == kind.value]
        for index in named:
            self._membership.report(version, p.NodeType(kind.value), index, first_line(error))
        if (
            kind is FailureKind.WORKER or not named
        ):  # another version follows by itself only if a parameter server is lost
            self._membership.connected(version, failed=first_line(error))

    def start_again(self) -> None:
        """End this process, whose memory and threads TensorFlow does not give back; the launcher starts it again."""
        log.info("the chief is started again after %d reconnects (max_reconnects)", len(self.reconnects))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(AGAIN)

    def finish(self) -> None:
        """The training is over. A launcher releases the servers when this process has ended, and until then it stays
        the chief, whatever it does. Without a launcher the servers are released now.
        """
        if not self._launched:
            self._membership.finish()
            self._membership.close()

    def close(self) -> None:
        """Leave, after an error. A launched process stays a member until it has ended: its launcher sees that."""
        if not self._launched:
            self._membership.close()

    @contextlib.contextmanager
    def _watched(self) -> Generator[None]:
        """While it lasts, a thread of C ends the process (with 1, after all stacks) once `alive` was not called for
        `watchdog_s` seconds: TensorFlow can hang with the GIL held, so that no thread of Python could do it.
        """

        def look() -> None:
            while not thread.stopping.wait(min(1.0, self._watchdog_s / 20)):
                self._look_for_a_stall()

        where = f"the chief of job {self._config.job}"
        thread = BackgroundThread("dlrover-hooks-stall", look, where=where, on_error="warn", again_s=1.0)
        self.alive()
        thread.start()
        try:
            yield
        finally:
            thread.stop()
            faulthandler.cancel_dump_traceback_later()

    def alive(self) -> None:
        """There is progress: the watchdog, which ends the process, starts its `watchdog_s` again."""
        self._progress_at = time.monotonic()
        faulthandler.dump_traceback_later(self._watchdog_s, exit=True)

    def check(self) -> None:
        """Raise Stalled if the workers of the version in use are being replaced, because they completed no step."""
        if self._stalled == self.cluster.version:
            raise Stalled

    def _look_for_a_stall(self) -> None:
        """On a thread. Report all workers, and give the version up, after `_STALLED` of the watchdog's time.

        A step of a worker can hang for reasons of its own, such as a file system that does not answer. That worker
        still sends heartbeats, and a new chief would wait for it, too.
        """
        cluster, stalled_s = self.cluster, time.monotonic() - self._progress_at
        if not self._training or self._stalled == cluster.version or stalled_s < self._watchdog_s * _STALLED:
            return
        why = f"no step was completed for {stalled_s:.0f} s"
        log.warning("%s at step %d: the workers are replaced", why, self._step())
        for index in range(len(cluster.workers)):
            self._membership.report(cluster.version, p.NodeType.WORKER, index, why)
        self._membership.connected(cluster.version, failed=why)
        self._stalled = cluster.version


def _kind(error: tf.errors.OpError) -> FailureKind:
    return failure_kind(type(error).__name__, str(error))


def first_line(error: tf.errors.OpError) -> str:
    """The message, shortened for a log."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
