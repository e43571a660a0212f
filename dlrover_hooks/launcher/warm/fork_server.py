"""The fork server: forks workers that have imported everything and wait for a rank.

`python -u -m dlrover_hooks.launcher.warm.fork_server`

The server imports what a worker of this node has imported or, before that is known, what the source of the script
imports (`script_imports`). The script itself runs only once a standby has its rank. The server forks a standby for each
request of the launcher (`standby_pool`). It forks twice: the standby's parent ends at once and the launcher adopts the
standby. The launcher then reaps it, and the kernel kills it with the launcher, while the server may die without harm to
any worker.

A fork has only the thread that forked, a lock that another thread held stays locked for ever, and a CUDA context does
not survive at all. The server therefore has one thread and does not use a GPU: a package that starts a thread or opens
a device at import is left out, by name. Each standby then gets what a fresh process has: its own session, environment,
files, random state and number of threads.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping

import msgspec

from dlrover_hooks import config as settings
from dlrover_hooks.host.parent_death import die_with_parent
from dlrover_hooks.launcher.warm import script_imports, worker_bootstrap
from dlrover_hooks.worker import preimport_list

NO_FORK = b"no fork"
"""The reply of a server that could not fork: no memory, or too many processes."""
ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""While the server imports: NumPy's BLAS and PyArrow's allocator would start threads, `torch.cuda.is_available()` would
initialise CUDA.
"""
_ADOPTED_S = 10.0
"""Timeout of the adoption, which takes a millisecond."""
_OOM_SCORE = "/proc/self/oom_score_adj"


class StandbyOrder(msgspec.Struct, frozen=True):
    """The worker that a standby becomes. Descriptors for stdin, stdout, stderr and the error pipe come with it."""

    arguments: list[str]
    """`[-m] script args`."""
    environment: dict[str, str]
    folder: str


def main() -> None:
    """Serve until the launcher closes the connection. In a standby: become the worker that the launcher orders."""
    descriptor, launcher, file, leave_out, *script = sys.argv[1:]
    worker_bootstrap.forget_cwd()
    line = socket.socket(fileno=int(descriptor))
    oom_score = _first_to_go()
    wanted = _wanted(file, script)
    if wanted is None:
        return
    with settings.environment_of(wanted.environment) as own:
        for part, why in _imported(wanted, leave_out.split(",")):
            line.send(f"{part} is left out of the standbys' imports: {why}".encode())
            _last_to_go(oom_score)
            arguments = [descriptor, launcher, file, f"{leave_out},{part}", *script]
            os.execv(
                sys.executable, [sys.executable, "-u", "-m", "dlrover_hooks.launcher.warm.fork_server", *arguments]
            )
    os.set_inheritable(line.fileno(), False)
    gc.collect()
    gc.freeze()  # a collection would write to every page that the standbys share
    seat = _serve(line, int(launcher))
    if seat is not None:
        order, files = _ordered(seat)
        _last_to_go(oom_score)
        threads = settings.omp_threads(order.environment | wanted.environment)
        _become(order, files, own, threads)


def _wanted(file: str, script: list[str]) -> preimport_list.Imported | None:
    """The modules to import: a worker's list, or those in the source of the script; None if there are none."""
    told = os.path.exists(file)
    wanted = preimport_list.told(file) if told else script_imports.read(script)
    if not told and not wanted.modules:
        return None
    environment = {name: value for name, value in wanted.environment.items() if name not in ONE_THREAD}
    return msgspec.structs.replace(wanted, environment=environment)


def _first_to_go() -> str:
    """When memory runs out, let the kernel kill this process and idle standbys, not a worker. Returns the old score."""
    try:
        with open(_OOM_SCORE, "r+b", buffering=0) as file:
            before = file.read(16).decode()
            file.write(b"1000")
    except OSError:
        return ""
    return before


def _last_to_go(before: str) -> None:
    with contextlib.suppress(OSError), open(_OOM_SCORE, "w") as file:
        file.write(before)


