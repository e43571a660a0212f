"""The keeper: a process that owns a node's checkpoint memory, so that the memory outlives the trainers.

    python -m dlrover_hooks.checkpoint.keeper --job J --node NODE [--life-fd N] [--linger-s 600] [--detach]

With `--life-fd` (set by a launcher) it runs until that pipe is closed. Without, it runs until `--linger-s` after its
last trainer. Before it exits it makes the newest complete generation durable, within `--grace-s`, and removes its
socket and lock. It never imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from dlrover_hooks.checkpoint.ipc import keeper_messages
from dlrover_hooks.checkpoint.ipc.unix_socket import Address, KeeperSocket, address, dial, lock, send
from dlrover_hooks.checkpoint.keeper.daemon import Keeper

GRACE_S = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the end. Also returns 0 if another keeper of (job, node) already runs."""
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s keeper {options.node} job={options.job} %(message)s")
    failures = _Failures()
    logging.getLogger().addHandler(failures)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if options.life_fd is not None:
        os.set_inheritable(options.life_fd, False)
    place = address(options.job, options.node)
    fd = _take(place, options.life_fd, options.grace_s)
    if fd is None:
        return 0
    plate = KeeperSocket(place, fd)
    try:
        if options.detach and os.fork():  # no thread exists yet; the parent's exit means: trainers may connect
            os._exit(0)
        _settle()
        keeper = Keeper(plate, life_fd=options.life_fd, linger_s=options.linger_s, grace_s=options.grace_s)
        signal.signal(signal.SIGTERM, lambda *_: keeper.stop())
        keeper.run()
    finally:
        plate.remove()
        spent = [options.log] if options.log is not None and not failures.seen and sys.exc_info()[0] is None else []
        for path in (*options.remove, *spent):
            with contextlib.suppress(OSError):
                os.unlink(path)
    logging.shutdown()
    os._exit(0)  # a thread may hang in an unresponsive store


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dlrover_hooks.checkpoint.keeper", description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--life-fd", type=int, help="end when this pipe does")
    parser.add_argument("--linger-s", type=float, default=600.0, help="without --life-fd: wait this long for a trainer")
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="time for the last generation to become durable")
    parser.add_argument("--detach", action="store_true", help="return as soon as trainers may connect")
    parser.add_argument("--remove", action="append", default=[], help="at the end, a temporary file of the launcher's")
    parser.add_argument("--log", help="where standard error goes; removed at the end if no error is in it")
    return parser.parse_args(arguments)


class _Failures(logging.Handler):
    """Records whether an error was logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen = True


def _take(place: Address, life_fd: int | None, grace_s: float) -> int | None:
    """Take the lock. None if a running keeper serves, and has adopted our life pipe if there is one.

    If the running keeper is just ending, wait for it: a launcher must not be left without a keeper.
    """
    deadline = time.monotonic() + grace_s + 5.0
    while True:
        fd = lock(place.lock)
        if fd is not None:
            return fd
        if life_fd is None or _adopted(place.socket, life_fd) or time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def _adopted(path: str, life_fd: int) -> bool:
    frames = keeper_messages.Frames()
    connection = dial(path)
    if connection is None:
        return False
    with connection:
        connection.settimeout(5.0)
        try:
            send(
                connection,
                keeper_messages.frame(keeper_messages.Adopt(ref=1, at=keeper_messages.whereabouts(life_fd))),
                [life_fd],
            )
            while frames.receive(connection):
                for message, _ in frames.messages():
                    return isinstance(message, keeper_messages.Acknowledged)
        except OSError:
            return False
    return False


def _settle() -> None:
    """Lower the process priority, and leave the current folder so that it can be unmounted."""
    with contextlib.suppress(OSError):
        os.nice(5)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # a trainer's message does not preempt it
    os.chdir("/")


if __name__ == "__main__":
    sys.exit(main())
