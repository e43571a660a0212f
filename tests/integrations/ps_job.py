"""`dlrover-hooks run --ps` under test, in the environment that has TensorFlow, and what its chief wrote."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from dlrover_hooks.host.ports import free_port
from tests import ranks
from tests.e2e.master_process import LiveMaster
from tests.waiting import json_lines, until

PYTHON = ranks.ROOT / ".venv-keras/bin/python"
CHIEF = Path(__file__).with_name("ps_chief.py")
WAIT_S = 120.0
SHARDS = 600
"""Number of shards of a job that `ps_jobs` starts, of two samples each."""
SINCE = 50 + 2 * 16
"""Steps since the newest checkpoint, at most: save_every, and those scheduled when it was due and now."""
WATCHDOG_S = 40.0
"""Longer than a first step, and than the start of the servers, also on a slow machine."""


def environment(folder: Path) -> dict[str, str]:
    """Without variables of this process's own job. Locks and sockets lie in `folder`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_HOOKS_")}
    env |= {"PYTHONPATH": str(ranks.ROOT), "XDG_RUNTIME_DIR": str(folder), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return env | {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "tensorflow"}


class PSJob:
    """A launcher, started by the constructor. `rows`: what its chiefs wrote, in order."""

    def __init__(
        self,
        folder: Path,
        job: str,
        plan: dict[str, Any],
        *options: str,
        ps: int = 1,
        workers: int = 2,
        chief: Path = CHIEF,
        **env: str,
    ) -> None:
        assert PYTHON.exists(), "make test-deep builds the environment that has TensorFlow"
        self.folder, self.job, self.lives = folder, job, folder / "lives.jsonl"
        self.lives.touch()
        self._env = environment(folder) | env
        sizes = ["--ps", str(ps), "--workers", str(workers), "--job", job]
        command = [str(PYTHON), "-m", "dlrover_hooks", "run", *sizes, *options, str(chief)]
        command += [json.dumps(plan), str(self.lives)]
        self.process = subprocess.Popen(
            command, env=self._env, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self.said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)  # ends with the last writer
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.said.append(line.rstrip())

    @property
    def rows(self) -> list[dict[str, Any]]:
        return json_lines(self.lives)

    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows if "step" in row]

    def row(self, key: str, value: Any = None) -> dict[str, Any]:
        """Wait for a row with `key` (and that value)."""

        def found() -> dict[str, Any] | None:
            return next((row for row in self.rows if key in row and value in (None, row[key])), None)

        return until(found, f"a row with {key}={value}", WAIT_S, between=self._runs, diagnostic=self._tail)

    def says(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Wait until `times` lines match; the last match."""

        def found() -> re.Match[str] | None:
            matches = [match for line in list(self.said) if (match := re.search(pattern, line))]
            return matches[times - 1] if len(matches) >= times else None

        return until(found, f"{pattern!r}, {times} times", WAIT_S, between=self._runs, diagnostic=self._tail)

    def _runs(self) -> None:
        assert self.process.poll() in (None, 0), self._tail()

    def _tail(self) -> list[str]:
        return self.said[-40:]

    def pid(self, name: str) -> int:
        """Of the process that runs a task now, such as "ps 0"."""
        return int([match for line in self.said if (match := re.search(rf"\] {name}: pid (\d+)", line))][-1][1])

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def release(self, step: int | str) -> None:
        """Let the chief go on, which waits at `step`."""
        (self.folder / f"go-{step}").touch()

    def scale(self, *options: str, code: int = 0) -> str:
        """`dlrover-hooks scale`; what it prints."""
        command = [str(PYTHON), "-m", "dlrover_hooks", "scale", *options]
        done = subprocess.run(
            command, env=self._env, capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=self.folder
        )
        assert done.returncode == code, (done.stdout, done.stderr, self._tail())
        return done.stdout + done.stderr

    @contextmanager
    def scaling(self, *options: str) -> Iterator[subprocess.Popen[str]]:
        """`dlrover-hooks scale` under way; both its outputs are one."""
        command = [str(PYTHON), "-m", "dlrover_hooks", "scale", *options]
        with subprocess.Popen(
            command, env=self._env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def end(self, code: int = 0) -> list[str]:
        """Wait until all of it has ended; what the launcher said."""
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs on: {self._tail()}") from None
        self._listener.join(WAIT_S)
        assert self.process.returncode == code, self._tail()
        return self.said

    def close(self) -> None:
        """Nothing of it outlives the test."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for process in self.left():
            process.kill()
        until(lambda: not self.left(), "the end of all its processes", 10.0, diagnostic=self.left)

    def left(self) -> list[psutil.Process]:
        """Processes with this job in their environment or command line."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("XDG_RUNTIME_DIR") == str(self.folder):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@contextmanager
def ps_job(folder: Path, job: str, plan: dict[str, Any], *options: str, **more: Any) -> Iterator[PSJob]:
    """A running job, whose processes are ended with the context."""
    one = PSJob(folder, job, plan, *options, **more)
    try:
        yield one
    finally:
        one.close()


StartPS = Callable[..., PSJob]


@contextmanager
def ps_jobs(folder: Path) -> Iterator[StartPS]:
    """Yields a function that starts a job of `SHARDS` shards. The jobs are ended with the context, the newest first."""
    with ExitStack() as open_:
        started = 0

        def begin(*options: str, env: dict[str, str] | None = None, **plan: Any) -> PSJob:
            nonlocal started
            sizes = {name: plan.pop(name) for name in ("ps", "workers", "chief") if name in plan}
            place = folder / (plan.pop("folder", None) or f"job{started}")
            place.mkdir(exist_ok=True)
            started += 1
            plan = {"samples": 2 * SHARDS, "size": 2, **plan}
            return open_.enter_context(ps_job(place, "ps-test", plan, *options, **sizes, **(env or {})))

        yield begin


def emptied(pipe: Path) -> None:
    """Replace the pipe with an empty file: a step that opens its path from now on does not wait."""
    empty = pipe.with_name("empty")
    empty.touch()
    empty.replace(pipe)


def trained_once(job: PSJob | ByHand) -> None:
    """Each shard is in the model once, and no result is missing."""
    seen = job.row("seen")["seen"]
    assert seen == [1] * SHARDS, [at for at, count in enumerate(seen) if count != 1]
    assert job.row("done")["done"] == SHARDS


def no_worker_was_replaced(job: PSJob) -> None:
    assert not [line for line in job.said if re.search("the workers are replaced|worker .*; it is replaced", line)]


class ByHand:
    """The same chief in a cluster that TF_CONFIG describes: a process per task, and a master, without a launcher."""

    def __init__(self, folder: Path, plan: dict[str, Any], ps_host: str = "127.0.0.1") -> None:
        self.folder, self._plan, self.lives = folder, plan, folder / "lives.jsonl"
        self.lives.touch()
        self.master = LiveMaster(folder)
        tasks = ("ps", "worker", "chief")
        self._cluster = {name: [f"127.0.0.1:{free_port()}"] for name in tasks}
        self._cluster["ps"] = [f"{ps_host}:{free_port()}"]
        self._started: list[subprocess.Popen[str]] = []
        self.processes = {name: self.begin(name) for name in tasks}

    def begin(self, task: str, index: int = 0, address: str | None = None) -> subprocess.Popen[str]:
        """One more process for a task. `address`: of a task that TF_CONFIG of the others does not name."""
        cluster = self._cluster | ({} if address is None else {task: [*self._cluster[task], address]})
        env = environment(self.folder) | {"DLROVER_HOOKS_MASTER": self.master.url, "DLROVER_HOOKS_JOB": "by-hand"}
        env |= {"DLROVER_HOOKS_TOKEN": self.master.token or "", "GRPC_FAIL_FAST": "use_caller"}
        env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": task, "index": index}})
        command = [str(PYTHON), str(CHIEF), json.dumps(self._plan), str(self.lives)]
        self._started.append(
            subprocess.Popen(
                command, env=env, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return self._started[-1]

    def row(self, key: str, value: Any = None) -> dict[str, Any]:
        """Wait for a row with `key` (and that value)."""

        def found() -> dict[str, Any] | None:
            return next((row for row in json_lines(self.lives) if key in row and value in (None, row[key])), None)

        return until(found, f"a row with {key}={value}", WAIT_S)

    def release(self, step: int) -> None:
        """Let the chief go on, which waits at `step`."""
        (self.folder / f"go-{step}").touch()

    def close(self) -> None:
        """Nothing of it outlives the test."""
        for process in self._started:
            process.kill()
            process.communicate()
        self.master.close()


@contextmanager
def by_hand(folder: Path, plan: dict[str, Any], **options: Any) -> Iterator[ByHand]:
    """Such a cluster, ended with the context."""
    one = ByHand(folder, plan, **options)
    try:
        yield one
    finally:
        one.close()
