"""Injects faults into this process, its master, its keeper or its launcher. Linux.

When to inject them is decided elsewhere: see `dlrover_hooks.testing.faults.fault_plan` and `drill`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import msgspec

from dlrover_hooks.errors import HooksError
from dlrover_hooks.host.background_thread import BackgroundThread
from dlrover_hooks.testing.faults.fault_plan import Fault, Kind, Target

_KEEPER = "dlrover_hooks.checkpoint.keeper"
_LAUNCHERS = (("dlrover-hooks", "run"), ("dlrover_hooks", "run"))
_CUT_AGAIN_S = 0.005


class InjectedFault(RuntimeError):
    """Raised on the training thread by an `exception` fault. Stands for an error in the user's code."""


class FaultContext(msgspec.Struct, frozen=True):
    """The job and node of this process. `master`: the URLs of all masters, separated by commas; empty: none."""

    job: str
    node: str
    master: str = ""


def strike(fault: Fault, around: FaultContext) -> None:
    """Inject `fault` into this process, or into its master, keeper or launcher. The caller implements SLOW.

    Raises:
        InjectedFault: for an exception fault.
        HooksError: the master, the keeper or the launcher was not found.
    """
    if fault.of is not Target.WORKER:
        found = {Target.MASTER: _master, Target.KEEPER: _keeper, Target.LAUNCHER: _launcher}[fault.of]
        (kill if fault.kind is Kind.KILL else stop)(found(around), fault.seconds)
        return
    doing: dict[Kind, Callable[[], object]] = {
        Kind.KILL: lambda: kill(os.getpid()),
        Kind.STOP: lambda: stop(os.getpid(), fault.seconds),
        Kind.EXCEPTION: lambda: _raise(fault),
        Kind.HANG: lambda: hang(fault.seconds),
        Kind.SEGFAULT: segfault,
        Kind.CUT: lambda: cut(around.master, fault.seconds),
        Kind.CUT_PEERS: lambda: cut(around.master, fault.seconds, peers=True),
        Kind.SLOW: lambda: None,
    }
    doing[fault.kind]()


def _raise(fault: Fault) -> None:
    raise InjectedFault(f"injected: {fault}")


def kill(pid: int, _: float = 0.0) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, seconds: float = 0.0) -> None:
    """SIGSTOP, and SIGCONT after `seconds` (0: never), sent by a small process that ends with this session."""
    if seconds > 0:
        subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds:g}; kill -CONT {pid}"], stdin=subprocess.DEVNULL)
    os.kill(pid, signal.SIGSTOP)


def hang(seconds: float = 0.0) -> None:
    """Hold the interpreter's lock for `seconds` (0: forever) in a C call. A signal ends it."""
    ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000) if seconds > 0 else -1)


def segfault() -> None:
    """SIGSEGV, without a core dump."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.string_at(0)


def cut(master: str, seconds: float = 0.0, *, peers: bool = False) -> BackgroundThread:
    """End this process's TCP connections to `master` (the URLs of all masters, separated by commas), or all others
    (`peers`), and new ones for `seconds`.

    Both sides see the end of the connection, as with a reset. Returns the thread that keeps cutting.
    """
    until = time.monotonic() + seconds
    hosts = _addresses(master)
    _shut_down(hosts, peers)
    run = functools.partial(_keep_cutting, hosts, peers, until)
    thread = BackgroundThread("dlrover-hooks-cut", run, where=f"cutting connections, master {master}", on_error="warn")
    thread.start()
    return thread


def _keep_cutting(hosts: set[tuple[str, int]], peers: bool, until: float) -> None:
    while time.monotonic() < until:
        _shut_down(hosts, peers)
        time.sleep(_CUT_AGAIN_S)


def _shut_down(hosts: set[tuple[str, int]], peers: bool) -> None:
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            host, port = connection.getpeername()[:2]
            if ((host.removeprefix("::ffff:"), port) in hosts) is not peers:
                connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[socket.socket]:
    """This process's internet sockets, each as a duplicate descriptor."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(name)))
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
                else:
                    found.close()


def _addresses(urls: str) -> set[tuple[str, int]]:
    addresses = set()
    for parts in map(urlsplit, urls.split(",")):
        if parts.hostname:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
            addresses |= {(str(one[4][0]), port) for one in found}
    return addresses


def _master(around: FaultContext) -> int:
    """The process ID of the one that leads."""
    import requests

    errors: list[Exception] = []
    for url in around.master.split(","):
        try:
            health = requests.get(f"{url}/healthz", timeout=5).json()
            if health.get("role") != "standby":
                return int(health["pid"])
        except (requests.RequestException, KeyError, ValueError) as error:
            errors.append(error)
    raise HooksError(f"no master at {around.master!r} leads and says its pid: {errors}")


def _keeper(around: FaultContext) -> int:
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if _KEEPER in words and _after(words, "--job") == around.job and _after(words, "--node") == around.node:
            return process.pid
    raise HooksError(f"job {around.job!r} has no keeper on node {around.node!r}")


def _launcher(around: FaultContext) -> int:
    import psutil

    for process in psutil.Process().parents():
        words = [os.path.basename(word) for word in process.cmdline()]
        if any(pair in _LAUNCHERS for pair in itertools.pairwise(words)):
            return process.pid
    raise HooksError(f"job {around.job!r} was not started by `dlrover-hooks run` on node {around.node!r}")


def _after(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words[:-1] else None


class InjectedFaults:
    """The faults of a schedule that were injected already: lines of a file beside it, shared by all workers of a run.

    A line is written before its fault is injected, so that no failure or restart injects it twice.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def claim(self, number: int, fault: Fault, **facts: object) -> bool:
        """True for the first caller that claims fault `number`."""
        with open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if any(row["number"] == number for row in map(msgspec.json.decode, file)):
                return False
            row = {"number": number, "fault": str(fault), "at": time.time(), "pid": os.getpid(), **facts}
            file.write(msgspec.json.encode(row) + b"\n")
            return True

    def rows(self) -> list[dict[str, object]]:
        """The injected faults, in order."""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            return [msgspec.json.decode(line) for line in file]
        return []
