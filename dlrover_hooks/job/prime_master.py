"""The PrimeMaster runs the job's HTTP master and one SubMaster for each role, and ends all processes with the job.

Its persistent state is the journal of the HTTP master: a PrimeMaster that is started again continues from it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import HooksError, LaunchError, MasterAway, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.child_process import Child, described
from dlrover_hooks.job.platform import MasterPlatform
from dlrover_hooks.job.plugin_events import PluginEvents
from dlrover_hooks.job.spec import JobSpec

log = logging.getLogger("dlrover_hooks.job")

_POLL_S, _AGAIN_S, _LOOK_S = 2.0, 0.2, 1.0
_PLACE_S = 1.0
"""Seconds that a cluster with room may take to reserve the resources of a job: a longer wait is reported."""
_REVIVE_S = 0.05
_FIRST_S = 60.0
"""Timeout for a request in seconds: it includes the start of the HTTP master."""
_EARLY_S, _EARLY_ENDS = 5.0, 5
"""If the HTTP master ends within `_EARLY_S` seconds, `_EARLY_ENDS` times in a row, it is not started again."""


class Submission(msgspec.Struct, frozen=True):
    """What the masters of a job need to begin. `id`: names this submission. `token`: of the HTTP master."""

    spec: JobSpec
    id: str
    token: str
    plugins: tuple[p.RolePlugin, ...] = ()

    def plugin_names(self) -> list[str]:
        """Names of the plug-ins that the submitting process could import."""
        return [one.name for one in self.plugins if one.functions]


class HttpMaster:
    """The HTTP master as a child process. Main thread only.

    The owner of this object holds the listening socket, so that it stays open while the process is started again.
    """

    def __init__(self, listener: socket.socket, journal: str, token: str, silent_s: float) -> None:
        self._listener, self._journal, self._token, self._silent_s = listener, journal, token, silent_s
        self._early_ends = 0
        self._life, self._life_end = os.pipe()
        self._child = self._start()

    def revive(self) -> None:
        """Start it again if it has ended. Raises LaunchError if it ended too often directly after its start."""
        code = self._child.exit_code()
        if code is None:
            return
        self._child.reap()
        early = time.monotonic() - self._child.started_at < _EARLY_S
        self._early_ends = self._early_ends + 1 if early else 0
        if self._early_ends >= _EARLY_ENDS:
            raise LaunchError(f"the HTTP master ended with {described(code)}", hint="see its message above")
        log.warning("the HTTP master died (%s); starting it again", described(code))
        self._child = self._start()

    def close(self) -> None:
        """Ask the process to end, and kill it after 5 s. It completes the writes that have begun."""
        os.close(self._life_end)
        self._child.wait(5.0)
        self._child.end()
        os.close(self._life)

    def _start(self) -> Child:
        fd, silent = self._listener.fileno(), str(self._silent_s)
        command = [sys.executable, "-m", "dlrover_hooks.master", "--fd", str(fd), "--journal", self._journal,
                   "--life-fd", str(self._life), "--lease", silent, "--open-lease", silent]  # fmt: skip
        env = settings.worker_environment(DLROVER_HOOKS_TOKEN=self._token)
        return Child("master", command, env=env, pass_fds=(fd, self._life), die_with_parent=True)


class PrimeMaster:
    """Runs one job. Call `run` on the main thread of its process, or on one thread of its actor.

    Args:
        submission: the job.
        client: client of the HTTP master.
        platform: starts and watches the SubMasters.
        look: called repeatedly: starts the HTTP master again if it has ended. What it raises ends `run`.
    """

    def __init__(
        self, submission: Submission, client: MasterClient, platform: MasterPlatform, look: Callable[[], None]
    ) -> None:
        self._job, self._submission = submission.spec.name, submission
        self._client, self._platform, self._look = client, platform, look
        self._plugins = PluginEvents(self._job, client.incarnation, submission.plugin_names(), self._note)
        self._watch = BackgroundThread(
            "dlrover-hooks-sub-masters", self._restarts, where=f"job {self._job}", on_error="warn", again_s=_AGAIN_S
        )

    def run(self) -> p.Roles:
        """Block until the job is over; returns its final state. Raises MasterAway, MasterError, LaunchError."""
        try:
            return self._until_over(self._started())
        except BaseException:
            self._watch.stop()  # so that no SubMaster is started again if the caller removes them
            raise

    def _until_over(self, roles: p.Roles) -> p.Roles:
        self._watch.start()
        placed, problem, began = False, "", time.monotonic()
        while roles.phase is p.JobPhase.RUNNING:
            self._look()
            if not placed:
                placed = self._platform.begin()
                missing = "" if placed else self._platform.missing()
                if missing and missing != problem and time.monotonic() > began + _PLACE_S:
                    problem = missing
                    log.warning("job %s: waiting for resources: %s", self._job, missing)
                    self._say_missing(roles, missing)
            roles = self._next(roles, _POLL_S if placed else 0.2)
            self._plugins.follow(roles)
        log.info("job %s: %s: %s", self._job, (roles.phase or p.JobPhase.STOPPED).value, roles.reason)
        roles = self._ask(p.ShowRoles(self._job))
        self._watch.stopping.set()
        self._plugins.finish(roles)
        self._platform.finish(roles)
        return roles

    def _started(self) -> p.Roles:
        spec, own = self._submission.spec, self._client.incarnation
        start = p.StartRoles(
            self._job,
            own,
            self._submission.id,
            spec.rules(),
            spec.budgets(),
            msgspec.json.encode(spec).decode(),
            takes_over=True,
            plugins=self._submission.plugins,
        )
        roles: p.Roles = self._ask(start, self._client.key("prime"))
        again = len(roles.events) > 1
        if again:
            self._ask(p.MasterRestarted(self._job, own), self._client.key("prime"))
        self._plugins.begin(roles, again=again)
        return roles

    def _ask(self, request: p.Message, key: str | None = None) -> Any:
        """Send the request until the HTTP master answers, which `look` starts again if it ended.

        Raises MasterAway after `_FIRST_S`.
        """
        deadline = time.monotonic() + _FIRST_S
        while True:
            self._look()
            try:
                return self._client.call(request, timeout_s=_LOOK_S, key=key)
            except MasterAway:
                if time.monotonic() > deadline:
                    raise

    def _next(self, roles: p.Roles, timeout_s: float) -> p.Roles:
        request = p.AwaitRoles(self._job, self._client.incarnation, roles.number, timeout_s=timeout_s)
        try:
            found: p.Roles = self._client.call(request, timeout_s=timeout_s + _LOOK_S, again=False)
        except MasterAway:
            self._watch.stopping.wait(_REVIVE_S)  # the next turn of `run` starts it again
            return roles
        return found if found.phase is not None else roles

    def _say_missing(self, roles: p.Roles, missing: str) -> None:
        for worker in roles.workers:
            if worker.state is p.WorkerState.INITIAL:
                own, key = self._client.incarnation, self._client.key("prime")
                self._ask(p.WorkerWaits(self._job, own, worker.role, worker.rank, worker.life, missing), key)

    def _note(self, event: p.Message) -> None:
        """Called on other threads than `run`, so that `run` can start the HTTP master again meanwhile."""
        try:
            self._client.call(event, channel="notes", timeout_s=_FIRST_S)
        except HooksError as error:
            log.warning("job %s: %s could not be recorded: %s", self._job, type(event).__name__, error.message)

    def _restarts(self) -> None:
        while not self._watch.stopping.is_set():
            for role in self._platform.restarted(_POLL_S):
                log.warning("job %s: the SubMaster of role %s was started again", self._job, role)
                self._note(p.MasterRestarted(self._job, self._client.incarnation, role))


def journal_of(spec: JobSpec, folder: str) -> str:
    """Path or URL of the journal of a job's HTTP master. `folder`: used if the job has no `state`; it is created.

    Raises UsageError if the folder cannot be created.
    """
    if spec.state.startswith(("etcd://", "etcds://")):
        return spec.state
    folder = spec.state.removeprefix("file://") or folder
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"job {spec.name}: the folder of its journal cannot be created: {error}",
            hint="give another one in state(), which the PrimeMaster may write",
        ) from None
    return os.path.join(folder, f"{spec.name}.journal")
