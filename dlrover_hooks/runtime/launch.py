"""`dlrover-hooks run`: starts a master, a keeper and N workers on this machine, and keeps them running.

When a worker dies all local workers are ended and started anew; they resume from memory. A dead master is restarted on
the listening socket, which the launcher owns: its clients see a pause. A dead keeper is restarted too. Whatever ends
the launcher, it leaves no process, port, segment or temporary file behind.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import logging
import os
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
from typing import Any, NoReturn

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import HooksError, LaunchError, MasterAway, UsageError
from dlrover_hooks.runtime.child import Child, described
from dlrover_hooks.runtime.ports import free_port, listen
from dlrover_hooks.runtime.sole import sole
from dlrover_hooks.runtime.verdict import (
    DONE,
    USER_ERROR,
    counted,
    culprit,
    farewell,
    finished_before,
    judge,
    knows_why,
)

log = logging.getLogger("dlrover_hooks.run")

_EARLY_S, _EARLY_ENDS = 5.0, 3
"""A master or keeper that ends with an error so soon after its start, so often in a row, will not come up."""
_KEEPER_END_S = 35.0
"""The keeper may take 30 s to persist the newest generation before it goes."""
_FORM_S = 60.0
"""A master that comes up, and a round of workers that are all here, take far less."""
_POLL_S = 0.5
"""So long a signal may go unheard while the master is asked."""
_LAST_WORDS_S = 1.0
"""A worker whose collective failed may be seen dead before the one that took it along."""


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


class _Over(Exception):
    """The run ends here, with exit code `code`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Launcher:
    """Runs one job on one machine; `run` returns the exit code. Main thread only (it takes SIGINT and SIGTERM)."""

    def __init__(self, options: Options) -> None:
        self.options = options
        config = settings.load()
        self.job = options.job or config.job
        self._fresh = options.fresh or config.fresh
        self.restarts = 0
        self._incarnation = uuid.uuid4().hex
        self._node = socket.gethostname()
        self._token = secrets.token_hex(16)
        self._signal: int | None = None
        self._workers: dict[str, Child] = {}
        self._round = 0
        self._started_at_step = 0
        self._early_ends = 0
        self._seen: p.JobView | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        code = self._run()
        if self._signal is not None:
            log.info("%s", farewell(self.job, self._seen))
        return code

    def _run(self) -> int:
        with contextlib.ExitStack() as owned:
            owned.enter_context(sole(self.job, self._node))
            self._journal = self.options.journal or owned.enter_context(_temporary_journal())
            self._listener = owned.enter_context(listen(self.options.port))
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
        log.info("job %s: %s, master at %s", self.job, counted(self.options.workers, "worker"), self.url)
        try:
            while True:
                self._start_workers()
                self._watch_workers()
                self.restarts += 1
        except _Over as over:
            return over.code

    def _watch_workers(self) -> None:
        """Until they must be started again. Raises _Over when all are done or the run is over for another reason."""
        running = dict(self._workers)
        while running:
            self._selector.select(timeout=1.0)
            self._obey_signal()
            self._revive_services()
            dead = {key: child for key, child in running.items() if child.exit_code() is not None}
            for key, child in dead.items():
                self._selector.unregister(child)
                del running[key]
            if any(child.exit_code() for child in dead.values()):
                return self._failed(dead, running)
        workers = self.options.workers
        log.info("job %s: %s", self.job, "its worker is done" if workers == 1 else f"all {workers} workers are done")
        self._end_workers()
        raise _Over(DONE)

    def _obey_signal(self) -> None:
        """Raises _Over after SIGINT or SIGTERM, when the workers have ended."""
        if self._signal is None:
            return
        log.info("%s: ending %s", signal.Signals(self._signal).name, counted(len(self._workers), "worker"))
        self._end_workers(self.options.grace_s)
        with contextlib.suppress(HooksError):
            self._seen = self._client.call(p.ShowJob(self.job), timeout_s=2.0)
        raise _Over(128 + self._signal)

    def _failed(self, dead: dict[str, Child], running: dict[str, Child]) -> None:
        """Some workers failed: tell the master, end the others, and decide. Raises _Over unless all start again."""
        view = self._view()
        if view is None or not view.finished:
            self._hear_last_words(dead, running)
        for key, child in dead.items():
            self._tell_exit(key, child.exit_code() or 0)
        self._end_workers()
        began_at = self._started_at_step if view is None or view.begun_step is None else view.begun_step
        most = self.options.max_restarts
        verdict = judge(culprit(dead.values()), view, began_at, restarts=self.restarts, max_restarts=most)
        if verdict.code is not None:
            log.error("job %s: %s", self.job, verdict.text)
            raise _Over(verdict.code)
        log.warning("%s; restarting %s (%d of %d restarts)", verdict.text, counted(self.options.workers, "worker"),
                    self.restarts + 1, most)  # fmt: skip

    def _hear_last_words(self, dead: dict[str, Child], running: dict[str, Child]) -> None:
        """Unless the cause is clear, see who else ends: add them to `dead`."""
        deadline = time.monotonic() + _LAST_WORDS_S
        for key, child in running.items():
            if any(knows_why(one.exit_code()) for one in dead.values()):
                return
            if child.wait(max(0.0, deadline - time.monotonic())):
                dead[key] = child

    def _view(self) -> p.JobView | None:
        try:
            return self._ask(p.ShowJob(self.job), 10.0)
        except HooksError as error:
            log.warning("job %s: its state is not known: %s", self.job, error.message)
            return None

    def _ask(self, request: p.Message, patience_s: float) -> Any:
        """The reply, through restarts of the master, which are seen to here. Raises _Over on a signal, MasterAway."""
        deadline = time.monotonic() + patience_s
        while True:
            self._obey_signal()
            self._revive_services()
            try:
                return self._client.call(request, timeout_s=_POLL_S)
            except MasterAway:
                if time.monotonic() > deadline:
                    raise

    def _tell_exit(self, worker: str, code: int) -> None:
        with contextlib.suppress(HooksError):
            self._client.call(p.Exited(self.job, self._incarnation, worker, code), timeout_s=2.0)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        seats = tuple(p.Seat(uuid.uuid4().hex, local_rank) for local_rank in range(self.options.workers))
        seated = self._join(seats)
        view = self._view()
        self._started_at_step = view.step if view is not None else 0
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
            port=free_port(),
            min_workers=workers,
            max_workers=workers,
            proposed_run=uuid.uuid4().hex,
            fresh=self._fresh and self.restarts == 0,
            again=self.restarts == 0,
            sole=True,
        )
        self._ask(p.ListJobs(), _FORM_S)  # it may still be coming up: an event sent twice would form two rounds
        joined = self._ask(join, _FORM_S)
        if joined.finished:
            self._say_finished(joined.finished_step)
        deadline = time.monotonic() + _FORM_S
        while time.monotonic() < deadline:
            ask = p.AwaitRound(self.job, self._incarnation, after=self._round, timeout_s=_POLL_S)
            seated = self._ask(ask, deadline - time.monotonic())
            if seated.round is not None:
                self._round = seated.round
                return seated
        raise MasterAway(
            f"job {self.job}: the master formed no round of {counted(workers, 'worker')} within {_FORM_S:g} s"
        )

    def _say_finished(self, step: int | None) -> NoReturn:
        if self.restarts:
            log.error("job %s: %s", self.job, finished_before(step))
            raise _Over(USER_ERROR)
        log.info("job %s was finished at step %d: nothing is left to train; --fresh starts anew", self.job, step or 0)
        raise _Over(DONE)

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
            "DLROVER_HOOKS_FRESH": "1" if self._fresh and self.restarts == 0 else "",
        }
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


def worker_command(script: str, arguments: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """`python -u script args` or `python -u -m module args`, with this interpreter.

    Raises:
        UsageError: there is no such script or module.
    """
    if module:
        package = script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"{script}: no such module")
    elif not os.path.exists(script):
        needless = os.path.basename(script).startswith("python")
        raise UsageError(f"{script}: no such file" + (" (`python` is not needed here: name the script)" * needless))
    return (sys.executable, "-u", *(["-m"] if module else []), script, *arguments)
