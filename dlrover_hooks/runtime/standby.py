"""`python -u -m dlrover_hooks.runtime.standby`: forks workers that have imported everything and wait for a seat.

The server imports what a worker of this node had imported, and then forks a standby at each request of the launcher
(`standbys`). It forks twice: the standby's parent ends at once and the launcher adopts it, so that the launcher reaps
it and the kernel kills it with the launcher, while the server may die without harm to any worker.

A fork has only the thread that forked, and a lock that another one held is held for ever; a CUDA context does not
survive it at all. So the server has one thread and has not touched a GPU: a package that starts a thread or opens a
device when it is imported is left out, by name. Each standby is then made as a fresh process is: its own session,
environment, files, random state and number of threads.
"""

from __future__ import annotations

import gc
import os
import random
import select
import socket
import sys
import time
from collections.abc import Iterator

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.runtime import boot, preload
from dlrover_hooks.runtime.parent import die_with_parent

_ADOPTED_S = 10.0
"""It takes a millisecond."""


class Order(msgspec.Struct, frozen=True):
    """What a standby is to become. With it come descriptors for its standard input, output, errors and last words."""

    arguments: list[str]
    """`[-m] script args`."""
    environment: dict[str, str]
    folder: str


def main() -> None:
    """Serve until the launcher hangs up. In a standby: become the worker that the launcher orders."""
    descriptor, launcher, file, leave_out = sys.argv[1:5]
    boot.forget_cwd()
    line = socket.socket(fileno=int(descriptor))
    for package, why in _imported(file, leave_out.split(",")):
        line.send(f"{package} is left out of the standbys' imports: {why}".encode())
        arguments = [descriptor, launcher, file, f"{leave_out},{package}"]
        os.execv(sys.executable, [sys.executable, "-u", "-m", "dlrover_hooks.runtime.standby", *arguments])
    os.set_inheritable(line.fileno(), False)
    gc.collect()
    gc.freeze()  # a collection would write to every page that the standbys share
    own = _serve(line, int(launcher))
    if own is not None:
        _become(*_ordered(own))


def _imported(file: str, leave_out: list[str]) -> Iterator[tuple[str, str]]:
    """Import all; yields the package that has spoiled this process for forking, if one has, and why."""
    for package in preload.load(preload.told(file), leave_out):
        if why := _not_forkable():
            yield package, why
            return


def _not_forkable() -> str:
    if len(os.listdir("/proc/self/task")) > 1:
        return "it starts a thread when it is imported"
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.lexists(link) and os.readlink(link).startswith("/dev/nvidia"):
            return "it opens the GPU when it is imported"
    return ""


def _serve(line: socket.socket, launcher: int) -> socket.socket | None:
    """Fork a standby for each message. Returns in the standby, with its line; None when the launcher hangs up."""
    while line.recv(64):
        if why := _not_forkable():
            line.send(f"no more standbys: {why.replace('it', 'something', 1)}".encode())
            return None
        theirs, own = socket.socketpair()
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)
            line.close()
            theirs.close()
            _settle(own, launcher)
            return own
        own.close()
        os.waitpid(middle, 0)
        with theirs:
            socket.send_fds(line, [b"a standby"], [theirs.fileno()])
    return None


def _settle(own: socket.socket, launcher: int) -> None:
    """Be the launcher's child, in a session of its own; then say so. Ends this process if the launcher is gone."""
    os.setsid()
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != launcher:
        hung_up, _, _ = select.select([own], [], [], 0.001)
        if hung_up or time.monotonic() > deadline:
            os._exit(1)
    die_with_parent()
    if os.getppid() != launcher:  # it ended just before
        os._exit(1)
    own.send(str(os.getpid()).encode())


def _ordered(own: socket.socket) -> tuple[Order, list[int]]:
    """Wait for the seat. Ends this process if the launcher has no use for it."""
    head, files, _, _ = socket.recv_fds(own, 4, 4)
    if not head:
        os._exit(0)
    with own, own.makefile("rb") as rest:
        return msgspec.json.decode(rest.read(int.from_bytes(head, "big")), type=Order), files


def _become(order: Order, files: list[int]) -> None:
    for descriptor, file in enumerate(files[:3]):
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(order.folder)
    words = settings.last_words_to(files[3]) if files[3:] else {}
    settings.replace_environment(order.environment | words)
    time.tzset()
    _freshen()
    what = boot.program(order.arguments)
    boot.enter(what)
    boot.take_place()
    boot.run(what)


def _freshen() -> None:
    """What a fresh process draws or reads at its start, and all forks have alike."""
    random.seed()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
        if threads := settings.omp_threads():
            torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
