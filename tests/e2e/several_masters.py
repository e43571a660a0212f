"""Masters that share a journal, of which one leads, and clients that write to them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import requests

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import HooksError
from tests.e2e.etcd_process import free_ports
from tests.e2e.job_script import join
from tests.waiting import until


class Masters:
    """Masters on one journal, each with its own address. `env`: variables of them; their log is in `folder`."""

    def __init__(self, folder: Path, journal: str, count: int = 2, *flags: str, **env: str) -> None:
        self.journal, self._env = journal, env
        self.log = folder / "masters.log"
        self._flags, self._ports = flags, free_ports(count)
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self.processes = [self._start(index) for index in range(count)]

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "dlrover_hooks.master",
            "--port",
            str(self._ports[index]),
            "--journal",
            self.journal,
        ]
        env = {key: value for key, value in os.environ.items() if not key.startswith("DLROVER_HOOKS_")} | self._env
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, "--log-level", "info", *self._flags], env=env, stdout=log, stderr=log, start_new_session=True
            )

    def leader(self, *not_these: int) -> int:
        """The index of the master that accepts requests, none of `not_these`; waits for one."""
        among = [index for index in range(len(self.urls)) if index not in not_these]

        def found() -> list[int]:
            return [index for index in among if (answer := self.readiness(index)) is not None and answer.ok]

        return int(until(found, "a leader", diagnostic=self.told)[0])

    def readiness(self, index: int) -> requests.Response | None:
        """What it answers to /readyz; None: nothing."""
        try:
            return requests.get(f"{self.urls[index]}/readyz", timeout=5)
        except requests.RequestException:
            return None

    def told(self) -> str:
        """The log of all masters."""
        return self.log.read_text()

    def kill(self, index: int) -> None:
        """SIGKILL, reaped."""
        self.processes[index].kill()
        self.processes[index].wait(60)

    def again(self, index: int) -> None:
        """Start a master that was killed."""
        self.processes[index] = self._start(index)

    def signal(self, index: int, signum: int) -> None:
        """Send a signal."""
        self.processes[index].send_signal(signum)

    def close(self) -> None:
        """End all masters."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait(60)

    def stop(self, index: int) -> None:
        """SIGSTOP; it is stopped when this returns."""
        self.signal(index, signal.SIGSTOP)
        os.waitid(os.P_PID, self.processes[index].pid, os.WSTOPPED | os.WNOWAIT)


def client_of(masters: Masters, *urls: str) -> MasterClient:
    """One with the addresses of all, or with `urls`."""
    return MasterClient(",".join(urls or masters.urls), incarnation="agent", deadline_s=60.0)


def names(client: MasterClient) -> set[str]:
    """The jobs that the leader knows."""
    return set(client.call(p.ListJobs()).jobs)


class Writer:
    """Sends one event after the other, each for a job of its own, from a thread until `end`."""

    def __init__(self, masters: Masters, number: int) -> None:
        self.acknowledged: list[str] = []
        self.errors: list[Exception] = []
        self._number, self._ending = number, threading.Event()
        self._client = MasterClient(",".join(masters.urls), incarnation=f"agent-{number}", deadline_s=60.0)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def _write(self) -> None:
        while not self._ending.is_set() and not self.errors:
            job = f"job-{self._number}-{len(self.acknowledged)}"
            try:
                self._client.call(join(f"agent-{self._number}", job=job, lives=f"{job}-w"))
            except HooksError as error:
                self.errors.append(error)
            self.acknowledged.append(job)

    def end(self) -> None:
        self._ending.set()
        self._thread.join(60.0)
        self._client.close()


class Takeovers(NamedTuple):
    """What three clients wrote meanwhile. `jobs`: those that the last leader knows, with the number of their rounds."""

    errors: list[Exception]
    acknowledged: set[str]
    jobs: dict[str, int]


def takeovers_under_load(masters: Masters, turns: int, *, stop_each_second: bool) -> Takeovers:
    """End the leader `turns` times while three clients write.

    It is killed and started again, or, `stop_each_second` time, stopped until another one leads.
    """
    rng, writers = random.Random(16), [Writer(masters, number) for number in range(3)]
    try:
        for turn in range(turns):
            leader = masters.leader()
            enough = sum(len(one.acknowledged) for one in writers) + rng.randrange(10, 200)
            until(lambda enough=enough: sum(len(one.acknowledged) for one in writers) > enough, "more events")
            if stops := stop_each_second and turn % 2:
                masters.stop(leader)
            else:
                masters.kill(leader)
            masters.leader(leader)
            if stops:
                masters.signal(leader, signal.SIGCONT)
            else:
                masters.again(leader)
    finally:
        for one in writers:
            one.end()
    client = client_of(masters)
    jobs = {job: client.call(p.ShowJob(job)).round for job in names(client)}
    client.close()
    errors = [error for one in writers for error in one.errors]
    return Takeovers(errors, {job for one in writers for job in one.acknowledged}, jobs)
