"""Submits a job to a Ray cluster, and controls it."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
import uuid
from typing import Any

import msgspec
import ray

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import Conflict, HooksError, LaunchError, MasterAway
from dlrover_hooks.integrations.ray import cluster_state
from dlrover_hooks.integrations.ray.actor_platform import remove_job
from dlrover_hooks.integrations.ray.actors import PrimeActor
from dlrover_hooks.integrations.ray.cluster_state import NAMESPACE, actor_name, actor_options
from dlrover_hooks.job.job_handle import EXIT_CODES
from dlrover_hooks.job.prime_master import Submission
from dlrover_hooks.job.spec import JobSpec
from dlrover_hooks.job.sub_master import client_of

log = logging.getLogger("dlrover_hooks.job")

_UP_S, _POLL_S, _ENDING_S = 120.0, 2.0, 10.0


def submit(spec: JobSpec, *, address: str | None = None, plugins: tuple[p.RolePlugin, ...] = ()) -> RayJob:
    """Start a job on a Ray cluster. It continues when this process ends.

    Args:
        spec: the job.
        address: address of the cluster. None: RAY_ADDRESS; without it a new cluster, which ends with this process. Not
            used if this process is already connected to Ray.
        plugins: the plug-ins that the masters of the job import.

    Raises:
        Conflict: a job of this name runs in the cluster.
        LaunchError: the job could not be started within 120 s.
    """
    _connect(address)
    _clear_leftovers(spec)
    submission = Submission(spec, uuid.uuid4().hex, secrets.token_hex(16), plugins)
    options = actor_options(
        actor_name(spec.name, "prime"),
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4,
        scheduling_strategy=cluster_state.at_the_head(),
    )
    ray.remote(PrimeActor).options(**options).remote(msgspec.json.encode(submission))
    try:
        return RayJob(submission)
    except LaunchError:
        remove_job(spec)
        cluster_state.forget(spec.name)
        raise


def attach(job: str, *, address: str | None = None) -> RayJob:
    """The handle of a job that runs on a cluster.

    Args:
        job: its name.
        address: address of the cluster. None: that of RAY_ADDRESS, or of a cluster that runs on this machine.

    Raises:
        LaunchError: there is no such cluster, or no such job runs there.
        MasterAway: its master does not answer.
    """
    try:
        _connect(address or settings.ray_address() or "auto")
    except ConnectionError as error:
        raise LaunchError(f"no Ray cluster was found: {error}", hint="give address=, or set RAY_ADDRESS") from None
    found = cluster_state.get_address(job)
    if found is None:
        raise LaunchError(f"job {job} does not run in this cluster", hint="Check the name and the address.")
    client = client_of(found.url, found.token)
    roles: p.Roles = client.call(p.ShowRoles(job))
    client.close()
    spec = msgspec.json.decode(roles.spec, type=JobSpec)
    return RayJob(Submission(spec, found.submission, found.token))


def _connect(address: str | None) -> None:
    if not ray.is_initialized():
        ray.init(address=address or settings.ray_address() or "local", namespace=NAMESPACE, log_to_driver=True)


def _clear_leftovers(spec: JobSpec) -> None:
    """Remove what an ended job of this name has left. Raises Conflict if a job of this name runs."""
    prime, found = actor_name(spec.name, "prime"), cluster_state.get_address(spec.name)
    if found is not None and prime in cluster_state.actor_names(prime):
        raise Conflict(
            f"Job {spec.name!r} already runs in this cluster.",
            hint="Stop it first (integrations.ray.attach(NAME).stop()), or submit(job_name=ANOTHER).",
        )
    if found is None:  # a job that has just ended may still be closing its journal
        deadline = time.monotonic() + _ENDING_S
        while prime in cluster_state.actor_names(prime) and time.monotonic() < deadline:
            time.sleep(0.05)
    left = cluster_state.actor_names(actor_name(spec.name, ""))
    if left:
        log.warning("job %s: removing %d actors that an earlier job of this name has left", spec.name, len(left))
    remove_job(spec)
    cluster_state.forget(spec.name)


class RayJob:
    """A `JobHandle` of a job on Ray. `submit` and `attach` make one. One thread at a time."""

    def __init__(self, submission: Submission) -> None:
        self._submission, self._result = submission, None
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
        return found.url if found is not None else ""

    @property
    def token(self) -> str:
        """See `JobHandle`."""
        return self._submission.token

    def status(self) -> p.Roles:
        """See `JobHandle`."""
        deadline = time.monotonic() + _UP_S
        while True:
            if (roles := self._over()) is not None:
                return roles
            with contextlib.suppress(MasterAway):
                return self._call(p.ShowRoles(self.name), _POLL_S)
            if time.monotonic() > deadline:
                raise MasterAway(f"The master of job {self.name} does not answer.", hint="Check that its cluster runs.")

    def wait(self, timeout_s: float | None = None) -> int:
        """See `JobHandle`."""
        deadline, number = None if timeout_s is None else time.monotonic() + timeout_s, 0
        while (roles := self._over()) is None:
            left = _POLL_S if deadline is None else max(0.05, min(_POLL_S, deadline - time.monotonic()))
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {self.name} is not over after {timeout_s:g} s")
            with contextlib.suppress(HooksError):
                found = self._call(p.AwaitRoles(self.name, self._submission.id, number, timeout_s=left), 2 * left)
                number = found.number
            time.sleep(0.02)
        return EXIT_CODES[roles.phase or p.JobPhase.FAILED]

    def stop(self, reason: str = "a user stopped it", *, timeout_s: float = 60.0) -> int:
        """See `JobHandle`."""
        if self._over() is None:
            with contextlib.suppress(HooksError):
                self._call(p.StopRoles(self.name, self._submission.id, reason), timeout_s)
        try:
            return self.wait(timeout_s)
        except TimeoutError:
            remove_job(self._submission.spec)
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
            if time.monotonic() > deadline:
                raise LaunchError(f"job {self.name} was not up after {_UP_S:g} s", hint="see the log of its PrimeActor")
            time.sleep(0.02)
