"""The process of a worker: it registers, sends heartbeats, joins its role's round, and runs the function of the role.

This is the same on every platform. The platform provides the transport for calls and passes the outcome to the
SubMaster.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover_hooks import config as settings, protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import CallFailed, HooksError, JobFinished, MasterAway, MasterError, UsageError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.job import entry_point
from dlrover_hooks.job.call_messages import request, result_of
from dlrover_hooks.job.spec import JobSpec, printable
from dlrover_hooks.job.sub_master import reaper, role_job
from dlrover_hooks.job.worker_context import CallTransport, WorkerContext, enter
from dlrover_hooks.protocol import AGAIN, REQUEUE
from dlrover_hooks.worker.round_join import join_request, seat_environment, take_seat

log = logging.getLogger("dlrover_hooks.job")

_BEAT_S = 2.0
_AWAY_S = 120.0
"""A worker ends if the master has not answered for this many seconds."""
_LOOK_S = 0.1
_KEEPER_S = "60"
"""How many seconds a keeper of checkpoints waits for the next process of its worker."""


class WorkerPlace(msgspec.Struct, frozen=True):
    """Which worker a process runs, and the URL and token of its master. `node`, `host`: name and address of its
    machine."""

    job: str
    role: str
    rank: int
    life: int
    master: str
    token: str
    node: str
    host: str = "127.0.0.1"


class Outcome(msgspec.Struct, frozen=True):
    """How the function of a worker ended. `cause` None: the function returned."""

    cause: p.WorkerCause | None = None
    detail: str = ""


class Worker:
    """Call `register`, then `run`, then `leave`. The constructor raises MasterAway and MasterError.

    Args:
        place: which worker this process runs.
        ended: called on any thread, with an exit code, when this process must end at once: another process has its
            rank, the job is over, or no master has answered for 120 s.
    """

    def __init__(self, place: WorkerPlace, ended: Callable[[int], None]) -> None:
        self.place, self.over = place, threading.Event()
        self._ended = ended
        self._client = MasterClient(place.master, place.token, incarnation=uuid.uuid4().hex)
        self._beats = BackgroundThread(
            "dlrover-hooks-beats", self._beat, where=f"job {place.job}, {place.role} {place.rank}", on_error="warn",
            again_s=_BEAT_S,
        )  # fmt: skip
        roles: p.Roles = self._client.call(p.ShowRoles(place.job), timeout_s=_AWAY_S)
        self._spec = msgspec.json.decode(roles.spec, type=JobSpec)
        self._role = self._spec.role(place.role)
        self.context: WorkerContext | None = None
        self._first = True
        """This rank had no earlier life since the job was submitted."""

    @property
    def is_driver(self) -> bool:
        """Whether the job waits for this worker's role."""
        return self._role.driver

    def register(self, address: str, transport: CallTransport) -> WorkerContext:
        """Register this process with the master, and begin to send heartbeats.

        Args:
            address: address at which this process serves calls.
            transport: sends calls to other workers.

        Raises:
            MasterError: `Stale` if another process has this rank, or the job is over.
            MasterAway: the master did not answer.
        """
        place = self.place
        sizes = {one.name: one.workers for one in self._spec.roles}
        self.context = WorkerContext(
            place.job, place.role, place.rank, place.life, sizes=sizes, config=self._spec.config,
            transport=transport, over=self.over,
        )  # fmt: skip
        event = p.RegisterWorker(
            place.job, self._client.incarnation, place.role, place.rank, place.life, place.node, os.getpid(), address
        )
        registered: p.RoleWorker = self._client.call(event, timeout_s=_AWAY_S)
        self._first = self.context.first = not registered.reason
        self._beats.start()
        self._client.watch(place.job, self._noticed, self._refused)
        return self.context

    def run(self) -> Outcome:
        """Run the function of the role on this thread, and return how it ended. Does not raise what it raises."""
        assert self.context is not None
        enter(self.context)
        settings.change_environment(self._environment())
        try:
            if self._role.trains:
                settings.change_environment(self._seat())
            function = entry_point.load(self._role.entry, self._role.name)
            function()
        except JobFinished as over:
            log.info("%s", over.message)
        except SystemExit as end:
            if end.code == REQUEUE:
                return Outcome(p.WorkerCause.PREEMPTED, "it has saved and left")
            if end.code not in (None, 0):
                return Outcome(p.WorkerCause.RAISED, f"exit code {end.code}")
        except UsageError as error:
            if error.__cause__ is not None:
                sys.stderr.write(_trace(error.__cause__))
            log.error("%s", error)
            return Outcome(p.WorkerCause.WRONG_SETTING, " ".join(printable(str(error)).split()))
        except BaseException as error:
            trace = _trace(error)
            sys.stderr.write(trace)
            return Outcome(p.WorkerCause.RAISED, f"{_headline(error)}\n{trace}")
        return Outcome()

    def leave(self) -> None:
        """Stop the heartbeats and tell the master, so that it does not declare this process dead while it ends."""
        self._beats.stopping.set()
        with contextlib.suppress(HooksError):
            left = p.Leave(self.place.job, self._client.incarnation, p.Departure.STOPPED)
            self._client.call(left, timeout_s=_BEAT_S)
        self._client.close()

    # ---- the environment of the hooks --------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        place, role = self.place, self._role
        return self._spec.env | role.env | {
            "DLROVER_HOOKS_MASTER": place.master,
            "DLROVER_HOOKS_TOKEN": place.token,
            "DLROVER_HOOKS_JOB": role_job(place.job, place.role),
            "DLROVER_HOOKS_NODE": f"{place.node}-{place.role}-{place.rank}",
            "DLROVER_HOOKS_HOST": place.host,
            "DLROVER_HOOKS_KEEPER_LINGER_S": _KEEPER_S,
        }  # fmt: skip

    def _seat(self) -> dict[str, str]:
        """Join the role's round, wait for the other workers, and return the variables of the process group.

        torch is imported first, because the others wait for this worker once it has joined. The module of the role is
        imported only afterwards, because it may read RANK. Raises JobFinished, MasterAway, MasterError.
        """
        if importlib.util.find_spec("torch") is not None:
            importlib.import_module("torch")
        own, role = self._client.incarnation, self._role
        # Also those of torchrun: without TORCHELASTIC_RUN_ID Lightning picks an environment that keeps its first rank.
        settings.change_environment(
            {
                "DLROVER_HOOKS_INCARNATION": own,
                "DLROVER_HOOKS_LAUNCHER": reaper(self.place.job, role.name),
                "DLROVER_HOOKS_MIN_WORKERS": str(role.min_workers or role.workers),
                "DLROVER_HOOKS_MAX_WORKERS": str(role.workers),
                "LOCAL_RANK": str(self.place.rank % role.per_group),
                "LOCAL_WORLD_SIZE": "1",
                "TORCHELASTIC_RUN_ID": role_job(self.place.job, role.name),
                "TORCHELASTIC_MAX_RESTARTS": str(role.worker_restarts),
                "TORCHELASTIC_RESTART_COUNT": str(self.place.life - 1),
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            }
        )
        config, place = settings.load(), settings.place()
        join = msgspec.structs.replace(join_request(config, place, own), again=self._first)
        seated = take_seat(self._client, join, away_s=_AWAY_S, channel="boot", look=self._look)
        return seat_environment(seated, incarnation=own, local_rank=place.local_rank, local_world_size=1)

    def _look(self) -> None:
        if self.over.is_set():
            raise JobFinished(f"job {self.place.job} is over")

    # ---- heartbeats --------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        request, heard = p.Heartbeat(self.place.job, self._client.incarnation), time.monotonic()
        while not self._beats.stopping.is_set():  # the first heartbeat begins the lease, so it is sent at once
            try:
                self._client.call(request, timeout_s=_BEAT_S)
                heard = time.monotonic()
            except MasterAway:
                if time.monotonic() > heard + _AWAY_S:
                    self._end(AGAIN, f"no master has answered for {_AWAY_S:g} s")
            except MasterError as error:
                self._refused(error)
                return
            self._beats.stopping.wait(_BEAT_S)

    def _noticed(self, notice: p.Notice) -> None:
        if notice.finished:
            self.over.set()

    def _refused(self, error: MasterError) -> None:
        self._end(AGAIN, str(error))

    def _end(self, code: int, why: str) -> None:
        if not self._beats.stopping.is_set():
            log.error("job %s: %s %d (life %d) ends: %s", self.place.job, self.place.role, self.place.rank,
                      self.place.life, why)  # fmt: skip
            self._ended(code)