def _imported(wanted: preimport_list.Imported, leave_out: list[str]) -> Iterator[tuple[str, str]]:
    """Import all. Yields the package or sub-package that made this process unsafe to fork, if any, and the reason."""
    for module in preimport_list.load(wanted, leave_out):
        if why := _not_forkable():
            yield preimport_list.part(module), why
            return


def _not_forkable() -> str:
    if len(os.listdir("/proc/self/task")) > 1:
        return "it starts a thread when it is imported"
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.lexists(link) and opens_gpu(os.readlink(link)):
            return "it opens the GPU when it is imported"
    return ""


def opens_gpu(device: str) -> bool:
    """Whether this open file belongs to a CUDA context.

    NVML (device counts, metrics) also opens /dev/nvidiactl and /dev/nvidia0, and survives a fork. Only CUDA opens the
    device for a context's managed memory.
    """
    return device.startswith("/dev/nvidia-uvm")


def _serve(line: socket.socket, launcher: int) -> socket.socket | None:
    """Fork a standby for each message. Returns its connection in the standby, None when the launcher disconnects."""
    while line.recv(64):
        if why := _not_forkable():
            line.send(f"no more standbys: {why.replace('it', 'something', 1)}".encode())
            return None
        theirs, own = socket.socketpair()
        with theirs:
            try:
                middle = os.fork()
            except OSError:
                own.close()
                line.send(NO_FORK)
                continue
            if middle == 0:
                _fork_or_exit()
                line.close()
                theirs.close()
                _settle(own, launcher)
                return own
            own.close()
            _, status = os.waitpid(middle, 0)
            if status:
                line.send(NO_FORK)
            else:
                socket.send_fds(line, [b"a standby"], [theirs.fileno()])
    return None


def _fork_or_exit() -> None:
    """Returns in the child. The intermediate process ends: with 1 if the fork failed."""
    try:
        child = os.fork()
    except OSError:
        os._exit(1)
    if child:
        os._exit(0)


def _settle(own: socket.socket, launcher: int) -> None:
    """Become the launcher's child, in an own session; then report that. Ends this process if the launcher is gone."""
    os.setsid()
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != launcher:
        hung_up, _, _ = select.select([own], [], [], 0.001)
        if hung_up or time.monotonic() > deadline:
            os._exit(1)
    die_with_parent()
    if os.getppid() != launcher:  # it ended just before
        os._exit(1)
    pidfd = os.pidfd_open(os.getpid())  # always means this process, while its pid may be reused before it is read
    socket.send_fds(own, [str(os.getpid()).encode()], [pidfd])
    os.close(pidfd)


def _ordered(own: socket.socket) -> tuple[StandbyOrder, list[int]]:
    """Wait for the order. Ends this process if the launcher disconnects."""
    try:
        head, files, _, _ = socket.recv_fds(own, 4, 4)
    except ConnectionError:  # the launcher disconnected without having read this standby's message
        head, files = b"", []
    if not head:
        os._exit(0)
    with own, own.makefile("rb") as rest:
        return msgspec.json.decode(rest.read(int.from_bytes(head, "big")), type=StandbyOrder), files


def _become(order: StandbyOrder, files: list[int], own: Mapping[str, str], threads: int | None) -> None:
    """Args: `own`: variables that packages have set in the environment at import. `threads`: for torch."""
    for descriptor, file in enumerate(files[:3]):
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(order.folder)
    error_pipe = settings.last_words_to(files[3]) if files[3:] else {}
    settings.replace_environment({**order.environment, **own, **error_pipe})
    time.tzset()
    _freshen(threads)
    what = worker_bootstrap.program(order.arguments)
    worker_bootstrap.enter(what)
    worker_bootstrap.take_place()
    worker_bootstrap.run(what)


def _freshen(threads: int | None) -> None:
    """Renew what a process draws or reads at its start, and what all forks would share."""
    random.seed()
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
        if threads:
            torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
