"""Faults done to a real process: each is what it says (fault kit)."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from dlrover_hooks.testing.faults import fault_actions
from dlrover_hooks.testing.faults.fault_actions import FaultContext
from dlrover_hooks.testing.faults.fault_plan import Fault, Kind
from tests.waiting import until

AROUND = FaultContext("job", "node")


def victim(fault: str) -> subprocess.Popen[str]:
    """A process that lets `fault` happen to itself, and then says something."""
    code = f"""if True:
        from dlrover_hooks.testing.faults import fault_actions as inject, fault_plan as faults
        print("ready", flush=True)
        inject.strike(faults.parse("step=1 {fault}")[0], inject.FaultContext("job", "node"))
        print("over", flush=True)
    """
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize(
    ("fault", "code"), [("kill", -signal.SIGKILL), ("segfault", -signal.SIGSEGV), ("exception", 1)]
)
def test_it_ends_as_it_should(fault: str, code: int) -> None:
    process = victim(fault)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "ready\n")


def test_a_stopped_process_goes_on_after_its_time() -> None:
    process = victim("stop seconds=0.5")
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "a stopped process")
    assert process.communicate(timeout=20)[0] == "over\n"
    assert time.monotonic() - began > 0.4


def test_a_hang_lets_no_other_thread_run() -> None:
    """It holds the interpreter's lock: a thread that keeps reading the clock reads nothing for as long as it lasts."""
    read: list[float] = []
    running, over = threading.Event(), threading.Event()

    def read_the_clock() -> None:
        ends = False
        while not ends:
            ends = over.wait(0.002)
            read.append(time.monotonic())  # at least once after the hang
            running.set()

    thread = threading.Thread(target=read_the_clock)
    thread.start()
    assert running.wait(10)
    fault_actions.hang(0.3)
    over.set()
    thread.join()
    assert max(later - earlier for earlier, later in itertools.pairwise(read)) >= 0.3


def test_a_cut_ends_the_connections_to_the_master_or_all_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as master, socket.create_server(("127.0.0.1", 0)) as peer:
        url = f"http://127.0.0.1:1,http://127.0.0.1:{master.getsockname()[1]}"  # of two masters
        ours, theirs = (socket.create_connection(one.getsockname()) for one in (master, peer))
        served = [one.accept()[0] for one in (master, peer)]
        fault_actions.cut(url).join(5)
        assert served[0].recv(1) == b""
        theirs.sendall(b"x")
        assert served[1].recv(1) == b"x", "peers hear nothing of it"
        for one in (ours, served[0]):
            one.close()
        fault_actions.cut(url, peers=True).join(5)
        assert served[1].recv(1) == b""
        for one in (theirs, served[1]):
            one.close()


def test_a_cut_lasts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        cutting = fault_actions.cut(f"http://127.0.0.1:{master.getsockname()[1]}", 0.3)
        with socket.create_connection(master.getsockname()) as again, master.accept()[0] as served:
            served.settimeout(5)
            assert served.recv(1) == b""
            assert again.fileno() >= 0
        cutting.join(5)
        assert not cutting.alive
        with socket.create_connection(master.getsockname()) as again, master.accept()[0] as served:
            again.sendall(b"x")
            assert served.recv(1) == b"x"


def test_a_fault_is_claimed_once_by_whoever_asks_first(tmp_path: os.PathLike[str]) -> None:
    fault = Fault(step=1, kind=Kind.KILL)
    path = os.path.join(tmp_path, "faults.struck")
    won: list[bool] = []
    threads = [
        threading.Thread(target=lambda: won.append(fault_actions.InjectedFaults(path).claim(0, fault)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    assert [row["fault"] for row in fault_actions.InjectedFaults(path).rows()] == ["step=1 rank=0 kill"]
