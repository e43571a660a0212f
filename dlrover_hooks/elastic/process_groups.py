"""The process groups of one round: tracked while they are created, aborted when a peer is gone, destroyed at the end.

Wraps two private functions of torch 2.13 meanwhile; tests/elastic/test_process_groups.py checks that they are there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dlrover_hooks.elastic.gloo_connections import Connections
from dlrover_hooks.host.background_thread import BackgroundThread

log = logging.getLogger("dlrover_hooks")

rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
"""Imported by name because torch.distributed has a function of the same name."""

_AGAIN_S = 0.05
"""Interval between aborts. A group that is being created opens more connections, so aborts repeat until `stop`."""

_DIAL = timedelta(seconds=2)
"""Timeout of one connection attempt. torch retries a lost store until its timeout and cannot be aborted meanwhile."""


class Groups:
    """The process groups of one round. `check` raises once the round is broken.

    `cut` may be called on any thread, the rest on the training thread.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.connections = Connections()
        self._check = check
        self._cutter = BackgroundThread(
            "dlrover-hooks-cut",
            self._cut,
            where="the process groups of a broken round",
            on_error="warn",  # it is tried again, until the collectives have failed and `stop` is called
            again_s=_AGAIN_S,
        )

    def cut(self) -> None:
        """Make every collective of this round fail, pending ones at once. Returns at once. Idempotent."""
        self._cutter.start()

    def stop(self) -> None:
        """Stop aborting. Idempotent."""
        self._cutter.stop()

    def destroy(self) -> None:
        """Destroy all groups at the end of the round, and reset torch's count of groups.

        torch names a group by the number of groups created before. A group that failed during creation has been counted
        in this process but not in a new worker's process. In the next round each would wait forever for the other under
        a different name.
        """
        self.stop()
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception as error:  # errors do not matter: the group is aborted already
                log.info("the process group of the round before ended with: %s", error)
        distributed_c10d._world.group_count = 0

    def _cut(self) -> None:
        _abort_nccl()
        while True:
            self.connections.cut()
            if self._cutter.stopping.wait(_AGAIN_S):
                return

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which new process groups are tracked for `cut`."""
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
        """Wait until the store accepts connections.

        If rank 0 is dead, torch would retry until the group's timeout, and that cannot be aborted.
        """
        until = time.monotonic() + timeout.total_seconds()
        while time.monotonic() < until:
            self._check()
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
                return
            self._cutter.stopping.wait(0.01)

    def _dial(self, connect: Callable[[timedelta], Any], timeout: timedelta) -> Any:
        """Connect a client's store in short attempts: rank 0 may die after `_await_store` has reached it."""
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
    """Abort collectives on devices. Does nothing without NCCL."""
    if not (dist.is_nccl_available() and dist.is_initialized() and torch.cuda.is_initialized()):
        return
    for group in list(distributed_c10d._world.pg_map):
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                backend.abort()
        except RuntimeError as error:  # no backend for CUDA devices
            log.debug("nothing to abort: %s", error)
