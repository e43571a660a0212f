"""Calls by role and rank: which process they go to, and the reason that a call which fails gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from dlrover_hooks import protocol as p
from dlrover_hooks.client import MasterClient
from dlrover_hooks.errors import CallFailed, UsageError
from dlrover_hooks.job.call_messages import answered
from dlrover_hooks.job.worker_process import ResolvedCalls

LONG_S = 30.0
INITIAL, RUNNING, DONE = p.WorkerState.INITIAL, p.WorkerState.RUNNING, p.WorkerState.DONE


class ListedWorkers:
    """Replaces `MasterClient`: lists worker 0 of role `server` in the next of `states`, and then in the last one."""

    def __init__(self, *states: p.WorkerState) -> None:
        self.states, self.asked = list(states), 0

    def call(self, request: p.ShowRoles, *, timeout_s: float) -> p.Roles:
        assert request == p.ShowRoles("ppo", "server")
        assert timeout_s > 0
        state = self.states[min(self.asked, len(self.states) - 1)]
        self.asked += 1
        worker = p.RoleWorker("server", 0, self.asked, state, address=f"address {self.asked}", waits="no room")
        return p.Roles(workers=(worker,))


def calls(listed: ListedWorkers, send: Callable[[str, bytes, float], bytes], *, driver: bool = True) -> ResolvedCalls:
    return ResolvedCalls("ppo", cast("MasterClient", listed), send, driver=driver)


def echo(address: str, data: bytes, timeout_s: float) -> bytes:
    """A worker whose functions return how they were called."""
    return answered(lambda function, arguments, within_s: [address, function, arguments, within_s], data, timeout_s)


def ended(address: str, data: bytes, timeout_s: float) -> bytes:
    del data, timeout_s
    raise ConnectionResetError(f"nothing listens at {address}")


def hangs(address: str, data: bytes, timeout_s: float) -> bytes:
    del address, data, timeout_s
    raise TimeoutError


def failure(listed: ListedWorkers, send: Callable[[str, bytes, float], bytes], timeout_s: float) -> str:
    with pytest.raises(CallFailed) as failed:
        calls(listed, send).call("server", 0, "generate", [1], timeout_s)
    return failed.value.message


def test_a_worker_is_told_how_long_its_caller_waits_and_is_looked_up_once() -> None:
    listed = ListedWorkers(INITIAL, RUNNING)
    resolved = calls(listed, echo)
    address, function, arguments, within_s = resolved.call("server", 0, "generate", [(1, "a")], LONG_S)
    assert (address, function, arguments) == ("address 2", "generate", [(1, "a")])
    assert 0 < within_s < LONG_S, "less than at the beginning, because it had to wait for the worker"
    assert resolved.call("server", 0, "generate", [], LONG_S)[0] == "address 2"
    assert listed.asked == 2


def test_a_process_that_ended_is_looked_up_again() -> None:
    def first_ended(address: str, data: bytes, timeout_s: float) -> bytes:
        return (ended if address == "address 1" else echo)(address, data, timeout_s)

    assert calls(ListedWorkers(RUNNING), first_ended).call("server", 0, "generate", [], LONG_S)[0] == "address 2"


def test_an_argument_that_cannot_be_sent_is_refused_at_once() -> None:
    listed = ListedWorkers(INITIAL)
    with pytest.raises(UsageError, match="cannot be sent to another worker"):
        calls(listed, echo).call("server", 0, "generate", [object()], LONG_S)
    assert listed.asked == 0


@pytest.mark.parametrize(
    ("states", "send", "reason"),
    [
        ([INITIAL], echo, r"its process \d+ has not registered, no room"),
        ([RUNNING], hangs, "its process runs and has not answered"),
        ([INITIAL, RUNNING], hangs, "its process runs and has not answered"),
        ([RUNNING, INITIAL], ended, r"its process \d+ has not registered, no room"),
        ([RUNNING], ended, r"its process has ended, or accepts no calls: nothing listens at address \d+"),
    ],
)
def test_a_timeout_tells_the_last_reason(states: list[p.WorkerState], send: Any, reason: str) -> None:
    with pytest.raises(CallFailed, match=rf"^server 0 of job ppo has not answered generate within 2 s: {reason}$"):
        calls(ListedWorkers(*states), send).call("server", 0, "generate", [], 2.0)


def test_a_timeout_of_zero_tells_that_there_was_no_time() -> None:
    assert failure(ListedWorkers(RUNNING), echo, 0.0).endswith("there was no time to ask it")


@pytest.mark.parametrize("states", [[DONE], [RUNNING, DONE], [RUNNING, RUNNING, DONE]])
def test_a_call_of_a_worker_that_is_done_fails_at_once(states: list[p.WorkerState]) -> None:
    began = time.monotonic()
    told = failure(ListedWorkers(*states), ended, LONG_S)
    assert told == "server 0 of job ppo is done: its function has returned, so generate cannot be called"
    assert time.monotonic() < began + LONG_S / 2


def test_in_a_role_that_is_no_driver_a_call_of_a_worker_that_is_done_waits() -> None:
    """The job is over when its drivers are done: no worker is to fail because of that."""
    with pytest.raises(CallFailed, match=r"within 0\.5 s: it is done: its function has returned"):
        calls(ListedWorkers(DONE), echo, driver=False).call("server", 0, "generate", [], 0.5)
    listed = ListedWorkers(DONE, RUNNING)
    assert calls(listed, echo, driver=False).call("server", 0, "generate", [], LONG_S)[0] == "address 2"


def test_what_the_function_raises_is_told_with_its_name() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such prompt")

    told = failure(ListedWorkers(RUNNING), lambda _, data, within_s: answered(fail, data, within_s), LONG_S)
    assert told.startswith("generate of server 0: ValueError: no such prompt\nTraceback")


def test_a_result_that_cannot_be_read_fails_the_call() -> None:
    told = failure(ListedWorkers(RUNNING), lambda *_: b"\xc1", LONG_S)
    assert told.startswith("generate of server 0: its result cannot be read: DecodeError")
