"""The SubMaster of a role starts and ends processes until they match the list of the master, and reports their ends.

It has no persistent state. When it is started again, it reads the list and finds the running processes.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
import uuid

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import MasterAway, MasterError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.job.platform import EndedWorker, WorkerPlatform
from dlrover_hooks.job.plugins import JobPlugins, PluginFailure
from dlrover_hooks.job.prime_master import Submission

log = logging.getLogger("dlrover_hooks.job")

_POLL_S, _AGAIN_S = 20.0, 0.2
_OTHERS_S = 0.5
"""After an exception in a worker of a process group, wait this long for the end of another worker that may have caused
it. Measured: gloo raises within 0.13 s at all ranks that have destroyed their groups."""
_WAIT_S = 1.0
"""Seconds between two attempts to start a process for which there is no room yet."""


def reaper(job: str, role: str) -> str:
    """The incarnation with which all SubMasters of a role report the ends of its workers to the role's rounds."""
    return f"sub-master-{job}-{role}"


def role_job(job: str, role: str) -> str:
    """The job name that the hooks in the workers of a role use for datasets, rounds and checkpoints."""
    return f"{job}.{role}"


class SubMaster:
    """Supervises the workers of one role, in a separate process or actor.

    Args:
        submission: the job.
        role: name of the role.
        url: URL of the HTTP master.
        platform: starts, kills and watches the workers of the role.
    """

    def __init__(self, submission: Submission, role: str, url: str, platform: WorkerPlatform) -> None:
        self._spec, job, token = submission.spec, submission.spec.name, submission.token
        self._job, self._role, self._trains = job, role, self._spec.role(role).trains
        self._client, self._platform = client_of(url, token), platform
        self._plugins = JobPlugins(job, submission.plugin_names(), self._plugin_failed)
        self._told: queue.SimpleQueue[p.Roles | EndedWorker | None] = queue.SimpleQueue()
        self._seen = set[tuple[int, int]]()
        """Ranks and lives that this SubMaster has started or seen running."""
        self._reaping = MasterClient(url, token, incarnation=reaper(job, role))
        """All SubMasters of a role share this incarnation, so each sends on a channel of its own."""
        self._reaped = set[str]()
        """Incarnations of processes whose ends were reported to the role's round."""
        self._waiting = dict[tuple[int, int], float]()
        """By rank and life: when its start is tried again."""
        self._more = dict[int, tuple[int, dict[str, str]]]()
        """By rank: its newest life, and the variables that plug-ins set for it."""
        where = f"job {job}, role {role}"
        self._threads = [
            BackgroundThread("dlrover-hooks-roles", self._listen, where=where, on_error="warn", again_s=_AGAIN_S),
            BackgroundThread("dlrover-hooks-ends", self._hear, where=where, on_error="warn", again_s=_AGAIN_S),
        ]

    def run(self) -> None:
        """Block until the job is over."""
        for thread in self._threads:
            thread.start()
        try:
            table = p.Roles()
            while True:
                news = self._next()
                if isinstance(news, EndedWorker):
                    self._report_all(news)
                    continue
                table = news or table
                if table.phase not in (None, p.JobPhase.RUNNING):
                    log.info("job %s, role %s: the job is over", self._job, self._role)
                    return
                self._end_former(table)
                lives = self._platform.lives()
                for worker in table.workers:
                    self._keep(worker, lives.get(worker.rank), table.avoid)
        finally:
            for thread in self._threads:
                thread.stopping.set()
            self._reaping.close()
            self._client.close()

    def _next(self) -> p.Roles | EndedWorker | None:
        """The next change of the list or end of a worker; None: it is time to try a start again."""
        timeout_s = None if not self._waiting else max(0.0, min(self._waiting.values()) - time.monotonic())
        try:
            return self._told.get(timeout=timeout_s)
        except queue.Empty:
            return None

    # ---- one worker --------------------------------------------------------------------------------------------------

    def _end_former(self, table: p.Roles) -> None:
        """Kill all processes of former lives before a new one is started: otherwise a new process could form a round
        with one that is about to be killed."""
        lives = self._platform.lives()
        for worker in table.workers:
            if 0 < lives.get(worker.rank, 0) < worker.life:
                self._platform.end(worker.rank, lives[worker.rank])
            if self._trains and worker.former and worker.state is p.WorkerState.INITIAL:
                self._exited(worker.former)

    def _keep(self, worker: p.RoleWorker, runs: int | None, avoid: tuple[str, ...]) -> None:
        """Start a worker or report its end, if its process does not match the list.

        The list may be out of date: the master refuses what no longer applies. `runs`: the life that runs now, if any.
        """
        place = (worker.rank, worker.life)
        if worker.state is p.WorkerState.DONE or (runs is not None and runs > worker.life):
            return
        if runs == worker.life:
            self._seen.add(place)
        elif worker.state is p.WorkerState.RUNNING or place in self._seen:
            if place not in self._seen:  # it ended while no SubMaster ran; otherwise `ended` reports it
                self._seen.add(place)
                self._report_all(self._platform.outcome(*place))
        elif self._waiting.get(place, 0.0) <= time.monotonic():
            self._start(worker, avoid)

    def _start(self, worker: p.RoleWorker, avoid: tuple[str, ...]) -> None:
        place = (worker.rank, worker.life)
        self._waiting = {one: at for one, at in self._waiting.items() if one[0] != worker.rank}
        try:
            missing = self._platform.start(worker, avoid, self._variables(worker))
        except Exception as error:  # the master shows it as the reason of the wait, and counts a failure if it lasts
            log.exception("job %s: %s %d could not be started", self._job, self._role, worker.rank)
            missing = f"{type(error).__name__}: {error}"
        if not missing:
            self._seen.add(place)
            if worker.reason:
                log.warning("job %s: worker %d of role %s is started again (life %d)", self._job, worker.rank,
                            self._role, worker.life)  # fmt: skip
            return
        self._waiting[place] = time.monotonic() + _WAIT_S
        if missing != worker.waits:
            self._tell(p.WorkerWaits(self._job, self._client.incarnation, self._role, *place, missing))

    def _variables(self, worker: p.RoleWorker) -> dict[str, str]:
        """Variables that plug-ins set. Each life asks them once, although its start may be tried every second."""
        if self._more.get(worker.rank, (0, {}))[0] != worker.life:
            self._more[worker.rank] = worker.life, self._plugins.environment(self._spec, self._role, worker.rank)
        return self._more[worker.rank][1]

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _report_all(self, first: EndedWorker) -> None:
        """Report an end. In a process group, wait for ends that may have caused it, and report those first."""
        ends, rest = [first], list[p.Roles | None]()
        if self._trains and first.cause is p.WorkerCause.RAISED:
            deadline = time.monotonic() + _OTHERS_S
            while (left := deadline - time.monotonic()) > 0 and all(one.cause is p.WorkerCause.RAISED for one in ends):
                with contextlib.suppress(queue.Empty):
                    news = self._told.get(timeout=left)
                    ends.append(news) if isinstance(news, EndedWorker) else rest.append(news)
        for one in sorted(ends, key=lambda one: one.cause is p.WorkerCause.RAISED):
            self._report(one)
        for news in rest:
            self._told.put(news)

    def _report(self, end: EndedWorker) -> None:
        recovers = end.cause is not None and self._trains and self._broke_round(end)
        if end.cause is not None:
            log.warning("job %s: worker %d of role %s (life %d): %s: %s", self._job, end.rank, self._role, end.life,
                        end.cause.value, end.detail.strip().partition("\n")[0])  # fmt: skip
        policy = self._plugins.policy(self._role, end) if end.cause is not None else None
        own = self._client.incarnation
        self._tell(
            p.WorkerEnded(self._job, own, self._role, end.rank, end.life, end.cause, end.detail, recovers, policy)
        )

    def _broke_round(self, end: EndedWorker) -> bool:
        """End the role's round at once. True if all its other workers can recover in their processes."""
        name, incarnation = role_job(self._job, self._role), self._incarnation_of(end)
        if incarnation:
            self._exited(incarnation)
        try:
            view: p.JobView = self._client.call(p.ShowJob(name))
        except MasterError:  # no worker of the role has joined yet
            return False
        others = [one for one in view.members if one.alive and one.incarnation != incarnation]
        return bool(others) and all(one.recovers for one in others)

    def _exited(self, incarnation: str) -> None:
        """Report to the role's round, once, that a process has ended."""
        if incarnation in self._reaped:
            return
        self._reaped.add(incarnation)
        own = reaper(self._job, self._role)
        exited = p.Exited(role_job(self._job, self._role), own, incarnation, -9, newcomer=True)
        try:
            self._reaping.call(exited, channel=self._client.incarnation)
        except MasterError as error:  # the process is not a member of a round
            log.debug("job %s, role %s: the end of %s: %s", self._job, self._role, incarnation, error.message)

    def _incarnation_of(self, end: EndedWorker) -> str:
        table: p.Roles = self._client.call(p.ShowRoles(self._job, self._role))
        found = (one for one in table.workers if (one.rank, one.life) == (end.rank, end.life))
        return next((one.incarnation for one in found), "")

    def _plugin_failed(self, failure: PluginFailure) -> None:
        self._tell(p.PluginFailed(self._job, self._client.incarnation, *failure))

    def _tell(self, event: p.Message) -> None:
        """Send until the master answers: without this report it would not replace the worker."""
        key = self._client.key("sub-master")
        while True:
            try:
                self._client.call(event, key=key)
                return
            except MasterAway as away:
                log.warning("job %s, role %s: %s", self._job, self._role, away.message)
            except MasterError as error:
                log.warning("job %s, role %s: %s", self._job, self._role, error)
                return

    # ---- the threads -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        stopping, after = self._threads[0].stopping, 0
        while not stopping.is_set():
            request = p.AwaitRoles(self._job, self._client.incarnation, after, self._role, _POLL_S)
            try:
                found: p.Roles = self._client.call(request, timeout_s=2 * _POLL_S)
            except MasterAway:
                continue
            if found.phase is not None:
                after = found.number
                self._told.put(found)

    def _hear(self) -> None:
        stopping = self._threads[1].stopping
        while not stopping.is_set():
            for end in self._platform.ended(_POLL_S):
                self._told.put(end)


def client_of(url: str, token: str) -> MasterClient:
    """A client of a job's HTTP master, with a new incarnation."""
    return MasterClient(url, token, incarnation=uuid.uuid4().hex)
