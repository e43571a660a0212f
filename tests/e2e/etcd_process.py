"""A real etcd of one or three members for tests, and masters that share a journal in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import requests

from dlrover_hooks.host.ports import free_port
from tests.waiting import until


def free_ports(count: int) -> list[int]:
    """Different ports that were free just now."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


class EtcdProcess:
    """`etcd`, which Debian has as the package etcd-server. `members`: the list for --journal; `flags`: of etcd.

    `tls`: certificate and key of the members, with which clients have to come, too.
    """

    def __init__(self, folder: Path, count: int = 1, *flags: str, tls: tuple[str, str] | None = None) -> None:
        self._folder, self._tls = folder, tls
        scheme = "http" if tls is None else "https"
        if tls is not None:
            flags += ("--cert-file", tls[0], "--key-file", tls[1], "--trusted-ca-file", tls[0], "--client-cert-auth")
        ports = free_ports(2 * count)
        self._clients, peers = ports[:count], ports[count:]
        self.members = ",".join(f"127.0.0.1:{port}" for port in self._clients)
        cluster = ",".join(f"m{index}=http://127.0.0.1:{port}" for index, port in enumerate(peers))
        self._commands = [
            ["etcd", "--name", f"m{index}", "--data-dir", str(folder / f"etcd-{index}"),
             "--listen-client-urls", f"{scheme}://127.0.0.1:{client}",
             "--advertise-client-urls", f"{scheme}://127.0.0.1:{client}",
             "--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
             "--initial-cluster", cluster, *flags]
            for index, (client, peer) in enumerate(zip(self._clients, peers, strict=True))
        ]  # fmt: skip
        self.processes = [self._start(index) for index in range(count)]
        for port in self._clients:
            until(lambda port=port: self._healthy(port), f"etcd at port {port}")

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        with (self._folder / f"etcd-{index}.log").open("ab") as log:
            return subprocess.Popen(self._commands[index], stdout=log, stderr=log, start_new_session=True)

    def again(self, index: int) -> None:
        """Start a member that was killed."""
        self.processes[index] = self._start(index)
        until(lambda: self._healthy(self._clients[index]), "the member")

    def _healthy(self, port: int) -> bool:
        scheme, ca = ("http", True) if self._tls is None else ("https", self._tls[0])
        try:
            answer = requests.get(f"{scheme}://127.0.0.1:{port}/health", timeout=5, verify=ca, cert=self._tls)
        except requests.RequestException:
            return False
        return answer.json().get("health") == "true"

    def kill(self, index: int) -> None:
        """SIGKILL, reaped."""
        self.processes[index].kill()
        self.processes[index].wait(60)

    def close(self) -> None:
        """End all members."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(60)


class Masters:
    """Masters on one journal in etcd, each with its own address. `env`: variables of them; `scheme`: of the journal."""

    def __init__(
        self, folder: Path, etcd: EtcdProcess, count: int = 2, *flags: str, scheme: str = "etcd://", **env: str
    ) -> None:
        self.journal, self._env = f"{scheme}{etcd.members}/{folder.name}", env
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
