"""Functions of roles that need no torch, for the tests of jobs on both backends. They and the tests exchange files.

An import of torch takes a process 3 s of CPU time: what needs it is in `job_trainers`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover_hooks.errors import CallFailed, UsageError
from dlrover_hooks.job import current_worker

if TYPE_CHECKING:
    import numpy as np


def folder() -> Path:
    """Of this test."""
    return Path(current_worker().config["folder"])


def _until(name: str) -> None:
    """Wait until the test has created this file."""
    while not (folder() / name).exists():
        threading.Event().wait(0.02)


def serve() -> None:
    worker = current_worker()
    queue = worker.queue("numbers", 2)

    def double(items: list[int]) -> list[int]:
        return [2 * one for one in items]

    def fail() -> None:
        raise ValueError("no such prompt")

    def write(array: np.ndarray[Any, Any]) -> list[float]:
        array += 1
        return array.tolist()

    worker.serve(
        double=double, pid=os.getpid, echo=lambda value: value, fail=fail, size=queue.qsize, write=write,
        leave=sys.exit, give_object=object, give_int=lambda: 1 << 64,
    )  # fmt: skip


def site() -> None:
    """Writes the variables that plug-ins have set into a file."""
    (folder() / f"site-{current_worker().life}").write_text(f"{os.environ['SITE']}, {os.environ['SITE_WORKER']}")
    _until("end")


def wait() -> None:
    """Returns when the test creates the file `end`."""
    _until("end")


def call() -> None:
    """Calls the servers repeatedly, also while they are replaced."""
    servers = current_worker().role("server")
    while not (folder() / "end").exists():
        assert servers.shard("double", [1, 2, 3], timeout_s=60.0) == [2, 4, 6]


def talk() -> None:
    """Makes every kind of call once."""
    import numpy as np
    import pytest

    servers = current_worker().role("server")
    assert servers.shard("double", list(range(5))) == [0, 2, 4, 6, 8]
    assert len(set(servers.broadcast("pid"))) == servers.workers
    array = np.arange(6.0).reshape(2, 3)
    echo = servers.call("echo", array, rank=0)
    assert np.array_equal(echo, array)
    echo += 1
    assert servers.call("write", array[0]) == [1, 2, 3]
    assert servers.call("echo", (1, "two", None), rank=1) == (1, "two", None)
    for function, *arguments, says in (
        ("fail", "no such prompt"), ("leave", "odd", "SystemExit: odd"), ("give_int", "its result: .* cannot be sent"),
        ("give_object", "its result: an object of type object: it cannot be sent"),
        ("fial", "has exported no function 'fial', only"),
    ):  # fmt: skip
        with pytest.raises(CallFailed, match=says):
            servers.call(function, *arguments)
    for value in (object(), {1}, np.ma.masked_array([1, 2], [True, False])):
        with pytest.raises(UsageError, match="cannot be sent to another worker"):
            servers.call("echo", value)
    numbers = servers.queue("numbers")
    numbers.put(1)
    numbers.put(2)
    with pytest.raises(CallFailed, match="no room"):
        numbers.put(3, timeout_s=0.2)
    assert (len(numbers), numbers.get(), numbers.get()) == (2, 1, 2)


def return_at_once() -> None:
    """A role that is done before others call it."""


def crowd() -> None:
    """Waits for items of a queue on more threads than serve calls on Ray, and calls a worker that is done."""
    import pytest

    with pytest.raises(CallFailed, match="is done: its function has returned"):
        current_worker().role("short").call("f", timeout_s=60.0)
    server = current_worker().role("server")
    numbers = server.queue("numbers")
    with ThreadPoolExecutor(24) as pool:
        waiting = [pool.submit(numbers.get, 60.0) for _ in range(24)]
        while server.call("queue_get", "numbers", 0.01, timeout_s=10.0) != (False, 0.1):
            pass  # fewer than 8 wait
        assert server.call("double", [1], timeout_s=10.0) == [2]
        for number in range(24):
            numbers.put(number)
        assert sorted(one.result() for one in waiting) == list(range(24))


def fork() -> None:
    """Calls a server from this process, two children and a thread at the same time."""
    server = current_worker().role("server")

    def echoes(name: str) -> bool:
        return all(server.call("echo", [name, number]) == [name, number] for number in range(100))

    def forked(name: str) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = 0 if echoes(name) else 1
            os._exit(code)
        return pid

    assert echoes("before")
    children = [forked(f"child {number}") for number in range(2)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(echoes, "thread")
        assert echoes("parent")
        assert other.result()
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


class Unspeakable(Exception):
    """Its text has a lone surrogate, which UTF-8 cannot represent."""

    def __str__(self) -> str:
        return "no \ud800 such prompt"


def raise_always() -> None:
    raise Unspeakable


def raise_once() -> None:
    if current_worker().life == 1:
        raise RuntimeError("a bad start")


def leave_once() -> None:
    """Its first life is preempted."""
    if current_worker().life == 1:
        sys.exit(75)


def produce() -> None:
    """Puts numbers into the queue of role `main` until the test ends."""
    numbers = current_worker().role("main").queue("numbers")
    number = 0
    while not (folder() / "end").exists():
        numbers.put(number, timeout_s=60.0)
        number += 1


def consume() -> None:
    """Takes 20 numbers, waits until another role trains, and then ends the job."""
    numbers = current_worker().queue("numbers", 2)
    taken = [numbers.get(timeout=60.0) for _ in range(20)]
    (folder() / "consumed").write_text(f"{taken == list(range(20))} {'torch' in sys.modules}")
    while not (folder() / "steps").exists():
        threading.Event().wait(0.02)
    (folder() / "end").touch()


def pass_numbers() -> None:
    """Puts numbers into a queue of role `server` and takes them out; a second life first gets those of the first."""
    numbers, passed = current_worker().role("server").queue("numbers"), 0
    while not (folder() / "end").exists():
        numbers.put(passed, timeout_s=60.0)
        numbers.get(timeout_s=60.0)
        passed += 1
        (folder() / f"passed-{os.getpid()}").write_text(str(passed))
