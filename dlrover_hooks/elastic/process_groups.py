"""The process groups of one life of a training function: watched while they are made, cut when a peer is gone, ended.

Two private functions of torch 2.13 are wrapped meanwhile (tests/integrations/test_groups.py holds torch to them).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dlrover_hooks.elastic.collective_abort import Connections

log = logging.getLogger("dlrover_hooks")

rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
"""torch.distributed has a function of that name."""

_AGAIN_S = 0.05
"""A group that is just being made opens more connections; so they are cut until the life is over."""

_DIAL = timedelta(seconds=2)
"""torch dials a store that has gone until its timeout, and cannot be cut meanwhile."""


class Groups:
    """Of one life. `check` raises once the round is broken; `cut` on any thread, the rest on the training thread."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.connections = Connections()
        self._check = check
        self._over = threading.Event()
        self._cutter: threading.Thread | None = None

    def cut(self) -> None:
        """From now on every collective of this life fails, pending ones at once. Returns at once, idempotent."""
        if self._cutter is None:
            cutter = threading.Thread(target=self._cut, name="dlrover-hooks-cut", daemon=True)
            cutter.start()
            self._cutter = cutter  # `stop` joins it, and may be called at this moment: only a started one can be joined

    def stop(self) -> None:
        """Cut no more. Idempotent."""
        self._over.set()
        if self._cutter is not None:
            self._cutter.join(5.0)

    def destroy(self) -> None:
        """The life is over: no group of it is left, nor the number of one.

        torch names a group by how many were made. One that failed while it was made has counted, in this process and
        not in a newcomer's: in the next life each would wait for the other under another name, for ever.
        """
        self.stop()
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception as error:  # a group that is cut has nothing left to lose
                log.info("the process group of the round before ended with: %s", error)
        distributed_c10d._world.group_count = 0

    def _cut(self) -> None:
        _abort_nccl()
        while True:
            self.connections.cut()
            if self._over.wait(_AGAIN_S):
                return

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Groups that are made inside are known to `cut`."""
        made, stored = distributed_c10d._new_process_group_helper, rendezvous._create_c10d_store

        @functools.wraps(made)
        def make(*args: Any, **kwargs: Any) -> Any:
            self._check()
            with self.connections.opening():
                return made(*args, **kwargs)

        @functools.wraps(stored)
        def store(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *rest: Any) -> Any:
            self.connections.store(port)
            if not rank:
                return stored(hostname, port, rank, world_size, timeout, *rest)
            self._await_store(hostname, port, timeout)
            return self._dial(lambda within: stored(hostname, port, rank, world_size, within, *rest), timeout)

        distributed_c10d._new_process_group_helper, rendezvous._create_c10d_store = make, store
        try:
            yield
        finally:
            distributed_c10d._new_process_group_helper, rendezvous._create_c10d_store = made, stored

    def _await_store(self, host: str, port: int, timeout: timedelta) -> None:
        """Rank 0 may be dead by now: torch would dial it until the group's timeout, where nothing can be cut."""
        until = time.monotonic() + timeout.total_seconds()
        while time.monotonic() < until:
            self._check()
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
                return
            self._over.wait(0.01)

    def _dial(self, connect: Callable[[timedelta], Any], timeout: timedelta) -> Any:
        """A client's store. Rank 0 may die between its first sign of life and this."""
        until = time.monotonic() + timeout.total_seconds()
        while True:
            self._check()
            try:
                found = connect(min(timeout, _DIAL))
            except dist.DistError:
                if time.monotonic() > until:
                    raise
            else:
                found.set_timeout(timeout)
                return found


def _abort_nccl() -> None:
    """End what waits on a device. A torch without NCCL, or a group without it, has nothing to abort."""
    if not (dist.is_nccl_available() and dist.is_initialized() and torch.cuda.is_initialized()):
        return
    for group in list(distributed_c10d._world.pg_map):
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                backend.abort()
        except RuntimeError as error:  # no backend for devices
            log.debug("nothing to abort: %s", error)
