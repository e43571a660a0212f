"""Nodes on one machine: a keeper process each, a trainer of theirs in this process, TCP over loopback between them."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dlrover_hooks.checkpoint.checkpointer import Checkpointer
from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from dlrover_hooks.errors import Corrupt, KeeperAway
from dlrover_hooks.protocol import Generation, Held, KeeperAddress, Located, Replication, Secret
from tests.waiting import until

RUN = "0123456789abcdef" * 2
SECRET = Secret("5ec2e7" * 8)
WAIT_S = 60.0


def state(seed: int, size: int = 1000, frozen: int = 0) -> dict[str, Any]:
    """Other bytes for each seed; `frozen` bytes that are the same for all."""
    chance = np.random.default_rng(seed)
    tree: dict[str, Any] = {"w": chance.integers(1, 1 << 62, size), "seed": seed}
    if frozen:
        tree["base"] = np.random.default_rng(0).integers(1, 1 << 62, frozen // 8)
    return {"state": tree, "rank": {"rng": chance.integers(1, 1 << 62, 10)}, "data": {"train": seed}}


def same(found: Any, seed: int, **more: int) -> bool:
    """`found` is bit-exactly `state(seed)`."""
    wanted = state(seed, **more)
    return (
        found["state"].keys() == wanted["state"].keys()
        and all(np.array_equal(found["state"][name], value) for name, value in wanted["state"].items())
        and np.array_equal(found["rank"]["rng"], wanted["rank"]["rng"])
        and found["data"] == wanted["data"]
    )


class Node:
    """One keeper process and one trainer at seat 0 that saves as `rank`."""

    def __init__(self, name: str, rank: int, world: int = 2) -> None:
        self.name, self.rank = name, rank
        self.notices: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.located: tuple[KeeperAddress, ...] = ()
        self.keeper = self.start()
        self.trainer = self._trainer()
        self.trainer.begin(RUN, 1, rank, world)
        self.at = self.trainer.neighbours.listen("127.0.0.1")

    def _trainer(self) -> Checkpointer:
        return Checkpointer(
            "job",
            self.name,
            0,
            notify=self.notices.put,
            locate=lambda *_: Located(SECRET, self.located),
            start_keeper=False,
            deadline_s=WAIT_S,
        )

    def next_trainer(self) -> None:
        """The trainer is gone, and another process is in its place, which has asked for nothing yet."""
        self.trainer.close()
        self.trainer = self._trainer()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dlrover_hooks.checkpoint.keeper", "--job", "job", "--node", self.name]
        self.keeper = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        KeeperLink.connect("job", self.name, notify=lambda _: None, start=False, deadline_s=WAIT_S).close()
        return self.keeper

    def follow(self, to: KeeperAddress | None = None, secret: Secret = SECRET) -> None:
        self.trainer.neighbours.follow(Replication(secret, to))

    def save(self, step: int, **more: int) -> Generation:
        """Bytes that depend on step and rank; returns when they are hashed."""
        assert self.trainer.save(step, state(100 * step + self.rank, **more)) is not None, self.trainer.error
        notice = self.notices.get(timeout=WAIT_S)
        assert isinstance(notice, keeper_messages.Hashed)
        assert (notice.generation.step, notice.rank) == (step, self.rank)
        return notice.generation

    def sit(self) -> None:
        """Take the seat, at a new keeper if the one before was killed."""

        def taken() -> bool:
            with contextlib.suppress(KeeperAway):
                self.trainer.take_seat()
                return True
            return False

        until(taken, "the seat")

    def replicas(self) -> list[Held]:
        return [one for one in self.trainer.held() if one.home]

    def has(self, step: int, home: str) -> None:
        """Wait until a whole replica of that step is here."""
        until(lambda: any((one.generation.step, one.home) == (step, home) for one in self.replicas()), f"step {step}")

    def segments(self, seat: int = 0) -> list[SharedSegment]:
        """The keeper's own memory of `seat`s, of this node and of others, from outside."""
        found: dict[int, SharedSegment] = {}
        for name in os.listdir(f"/proc/{self.keeper.pid}/fd"):
            path = f"/proc/{self.keeper.pid}/fd/{name}"
            with contextlib.suppress(OSError, ValueError, Corrupt):  # the latter: it is just being made
                if os.readlink(path).startswith(f"/memfd:dlrover-hooks-seat-{seat} "):
                    found.setdefault(os.stat(path).st_ino, SharedSegment.attach(os.open(path, os.O_RDWR)))
        return list(found.values())

    def flip(self, step: int, rank: int, at: int = -5) -> None:
        """One bit of `rank`'s image of `step`, here."""
        for shared in self.segments():
            for slot in shared.slots():
                if slot.generation is not None and (slot.generation.step, slot.rank) == (step, rank):
                    shared.view(slot.index, slot.image_bytes)[at] ^= 4
            shared.close()

    def kill(self) -> None:
        """SIGKILL of the keeper; what it held is gone."""
        self.keeper.kill()
        self.keeper.wait()

    def close(self) -> None:
        self.trainer.close()
        self.kill()


class Proxy:
    """Stands between a caller and the keeper at `to`. `sent`: bytes from the caller. `meddle` sees each piece of them.

    It may return other bytes, or None to cut the connection.
    """

    def __init__(self, to: KeeperAddress, meddle: Callable[[bytes], bytes | None] = lambda data: data) -> None:
        self.sent, self.meddle, self._to = 0, meddle, to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.at = KeeperAddress(to.node, "127.0.0.1", self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            try:
                keeper = socket.create_connection((self._to.host, self._to.port))
            except OSError:
                caller.close()
                continue
            self._open += [caller, keeper]
            for source, sink, counts in ((caller, keeper, True), (keeper, caller, False)):
                self._threads.append(threading.Thread(target=self._pass, args=(source, sink, counts)))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    self.sent += len(data)
                    meddled = self.meddle(data)
                    if meddled is None:
                        break
                    data = meddled
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(WAIT_S)
