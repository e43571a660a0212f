"""Lives and workers of one job at one master, with real keepers."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import psutil

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.keeper_connection import KeeperLink
from dlrover_hooks.checkpoint.memory.segment import SharedSegment
from tests.e2e.kept import segment
from tests.e2e.life_process import LifeProcess
from tests.e2e.master_process import LiveMaster
from tests.e2e.session_life import Life
from tests.waiting import until


class House:
    """Makes lives and workers of one job at one master; leaves no process behind."""

    def __init__(self, master: LiveMaster) -> None:
        self.job, self.master = f"session-{uuid.uuid4().hex[:8]}", master
        self._stack = contextlib.ExitStack()

    def life(self, **given: Any) -> Life:
        life = Life(**{"job": self.job, "master": self.master.url, "token": self.master.token} | given)
        self._stack.callback(life.leave)
        return life

    def worker(self, **given: Any) -> LifeProcess:
        made = LifeProcess(**{"job": self.job, "master": self.master.url, "token": self.master.token} | given)
        self._stack.callback(made.kill)
        return made

    def keeper_pid(self) -> int:
        link = KeeperLink.connect(self.job, "node", notify=lambda _: None, start=False)
        try:
            return link.call(lambda ref: keeper_messages.Inventory(ref=ref))[0].pid
        finally:
            link.close()

    def kill_keeper(self) -> int:
        pid = self.keeper_pid()
        process = psutil.Process(pid)
        process.kill()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0)  # nobody may reap it here: a zombie holds nothing any more
        until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the keeper's end")
        return pid

    def shared(self, seat: int = 0) -> SharedSegment:
        """The keeper's own memory, from outside."""
        return segment(self.keeper_pid(), seat)

    def close(self) -> None:
        self._stack.close()
        for process in psutil.process_iter(["cmdline"]):
            if any(self.job in part for part in process.info["cmdline"] or ()):
                process.kill()


def trained(life: Life, steps: int, *, durable: bool = False) -> Life:
    for _ in range(steps):
        life.step()
        life.durable() if durable else life.whole()
    return life


def lives(house: House, world_size: int) -> list[LifeProcess]:
    return [house.worker(rank=rank, world_size=world_size) for rank in range(world_size)]


def everyone(workers: list[LifeProcess], verb: str) -> list[dict[str, Any]]:
    return [worker.tell(verb) for worker in workers]
