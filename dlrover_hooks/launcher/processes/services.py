"""The two services next to the workers, master and the node's keeper. They are restarted when they die."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.errors import LaunchError
from dlrover_hooks.host.child_process import Child, described

log = logging.getLogger("dlrover_hooks.run")

_EARLY_S, _EARLY_ENDS = 5.0, 3
"""Start counts as failed if the service ends with an error within so many seconds, so often in a row."""
_PAUSE_S = 30.0
"""The longest pause before a restart."""
_END_S = {"keeper": 35.0, "master": 5.0}
"""The keeper may take 30 s to persist the newest generation before it ends."""


class Served(msgspec.Struct, frozen=True):
    """The master served by this launcher: on a socket that outlives the master, with a journal: a file or `etcd://...`.

    `advertise`: with etcd, the URL by which clients reach this master.
    """

    listener: socket.socket
    journal: str
    ephemeral: bool
    hang_timeout_s: float
    brain: str = ""
    """The address of the Brain; empty: there is none."""
    certificate: str = ""
    """File with the certificate of the master, which then serves HTTPS; empty: HTTP."""
    key: str = ""
    """File with its key; empty: it is in `certificate`."""
    advertise: str = ""


class Services:
    """Owns both children, and the pipe whose closing signals them that the launcher is gone. Main thread only.

    Args:
        job: its name.
        node: this node's name.
        token: the master's.
        served: None if the master is served elsewhere.
        temporary: files of the launcher, which the keeper removes if the launcher is killed.
        selector: wakes when one of them dies.
        keeper: False for a job whose checkpoints do not go through it.
    """

    def __init__(
        self,
        job: str,
        node: str,
        token: str | None,
        served: Served | None,
        temporary: Sequence[str],
        selector: selectors.BaseSelector,
        *,
        keeper: bool = True,
    ) -> None:
        self._job, self._node, self._token, self._selector = job, node, token, selector
        self._temporary = temporary
        self._early_ends, self._failures, self._served_before = 0, 0, False
        self._due: dict[str, float] = {}
        """When a dead service is restarted (monotonic time)."""
        self._life, self._life_end = os.pipe()
        self._starts: dict[str, Callable[[], Child]] = {"keeper": self._start_keeper} if keeper else {}
        if served is not None:
            self._starts["master"] = lambda: self._start_master(served)
        self._children = {name: start() for name, start in self._starts.items()}

    def revive(self) -> None:
        """Restart a dead master or keeper. Raises LaunchError if it cannot even start; its output has the reason."""
        for name, start in self._starts.items():
            child = self._children.get(name)
            if child is not None and (code := child.exit_code()) is not None:
                del self._children[name]
                self._due[name] = time.monotonic() + self._gone(child, code)
            if name not in self._children and time.monotonic() >= self._due[name]:
                self._children[name] = start()

    def end(self) -> None:
        """Close the pipe: the keeper then persists the newest generation, the master completes pending commits."""
        os.close(self._life_end)
        for name, child in self._children.items():
            child.wait(_END_S[name])
            child.end()
        os.close(self._life)

    def _start_master(self, served: Served) -> Child:
        in_file, folder = "://" not in served.journal, os.path.dirname(os.path.abspath(served.journal))
        if self._served_before and in_file and not os.path.exists(served.journal):
            log.error(
                "the master's journal %s is gone: the master begins a new one, and the workers start again from the "
                "newest checkpoint that they or the storage have", served.journal,
            )  # fmt: skip
            os.makedirs(folder, exist_ok=True)
        self._served_before = True
        fd = served.listener.fileno()
        command = [sys.executable, "-m", "dlrover_hooks.master", "--fd", str(fd),
                   "--journal", served.journal, "--life-fd", str(self._life)]  # fmt: skip
        command += ["--open-lease", str(served.hang_timeout_s), "--lease", str(min(10.0, served.hang_timeout_s))]
        if served.ephemeral:
            command.append("--ephemeral")
        if served.brain:
            command += ["--brain", served.brain]
        if served.advertise:
            command += ["--advertise", served.advertise]
        if served.certificate:
            command += ["--ssl-certfile", served.certificate]
        if served.key:
            command += ["--ssl-keyfile", served.key]
        env = settings.worker_environment(DLROVER_HOOKS_TOKEN=self._token or "")
        return self._watched(Child("master", command, env=env, pass_fds=(fd, self._life)))

    def _start_keeper(self) -> Child:
        command = [sys.executable, "-m", "dlrover_hooks.checkpoint.keeper", "--job", self._job, "--node", self._node,
                   "--life-fd", str(self._life)]  # fmt: skip
        command += [word for path in self._temporary for word in ("--remove", path)]
        return self._watched(Child("keeper", command, env=settings.worker_environment(), pass_fds=(self._life,)))

    def _watched(self, child: Child) -> Child:
        self._selector.register(child, selectors.EVENT_READ)
        return child

    def _gone(self, child: Child, code: int) -> float:
        """Reap a dead service. Returns the pause before its restart, in seconds.

        A service that repeatedly ends with an error right after its start ends the run. One that is repeatedly killed
        there (for its memory) is restarted after increasing pauses.
        """
        self._selector.unregister(child)
        child.reap()
        early = time.monotonic() - child.started_at < _EARLY_S
        self._early_ends = self._early_ends + 1 if early else 0
        self._failures = self._failures + 1 if early and code > 0 else 0
        if self._failures >= _EARLY_ENDS:
            raise LaunchError(f"the {child.name} ended with {described(code)}", hint="its own message stands above")
        pause_s = min(_PAUSE_S, 2.0 ** (self._early_ends - _EARLY_ENDS)) if self._early_ends >= _EARLY_ENDS else 0.0
        later = f" in {pause_s:g} s" if pause_s else ""
        log.warning("the %s died (%s); restarting it%s", child.name, described(code), later)
        return pause_s


@contextlib.contextmanager
def temporary_journal() -> Iterator[str]:
    """A file for this run only, with what SQLite puts beside it. The master removes it, too, in case this process is
    killed; a master that is killed as it makes the file leaves `-journal`."""
    file, path = tempfile.mkstemp(prefix="dlrover-hooks-", suffix=".journal")
    os.close(file)
    try:
        yield path
    finally:
        for suffix in ("", "-journal", "-wal", "-shm", ".lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + suffix)


@contextlib.contextmanager
def temporary_file(name: str) -> Iterator[str]:
    """A path in this user's runtime folder for this run only; the user of the path creates the file."""
    path = os.path.join(settings.runtime_dir(), f"{name}-{uuid.uuid4().hex}")
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
