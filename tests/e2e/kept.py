"""Keeper processes and trainers of tests, and what they left behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.errors import Corrupt
from tests.waiting import WAIT_S

RUN = uuid.uuid4().hex


@contextlib.contextmanager
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of its own, short enough for a socket's path."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "dlrover-hooks"


class Kept:
    """Starts keepers and trainers, and leaves none behind."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.notices: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def keeper(
        self,
        *options: str,
        pass_fds: tuple[int, ...] = (),
        ready: bool = True,
        before: tuple[str, ...] = (),
        job: str = "job",
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        """`before`: what is run instead, with the module's name and its options behind it."""
        command = [sys.executable, *(before or ("-m",)), "dlrover_hooks.checkpoint.keeper"]
        command += ["--job", job, "--node", "node", *options]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment
        process = subprocess.Popen(command, pass_fds=pass_fds, stderr=subprocess.DEVNULL, env=environment)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        if ready:
            KeeperLink.connect(job, "node", notify=lambda _: None, start=False, deadline_s=WAIT_S).close()
        return process

    def trainer(
        self, seat: int = 0, *, rank: int = 0, world: int = 1, job: str = "job", **options: Any
    ) -> Checkpointer:
        notify = self.notices.put
        options = {"start_keeper": False, "deadline_s": WAIT_S, **options}
        made = Checkpointer(job, "node", seat, notify=notify, **options)
        made.begin(RUN, 0, rank, world)
        self._stack.callback(made.close)
        return made

    def dead_trainer(self, step: int, seat: int = 0, *, world: int = 1, size: int = 1000, **options: Any) -> int:
        """A trainer of rank `seat` in a process of its own that saved `step`, heard of its hash, and was killed: -9.

        Not forked: a thread that a test before has left may hold a lock, which the child would wait for without end.
        """
        given = {"run": RUN, "step": step, "seat": seat, "world": world, "size": size, "options": options}
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-m", "tests.e2e.kept", json.dumps(given)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as trainer:
            assert trainer.stdout is not None
            try:
                ready, _, _ = select.select([trainer.stdout], [], [], 2 * WAIT_S)
                assert ready, "the trainer hangs"
                assert os.read(trainer.stdout.fileno(), 1) == b"!", "the trainer failed"
            finally:
                trainer.kill()
        return trainer.pid

    def notice(self, kind: type[Any] | tuple[type[Any], ...]) -> Any:
        while True:
            got = self.notices.get(timeout=WAIT_S)
            if isinstance(got, kind):
                return got

    def kill_at_end(self, pid: int) -> None:
        def kill() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

        self._stack.callback(kill)

    def keeper_pid(self) -> int:
        link = KeeperLink.connect("job", "node", notify=lambda _: None, start=False)
        try:
            return link.call(lambda ref: keeper_messages.Inventory(ref=ref))[0].pid
        finally:
            link.close()

    @staticmethod
    def kill(pid: int) -> None:
        """Kill -9, and wait until it is gone."""
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # all its threads: its main one alone keeps no socket open

    def close(self) -> None:
        self._stack.close()


def state(step: int, size: int = 1000) -> dict[str, Any]:
    return {
        "state": {"w": np.full(size, step, np.float32), "step": step},
        "rank": {"rng": np.full(10, step, np.int64)},
        "data": {"train": step},
    }


def segment(keeper_pid: int, seat: int = 0) -> SharedSegment:
    """The keeper's own memory of a seat, from outside. One that is just being made is none yet."""
    for name in os.listdir(f"/proc/{keeper_pid}/fd"):
        path = f"/proc/{keeper_pid}/fd/{name}"
        with contextlib.suppress(OSError, ValueError, Corrupt):
            if os.readlink(path).startswith(f"/memfd:dlrover-hooks-seat-{seat} "):
                return SharedSegment.attach(os.open(path, os.O_RDWR))
    raise LookupError(f"no segment of seat {seat}")


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def memfds(pid: int) -> set[int]:
    """The segments that a process has, by inode."""
    paths = [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
    return {os.stat(path).st_ino for path in paths if "memfd" in os.readlink(path)}


def main() -> None:
    """What `Kept.dead_trainer` starts."""
    given = json.loads(sys.argv[1])
    hashed: queue.SimpleQueue[Any] = queue.SimpleQueue()
    trainer = Checkpointer("job", "node", given["seat"], start_keeper=False, notify=hashed.put, **given["options"])
    trainer.begin(given["run"], 0, given["seat"], given["world"])
    trainer.save(given["step"], state(given["step"], given["size"]))
    hashed.get(timeout=WAIT_S)
    os.write(1, b"!")
    signal.pause()


if __name__ == "__main__":
    main()
