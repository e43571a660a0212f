"""The platforms of a local job. They call the host process, which starts, kills and watches the others."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Collection, Mapping

import msgspec

from dlrover_hooks.host.child_process import described
from dlrover_hooks.job.local.host import host_socket
from dlrover_hooks.job.local.socket_calls import CallClient
from dlrover_hooks.job.platform import EndedWorker
from dlrover_hooks.job.spec import JobSpec
from dlrover_hooks.job.worker_process import Outcome, WorkerPlace
from dlrover_hooks.protocol import REQUEUE, Roles, RoleWorker, WorkerCause

_KILL_S = 40.0


class LocalAddress(msgspec.Struct, frozen=True):
    """The folder of a local job, and the URL and token of its HTTP master."""

    folder: str
    master: str
    token: str


def outcome_file(folder: str, role: str, rank: int, life: int) -> str:
    """Path of the file to which a worker writes its outcome before it ends."""
    return os.path.join(folder, f"outcome-{role}-{rank}-{life}")


class LocalWorkers:
    """The `WorkerPlatform` of one role.

    Args:
        address: how the processes of the job reach each other.
        spec: the job.
        role: name of the role.
        node: name of this machine.
    """

    def __init__(self, address: LocalAddress, spec: JobSpec, role: str, node: str) -> None:
        self._address, self._spec, self._role, self._node = address, spec, role, node
        self._host = CallClient(host_socket(address.folder))
        self._after = _newest(self._host, f"worker/{role}/")
        self._told = threading.Lock()
        self._untold = dict[int, int]()
        """By rank: the life that this object has started and whose end `ended` has not returned yet."""

    def lives(self) -> dict[int, int]:
        """See `WorkerPlatform`."""
        running = self._host.call("running", f"worker/{self._role}/")
        places = [_place(name) for name in running]
        with self._told:
            found = dict(self._untold)
        for rank, life in places:
            found[rank] = max(life, found.get(rank, 0))
        return found

    def start(self, worker: RoleWorker, avoid: Collection[str], env: Mapping[str, str]) -> str:
        """See `WorkerPlatform`. There is only one node, so `avoid` has no effect."""
        del avoid
        place = WorkerPlace(
            self._spec.name,
            worker.role,
            worker.rank,
            worker.life,
            self._address.master,
            "",  # the worker reads the token in the folder: all users can see the arguments of a process
            self._node,
        )
        command = [sys.executable, "-u", "-m", "dlrover_hooks.job.local.worker", self._address.folder,
                   msgspec.json.encode(place).decode()]  # fmt: skip
        with self._told:
            self._untold[worker.rank] = worker.life
        self._host.call("start", _name(self._role, worker.rank, worker.life), command,
                        {**env, **self._spec.env, **self._spec.role(self._role).env})  # fmt: skip
        return ""

    def end(self, rank: int, life: int) -> None:
        """See `WorkerPlatform`."""
        with self._told:
            self._untold.pop(rank, None)
        self._host.call("kill", _name(self._role, rank, life), timeout_s=_KILL_S)

    def outcome(self, rank: int, life: int) -> EndedWorker:
        """See `WorkerPlatform`."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            with open(outcome_file(self._address.folder, self._role, rank, life), "rb") as file:
                found = msgspec.json.decode(file.read(), type=Outcome)
            return EndedWorker(rank, life, found.cause, found.detail)
        return EndedWorker(rank, life, WorkerCause.KILLED, "its process was gone when the SubMaster came back")

    def ended(self, timeout_s: float) -> list[EndedWorker]:
        """See `WorkerPlatform`."""
        ends = self._host.call("ended", f"worker/{self._role}/", self._after, timeout_s, timeout_s=timeout_s + 30.0)
        found = list[EndedWorker]()
        for number, name, code, killed in ends:
            self._after = max(self._after, number)
            rank, life = _place(name)
            if killed:
                continue
            end = self.outcome(rank, life)
            if end.cause is WorkerCause.KILLED:
                cause = WorkerCause.PREEMPTED if code == REQUEUE else WorkerCause.KILLED
                end = EndedWorker(rank, life, cause, f"its process ended with {described(code)}")
            found.append(end)
            with self._told:
                if self._untold.get(rank) == life:
                    del self._untold[rank]
        return found


class LocalMasters:
    """The `MasterPlatform`."""

    def __init__(self, address: LocalAddress, spec: JobSpec) -> None:
        self._address, self._spec = address, spec
        self._host = CallClient(host_socket(address.folder))
        self._after = _newest(self._host, "sub-master/")

    def begin(self) -> bool:
        """See `MasterPlatform`."""
        for role in self._spec.roles:
            self._start(role.name)
        return True

    def missing(self) -> str:
        """See `MasterPlatform`."""
        return ""

    def _start(self, role: str) -> None:
        command = [sys.executable, "-m", "dlrover_hooks.job.local.sub_master", self._address.folder, role]
        self._host.call("start", f"sub-master/{role}", command, {})

    def restarted(self, timeout_s: float) -> list[str]:
        """See `MasterPlatform`."""
        ends = self._host.call("ended", "sub-master/", self._after, timeout_s, timeout_s=timeout_s + 30.0)
        running, found = self._host.call("running", "sub-master/"), list[str]()
        for number, name, code, killed in ends:
            self._after = max(self._after, number)
            role = name.removeprefix("sub-master/")
            over = code == 0  # a SubMaster only exits with 0 when the job is over
            if name not in running and not killed and not over and role not in found:
                self._start(role)
                found.append(role)
        return found

    def finish(self, roles: Roles) -> None:
        """See `MasterPlatform`."""
        path = os.path.join(self._address.folder, "result")
        with open(path + ".new", "wb") as file:
            file.write(msgspec.json.encode(roles))
        os.replace(path + ".new", path)
        self._host.call("finish", timeout_s=_KILL_S)


def _newest(host: CallClient, prefix: str) -> int:
    """Number of the newest end. Earlier ends need no report: the caller compares the list with what runs."""
    return max((end[0] for end in host.call("ended", prefix, 0, 0.0)), default=0)


def _name(role: str, rank: int, life: int) -> str:
    return f"worker/{role}/{rank}/{life}"


def _place(name: str) -> tuple[int, int]:
    """Rank and life of a worker's process."""
    rank, life = name.split("/")[-2:]
    return int(rank), int(life)
