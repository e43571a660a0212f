"""`dlrover-hooks run`: starts a master, a keeper and N workers on this machine, and keeps them running.

When a worker dies all local workers are ended and started anew; they resume from memory. A dead master is restarted on
the listening socket, which the launcher owns: its clients see a pause. A dead keeper is restarted too. Whatever ends
the launcher, it leaves no process, port, segment or temporary file behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from types import FrameType

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import HooksError, LaunchError, MasterAway
from dlrover_hooks.runtime.child import Child, described

log = logging.getLogger("dlrover_hooks.run")

DONE, USER_ERROR, GAVE_UP, USAGE = 0, 1, 77, 78
_EARLY_S, _EARLY_ENDS = 5.0, 3
"""A master or keeper that ends with an error so soon after its start, so often in a row, will not come up."""
_KEEPER_END_S = 35.0
"""The keeper may take 30 s to persist the newest generation before it goes."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `dlrover-hooks run` was asked for. `command` is run once per worker."""

    command: tuple[str, ...]
    workers: int = 1
    max_restarts: int = 10
    job: str = ""
    fresh: bool = False
    port: int = 0
    journal: str | None = None
    grace_s: float = 10.0


class Launcher:
    """Runs one job on one machine; `run` returns the exit code. Main thread only (it takes SIGINT and SIGTERM)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.job = options.job or settings.load().job
        self.restarts = 0
        self._incarnation = uuid.uuid4().hex
        self._node = socket.gethostname()
        self._token = secrets.token_hex(16)
        self._signal: int | None = None
        self._workers: dict[str, Child] = {}
        self._round = 0
        self._started_at_step = 0
        self._early_ends = 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        with contextlib.ExitStack() as owned:
            self._journal = self.options.journal or owned.enter_context(_temporary_journal())
            self._listener = owned.enter_context(_listen(self.options.port))
            self._life, self._life_end = os.pipe()
            owned.callback(os.close, self._life)
            self._take_signals(owned)
            self._master, self._keeper = self._start_master(), self._start_keeper()
            owned.callback(self._end_services)
            self._client = MasterClient(self.url, self._token, incarnation=self._incarnation)
            owned.callback(self._client.close)
            owned.callback(self._end_workers)
            return self._supervise()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _supervise(self) -> int:
        log.info("job %s: %d workers, master at %s", self.job, self.options.workers, self.url)
        while True:
            self._start_workers()
            code = self._watch_workers()
            if code is not None:
                return code
            self.restarts += 1

    def _watch_workers(self) -> int | None:
        """Until all workers are done (0), the run is over (its exit code), or they must be started again (None)."""
        running = dict(self._workers)
        while running:
            self._selector.select(timeout=1.0)
            if self._signal is not None:
                log.info("%s: ending %d workers", signal.Signals(self._signal).name, len(running))
                self._end_workers(self.options.grace_s)
                return 128 + self._signal
            self._revive_services()
            dead = {key: child for key, child in running.items() if child.exit_code() is not None}
            for key, child in dead.items():
                self._selector.unregister(child)
                del running[key]
            if any(child.exit_code() for child in dead.values()):
                return self._failed(dead)
        log.info("job %s: all %d workers are done", self.job, self.options.workers)
        self._end_workers()
        return DONE

    def _failed(self, dead: dict[str, Child]) -> int | None:
        """Some workers failed: tell the master, end the others, and decide. A signal's victim is the cause, if any."""
        cause = min(dead.values(), key=lambda child: child.exit_code() or 1)
        code, step = cause.exit_code() or 1, self._step()
        for key, child in dead.items():
            self._tell_exit(key, child.exit_code() or 0)
        self._end_workers()
        what = f"{cause.name} died ({described(code)}) after step {step}"
        if code > 0 and step <= self._started_at_step:
            log.error("%s before any progress: not restarted, see its traceback above", what)
            return USER_ERROR
        if self.restarts >= self.options.max_restarts:
            log.error("%s; gave up after %d restarts (--max-restarts)", what, self.restarts)
            return GAVE_UP
        log.warning("%s; restarting %d workers (%d of %d restarts)", what, self.options.workers, self.restarts + 1,
                    self.options.max_restarts)  # fmt: skip
        return None

    def _step(self) -> int:
        with contextlib.suppress(HooksError):
            return self._client.call(p.ShowJob(self.job), timeout_s=10.0).step
        return 0

    def _tell_exit(self, worker: str, code: int) -> None:
        with contextlib.suppress(HooksError):
            self._client.call(p.Exited(self.job, self._incarnation, worker, code), timeout_s=10.0)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        seats = tuple(p.Seat(uuid.uuid4().hex, local_rank) for local_rank in range(self.options.workers))
        seated = self._join(seats)
        self._started_at_step = self._step()
        for seat, rank in zip(seats, seated.ranks, strict=True):
            env = self._worker_env(seat, rank, seated)
            child = Child(f"worker {rank}", self.options.command, env=env, die_with_parent=True)
            self._workers[seat.incarnation] = child
            self._selector.register(child, selectors.EVENT_READ)

    def _join(self, seats: tuple[p.Seat, ...]) -> p.Seated:
        workers = self.options.workers
        join = p.Join(
            job=self.job,
            incarnation=self._incarnation,
            node=self._node,
            seats=seats,
            host="127.0.0.1",
            port=_free_port(),
            min_workers=workers,
            max_workers=workers,
            proposed_run=uuid.uuid4().hex,
            fresh=self.options.fresh and self.restarts == 0,
        )
        self._client.call(join, timeout_s=60.0)
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            self._revive_services()
            ask = p.AwaitRound(self.job, self._incarnation, after=self._round, timeout_s=5.0)
            seated = self._client.call(ask, timeout_s=30.0)
            if seated.round is not None:
                self._round = seated.round
                return seated
        raise MasterAway(f"job {self.job}: the master formed no round of {workers} workers within 60 s")

    def _worker_env(self, seat: p.Seat, rank: int, seated: p.Seated) -> dict[str, str]:
        """What torchrun sets (Lightning picks the wrong cluster environment without TORCHELASTIC_RUN_ID), and ours."""
        workers = str(self.options.workers)
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(seat.local_rank),
            "WORLD_SIZE": str(seated.world_size),
            "LOCAL_WORLD_SIZE": workers,
            "GROUP_RANK": str(seated.node_rank),
            "GROUP_WORLD_SIZE": str(seated.node_count),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(seated.world_size),
            "MASTER_ADDR": seated.master_addr,
            "MASTER_PORT": str(seated.master_port),
            "TORCHELASTIC_RUN_ID": self.job,
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.options.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "DLROVER_HOOKS_JOB": self.job,
            "DLROVER_HOOKS_MASTER": self.url,
            "DLROVER_HOOKS_TOKEN": self._token,
            "DLROVER_HOOKS_NODE": self._node,
            "DLROVER_HOOKS_INCARNATION": seat.incarnation,
        }
        if self.options.fresh and self.restarts == 0:
            env["DLROVER_HOOKS_FRESH"] = "1"
        return settings.worker_environment(**env)

    def _end_workers(self, grace_s: float = 0.0) -> None:
        """End every worker's session; with `grace_s` all get SIGTERM at once and share the grace."""
        children = list(self._workers.values())
        self._workers.clear()
        if grace_s > 0:
            for child in children:
                child.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            for child in children:
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in children:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(child)
            child.end()

    # ---- services ---------------------------------------------------------------------------------------------------

    def _start_master(self) -> Child:
        command = [sys.executable, "-m", "dlrover_hooks.master", "--fd", str(self._listener.fileno()),
                   "--journal", self._journal, "--life-fd", str(self._life)]  # fmt: skip
        if self.options.journal is None:
            command.append("--ephemeral")
        env = settings.worker_environment(DLROVER_HOOKS_TOKEN=self._token)
        return self._watched(Child("master", command, env=env, pass_fds=(self._listener.fileno(), self._life)))

    def _start_keeper(self) -> Child:
        command = [sys.executable, "-m", "dlrover_hooks.checkpoint.keeper", "--job", self.job, "--node", self._node,
                   "--life-fd", str(self._life)]  # fmt: skip
        return self._watched(Child("keeper", command, env=settings.worker_environment(), pass_fds=(self._life,)))

    def _watched(self, child: Child) -> Child:
        self._selector.register(child, selectors.EVENT_READ)
        return child

    def _revive_services(self) -> None:
        """Restart a dead master or keeper. A service that cannot even start ends the run with its own message."""
        if (code := self._master.exit_code()) is not None:
            self._gone(self._master, code)
            self._master = self._start_master()
        if (code := self._keeper.exit_code()) is not None:
            self._gone(self._keeper, code)
            self._keeper = self._start_keeper()

    def _gone(self, child: Child, code: int) -> None:
        """Reap a dead service. One that fails again and again right after its start ends the run."""
        self._selector.unregister(child)
        child.reap()
        early = code > 0 and time.monotonic() - child.started_at < _EARLY_S
        self._early_ends = self._early_ends + 1 if early else 0
        if self._early_ends >= _EARLY_ENDS:
            raise LaunchError(f"the {child.name} ended with {described(code)}", hint="its own message stands above")
        log.warning("the %s died (%s); restarting it", child.name, described(code))

    def _end_services(self) -> None:
        """Closing the pipe tells both: the keeper persists what is newest, the master commits what is under way."""
        os.close(self._life_end)
        for child, patience_s in ((self._keeper, _KEEPER_END_S), (self._master, 5.0)):
            child.wait(patience_s)
            child.end()

    def _take_signals(self, owned: contextlib.ExitStack) -> None:
        """The first signal ends the run politely; a second one is left to kill it at once."""
        wake, wake_end = os.pipe()
        os.set_blocking(wake_end, False)
        owned.callback(lambda: (os.close(wake), os.close(wake_end)))
        owned.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wake_end))
        self._selector.register(wake, selectors.EVENT_READ)
        for number in (signal.SIGINT, signal.SIGTERM):
            owned.callback(signal.signal, number, signal.signal(number, self._signalled))

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        signal.signal(number, self._insist)

    def _insist(self, number: int, frame: FrameType | None) -> None:
        for child in self._workers.values():
            child.signal(signal.SIGKILL)


@contextlib.contextmanager
def _temporary_journal() -> Iterator[str]:
    """A file for this run only. The master removes it, too, should this process be killed."""
    file, path = tempfile.mkstemp(prefix="dlrover-hooks-", suffix=".journal")
    os.close(file)
    try:
        yield path
    finally:
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + suffix)


def _listen(port: int) -> socket.socket:
    """The master's listening socket, owned here so that a restart of the master is a pause, not a refusal."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"port {port} cannot be used: {error.strerror}", hint="leave --port out for a free one"
        ) from error
    listener.listen(1024)
    return listener


def _free_port() -> int:
    """A port for the process group's store, below the ephemeral range so that no outgoing connection takes it first."""
    for port in random.sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise LaunchError("no free port between 20000 and 30000 for the process group's store")


def worker_command(script: str, arguments: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """`python -u script args` or `python -u -m module args`, with this interpreter."""
    return (sys.executable, "-u", *(["-m"] if module else []), script, *arguments)
