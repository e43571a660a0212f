"""Submits a job to this machine, and controls it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import msgspec

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.errors import Conflict, HooksError, LaunchError, MasterAway
from dlrover_hooks.host.child_process import Child, described
from dlrover_hooks.job.job_handle import EXIT_CODES, STOPPED
from dlrover_hooks.job.local.host import host_socket
from dlrover_hooks.job.local.socket_calls import CallClient
from dlrover_hooks.job.prime_master import Submission
from dlrover_hooks.job.spec import JobSpec
from dlrover_hooks.job.sub_master import client_of
from dlrover_hooks.launcher.launcher_lock import sole
from dlrover_hooks.launcher.running_jobs import listed

_UP_S, _STATUS_S = 60.0, 20.0


def submit(spec: JobSpec, *, plugins: tuple[p.RolePlugin, ...] = ()) -> LocalJob:
    """Start a job on this machine. It ends with this process. `plugins`: the plug-ins that its masters import.

    Raises:
        Conflict: a job of this name already runs on this machine.
        LaunchError: the job could not be started.
    """
    return LocalJob(spec, plugins)


@contextlib.contextmanager
def _only(job: str) -> Iterator[None]:
    """Raises Conflict if another process of this user runs a job of this name."""
    with contextlib.ExitStack() as owned:
        try:
            owned.enter_context(sole(job, ""))
        except LaunchError as error:
            pid = error.message.rpartition(" ")[2]
            raise Conflict(
                f"Job {job!r} already runs on this machine: process {pid} has submitted it.",
                hint="Stop it first, or submit(job_name=ANOTHER).",
            ) from None
        yield


class LocalJob:
    """A `JobHandle`. It owns the folder of the job and its host process, the parent of all others."""

    def __init__(self, spec: JobSpec, plugins: tuple[p.RolePlugin, ...]) -> None:
        self._spec, self._token = spec, secrets.token_hex(16)
        with contextlib.ExitStack() as owned:
            owned.enter_context(_only(spec.name))
            self._folder = os.path.join(settings.runtime_dir(), f"job-{uuid.uuid4().hex[:12]}")
            os.makedirs(self._folder, mode=0o700)
            owned.callback(shutil.rmtree, self._folder, ignore_errors=True)
            submission = Submission(spec, uuid.uuid4().hex, self._token, plugins)
            with open(os.path.join(self._folder, "job.json"), "wb") as file:
                file.write(msgspec.json.encode(submission))
            life, life_end = os.pipe()
            owned.callback(os.close, life_end)
            command = [sys.executable, "-m", "dlrover_hooks.job.local.host", self._folder, "--life-fd", str(life)]
            self._host = Child("host", command, env=_environment(), pass_fds=(life,))
            os.close(life)
            owned.callback(self._host.end)
            self._result: p.Roles | None = None
            self._url = self._await_url()
            self._client = client_of(self._url, self._token)
            owned.callback(self._client.close)
            self._await_start(submission.id)
            owned.enter_context(listed(spec.name, self._url, self._token, roles=True))
            self._owned = owned.pop_all()

    @property
    def name(self) -> str:
        """See `JobHandle`."""
        return self._spec.name

    @property
    def url(self) -> str:
        """See `JobHandle`."""
        return self._url

    @property
    def token(self) -> str:
        """See `JobHandle`."""
        return self._token

    def status(self) -> p.Roles:
        """See `JobHandle`."""
        if self._result is None and self._host.exit_code() is None:
            try:
                return self._client.call(p.ShowRoles(self.name), timeout_s=_STATUS_S)
            except MasterAway:
                if self._host.exit_code() is None:  # the PrimeMaster starts the master again
                    raise
        return self._ended()

    def wait(self, timeout_s: float | None = None) -> int:
        """See `JobHandle`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._result is None and self._host.wait(1.0 if deadline is None else _left(deadline)) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.name} is not over after {timeout_s:g} s")
        roles = self._ended()
        return EXIT_CODES[roles.phase or p.JobPhase.FAILED]

    def stop(self, reason: str = STOPPED, *, timeout_s: float = 60.0) -> int:
        """See `JobHandle`."""
        if self._result is None and self._host.exit_code() is None:
            with contextlib.suppress(HooksError):
                self._client.call(p.StopRoles(self.name, self._client.incarnation, reason), timeout_s=timeout_s)
        try:
            return self.wait(timeout_s)
        except TimeoutError:
            self._host.end()  # all others end with it
            return self.wait()

    def restart(self, role: str) -> None:
        """See `JobHandle`."""
        self._client.call(p.RestartRole(self.name, self._client.incarnation, role))

    def _ended(self) -> p.Roles:
        """The result that the PrimeMaster has written. Ends the host process and removes the folder."""
        if self._result is None:
            code = self._host.reap()
            try:
                with open(os.path.join(self._folder, "result"), "rb") as file:
                    self._result = msgspec.json.decode(file.read(), type=p.Roles)
            except OSError:
                why = f"its processes ended before it was over ({described(code)})"
                self._result = p.Roles(phase=p.JobPhase.FAILED, reason=why)
            self._owned.close()
        return self._result

    def _await_url(self) -> str:
        deadline, client = time.monotonic() + _UP_S, CallClient(host_socket(self._folder))
        while True:
            try:
                with contextlib.closing(client):
                    return str(client.call("url"))
            except OSError:
                self._check(deadline)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._host.wait(0.02)

    def _await_start(self, submission: str) -> None:
        deadline = time.monotonic() + _UP_S
        while True:
            with contextlib.suppress(HooksError):
                roles: p.Roles = self._client.call(p.ShowRoles(self.name), timeout_s=1.0)
                if roles.submission == submission:
                    return
            self._check(deadline)
            self._host.wait(0.02)

    def _check(self, deadline: float) -> None:
        if (code := self._host.exit_code()) is not None:
            raise LaunchError(f"job {self.name} could not be started ({described(code)})", hint="see the log above")
        if time.monotonic() > deadline:
            raise LaunchError(f"job {self.name} was not up after {_UP_S:g} s", hint="is this machine overloaded?")


def _left(deadline: float) -> float:
    return min(1.0, max(0.0, deadline - time.monotonic()))


def _environment() -> dict[str, str]:
    """That of all processes. They find the modules that lie beside the script that submits the job, as it does."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or getattr(sys.flags, "safe_path", False):
        return settings.worker_environment()
    before = settings.environment().get("PYTHONPATH")
    path = [os.path.dirname(os.path.abspath(file)), *([before] if before else [])]
    return settings.worker_environment(PYTHONPATH=os.pathsep.join(path))