def _headline(error: BaseException) -> str:
    """Type of the exception and first line of its message."""
    lines = printable("".join(traceback.format_exception_only(error))).strip().splitlines()
    return lines[-1] if isinstance(error, SyntaxError) else lines[0]  # the lines before it show the source


def _trace(error: BaseException) -> str:
    return printable("".join(traceback.format_exception(error)))


class ResolvedCalls:
    """A `CallTransport` that asks the master for the address of a worker, and sends a call again after its restart.

    Args:
        job: name of the job.
        client: client of the master.
        driver: the calls come from a driver role. Then a call of a worker that is done fails at once. In other roles it
            waits, because the job may be over soon, and the worker ends with it.
        send: sends a request (see `call_messages`) to the worker at an address, and returns its answer within a timeout
            in seconds; raises OSError if that process has ended, TimeoutError, and CallFailed.
    """

    def __init__(
        self, job: str, client: MasterClient, send: Callable[[str, bytes, float], bytes | bytearray], *, driver: bool
    ) -> None:
        self._job, self._client, self._send, self._driver = job, client, send, driver
        self._known = dict[tuple[str, int], str]()

    def call(self, role: str, rank: int, function: str, arguments: list[Any], timeout_s: float) -> Any:
        """See `CallTransport`."""
        data, why = request(function, arguments), "there was no time to ask it"
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            address = self._known.get((role, rank))
            if address is None:
                address, why = self._find(role, rank, function, left)
            if address:
                try:
                    return result_of(self._send(address, data, max(0.0, deadline - time.monotonic())))
                except TimeoutError:
                    why = "its process runs and has not answered"
                    break
                except CallFailed as error:
                    raise CallFailed(f"{function} of {role} {rank}: {error.message}", hint=error.hint) from None
                except OSError as error:
                    why = f"its process has ended, or accepts no calls: {str(error) or type(error).__name__}"
                    self._known.pop((role, rank), None)
            threading.Event().wait(min(_LOOK_S, max(0.0, left)))
        raise CallFailed(f"{role} {rank} of job {self._job} has not answered {function} within {timeout_s:g} s: {why}")

    def _find(self, role: str, rank: int, function: str, left_s: float) -> tuple[str, str]:
        """The address of a worker, or else an empty one and why there is none. Raises CallFailed, see `driver`."""
        try:
            found: p.Roles = self._client.call(p.ShowRoles(self._job, role), timeout_s=min(left_s, _AWAY_S))
        except HooksError as error:
            raise CallFailed(f"{role} {rank} of job {self._job} is not known: {error.message}") from None
        worker = next((one for one in found.workers if one.rank == rank), None)
        if worker is None:
            return "", "the job does not list it"
        if worker.state is p.WorkerState.DONE and not self._driver:
            return "", "it is done: its function has returned"
        if worker.state is p.WorkerState.DONE:
            raise CallFailed(
                f"{role} {rank} of job {self._job} is done: its function has returned, so {function} cannot be called",
                hint="The function of a role that others call ends with serve().",
            )
        if worker.state is p.WorkerState.INITIAL:
            return "", f"its process {worker.life} has not registered" + (f", {worker.waits}" if worker.waits else "")
        self._known[role, rank] = worker.address
        return worker.address, ""
