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
import traceback
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from dlrover_hooks.errors import CallFailed, HooksError, MasterError, Stale
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.host.ports import listen
from dlrover_hooks.integrations.ray import cluster_state
from dlrover_hooks.integrations.ray.actor_platform import RayMasters, RayWorkers
from dlrover_hooks.integrations.ray.cluster_state import JobMaster, actor_name
from dlrover_hooks.job.prime_master import HttpMaster, PrimeMaster, Submission, journal_of
from dlrover_hooks.job.sub_master import SubMaster, client_of
from dlrover_hooks.job.worker_context import CALL_S
from dlrover_hooks.job.worker_process import Outcome, ResolvedCalls, Worker, WorkerPlace
from dlrover_hooks.protocol import WorkerCause

log = logging.getLogger("dlrover_hooks.job")

_AGAIN_S, _ADDRESS_S, _EXPORT_S = 0.5, 60.0, CALL_S


class PrimeActor:
    """Serves the HTTP master and runs the PrimeMaster. Ray starts it again when its process ends."""

    def __init__(self, submission: bytes) -> None:
        _log()
        self._submission = msgspec.json.decode(submission, type=Submission)
        self._thread = BackgroundThread("dlrover-hooks-prime", self._run, where=self._submission.spec.name)
        self._thread.start()

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def _run(self) -> None:
        while True:
            try:
                self._serve()
                break
            except Stale as error:
                log.error("job %s: the PrimeMaster ends: %s", self._submission.spec.name, error.message)
                os._exit(1)  # a later submission has this name
            except Exception:
                log.exception("job %s: the PrimeMaster failed; it tries again", self._submission.spec.name)
                time.sleep(_AGAIN_S)
        cluster_state.kill(actor_name(self._submission.spec.name, "prime"))

    def _serve(self) -> None:
        submission, job = self._submission, self._submission.spec.name
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        listener = _listener(job, node, host)
        url = f"http://{host}:{listener.getsockname()[1]}"
        folder = os.path.join(tempfile.gettempdir(), f"dlrover-hooks-ray-{os.getuid()}", submission.id)
        http = HttpMaster(listener, journal_of(submission.spec, folder), submission.token, submission.spec.silent_s)
        client = client_of(url, submission.token)
        try:
            cluster_state.put_address(job, JobMaster(url, submission.token, submission.id, node))
            PrimeMaster(submission, client, RayMasters(submission, SubMasterActor), http.revive).run()
        finally:
            client.close()
            http.close()
            listener.close()
        shutil.rmtree(folder, ignore_errors=True)  # the job is over


def _listener(job: str, node: str, host: str) -> socket.socket:
    """A listening socket. If the former PrimeMaster was on this node, on its port, so that its clients reconnect."""
    before = cluster_state.get_address(job)
    if before is not None and before.node == node:
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
    def call(self, function: str, arguments: list[Any]) -> tuple[bool, Any]:
        """Call an exported function and return (True, its result), or (False, text of the exception)."""
        worker = self._worker
        if worker is None or worker.context is None:
            return False, f"worker {self._rank} of role {self._role} does not run yet"
        try:
            return True, worker.context.answer(function, arguments, _EXPORT_S)
        except HooksError as error:
            return False, f"{type(error).__name__}: {error}"
        except Exception as error:
            return False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

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
        transport = ResolvedCalls(self._job, client_of(address.url, address.token), _send)
        worker.register(actor_name(self._job, "worker", self._role, self._rank, self._life), transport)
        outcome = worker.run()
        worker.leave()
        return outcome


def _send(address: str, function: str, arguments: list[Any], timeout_s: float) -> Any:
    """Call a worker's actor. Raises OSError (it has ended), TimeoutError, and CallFailed (the function raised)."""
    try:
        done, value = ray.get(cluster_state.actor(address).call.remote(function, arguments), timeout=timeout_s)
    except GetTimeoutError:
        raise TimeoutError from None
    except (RayActorError, ValueError) as error:
        raise OSError(f"{address} is gone: {type(error).__name__}") from None
    if not done:
        raise CallFailed(value)
    return value


def _address(job: str) -> JobMaster:
    deadline = time.monotonic() + _ADDRESS_S
    while (found := cluster_state.get_address(job)) is None:
        if time.monotonic() > deadline:
            raise HooksError(f"job {job} has no master in this cluster")
        time.sleep(0.1)
    return found


def _log() -> None:
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
