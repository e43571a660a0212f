"""A process's membership in a parameter server job: it registers, sends heartbeats and listens to the master."""

from __future__ import annotations

import abc
import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.config import Config, TaskPlace
from dlrover_hooks.errors import HooksError, MasterAway, MasterError, Stale, UnknownJob, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread

BEAT_S = 1.0
"""Between two heartbeats, unless the master asks for a longer interval."""
_POLL_S = 10.0
_AGAIN_S = 0.5
"""Pause after a call that failed."""
_CLOSE_S = 2.0


class _Membership(abc.ABC):
    """Registers in the constructor; then a thread sends a heartbeat each `BEAT_S`.

    Raises:
        UsageError: there is no master.
        MasterError: it refuses the task.
    """

    def __init__(self, config: Config, place: TaskPlace, address: str = "") -> None:
        if config.master is None:
            raise UsageError(
                "a parameter server job needs a master",
                hint="dlrover-hooks run --ps 1 --workers 1 train.py, or start one (python -m dlrover_hooks.master) "
                "and set DLROVER_HOOKS_MASTER to its address for all tasks",
            )
        self.job, self.place = config.job, place
        self.incarnation = uuid.uuid4().hex
        self.where = f"{place.type.value} {place.index} of job {self.job}"
        self._ended = threading.Event()
        self._client = MasterClient(config.master, config.token, incarnation=self.incarnation)
        register = p.RegisterTask(
            job=self.job,
            incarnation=self.incarnation,
            type=place.type,
            index=place.index,
            address=address,
            task=place.id,
        )
        try:
            self._enter(register)
        except BaseException:
            self._client.close()
            raise
        self._threads = [self._thread("heartbeat", self._beat), self._thread("listener", self._listen)]

    def _enter(self, register: p.RegisterTask) -> None:
        if self.place.ps is not None:  # by TF_CONFIG: the first process that registers creates the job
            target = p.ScaleTasks(
                self.job, self.incarnation, ps=self.place.ps, workers=self.place.workers, only_first=True
            )
            self._client.call(target)
        self._client.call(register)

    @abc.abstractmethod
    def _listen(self) -> None:
        """One long-poll."""

    @abc.abstractmethod
    def _refused(self, error: MasterError) -> None:
        """The master does not know this process any more."""

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise what a thread met."""
        for thread in self._threads:
            thread.check()

    def close(self) -> None:
        """End threads and connections. Idempotent."""
        self._ended.set()
        self._client.close()
        for thread in self._threads:
            thread.stop(_CLOSE_S)

    def ask(self, request: p.Message, *, timeout_s: float | None = None) -> Any:
        """`MasterClient.call`."""
        return self._client.call(request, timeout_s=timeout_s)

    def _thread(self, name: str, turn: Callable[[], None]) -> BackgroundThread:
        def run() -> None:
            while not thread.stopping.is_set() and not self._ended.is_set():
                try:
                    turn()
                except (Stale, UnknownJob) as error:
                    self._ended.set()
                    self._refused(error)
                except MasterAway:
                    thread.stopping.wait(_AGAIN_S)

        thread = BackgroundThread(
            f"dlrover-hooks-{name}", run, where=self.where, again_s=_AGAIN_S, wake=self._ended.set
        )
        return thread

    def _beat(self) -> None:
        reply: p.Beat = self.ask(p.Heartbeat(self.job, self.incarnation, self._step()), timeout_s=_POLL_S)
        self._ended.wait(max(BEAT_S, reply.interval_s))

    def _step(self) -> int:
        return 0


class ServerMembership(_Membership):
    """Of a parameter server or a worker. `over` is set when the task is released, or the master knows it no more."""

    def __init__(self, config: Config, place: TaskPlace, address: str) -> None:
        self.over = threading.Event()
        self.reason = ""
        self._seen = 0
        super().__init__(config, place, address)

    def close(self) -> None:
        """Leave, then end threads and connections. Idempotent."""
        if not self._ended.is_set() or self.over.is_set():
            with contextlib.suppress(HooksError):
                self._client.call(p.Leave(self.job, self.incarnation, p.Departure.DONE), timeout_s=_CLOSE_S)
        super().close()

    def _listen(self) -> None:
        found: p.Tasks = self.ask(p.AwaitTasks(self.job, self.incarnation, self._seen, _POLL_S), timeout_s=2 * _POLL_S)
        if found.number == self._seen:  # no change
            return
        self._seen = found.number
        own = next((one for one in found.tasks if one.incarnation == self.incarnation), None)
        if own is None or own.status in (p.NodeStatus.RELEASED, p.NodeStatus.FAILED):
            self.reason = "it was released" if own is None else own.reason or own.status.value
            self.over.set()
            self._ended.set()

    def _refused(self, error: MasterError) -> None:
        self.reason = error.message
        self.over.set()


class ChiefMembership(_Membership):
    """Of the chief. `newest` is the last cluster version that the master announced.

    Args:
        step: the number of the current step, for heartbeats; called by a thread.
    """

    def __init__(self, config: Config, place: TaskPlace, *, step: Callable[[], int] = lambda: 0) -> None:
        self.newest = p.PSCluster()
        self.lost: HooksError | None = None
        """The master declared this chief dead."""
        self._news = threading.Condition()
        self._count = step
        super().__init__(config, place)

    def start(self) -> None:
        """Start the threads, and open the liveness connection: the chief may hold the GIL for longer than a lease."""
        super().start()
        self._client.watch(self.job, lambda notice: None, self._refused)

    def _step(self) -> int:
        return self._count()

    def _listen(self) -> None:
        found: p.PSCluster = self.ask(
            p.AwaitCluster(self.job, self.incarnation, self.newest.version, _POLL_S), timeout_s=2 * _POLL_S
        )
        if found.version > self.newest.version:
            with self._news:
                self.newest = found
                self._news.notify_all()

    def _refused(self, error: MasterError) -> None:
        with self._news:
            self.lost = error
            self._news.notify_all()

    def changed(self, version: int) -> bool:
        """True if a version newer than `version` is announced. Raises Stale if the master declared this chief dead."""
        if self.lost is not None:
            raise self.lost
        return self.newest.version > version

    def newer(self, version: int, timeout_s: float) -> p.PSCluster | None:
        """Wait for a version newer than `version`; None after `timeout_s` seconds. Raises as `changed` does."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not self.changed(version):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._news.wait(min(left_s, BEAT_S))
        return self.newest

    def connected(self, version: int, failed: str = "") -> None:
        """Acknowledge `version`. One that was withdrawn meanwhile is ignored: the next one is under way."""
        with contextlib.suppress(Stale):
            self.ask(p.Connected(self.job, self.incarnation, version, failed))

    def report(self, version: int, kind: p.NodeType, index: int, reason: str) -> None:
        """A server of `version` cannot be reached: the master has it replaced."""
        with contextlib.suppress(MasterAway):
            self.ask(p.ReportTask(self.job, self.incarnation, version, kind, index, reason[:500]))

    def finish(self) -> None:
        """The training is over: all servers are released."""
        self.ask(p.EndTasks(self.job, self.incarnation))
