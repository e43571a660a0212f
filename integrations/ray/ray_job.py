"""Submits a job to a Ray cluster, and controls it."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
import uuid
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import Conflict, HooksError, LaunchError, MasterAway, Stale, UsageError
from dlrover_hooks.integrations.ray import cluster_state
from dlrover_hooks.integrations.ray.actor_platform import remove_job
from dlrover_hooks.integrations.ray.actors import PrimeActor
from dlrover_hooks.integrations.ray.cluster_state import actor_name, actor_options
from dlrover_hooks.job.job_handle import EXIT_CODES, STOPPED
from dlrover_hooks.job.prime_master import Submission
from dlrover_hooks.job.spec import JobSpec
from dlrover_hooks.job.sub_master import client_of

_UP_S, _POLL_S, _ENDING_S, _LAST_S = 120.0, 2.0, 10.0, 0.3


def submit(spec: JobSpec, *, address: str | None = None, plugins: tuple[p.RolePlugin, ...] = ()) -> RayJob:
    """Start a job on a Ray cluster. It continues when this process ends.

    If it raises, also KeyboardInterrupt, nothing of the job runs.

    Args:
        spec: the job.
        address: address of the cluster. None: the cluster that this process is connected to, or RAY_ADDRESS; without
            both a new cluster, which ends with this process.
        plugins: the plug-ins that the masters of the job import.

    Raises:
        Conflict: a job of this name runs in the cluster.
        LaunchError: there is no such cluster, or the job could not be started within 120 s.
        UsageError: this process is connected to another cluster than that at `address`.
    """
    _connect(address)
    prime = actor_name(spec.name, "prime")
    _await_end(spec.name, prime)
    submission = Submission(spec, uuid.uuid4().hex, secrets.token_hex(16), plugins)
    options = actor_options(
        prime,
        get_if_exists=False,  # of two submissions of a name Ray creates one
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4,
        scheduling_strategy=cluster_state.at_the_head(),
    )
    made: Any = None
    try:
        made = _created(options, submission)
        return RayJob(submission)
    except Conflict:
        raise
    except BaseException:
        _withdraw(submission, made)
        raise


def _created(options: dict[str, Any], submission: Submission) -> Any:
    try:
        return ray.remote(PrimeActor).options(**options).remote(msgspec.json.encode(submission))
    except ValueError:
        raise _conflict(submission.spec.name) from None


def _withdraw(submission: Submission, made: Any) -> None:
    """Remove a job that was not started completely. `made`: the actor of its PrimeMaster; None: not known."""
    job = submission.spec.name
    prime = actor_name(job, "prime")
    try:
        if made is None and _submission_of(prime) != submission.id:
            return
        ray.kill(made or cluster_state.actor(prime))
    except (ValueError, RayError):
        return
    for _ in range(2):  # its process may have created one more before it ended
        remove_job(job, but=prime)
        time.sleep(_LAST_S)
    found = cluster_state.get_address(job)
    if found is not None and found.submission == submission.id:
        cluster_state.delete_address(job)


def attach(job: str, *, address: str | None = None) -> RayJob:
    """The handle of a job that runs on a cluster.

    Args:
        job: its name.
        address: address of the cluster. None: the cluster that this process is connected to, that of RAY_ADDRESS, or
            one that runs on this machine.

    Raises:
        LaunchError: there is no such cluster, or no such job runs there.
        MasterAway: its master does not answer.
        UsageError: this process is connected to another cluster than that at `address`.
    """
    _connect(address, otherwise="auto")
    found = cluster_state.get_address(job)
    if found is None:
        raise LaunchError(f"job {job} does not run in this cluster", hint="Check the name and the address.")
    with contextlib.closing(client_of(found.url, found.token)) as client:
        roles: p.Roles = client.call(p.ShowRoles(job))
    spec = msgspec.json.decode(roles.spec, type=JobSpec)
    return RayJob(Submission(spec, found.submission, found.token))


def _connect(address: str | None, *, otherwise: str = "local") -> None:
    if not ray.is_initialized():
        cluster_state.connect(address or settings.ray_address() or otherwise, log_to_driver=True)
    elif address is not None and not _is_connected_to(address):
        raise UsageError(
            f"this process is connected to the Ray cluster at {ray.get_runtime_context().gcs_address}, not to the one "
            f"at {address}",
            hint="call ray.shutdown() before, or leave out address=",
        )


def _is_connected_to(address: str) -> bool:
    """Whether this may be the address of the cluster. Names that are no HOST:PORT are not compared."""
    host, _, port = address.rpartition(":")
    own_host, _, own_port = ray.get_runtime_context().gcs_address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        return True
    if port != own_port:
        return False
    try:
        found = socket.gethostbyname(host)
    except OSError:
        return False
    return found.startswith("127.") or found == socket.gethostbyname(own_host)


def _await_end(job: str, prime: str) -> None:
    """Wait for the end of a PrimeMaster of this name, if its job is over: it may still be closing its journal.

    Raises Conflict if the job is not over. `prime`: name of the actor.
    """
    try:
        actor, submission = cluster_state.actor(prime), _submission_of(prime)
    except (ValueError, RayActorError):
        return
    except GetTimeoutError:
        raise _conflict(job) from None
    if cluster_state.get_result(job, submission) is None:
        raise _conflict(job)
    deadline = time.monotonic() + _ENDING_S
    while prime in cluster_state.actor_names(prime):
        if time.monotonic() > deadline:
            ray.kill(actor)
            deadline += _ENDING_S
        time.sleep(0.05)


def _submission_of(prime: str) -> str:
    """The id of the submission that a PrimeMaster runs. `prime`: name of its actor. Raises ValueError, RayError."""
    return ray.get(cluster_state.actor(prime).submission.remote(), timeout=_ENDING_S)


def _conflict(job: str) -> Conflict:
    return Conflict(
        f"Job {job!r} already runs in this cluster.",
        hint="Stop it first (integrations.ray.attach(NAME).stop()), or submit(job_name=ANOTHER).",
    )


class RayJob:
    """A `JobHandle` of a job on Ray. `submit` and `attach` make one. One thread at a time."""

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._result: p.Roles | None = None
        self._client: MasterClient | None = None
        self._await_start()

    @property
    def name(self) -> str:
        """See `JobHandle`."""
        return self._submission.spec.name

    @property
    def url(self) -> str:
        """See `JobHandle`."""
        found = cluster_state.get_address(self.name)
        return found.url if found is not None and found.submission == self._submission.id else ""

    @property
    def token(self) -> str:
        """See `JobHandle`."""
        return self._submission.token

    def status(self) -> p.Roles:
        """See `JobHandle`. Raises Stale, too: a later job has this name, and the result of this one is not stored."""
        deadline = time.monotonic() + _UP_S
        while True:
            if (roles := self._over()) is not None:
                return roles
            with contextlib.suppress(MasterAway):
                return self._call(p.ShowRoles(self.name), _POLL_S)
            self._check_prime()
            if time.monotonic() > deadline:
                raise MasterAway(f"The master of job {self.name} does not answer.", hint="Check that its cluster runs.")

    def wait(self, timeout_s: float | None = None) -> int:
        """See `JobHandle`. Raises Stale as `status` does, and MasterAway if its PrimeMaster was removed."""
        deadline, number = None if timeout_s is None else time.monotonic() + timeout_s, 0
        while (roles := self._over()) is None:
            left = _POLL_S if deadline is None else max(0.05, min(_POLL_S, deadline - time.monotonic()))
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.name} is not over after {timeout_s:g} s")
            with contextlib.suppress(HooksError):
                found = self._call(p.AwaitRoles(self.name, self._submission.id, number, timeout_s=left), 2 * left)
                number = found.number
                continue
            self._check_prime()
            time.sleep(0.02)
        return EXIT_CODES[roles.phase or p.JobPhase.FAILED]

    def stop(self, reason: str = STOPPED, *, timeout_s: float = 60.0) -> int:
        """See `JobHandle`."""
        if self._over() is None:
            with contextlib.suppress(HooksError):
                self._call(p.StopRoles(self.name, self._submission.id, reason), timeout_s)
        try:
            return self.wait(timeout_s)
        except (TimeoutError, MasterAway):
            self._check_name()
            remove_job(self.name)
            stopped = p.Roles(phase=p.JobPhase.STOPPED, reason=f"{reason}; its masters did not answer")
            cluster_state.put_result(self.name, self._submission.id, stopped)
            return self.wait(timeout_s)

    def restart(self, role: str) -> None:
        """See `JobHandle`."""
        self._call(p.RestartRole(self.name, self._submission.id, role), _UP_S)

    def _over(self) -> p.Roles | None:
        if self._result is None:
            self._result = cluster_state.get_result(self.name, self._submission.id)
            if self._result is not None and self._client is not None:
                self._client.close()
        return self._result

    def _check_name(self) -> None:
        """Raises Stale if the PrimeMaster with the name of this job runs another submission."""
        with contextlib.suppress(ValueError, RayError):  # there is none, or it does not answer
            if _submission_of(actor_name(self.name, "prime")) != self._submission.id:
                raise Stale(f"A later job has the name {self.name!r}.")

    def _check_prime(self) -> None:
        """Raises Stale if a later submission has the name, and MasterAway if the actor of the PrimeMaster is gone."""
        found = cluster_state.get_address(self.name)
        if found is not None and found.submission != self._submission.id:
            if self._over() is None:
                raise Stale(f"A later job has the name {self.name!r}, and the result of this one is not stored.")
        elif self._has_no_prime():
            raise MasterAway(
                f"Job {self.name} is not over, but the actor of its PrimeMaster was removed.",
                hint="stop() removes what is left of the job.",
            )

    def _has_no_prime(self) -> bool:
        """Whether the job is not over, and there is no actor of its PrimeMaster, nor one that Ray starts again."""
        prime = actor_name(self.name, "prime")
        return prime not in cluster_state.actor_names(prime) and self._over() is None

    def _call(self, request: p.Message, timeout_s: float) -> Any:
        """Raises MasterAway, MasterError."""
        url = self.url
        if self._client is None or self._client.url != url:
            if not url:
                raise MasterAway(f"Job {self.name} has no master at the moment.")
            if self._client is not None:
                self._client.close()
            self._client = client_of(url, self._submission.token)
        if p.Routes.by_request[type(request)].event:
            request = msgspec.structs.replace(request, incarnation=self._client.incarnation)
        return self._client.call(request, timeout_s=timeout_s)

    def _await_start(self) -> None:
        deadline = time.monotonic() + _UP_S
        while self._over() is None:
            found = cluster_state.get_address(self.name)
            if found is not None and found.submission == self._submission.id:
                with contextlib.suppress(HooksError):
                    if self._call(p.ShowRoles(self.name), 1.0).submission == self._submission.id:
                        return
            if time.monotonic() > deadline or self._has_no_prime():
                raise LaunchError(
                    f"job {self.name} did not begin within {_UP_S:g} s, or the actor of its PrimeMaster was removed",
                    hint="see the log of the actor PrimeActor",
                )
            time.sleep(0.02)
