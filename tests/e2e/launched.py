"""`dlrover-hooks run` under test, and what its workers do there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.descendants import descendants
from tests.waiting import WAIT_S, json_lines, until

REPOSITORY = Path(__file__).parents[2]


class Launched:
    """A launcher under test, and what its workers wrote: one JSON line per life in `lives`."""

    def __init__(
        self, folder: Path, script: str, *options: str, job: str = "", before: Sequence[str] = (), **environment: str
    ) -> None:
        """`before`: a command that runs its arguments."""
        self.job = job or f"launch-{uuid.uuid4().hex[:8]}"
        self.lives = folder / "lives.jsonl"
        self.lives.touch()
        path = folder / "script.py"
        path.write_text("import json, os, signal, sys, time, threading\n" + textwrap.dedent(script))
        command = [
            *before,
            sys.executable,
            "-m",
            "dlrover_hooks",
            "run",
            *(() if job == "-" else ("--job", self.job)),
            *options,
            str(path),
            str(self.lives),
        ]
        # all of a test have one; its name is short, as multiprocessing's sockets lie there, which have no long ones
        self.temporary = Path(tempfile.gettempdir(), f"launched-{zlib.crc32(bytes(folder)):08x}")
        self.temporary.mkdir(exist_ok=True)
        weakref.finalize(self, shutil.rmtree, self.temporary, ignore_errors=True)
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.temporary)} | environment
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, cwd=folder)
        self._said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)  # ends with the last writer
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self._said.append(line)

    def read(self) -> list[dict]:
        return json_lines(self.lives)

    def wait_for(self, condition: Callable[[list[dict]], bool], timeout_s: float = WAIT_S) -> list[dict]:
        def found() -> list[dict] | None:
            return lives if condition(lives := self.read()) else None

        def runs() -> None:
            assert self.process.poll() is None, self.end()

        return until(found, "what the workers write", timeout_s, between=runs, diagnostic=self.read)

    def says(self, text: str, timeout_s: float = WAIT_S) -> bool:
        """Wait until it says `text` in one line. Raises AssertionError where it does not, at once if it has ended."""

        def speaks() -> None:
            assert self._listener.is_alive(), f"{self.job} has ended and did not say {text!r}: {self._said[-20:]}"

        def said() -> bool:
            return any(text in line for line in self._said)

        return until(said, repr(text), timeout_s, between=speaks, diagnostic=lambda: self._said[-20:])

    def end(self, timeout_s: float = WAIT_S) -> tuple[int, str]:
        """Wait until the launcher and all that write to its stderr have ended: its exit code, and what was said."""
        deadline = time.monotonic() + timeout_s
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.job} runs on after {timeout_s:g} s, and said: {self._said}") from None
        self._listener.join(max(0.0, deadline - time.monotonic()))
        assert not self._listener.is_alive(), f"somebody still holds the stderr of {self.job}: {self._said[-20:]}"
        return self.process.returncode, "".join(self._said)

    def child(self, word: str, timeout_s: float = WAIT_S, *, other_than: int = 0) -> psutil.Process:
        """The launcher's child with `word` in its command line, such as "keeper", as soon as there is one.

        `other_than`: a process ID that it does not have.
        """

        def found() -> psutil.Process | None:
            children = descendants(self.process.pid, word, children_only=True)
            return next((one for one in children if one.pid != other_than), None)

        return until(found, f"a child process with {word} in its command line", timeout_s)

    def leftovers(self) -> list[str]:
        """Processes of this job and temporary files that are still there."""
        found = [str(path) for path in self.temporary.rglob("*") if not path.is_dir()]
        for process in psutil.process_iter(["cmdline", "pid"]):
            line = " ".join(process.info["cmdline"] or ())
            if self.job in line or str(self.lives) in line:
                found.append(line)
        return found


def all_gone(pids: list[int]) -> bool:
    """True once none of them runs any more (a zombie waiting for init to reap it does not run)."""
    return until(lambda: all(not psutil.pid_exists(pid) or _is_zombie(pid) for pid in pids), f"the end of {pids}")


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


ALIVE = """
    def note(**more):
        line = json.dumps({"pid": os.getpid(), "rank": int(os.environ["RANK"]), **more})
        fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
        os.write(fd, (line + chr(10)).encode())
        os.close(fd)
"""

MEMBER = """
    from dlrover_hooks import config, protocol as p
    from dlrover_hooks.client import MasterClient
    from dlrover_hooks.errors import Stale, UsageError
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    conf, place = config.load(), config.place()
    client = MasterClient(conf.master, conf.token, incarnation=place.incarnation)

    def attach(**more):
        return client.call(p.Attach(conf.job, place.incarnation, place.node, os.getpid(), **more))

    def begun():
        # all have attached: what fails from now on failed in training
        return client.call(p.AwaitPlan(conf.job, place.incarnation))

    def beat(step):
        client.call(p.Heartbeat(conf.job, place.incarnation, step))

    def leave(step):
        client.call(p.Leave(conf.job, place.incarnation, p.Departure.DONE, step))
"""
"""What a session tells the master, without torch."""
