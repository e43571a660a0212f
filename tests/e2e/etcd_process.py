"""A real etcd of one or three members for tests."""

from __future__ import annotations

import subprocess
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

    def journal(self, name: str, scheme: str = "etcd://") -> str:
        """That of masters, for --journal."""
        return f"{scheme}{self.members}/{name}"

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
