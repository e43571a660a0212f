"""The three kinds of actors of a job. Their constructors must not raise: Ray does not restart an actor whose
constructor raised."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError

from dlrover_hooks.errors import BadRequest, CallFailed, HooksError, LaunchError, MasterError, Stale, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.ports import listen
from dlrover_hooks.integrations.ray import cluster_state
from dlrover_hooks.integrations.ray.actor_platform import RayMasters, RayWorkers, remove_job
from dlrover_hooks.integrations.ray.cluster_state import JobMaster, actor_name
from dlrover_hooks.job.call_messages import answered
from dlrover_hooks.job.prime_master import HttpMaster, PrimeMaster, Submission, journal_of
from dlrover_hooks.job.sub_master import SubMaster, client_of
from dlrover_hooks.job.worker_process import Outcome, ResolvedCalls, Worker, WorkerPlace
from dlrover_hooks.protocol import JobPhase, Roles, WorkerCause

log = logging.getLogger("dlrover_hooks.job")

_AGAIN_S, _ADDRESS_S = 0.5, 60.0
_REFUSALS = 2
"""If the settings of a job are refused so many times, or its HTTP master cannot be started, the job has failed."""


class PrimeActor:
    """Serves the HTTP master and runs the PrimeMaster. Ray starts it again when its process ends."""

    def __init__(self, submission: bytes) -> None:
        _log()
        self._submission, self._refusals = msgspec.json.decode(submission, type=Submission), 0
        self._thread = BackgroundThread("dlrover-hooks-prime", self._run, where=self._submission.spec.name)
        self._thread.start()

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def submission(self) -> str:
        """The id of the submission that this actor runs."""
        return self._submission.id

    def _run(self) -> None:
        job = self._submission.spec.name
        while True:
            try:
                if cluster_state.get_result(job, self._submission.id) is not None:
                    break
                self._attempt()
            except Stale as error:
                log.error("job %s: the PrimeMaster ends: %s", job, error.message)
                os._exit(1)  # a later submission has this name
            except Exception:
                log.exception("job %s: the PrimeMaster failed; it tries again", job)
                time.sleep(_AGAIN_S)
        shutil.rmtree(_journals(job), ignore_errors=True)
        cluster_state.kill(actor_name(job, "prime"))

    def _attempt(self) -> None:
        """Run the job until it is over, or has failed because its settings were refused before it began."""
        job, own = self._submission.spec.name, self._submission.id
        try:
            self._serve()
        except (LaunchError, UsageError, BadRequest) as error:
            self._refusals += 1
            address = cluster_state.get_address(job)
            if self._refusals < _REFUSALS or (address is not None and address.submission == own):
                raise
            remove_job(job, but=actor_name(job, "prime"))
            failed = Roles(phase=JobPhase.FAILED, reason=f"its PrimeMaster cannot run: {error}")
            cluster_state.put_result(job, own, failed)

    def _serve(self) -> None:
        submission, job = self._submission, self._submission.spec.name
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        before = cluster_state.get_address(job)
        if before is None or before.submission != submission.id:
            _remove_leftovers(job)
            before = None
        listener = _listener(job, host, before if before is not None and before.node == node else None)
        url = f"http://{host}:{listener.getsockname()[1]}"
        folder = os.path.join(_journals(job), submission.id)
        http = HttpMaster(listener, journal_of(submission.spec, folder), submission.token, submission.spec.silent_s)
        client = client_of(url, submission.token)
        masters = RayMasters(submission, SubMasterActor, JobMaster(url, submission.token, submission.id, node))
        try:
            PrimeMaster(submission, client, masters, http.revive).run()
        finally:
            client.close()
            http.close()
            listener.close()


def _journals(job: str) -> str:
    """The folder for journals of a job of this cluster, on this machine."""
    cluster = ray.get_runtime_context().gcs_address.replace(":", "-")
    return os.path.join(tempfile.gettempdir(), f"dlrover-hooks-ray-{os.getuid()}", f"{cluster}-{job}")


def _remove_leftovers(job: str) -> None:
    """Remove what an earlier job of this name has left in the cluster, and its journal if that is on this machine."""
    left = remove_job(job, but=actor_name(job, "prime"))
    if left:
        log.warning("job %s: removed %d actors that an earlier job of this name has left", job, len(left))
    cluster_state.delete_address(job)
    shutil.rmtree(_journals(job), ignore_errors=True)


def _listener(job: str, host: str, before: JobMaster | None) -> socket.socket:
    """A listening socket. `before`: the former master, if it was on this node. Its port lets clients reconnect."""
    if before is not None:
        try:
            return listen(int(before.url.rpartition(":")[2]), host)
        except HooksError as error:
            log.warning("job %s: %s", job, error.message)
    return listen(0, host)


class SubMasterActor:
    """Runs the SubMaster of a role. Ray starts it again when its process ends."""

    def __init__(self, submission: bytes, role: str) -> None:
        _log()
        self._submission, self._role = msgspec.json.decode(submission, type=Submission), role
        self._over = threading.Event()
        self._thread = BackgroundThread("dlrover-hooks-sub-master", self._run, where=f"role {role}")
        self._thread.start()

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def hold(self) -> None:
        """Returns when the job is over. If the call fails, the PrimeMaster knows that this process has ended."""
        self._over.wait()

    def _run(self) -> None:
        spec = self._submission.spec
        while not self._over.is_set():
            try:
                address = _address(spec.name)
                platform = RayWorkers(self._submission, self._role, WorkerActor)
                SubMaster(self._submission, self._role, address.url, platform).run()
                self._over.set()
            except Exception:
                log.exception("job %s, role %s: the SubMaster failed; it tries again", spec.name, self._role)
                time.sleep(_AGAIN_S)


class WorkerActor:
    """One life of a worker. A restarted SubMaster calls `run` again."""

    def __init__(self, job: str, role: str, rank: int, life: int) -> None:
        _log()
        self._job, self._role, self._rank, self._life = job, role, rank, life
        self._outcome = Outcome(WorkerCause.KILLED, "it has not run")
        self._ended, self._starting = threading.Event(), threading.Lock()
        self._thread: BackgroundThread | None = None
        self._worker: Worker | None = None

    @ray.method(concurrency_group="run")
    def run(self) -> bytes:
        """Run the function of the role unless it was started, wait for its end, and return the `Outcome` as JSON."""
        with self._starting:
            if self._thread is None:
                self._thread = BackgroundThread("dlrover-hooks-worker", self._run, where=f"role {self._role}")
                self._thread.start()
        self._ended.wait()
        return msgspec.json.encode(self._outcome)

    @ray.method(concurrency_group="calls")
    def call(self, data: bytes, within_s: float) -> bytes:
        """Run the request `data` of a caller that still waits for `within_s` seconds, and return its answer.

        Both are bytes of `call_messages`, which Ray does not pickle.
        """
        return answered(self._answer, data, within_s)

    def _answer(self, function: str, arguments: list[Any], within_s: float) -> Any:
        worker = self._worker
        if worker is None or worker.context is None:
            raise CallFailed(f"worker {self._rank} of role {self._role} does not run yet")
        return worker.context.answer(function, arguments, within_s)

    def __repr__(self) -> str:
        """Ray writes it before each line of its output."""
        return f"{self._role} {self._rank}"

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def _run(self) -> None:
        try:
            self._outcome = self._lived()
        except MasterError as error:
            self._outcome = Outcome(WorkerCause.KILLED, f"the master refused it: {error}")
        except BaseException as error:
            log.exception("job %s: %s %d failed", self._job, self._role, self._rank)
            self._outcome = Outcome(WorkerCause.RAISED, f"{type(error).__name__}: {error}")
        self._ended.set()

    def _lived(self) -> Outcome:
        address, context = _address(self._job), ray.get_runtime_context()
        place = WorkerPlace(
            self._job, self._role, self._rank, self._life, address.url, address.token, context.get_node_id()[:12],
            ray.util.get_node_ip_address(),
        )  # fmt: skip
        self._worker = worker = Worker(place, os._exit)
        client = client_of(address.url, address.token)
        transport = ResolvedCalls(self._job, client, _send, driver=worker.is_driver)
        worker.register(actor_name(self._job, "worker", self._role, self._rank, self._life), transport)
        outcome = worker.run()
        worker.leave()
        return outcome


def _send(address: str, data: bytes, timeout_s: float) -> bytes:
    """Send a request to a worker's actor and return its answer.

    Raises OSError (the actor has ended, or its node with the answer is lost), TimeoutError, and CallFailed.
    """
    sent = None
    try:
        sent = cluster_state.actor(address).call.remote(data, timeout_s)
        return ray.get(sent, timeout=timeout_s)
    except GetTimeoutError:
        ray.cancel(sent)  # if it has not begun: its caller is gone
        raise TimeoutError from None
    except (RayActorError, ObjectLostError, ValueError) as error:
        raise OSError(f"{address} is gone: {type(error).__name__}") from None
    except RayError as error:
        raise CallFailed(f"Ray cannot carry out the call: {type(error).__name__}: {error}") from None


def _address(job: str) -> JobMaster:
    deadline = time.monotonic() + _ADDRESS_S
    while (found := cluster_state.get_address(job)) is None:
        if time.monotonic() > deadline:
            raise HooksError(f"job {job} has no master in this cluster")
        time.sleep(0.1)
    return found


def _log() -> None:
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
